use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::ModelLimits;
use inflight_proto::v1;
use inflight_proto::v1::session_request::Message;
use inflight_router_core::{Credits, Ledger, Settled};
use metrics::Gauge;
use tokio::sync::mpsc;

use crate::dispatch::{Introduction, LaneId};
use crate::metrics as names;
use crate::placing::INDEX_BLOCKS_MAX;
use crate::relay::{Call, Phase, Relay};
use crate::violation::Violation;

/// A submission that its worker has not ended.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) relay: Arc<Relay>,
    pub(crate) attempt: u32,
    /// Its worker has said something of it.
    pub(crate) reported: bool,
    cancelled: bool,
}

/// An open session, as the dispatcher sees it: what its worker is, what it grants, what is in flight there.
pub(crate) struct Session {
    pub(crate) id: u64,
    pub(crate) worker: usize,
    pub(crate) address: String,
    pub(crate) lane: LaneId,
    pub(crate) fingerprint: Arc<str>,
    pub(crate) limits: ModelLimits,
    pub(crate) block_tokens: u32,
    /// Since when it takes nothing new: its worker drains, or was taken out of the list.
    pub(crate) draining: Option<Instant>,
    /// The suspect that has, or is about to have, this worker for itself, and since when.
    pub(crate) reserved: Option<(Arc<Relay>, Instant)>,
    /// When a suspect had waited for it for too long, in vain.
    pub(crate) spared: Option<Instant>,
    /// When it was last heard of.
    pub(crate) heard: Instant,
    heartbeat: Duration,
    /// Sequences and blocks that the worker said it has.
    pub(crate) has: Credits,
    /// Updates in the second that began then.
    pub(crate) updates: (Instant, u32),
    /// Entries of updates in that second.
    entries: usize,
    /// Blocks of its pools, as far as they are indexed.
    pool_blocks: usize,
    /// What the worker was told of the queue.
    backlog: Option<bool>,
    pub(crate) ledger: Ledger,
    pub(crate) flights: BTreeMap<u64, Flight>,
    /// Bounded by what is sent into it: at most one submission for each flight, whose number the grant bounds,
    /// and for each one cancel and one more for each choice.
    commands: mpsc::UnboundedSender<v1::SessionRequest>,
    gauges: Gauges,
}

struct Gauges {
    requests: Gauge,
    sequences: Gauge,
    sequences_granted: Gauge,
    blocks: Gauge,
    blocks_granted: Gauge,
}

impl Session {
    pub(crate) fn new(id: u64, lane: LaneId, introduction: Introduction, now: Instant) -> Self {
        let gauge = |name: &'static str| metrics::gauge!(name, "worker" => introduction.address.clone());
        let gauges = Gauges {
            requests: gauge(names::WORKER_REQUESTS),
            sequences: gauge(names::WORKER_SEQUENCES),
            sequences_granted: gauge(names::WORKER_SEQUENCES_GRANTED),
            blocks: gauge(names::WORKER_BLOCKS),
            blocks_granted: gauge(names::WORKER_BLOCKS_GRANTED),
        };
        Self {
            id,
            worker: introduction.worker,
            address: introduction.address,
            lane,
            fingerprint: introduction.fingerprint.into(),
            limits: introduction.limits,
            block_tokens: introduction.block_tokens,
            draining: None,
            reserved: None,
            spared: None,
            heard: now,
            heartbeat: introduction.heartbeat,
            has: introduction.has,
            updates: (now, 0),
            entries: 0,
            pool_blocks: (introduction.has.blocks as usize + introduction.host_blocks as usize)
                .min(INDEX_BLOCKS_MAX),
            backlog: None,
            ledger: Ledger::default(),
            flights: BTreeMap::new(),
            commands: introduction.commands,
            gauges,
        }
    }

    /// Whether the worker can run a request, were nothing else there.
    pub(crate) fn fits(&self, call: &Call) -> bool {
        u64::from(self.limits.sequence_tokens()) >= call.sequence_tokens() && call.accepts(&self.fingerprint)
    }

    /// Updates that a worker may send within a second, far more than any has iterations.
    const UPDATES_MAX: u32 = 20_000;
    /// Entries beyond one for each sequence in flight.
    const ENTRIES_SLACK: usize = 1024;
    /// Changes of the prefix cache, and blocks of a snapshot, in one update.
    const CACHE_ENTRIES_MAX: usize = 1 << 18;
    /// Counters of tenants in one update, and incarnations that they are of.
    const COUNTERS_MAX: usize = 1 << 16;
    /// Entries of any kind within a second, beyond four for each block that the worker has.
    const ENTRIES_PER_SECOND: usize = 1 << 20;
    /// How far a grant may be beyond what the worker has: what waits there, and one request of any size.
    const GRANT_FACTOR: u32 = 64;

    /// Checks what does not depend on any request.
    pub(crate) fn check(&mut self, update: &v1::Update, now: Instant) -> Result<(), Violation> {
        let (began, count) = &mut self.updates;
        if now.saturating_duration_since(*began) >= Duration::from_secs(1) {
            (*began, *count) = (now, 0);
            self.entries = 0;
        }
        *count += 1;
        if *count > Self::UPDATES_MAX {
            return Err(Violation::Flood { most: Self::UPDATES_MAX });
        }
        let oversized = |what, entries, most| {
            if entries > most { Err(Violation::Oversized { what, entries, most }) } else { Ok(()) }
        };
        let most = 2 * self.ledger.used().sequences as usize + Self::ENTRIES_SLACK;
        oversized("sequences", update.sequences.len(), most)?;
        let events = update.kv_events.as_ref().map_or(0, |events| events.events.len());
        oversized("prefix cache events", events, Self::CACHE_ENTRIES_MAX)?;
        let snapshot = update
            .kv_snapshot
            .as_ref()
            .map_or(0, |piece| piece.device_block_hashes.len() + piece.host_block_hashes.len());
        oversized("blocks of a snapshot", snapshot, Self::CACHE_ENTRIES_MAX)?;
        let charges = update.services.len();
        oversized("charges", charges, Self::COUNTERS_MAX)?;
        let services = update.service_tables.iter().map(|table| 1 + table.tenants.len()).sum::<usize>();
        oversized("counters of other incarnations", services, Self::COUNTERS_MAX)?;
        let entries = &mut self.entries;
        *entries = entries.saturating_add(events + snapshot + charges + services);
        oversized("entries within a second", *entries, Self::ENTRIES_PER_SECOND + 4 * self.pool_blocks)?;
        let Some(grant) = update.grant else { return Ok(()) };
        for (what, granted, has) in [
            ("sequences", grant.sequences, self.has.sequences),
            ("blocks", grant.kv_blocks, self.has.blocks),
            ("urgent sequences", grant.priority_sequences, self.has.sequences),
        ] {
            if granted > has.saturating_mul(Self::GRANT_FACTOR).min(i32::MAX as u32) {
                return Err(Violation::Grant { what, granted, has });
            }
        }
        Ok(())
    }

    /// Whether it is kept for a suspect that has not been handed over.
    pub(crate) fn awaits_suspect(&self) -> bool {
        self.reserved.as_ref().is_some_and(|(relay, _)| relay.lock().phase == Phase::Parked)
    }

    /// Whether it may be given work that is not a suspect's.
    pub(crate) fn takes(&self) -> bool {
        self.draining.is_none() && self.reserved.is_none()
    }

    /// Whether it should have been heard of since. It may be fine all the same; three times as long and it is lost.
    pub(crate) fn quiet(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.heard) > self.heartbeat + self.heartbeat / 4
    }

    /// Hands a submission to the worker and charges it.
    pub(crate) fn submit(
        &mut self,
        relay: &Arc<Relay>,
        attempt: u32,
        prompt_blocks: u32,
        choices: Vec<(u32, u32)>,
        submit: v1::Submit,
    ) {
        let submission = submit.submission_id;
        self.ledger.charge_choices(submission, relay.call.priority, prompt_blocks, choices.into_iter());
        self.flights
            .insert(submission, Flight { relay: relay.clone(), attempt, reported: false, cancelled: false });
        self.send(Message::Submit(submit));
        self.show();
    }

    /// Tells the worker whether anything waits here that it could run, if it does not know.
    pub(crate) fn tell_backlog(&mut self, waits: bool) {
        if self.backlog != Some(waits) {
            self.backlog = Some(waits);
            self.send(Message::Backlog(v1::Backlog { has_waiting_requests: waits }));
        }
    }

    /// Withdraws all that still runs of a submission.
    pub(crate) fn cancel(&mut self, submission: u64) {
        let Some(flight) = self.flights.get_mut(&submission) else { return };
        if !std::mem::replace(&mut flight.cancelled, true) {
            self.send(Message::Cancel(v1::Cancel { submission_id: submission, choice: None }));
        }
    }

    /// Withdraws one choice of a submission.
    pub(crate) fn cancel_choice(&mut self, submission: u64, choice: u32) {
        let cancelled = self.flights.get(&submission).is_none_or(|flight| flight.cancelled);
        if !cancelled && self.ledger.runs(submission, choice) {
            self.send(Message::Cancel(v1::Cancel { submission_id: submission, choice: Some(choice) }));
        }
    }

    /// Gives back what an ended choice held.
    pub(crate) fn settle(&mut self, submission: u64, choice: u32) {
        match self.ledger.settle(submission, choice) {
            Settled::Choice => {}
            Settled::Request => {
                self.flights.remove(&submission);
            }
            // Whoever calls has looked: the choice runs.
            Settled::Unknown => {}
        }
    }

    /// Tells the worker what another incarnation served, for routers to come.
    pub(crate) fn teach(&self, services: v1::ServiceTable) {
        self.send(Message::ServiceTable(services));
    }

    /// Asks for all that the worker's prefix cache holds.
    pub(crate) fn resync(&self) {
        self.send(Message::ResyncPrefixCache(v1::ResyncPrefixCache {}));
    }

    /// Shows the ledger in the metrics.
    pub(crate) fn show(&self) {
        let (used, grant) = (self.ledger.used(), self.ledger.grant());
        self.gauges.set(self.ledger.requests(), used, grant);
    }

    /// Shows that nothing is in flight or granted.
    pub(crate) fn clear_gauges(&self) {
        self.gauges.set(0, Credits::default(), Credits::default());
    }

    fn send(&self, message: Message) {
        // A receiver that is gone means that the session is being closed, which queues its requests again.
        let _ = self.commands.send(v1::SessionRequest { message: Some(message) });
    }
}

impl Gauges {
    fn set(&self, requests: usize, used: Credits, grant: Credits) {
        self.requests.set(requests as f64);
        self.sequences.set(used.sequences);
        self.sequences_granted.set(grant.sequences);
        self.blocks.set(used.blocks);
        self.blocks_granted.set(grant.blocks);
    }
}

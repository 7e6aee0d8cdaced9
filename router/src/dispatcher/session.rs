//! An open session with a worker: capacity, credits, submissions in submitted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::ModelLimits;
use inflight_router_core::{
    Credits, IncarnationCounters, Ledger, Settled, Submission, WorkerCommand, WorkerUpdate,
};
use metrics::Gauge;
use tokio::sync::mpsc;

use crate::cluster::bundle::Model;
use crate::dispatcher::placement::INDEX_BLOCKS_MAX;
use crate::dispatcher::request::{ActiveRequest, AdmittedCall, LaneId, Phase};
use crate::dispatcher::violation::Violation;
use crate::metrics as names;

/// What a worker said of itself, and its loaded bundle.
#[derive(Debug)]
pub(crate) struct WorkerInfo {
    pub(crate) worker: usize,
    pub(crate) address: String,
    pub(crate) model_name: String,
    pub(crate) architecture: String,
    pub(crate) bundle_digest: String,
    pub(crate) fingerprint: String,
    /// Different after each restart.
    pub(crate) incarnation: String,
    pub(crate) limits: ModelLimits,
    pub(crate) block_tokens: u32,
    /// Sequences and blocks that it has in all.
    pub(crate) has: Credits,
    /// Blocks of its host pool.
    pub(crate) host_blocks: u32,
    /// How often it says something when nothing happens.
    pub(crate) heartbeat: Duration,
    pub(crate) model: Arc<Model>,
    /// Where submissions and cancels go.
    pub(crate) commands: mpsc::UnboundedSender<WorkerCommand>,
}

/// A submission that its worker has not ended.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) active: Arc<ActiveRequest>,
    pub(crate) attempt: u32,
    /// Its worker has said something of it.
    pub(crate) reported: bool,
    cancelled: bool,
}

/// An open session, as the dispatcher sees it: what its worker is, what it grants, what is in submitted there.
pub(crate) struct WorkerSession {
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
    pub(crate) reserved: Option<(Arc<ActiveRequest>, Instant)>,
    /// When a suspect had waited for it for too long, in vain.
    pub(crate) reservation_failed_at: Option<Instant>,
    /// When it was last heard of.
    pub(crate) last_update: Instant,
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
    pub(crate) submissions: BTreeMap<u64, InFlight>,
    /// Bounded by what is sent into it: at most one submission for each submitted, whose number the grant bounds,
    /// and for each one cancel and one more for each choice.
    commands: mpsc::UnboundedSender<WorkerCommand>,
    gauges: Gauges,
}

struct Gauges {
    requests: Gauge,
    sequences: Gauge,
    sequences_granted: Gauge,
    blocks: Gauge,
    blocks_granted: Gauge,
}

impl WorkerSession {
    pub(crate) fn new(id: u64, lane: LaneId, info: WorkerInfo, now: Instant) -> Self {
        let gauge = |name: &'static str| metrics::gauge!(name, "worker" => info.address.clone());
        let gauges = Gauges {
            requests: gauge(names::WORKER_REQUESTS),
            sequences: gauge(names::WORKER_SEQUENCES),
            sequences_granted: gauge(names::WORKER_SEQUENCES_GRANTED),
            blocks: gauge(names::WORKER_BLOCKS),
            blocks_granted: gauge(names::WORKER_BLOCKS_GRANTED),
        };
        Self {
            id,
            worker: info.worker,
            address: info.address,
            lane,
            fingerprint: info.fingerprint.into(),
            limits: info.limits,
            block_tokens: info.block_tokens,
            draining: None,
            reserved: None,
            reservation_failed_at: None,
            last_update: now,
            heartbeat: info.heartbeat,
            has: info.has,
            updates: (now, 0),
            entries: 0,
            pool_blocks: (info.has.blocks as usize + info.host_blocks as usize).min(INDEX_BLOCKS_MAX),
            backlog: None,
            ledger: Ledger::default(),
            submissions: BTreeMap::new(),
            commands: info.commands,
            gauges,
        }
    }

    /// Whether the worker can run a request, were nothing else there.
    pub(crate) fn fits(&self, call: &AdmittedCall) -> bool {
        u64::from(self.limits.sequence_tokens()) >= call.sequence_tokens() && call.accepts(&self.fingerprint)
    }

    /// Updates that a worker may send within a second, far more than any has iterations.
    const UPDATES_MAX: u32 = 20_000;
    /// Entries beyond one for each sequence in submitted.
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
    pub(crate) fn check(&mut self, update: &WorkerUpdate, now: Instant) -> Result<(), Violation> {
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
        let events = update.cache_events.as_ref().map_or(0, |events| events.changes.len());
        oversized("prefix cache events", events, Self::CACHE_ENTRIES_MAX)?;
        let snapshot =
            update.cache_snapshot.as_ref().map_or(0, |piece| piece.device.len() + piece.host.len());
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
            ("sequences", grant.credits.sequences, self.has.sequences),
            ("blocks", grant.credits.blocks, self.has.blocks),
            ("urgent sequences", grant.priority_sequences, self.has.sequences),
        ] {
            if granted > has.saturating_mul(Self::GRANT_FACTOR).min(i32::MAX as u32) {
                return Err(Violation::Grant { what, granted, has });
            }
        }
        Ok(())
    }

    /// Whether it is kept for a suspect that has not been handed over.
    pub(crate) fn awaits_quarantined(&self) -> bool {
        self.reserved.as_ref().is_some_and(|(active, _)| active.lock().phase == Phase::AwaitingRetry)
    }

    /// Whether it may be given work that is not a suspect's.
    pub(crate) fn accepts_requests(&self) -> bool {
        self.draining.is_none() && self.reserved.is_none()
    }

    /// Whether it should have been heard of since. It may be fine all the same; three times as long and it is lost.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_update) > self.heartbeat + self.heartbeat / 4
    }

    /// Hands a submission to the worker and charges it.
    pub(crate) fn submit(
        &mut self,
        active: &Arc<ActiveRequest>,
        attempt: u32,
        prompt_blocks: u32,
        choices: Vec<(u32, u32)>,
        submit: Submission,
    ) {
        let submission = submit.id;
        self.ledger.charge_choices(submission, active.call.priority, prompt_blocks, choices.into_iter());
        self.submissions.insert(
            submission,
            InFlight { active: active.clone(), attempt, reported: false, cancelled: false },
        );
        self.send(WorkerCommand::Submit(Box::new(submit)));
        self.show();
    }

    /// Tells the worker whether anything waits here that it could run, if it does not know.
    pub(crate) fn send_backlog(&mut self, waits: bool) {
        if self.backlog != Some(waits) {
            self.backlog = Some(waits);
            self.send(WorkerCommand::Backlog { waiting: waits });
        }
    }

    /// Withdraws all that still runs of a submission.
    pub(crate) fn cancel(&mut self, submission: u64) {
        let Some(submitted) = self.submissions.get_mut(&submission) else { return };
        if !std::mem::replace(&mut submitted.cancelled, true) {
            self.send(WorkerCommand::Cancel { submission, choice: None });
        }
    }

    /// Withdraws one choice of a submission.
    pub(crate) fn cancel_choice(&mut self, submission: u64, choice: u32) {
        let cancelled = self.submissions.get(&submission).is_none_or(|submitted| submitted.cancelled);
        if !cancelled && self.ledger.runs(submission, choice) {
            self.send(WorkerCommand::Cancel { submission, choice: Some(choice) });
        }
    }

    /// Gives back what an ended choice held.
    pub(crate) fn settle(&mut self, submission: u64, choice: u32) {
        match self.ledger.settle(submission, choice) {
            Settled::Choice => {}
            Settled::Request => {
                self.submissions.remove(&submission);
            }
            // Whoever calls has looked: the choice runs.
            Settled::Unknown => {}
        }
    }

    /// Tells the worker what another incarnation served, for routers to come.
    pub(crate) fn send_service_table(&self, services: IncarnationCounters) {
        self.send(WorkerCommand::ServiceTable(services));
    }

    /// Asks for all that the worker's prefix cache holds.
    pub(crate) fn resync(&self) {
        self.send(WorkerCommand::ResyncPrefixCache);
    }

    /// Shows the ledger in the metrics.
    pub(crate) fn show(&self) {
        let (used, grant) = (self.ledger.used(), self.ledger.grant());
        self.gauges.set(self.ledger.requests(), used, grant);
    }

    /// Shows that nothing is in submitted or granted.
    pub(crate) fn clear_gauges(&self) {
        self.gauges.set(0, Credits::default(), Credits::default());
    }

    fn send(&self, command: WorkerCommand) {
        // A receiver that is gone means that the session is being closed, which queues its requests again.
        let _ = self.commands.send(command);
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

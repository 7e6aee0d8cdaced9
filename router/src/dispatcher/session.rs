//! Open session with a worker: capacity, grant ledger, submissions in flight.

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

/// Worker's hello message with its loaded bundle.
#[derive(Debug)]
pub(crate) struct WorkerInfo {
    pub(crate) worker: usize,
    pub(crate) address: String,
    pub(crate) model_name: String,
    pub(crate) architecture: String,
    pub(crate) bundle_digest: String,
    pub(crate) fingerprint: String,
    /// Random id of the worker process.
    pub(crate) incarnation: String,
    pub(crate) limits: ModelLimits,
    pub(crate) block_tokens: u32,
    /// Total sequences and KV blocks of the worker.
    pub(crate) capacity: Credits,
    /// Blocks of its host pool.
    pub(crate) host_blocks: u32,
    /// Interval of its heartbeats.
    pub(crate) heartbeat: Duration,
    pub(crate) model: Arc<Model>,
    /// Channel of submissions and cancels.
    pub(crate) commands: mpsc::UnboundedSender<WorkerCommand>,
}

/// Submission that its worker has not ended.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) active: Arc<ActiveRequest>,
    pub(crate) attempt: u32,
    /// Whether the worker has reported on it.
    pub(crate) reported: bool,
    cancelled: bool,
}

/// Open session, as the dispatcher sees it: worker, grant, submissions in flight.
pub(crate) struct WorkerSession {
    pub(crate) id: u64,
    pub(crate) worker: usize,
    pub(crate) address: String,
    pub(crate) lane: LaneId,
    pub(crate) fingerprint: Arc<str>,
    pub(crate) limits: ModelLimits,
    pub(crate) block_tokens: u32,
    /// Time since which it accepts nothing new: the worker drains, or was removed from discovery.
    pub(crate) draining: Option<Instant>,
    /// Quarantined request that has, or waits for, this worker alone, and the time of the reservation.
    pub(crate) reserved: Option<(Arc<ActiveRequest>, Instant)>,
    /// Time of the last reservation that timed out.
    pub(crate) reservation_failed_at: Option<Instant>,
    /// Time of the last update.
    pub(crate) last_update: Instant,
    heartbeat: Duration,
    /// Total sequences and KV blocks of the worker.
    pub(crate) capacity: Credits,
    /// Start of the current second and the updates in it.
    pub(crate) updates: (Instant, u32),
    /// Entries of updates in that second.
    entries: usize,
    /// Blocks of its pools, capped at the index limit.
    pool_blocks: usize,
    /// Backlog state last sent to the worker.
    backlog: Option<bool>,
    pub(crate) ledger: Ledger,
    pub(crate) submissions: BTreeMap<u64, InFlight>,
    /// Bounded by what is sent: one submission for each in flight, whose number the grant bounds, one cancel
    /// for each, and one for each of its choices.
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
            capacity: info.capacity,
            updates: (now, 0),
            entries: 0,
            pool_blocks: (info.capacity.blocks as usize + info.host_blocks as usize).min(INDEX_BLOCKS_MAX),
            backlog: None,
            ledger: Ledger::default(),
            submissions: BTreeMap::new(),
            commands: info.commands,
            gauges,
        }
    }

    /// Whether the worker could run a request if it were idle.
    pub(crate) fn fits(&self, call: &AdmittedCall) -> bool {
        u64::from(self.limits.sequence_tokens()) >= call.sequence_tokens() && call.accepts(&self.fingerprint)
    }

    /// Maximum updates per second, far above any worker's iteration rate.
    const UPDATES_MAX: u32 = 20_000;
    /// Entries allowed beyond one for each sequence in flight.
    const ENTRIES_SLACK: usize = 1024;
    /// Maximum prefix-cache events, and blocks of a snapshot, in one update.
    const CACHE_ENTRIES_MAX: usize = 1 << 18;
    /// Maximum service counters, and incarnations with them, in one update.
    const COUNTERS_MAX: usize = 1 << 16;
    /// Maximum entries of any kind per second, beyond four for each block of the worker.
    const ENTRIES_PER_SECOND: usize = 1 << 20;
    /// Maximum grant relative to the worker's capacity: its waiting queue, and one request of any size.
    const GRANT_FACTOR: u32 = 64;

    /// Checks everything that does not depend on a request.
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
            ("sequences", grant.credits.sequences, self.capacity.sequences),
            ("blocks", grant.credits.blocks, self.capacity.blocks),
            ("urgent sequences", grant.priority_sequences, self.capacity.sequences),
        ] {
            if granted > has.saturating_mul(Self::GRANT_FACTOR).min(i32::MAX as u32) {
                return Err(Violation::Grant { what, granted, has });
            }
        }
        Ok(())
    }

    /// Whether it is reserved for a quarantined request that has not been dispatched.
    pub(crate) fn awaits_quarantined(&self) -> bool {
        self.reserved.as_ref().is_some_and(|(active, _)| active.lock().phase == Phase::AwaitingRetry)
    }

    /// Whether it accepts requests that are not quarantined.
    pub(crate) fn accepts_requests(&self) -> bool {
        self.draining.is_none() && self.reserved.is_none()
    }

    /// Whether its heartbeat is late. Not an error yet; at three intervals the session is lost.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_update) > self.heartbeat + self.heartbeat / 4
    }

    /// Sends a submission to the worker and charges it.
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
        self.update_gauges();
    }

    /// Sends the backlog state to the worker if it has changed.
    pub(crate) fn send_backlog(&mut self, waits: bool) {
        if self.backlog != Some(waits) {
            self.backlog = Some(waits);
            self.send(WorkerCommand::Backlog { waiting: waits });
        }
    }

    /// Cancels all running choices of a submission.
    pub(crate) fn cancel(&mut self, submission: u64) {
        let Some(submitted) = self.submissions.get_mut(&submission) else { return };
        if !std::mem::replace(&mut submitted.cancelled, true) {
            self.send(WorkerCommand::Cancel { submission, choice: None });
        }
    }

    /// Cancels one choice of a submission.
    pub(crate) fn cancel_choice(&mut self, submission: u64, choice: u32) {
        let cancelled = self.submissions.get(&submission).is_none_or(|submitted| submitted.cancelled);
        if !cancelled && self.ledger.runs(submission, choice) {
            self.send(WorkerCommand::Cancel { submission, choice: Some(choice) });
        }
    }

    /// Releases the credits of an ended choice.
    pub(crate) fn settle(&mut self, submission: u64, choice: u32) {
        match self.ledger.settle(submission, choice) {
            Settled::Choice => {}
            Settled::Request => {
                self.submissions.remove(&submission);
            }
            // The caller has checked that the choice runs.
            Settled::Unknown => {}
        }
    }

    /// Sends the service counters of another incarnation to the worker, for routers that connect later.
    pub(crate) fn send_service_table(&self, services: IncarnationCounters) {
        self.send(WorkerCommand::ServiceTable(services));
    }

    /// Requests a snapshot of the worker's prefix cache.
    pub(crate) fn request_resync(&self) {
        self.send(WorkerCommand::ResyncPrefixCache);
    }

    /// Updates the metrics of the ledger.
    pub(crate) fn update_gauges(&self) {
        let (used, grant) = (self.ledger.used(), self.ledger.grant());
        self.gauges.set(self.ledger.requests(), used, grant);
    }

    /// Resets the metrics of the ledger.
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

//! Open session with a worker: capacity, grant ledger, submissions in flight.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{MemoryShape, ModelLimits};

use crate::dispatcher::placement_state::INDEX_BLOCKS_MAX;
use crate::{
    Command, Credits, IncarnationCounters, LaneId, Ledger, Priority, RequestId, RequestSpec, SessionId,
    Settled, Submission, SubmissionId, Violation, WorkerCommand, WorkerId, WorkerInfo, WorkerUpdate,
};

/// Submission that its worker has not ended.
#[derive(Debug)]
pub(in crate::dispatcher) struct InFlight {
    pub(in crate::dispatcher) request: RequestId,
    pub(in crate::dispatcher) attempt: u32,
    /// Whether the worker has reported on it.
    pub(in crate::dispatcher) reported: bool,
    cancelled: bool,
}

/// Reservation of a worker for a quarantined request.
#[derive(Debug, Clone, Copy)]
pub(in crate::dispatcher) struct Reservation {
    pub(in crate::dispatcher) request: RequestId,
    pub(in crate::dispatcher) since: Duration,
}

/// Open session, as the dispatcher sees it: worker, grant, submissions in flight.
#[derive(Debug)]
pub(in crate::dispatcher) struct WorkerSession {
    pub(in crate::dispatcher) id: SessionId,
    pub(in crate::dispatcher) worker: WorkerId,
    pub(in crate::dispatcher) lane: LaneId,
    pub(in crate::dispatcher) fingerprint: Arc<str>,
    pub(in crate::dispatcher) limits: ModelLimits,
    pub(in crate::dispatcher) shape: MemoryShape,
    /// Time since which it accepts nothing new: the worker drains, or was removed from discovery.
    pub(super) draining: Option<Duration>,
    /// Quarantined request that has, or waits for, this worker alone.
    pub(super) reserved: Option<Reservation>,
    /// Time of the last reservation that timed out.
    pub(super) reservation_failed_at: Option<Duration>,
    /// Time of the last update.
    pub(in crate::dispatcher) last_update: Duration,
    heartbeat: Duration,
    /// Total sequences and KV blocks of the worker.
    capacity: Credits,
    /// Start of the current second and the updates in it.
    updates: (Duration, u32),
    /// Entries of updates in that second.
    entries: usize,
    /// Blocks of its pools, capped at the index limit.
    pool_blocks: usize,
    /// Backlog state last sent to the worker.
    backlog: Option<bool>,
    pub(in crate::dispatcher) ledger: Ledger,
    pub(in crate::dispatcher) submissions: BTreeMap<SubmissionId, InFlight>,
}

impl WorkerSession {
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

    pub(in crate::dispatcher) fn new(id: SessionId, lane: LaneId, info: WorkerInfo, now: Duration) -> Self {
        Self {
            id,
            worker: info.worker,
            lane,
            fingerprint: info.fingerprint.into(),
            limits: info.limits,
            shape: info.shape,
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
        }
    }

    /// Whether the worker could run a request if it were idle.
    pub(in crate::dispatcher) fn fits(&self, spec: &RequestSpec) -> bool {
        self.holds(spec) && spec.accepts(&self.fingerprint)
    }

    /// Whether the request's longest sequence fits the worker's limits.
    pub(in crate::dispatcher) fn holds(&self, spec: &RequestSpec) -> bool {
        u64::from(self.limits.sequence_tokens()) >= spec.sequence_tokens()
    }

    /// Checks everything that does not depend on a request.
    pub(in crate::dispatcher) fn check(
        &mut self,
        update: &WorkerUpdate,
        now: Duration,
    ) -> Result<(), Violation> {
        let (began, count) = &mut self.updates;
        if now.saturating_sub(*began) >= Duration::from_secs(1) {
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

    /// Returns the time since which it accepts nothing new.
    pub(in crate::dispatcher) fn draining(&self) -> Option<Duration> {
        self.draining
    }

    /// Returns its reservation for a quarantined request.
    pub(in crate::dispatcher) fn reserved(&self) -> Option<Reservation> {
        self.reserved
    }

    /// Returns the time of the last reservation that timed out.
    pub(in crate::dispatcher) fn reservation_failed_at(&self) -> Option<Duration> {
        self.reservation_failed_at
    }

    /// Whether it accepts requests that are not quarantined.
    pub(in crate::dispatcher) fn accepts_requests(&self) -> bool {
        self.draining.is_none() && self.reserved.is_none()
    }

    /// Whether its heartbeat is late. Not an error yet; at three intervals the session is lost.
    pub(in crate::dispatcher) fn is_overdue(&self, now: Duration) -> bool {
        now.saturating_sub(self.last_update) > self.heartbeat + self.heartbeat / 4
    }

    /// Sends a submission to the worker and charges it.
    pub(in crate::dispatcher) fn submit(
        &mut self,
        priority: Priority,
        tenant: &str,
        prompt_blocks: u32,
        choices: impl Iterator<Item = (u32, u32)>,
        submission: Submission,
        commands: &mut Vec<Command>,
    ) {
        let start = submission.virtual_start_time;
        self.ledger.charge_choices(submission.id, priority.get(), tenant, start, prompt_blocks, choices);
        let Submission { id, request, attempt, .. } = submission;
        self.submissions.insert(id, InFlight { request, attempt, reported: false, cancelled: false });
        self.send(WorkerCommand::Submit(Box::new(submission)), commands);
    }

    /// Sends the backlog state to the worker if it has changed.
    pub(in crate::dispatcher) fn send_backlog(&mut self, waiting: bool, commands: &mut Vec<Command>) {
        if self.backlog != Some(waiting) {
            self.backlog = Some(waiting);
            self.send(WorkerCommand::Backlog { waiting }, commands);
        }
    }

    /// Cancels all running choices of a submission.
    pub(in crate::dispatcher) fn cancel(&mut self, submission: SubmissionId, commands: &mut Vec<Command>) {
        let Some(submitted) = self.submissions.get_mut(&submission) else { return };
        if !std::mem::replace(&mut submitted.cancelled, true) {
            self.send(WorkerCommand::Cancel { submission, choice: None }, commands);
        }
    }

    /// Cancels one choice of a submission.
    pub(in crate::dispatcher) fn cancel_choice(
        &mut self,
        submission: SubmissionId,
        choice: u32,
        commands: &mut Vec<Command>,
    ) {
        let cancelled = self.submissions.get(&submission).is_none_or(|submitted| submitted.cancelled);
        if !cancelled && self.ledger.runs(submission, choice) {
            self.send(WorkerCommand::Cancel { submission, choice: Some(choice) }, commands);
        }
    }

    /// Releases the credits of an ended choice. Returns whether the whole submission has ended.
    pub(in crate::dispatcher) fn settle(&mut self, submission: SubmissionId, choice: u32) -> bool {
        match self.ledger.settle(submission, choice) {
            Settled::Request => {
                self.submissions.remove(&submission);
                true
            }
            // The caller has checked that the choice runs.
            Settled::Choice | Settled::Unknown => false,
        }
    }

    /// Sends the service counters of another incarnation to the worker, for routers that connect later.
    pub(in crate::dispatcher) fn send_service_table(
        &self,
        table: IncarnationCounters,
        commands: &mut Vec<Command>,
    ) {
        self.send(WorkerCommand::ServiceTable(table), commands);
    }

    /// Sends a message to the worker.
    pub(in crate::dispatcher) fn send(&self, command: WorkerCommand, commands: &mut Vec<Command>) {
        commands.push(Command::Worker { worker: self.worker, command });
    }
}

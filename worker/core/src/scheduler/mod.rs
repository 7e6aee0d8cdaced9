//! Iteration scheduler: state, submission and end of sequences. Planning is in [`plan`], [`admit`] and
//! [`preempt`], completion in [`commit`].

mod admit;
mod commit;
mod drafting;
mod drafts;
mod end;
mod error;
mod invariants;
mod kv_memory;
mod launches;
mod load;
mod needs;
mod plan;
mod plan_draft;
mod predictions;
mod preempt;
mod prefill_backlog;
mod prefix;
mod resumption_estimator;
mod roster;
mod sequences;
mod slots;
mod snapshots;
mod step_bounds;
mod swap;
mod transfers;
mod waiting_queue;

use std::collections::BTreeSet;
use std::time::Duration;

use inflight_contract::{BlockHash, FinishReason, Service, TenantCharge, VirtualTokenCounters};

use crate::cost::{CostModel, CostPrior, StepWork};
use crate::drafts::{Acceptance, DraftKind};
use crate::history::History;
use crate::memory::{Spans, Tables};
use crate::policy::{Policy, SchedulingPolicy, SequenceView};
use crate::record::{RecordKind, RecordLog};
use crate::sequence::{Sequence, SequenceState};
use crate::state_progress::StateProgress;
use crate::{
    CacheEvent, CacheTier, Iteration, LimitsError, NewSequence, PrefillLoad, SchedulerLimits, ScoredRange,
    SequenceId, Slot, Time,
};
use drafting::Drafting;
pub use error::{CommitError, SubmitError};
use kv_memory::KvMemory;
use launches::Launches;
pub use load::{Load, PrefillEstimate};
use resumption_estimator::ResumptionEstimator;
pub use roster::{SequencePhase, SequenceStatus};
use sequences::Sequences;
use slots::Slots;
use step_bounds::StepBounds;
use transfers::Transfers;
use waiting_queue::{FlowKey, WaitingQueue};

/// Terminal event of a sequence. Its slot is freed separately, since an iteration in flight may still use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Ended sequence.
    pub id: SequenceId,
    /// Reason of the end.
    pub reason: FinishReason,
}

/// Iteration-level scheduler: decides before every forward pass which sequences take part and with how many
/// tokens.
///
/// **Invariants**, checked by the property tests: blocks are conserved under every interleaving, and a block
/// used by a transfer or an iteration in flight is not reused before its completion; each sequence ends
/// exactly once; an iteration never exceeds its token budget; no sequence is preempted for one that goes
/// after it; a step that preempts admits no sequence of the same class; every admitted sequence fits the pool
/// alone, so that the first sequence in policy order always makes progress.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    policy: Box<dyn SchedulingPolicy>,
    cost: CostModel,
    tenants: VirtualTokenCounters,
    memory: KvMemory,
    sequences: Sequences,
    slots: Slots,
    waiting: WaitingQueue,
    /// Sequences in `Prefilling` or `Decoding`.
    running: Vec<u32>,
    swapped: Vec<u32>,
    transfers: Transfers,
    deadlines: BTreeSet<(Time, u32)>,
    arrivals: u64,
    launches: Launches,
    drafting: Drafting,
    prefill_load: PrefillLoad,
    resumption: ResumptionEstimator,
    /// The last plan.
    iteration: Iteration,
    ended: Vec<Ended>,
    totals: Load,
    /// Queueing times of the sequences that the last plan has admitted for the first time.
    queueing_times: Vec<(SequenceId, Duration)>,
    history: History,
    /// Set if the last step stopped admitting only because its token budget was used up.
    group_open: bool,
    log: Option<RecordLog>,
    buffers: Buffers,
}

/// Buffers of a plan, kept to avoid allocation.
#[derive(Debug, Default)]
struct Buffers {
    /// Running sequences in the order in which their decodes are planned.
    decodes: Vec<u32>,
    /// Prefills of the step that is planned, with their uncomputed tokens.
    prefills: Vec<(u32, u32)>,
    /// First sequences of the flows that were not examined yet.
    heads: Vec<admit::FlowHead>,
    /// Sequences past which others are admitted.
    bypassed: Vec<u32>,
    /// Swapped sequences in the order in which they are swapped in.
    swapped: Vec<u32>,
    victims: Vec<u32>,
}

impl Scheduler {
    /// Maximum number of idle tenants whose service is kept.
    pub const TENANTS_MAX: usize = 10_000;

    /// Number of iterations in the history.
    pub const HISTORY: usize = 1024;

    /// Creates an idle scheduler.
    ///
    /// # Errors
    /// [`LimitsError`] if the limits contradict each other.
    pub fn new(
        limits: SchedulerLimits,
        policy: Box<dyn SchedulingPolicy>,
        cost: CostModel,
        tenants: VirtualTokenCounters,
    ) -> Result<Self, LimitsError> {
        limits.validate()?;
        Ok(Self {
            limits,
            policy,
            cost,
            tenants,
            memory: KvMemory::new(&limits),
            sequences: Sequences::default(),
            slots: Slots::new(limits.running_max),
            waiting: WaitingQueue::default(),
            running: Vec::with_capacity(limits.running_max as usize),
            swapped: Vec::new(),
            transfers: Transfers::default(),
            deadlines: BTreeSet::new(),
            arrivals: 0,
            launches: Launches::default(),
            drafting: Drafting::default(),
            prefill_load: PrefillLoad::default(),
            resumption: ResumptionEstimator::default(),
            iteration: Iteration::default(),
            ended: Vec::new(),
            totals: Load::default(),
            queueing_times: Vec::new(),
            history: History::new(Self::HISTORY),
            group_open: false,
            log: None,
            buffers: Buffers::default(),
        })
    }

    /// Returns the scheduler's limits.
    pub fn limits(&self) -> &SchedulerLimits {
        &self.limits
    }

    /// Starts recording all inputs, for [`crate::replay`]. Must be called before any input, with the policy
    /// and the prior that the scheduler was created with.
    pub fn record(&mut self, policy: impl Into<Policy>, prior: &CostPrior) {
        debug_assert!(
            self.arrivals == 0 && self.launches.count() == 0,
            "recording started after the first input"
        );
        self.log = Some(RecordLog::new(&self.limits, policy.into(), prior));
    }

    /// Drains the bytes recorded since the last call; empty if recording is off.
    pub fn take_log(&mut self) -> Vec<u8> {
        self.log.as_mut().map(RecordLog::take).unwrap_or_default()
    }

    /// Fits the cost model to a step measured outside of any iteration, as in calibration.
    pub fn observe_step(&mut self, work: &StepWork, took: Duration) {
        self.log.iter_mut().for_each(|log| log.step(work, took));
        self.cost.observe_step(work, took);
    }

    /// Fits the cost model to a measured one-way copy of `blocks` blocks.
    pub fn observe_copy(&mut self, blocks: u32, took: Duration) {
        self.log.iter_mut().for_each(|log| log.copy(blocks, took));
        self.cost.observe_copy(blocks, took);
    }

    /// Returns the cost model of the device.
    pub fn cost(&self) -> &CostModel {
        &self.cost
    }

    /// Returns the service accounting of the tenants.
    pub fn tenants(&self) -> &VirtualTokenCounters {
        &self.tenants
    }

    /// Drains the charges of the tenants charged since the last call.
    pub fn drain_charged(&mut self) -> impl Iterator<Item = TenantCharge<'_>> + '_ {
        self.tenants.drain_charged()
    }

    /// Returns the system virtual time: the highest virtual start time of the sequences that began to run.
    pub fn virtual_time(&self) -> Service {
        self.waiting.virtual_time()
    }

    /// Returns the current load and the counters.
    pub fn load(&self) -> Load {
        let unfilled = self.running.iter().map(|index| self.memory.unfilled(&self.sequences[*index]));
        Load {
            unfilled_tokens: unfilled.sum(),
            running: self.slots.used(),
            waiting: self.waiting.len(),
            swapped: self.swapped.len() as u32 + self.transfers.swapping_out(),
            blocks_used: self.memory.used(),
            blocks: self.memory.total(),
            host_blocks_used: self.memory.host_used(),
            ..self.totals
        }
    }

    /// Returns the queueing times of the sequences that the last plan has admitted for the first time.
    pub fn queueing_times(&self) -> &[(SequenceId, Duration)] {
        &self.queueing_times
    }

    /// Returns the recent iterations.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Returns true without sequences and transfers.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.transfers.is_empty()
    }

    /// Returns the block tables of a sequence, without blocks while it does not run; `None` if it has ended.
    pub fn tables(&self, id: SequenceId) -> Option<&Tables> {
        self.sequences.get(id).map(|sequence| &sequence.tables)
    }

    /// Adds a sequence to the waiting queue.
    ///
    /// # Errors
    /// [`SubmitError`]; no sequence is added then.
    pub fn submit(&mut self, new: NewSequence<'_>, now: Time) -> Result<SequenceId, SubmitError> {
        self.log.iter_mut().for_each(|log| log.submit(&new, now));
        if self.waiting.len() >= self.limits.waiting_max {
            return Err(SubmitError::QueueFull { waiting: self.waiting.len() });
        }
        if new.known_tokens == 0 || new.max_tokens == 0 {
            return Err(SubmitError::Empty);
        }
        let tokens = u64::from(new.known_tokens) + u64::from(new.max_tokens);
        let most = self.limits.sequence_tokens_max();
        if tokens > u64::from(most) {
            return Err(SubmitError::TooLong { tokens, most });
        }
        let full = |tokens: u32| (tokens / self.limits.block_tokens()) as usize;
        // Reserved for the maximum length, so that nothing is allocated while the sequence runs.
        let mut hashes = Vec::new();
        if self.limits.prefix_cache {
            hashes.reserve_exact(full(new.known_tokens + new.max_tokens));
            hashes.extend(new.hashes.iter().take(full(new.known_tokens)));
        }
        let tables = self.memory.tables(new.known_tokens + new.max_tokens);
        self.arrivals += 1;
        let tenant = self.tenants.arrive(new.tenant, new.weight);
        // A flow is served by arrival, so virtual start times must not decrease within it, whichever router
        // sent them.
        let last = self.waiting.last(FlowKey::new(new.priority, tenant));
        let last = last.and_then(|last| self.sequences[last].virtual_start_time);
        let virtual_start_time = new.virtual_start_time.map(|start| start.max(last.unwrap_or_default()));
        let (arrival, predicted) = (self.arrivals, self.drafting.inherited());
        let index = self.sequences.insert(|id| Sequence {
            id,
            state: SequenceState::Waiting,
            tenant,
            virtual_start_time,
            priority: new.priority,
            arrival,
            queued: now,
            deadline: new.deadline,
            known_tokens: new.known_tokens,
            computed_tokens: 0,
            committed_tokens: 0,
            remaining_tokens: new.max_tokens,
            input_tokens: new.known_tokens,
            charged_tokens: new.charged_tokens,
            tables,
            host_tables: Tables::default(),
            hashes,
            sealed_spans: 0,
            junction: 0,
            progress: StateProgress::default(),
            group: new.group,
            scored: ScoredRange { end: new.scored.end.min(new.known_tokens - 1), ..new.scored },
            drafted: 0,
            draft_kind: DraftKind::Guessed,
            drafts_in_flight: 0,
            undrafted: Spans::default(),
            acceptance: Acceptance::default(),
            predicted,
            predictions: 0,
            in_flight: 0,
            copies: 0,
            preempt_for: None,
            forced: false,
            skip_host: false,
            bypass_count: 0,
            preempted_at: None,
            dropped_spans: 0,
            without_progress: false,
            protected_until: 0,
        });
        if let Some(deadline) = new.deadline {
            self.deadlines.insert((deadline, index));
        }
        self.enqueue(index);
        Ok(self.sequences[index].id)
    }

    /// Forces the preemption of a running sequence as soon as no iteration uses it, for drills and tests.
    /// No-op for a sequence that does not run.
    pub fn preempt(&mut self, id: SequenceId) {
        let runs = |sequence: &Sequence| {
            matches!(sequence.state, SequenceState::Prefilling { .. } | SequenceState::Decoding { .. })
        };
        if self.sequences.get(id).is_some_and(runs) {
            self.log.iter_mut().for_each(|log| log.of_sequence(RecordKind::Preempt, id));
            let sequence = &mut self.sequences[id.index];
            (sequence.preempt_for, sequence.forced) = (Some(id), true);
        }
    }

    /// Drains the terminal events since the last call, in order.
    pub fn drain_ended(&mut self) -> impl Iterator<Item = Ended> + '_ {
        self.ended.drain(..)
    }

    /// Drains the slots freed since the last call; the driver detaches them before the next iteration runs.
    pub fn drain_freed_slots(&mut self) -> impl Iterator<Item = Slot> + '_ {
        self.slots.drain_freed()
    }

    /// Drains the changes of the prefix cache since the last call, in order per tier.
    pub fn drain_cache_events(&mut self) -> impl Iterator<Item = (CacheTier, CacheEvent)> + '_ {
        self.memory.drain_events()
    }

    /// Returns the hashes of the spans behind which a sequence can resume, with undrained changes applied: at most one entry per
    /// block of each pool.
    pub fn cache_contents(&self) -> impl Iterator<Item = (CacheTier, BlockHash)> + '_ {
        self.memory.contents()
    }

    /// Returns the last plan.
    pub fn iteration(&self) -> &Iteration {
        &self.iteration
    }

    /// Returns the number of launched and uncommitted iterations.
    pub fn in_flight(&self) -> usize {
        self.launches.in_flight()
    }

    /// Adds a sequence to its flow.
    fn enqueue(&mut self, index: u32) {
        let sequence = &mut self.sequences[index];
        sequence.state = SequenceState::Waiting;
        self.waiting.insert(sequence);
    }

    /// Removes a sequence from its flow and advances the system virtual time.
    fn dequeue(&mut self, index: u32) {
        let sequence = &self.sequences[index];
        self.waiting.remove(sequence);
        self.tenants.start(sequence.tenant);
    }

    /// Marks a preempted sequence as resumed: it is protected until it makes progress, and for the cool-down.
    fn resume(&mut self, index: u32, now: Time) {
        let protected_until = self.launches.count() + self.limits.cooldown_steps;
        let sequence = &mut self.sequences[index];
        let Some(since) = sequence.preempted_at.take() else { return };
        (sequence.without_progress, sequence.protected_until) = (true, protected_until);
        let pause = now.since(since);
        self.resumption.record_resumed(pause);
        self.totals.resumed_sequences += 1;
        self.totals.preemption_pause_us += u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
    }

    /// Returns a sequence to the waiting queue at its old position, with nothing computed.
    fn requeue(&mut self, index: u32, now: Time) {
        let sequence = &mut self.sequences[index];
        let lost = u64::from(sequence.committed_tokens);
        (sequence.computed_tokens, sequence.committed_tokens, sequence.sealed_spans) = (0, 0, 0);
        sequence.queued = now;
        let tenant = sequence.tenant;
        self.totals.recomputed_tokens += lost;
        self.tenants.wait(tenant);
        self.enqueue(index);
    }

    /// Returns the properties by which the policy orders a sequence.
    fn view(&self, index: u32, now: Time) -> SequenceView {
        let sequence = &self.sequences[index];
        SequenceView {
            priority: sequence.priority,
            arrival: sequence.arrival,
            tokens: sequence.known_tokens + sequence.remaining_tokens,
            tenant: sequence.tenant,
            service: match (sequence.state, sequence.virtual_start_time) {
                (SequenceState::Waiting, Some(order)) => order,
                _ => self.tenants.service(sequence.tenant),
            },
            waited: match sequence.state {
                SequenceState::Waiting | SequenceState::Swapped => now.since(sequence.queued),
                _ => Duration::ZERO,
            },
        }
    }

    /// Returns what bounds the steps.
    fn step_bounds(&self) -> StepBounds<'_> {
        StepBounds {
            target: self.limits.step_target,
            cost: &self.cost,
            prefill_load: &self.prefill_load,
            sequences: &self.sequences,
            predicting: self.prediction_time(),
        }
    }
}

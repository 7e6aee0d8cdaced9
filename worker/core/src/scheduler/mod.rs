//! Iteration scheduler: state, submission and end of sequences. Planning is in [`plan`], [`admit`] and
//! [`preempt`], completion in [`commit`].

mod admit;
mod commit;
mod drafts;
mod end;
mod error;
mod invariants;
mod load;
mod plan;
mod preempt;
mod prefill_backlog;
mod resumption_estimator;
mod roster;
mod step_bound;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use inflight_contract::{BlockHash, FinishReason, Service, Tenant, TenantCharge, VirtualTokenCounters};

use crate::cost::{CostModel, CostPrior, StepWork};
use crate::drafts::{Acceptance, DraftBudget, DraftKind};
use crate::history::History;
use crate::memory::{BlockStore, Spans, Tables};
use crate::policy::{Policy, SchedulingPolicy, SequenceView};
use crate::record::{RecordKind, RecordLog};
use crate::sequence::{Sequence, SequenceState};
use crate::{
    Block, CacheEvent, CacheTier, Chunk, Direction, Iteration, LimitsError, NewSequence, PrefillLoad,
    SchedulerLimits, ScoredRange, SequenceId, Slot, Time, TransferId,
};
pub use error::{CommitError, SubmitError};
pub use load::{Load, PrefillEstimate};
use resumption_estimator::ResumptionEstimator;
pub use roster::{SequencePhase, SequenceStatus};

/// Terminal event of a sequence. Its slot is freed separately, since an iteration in flight may still use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Ended sequence.
    pub id: SequenceId,
    /// Reason of the end.
    pub reason: FinishReason,
}

/// Launched and uncommitted iteration.
#[derive(Debug, Default)]
struct LaunchedIteration {
    number: u64,
    chunks: Vec<Chunk>,
    /// Sequences whose blocks are used by the iteration's block copies, once per copy.
    sources: Vec<u32>,
    work: StepWork,
    /// Share of prefills in the predicted duration.
    prefill_share: f64,
}

/// Transfer between device and host that has not reached its fence. It owns its blocks.
#[derive(Debug)]
struct TransferInFlight {
    direction: Direction,
    purpose: TransferPurpose,
    /// Device blocks: the whole tables of the sequence, even if only a part is copied.
    device: Tables,
    host: Tables,
}

/// Purpose of a transfer.
#[derive(Debug)]
enum TransferPurpose {
    /// Swap of a sequence, or load of its prefix from the host.
    Sequence(SequenceId),
    /// Transfer of a sequence that has ended: its blocks are freed at the fence.
    Orphaned,
    /// Offload of cold prefix-cache blocks to the host: device block, host block, hash.
    Offload(Vec<(Block, Block, BlockHash)>),
}

impl TransferInFlight {
    /// Returns the device blocks that it owns.
    fn device_blocks(&self) -> impl Iterator<Item = Block> + '_ {
        let offloaded = match &self.purpose {
            TransferPurpose::Offload(blocks) => blocks.as_slice(),
            TransferPurpose::Sequence(_) | TransferPurpose::Orphaned => &[],
        };
        self.device.blocks().chain(offloaded.iter().map(|(device, ..)| *device))
    }

    /// Returns the host blocks that it owns.
    fn host_blocks(&self) -> impl Iterator<Item = Block> + '_ {
        let offloaded = match &self.purpose {
            TransferPurpose::Offload(blocks) => blocks.as_slice(),
            TransferPurpose::Sequence(_) | TransferPurpose::Orphaned => &[],
        };
        self.host.blocks().chain(offloaded.iter().map(|(_, host, _)| *host))
    }

    fn owner(&self) -> Option<SequenceId> {
        match self.purpose {
            TransferPurpose::Sequence(owner) => Some(owner),
            TransferPurpose::Orphaned | TransferPurpose::Offload(_) => None,
        }
    }
}

/// Key of a flow: the waiting sequences of one tenant at one priority, which are served in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct FlowKey {
    priority: Reverse<i32>,
    tenant: Tenant,
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
    device: BlockStore,
    host: BlockStore,
    sequences: Vec<Option<Sequence>>,
    generations: Vec<u32>,
    free_indices: Vec<u32>,
    free_slots: Vec<Slot>,
    /// Sequences in `Prefilling` or `Decoding`.
    running: Vec<u32>,
    waiting: u32,
    /// Waiting sequences by flow and arrival number.
    flows: BTreeMap<FlowKey, BTreeMap<u64, u32>>,
    swapped: Vec<u32>,
    transfers: BTreeMap<TransferId, TransferInFlight>,
    deadlines: BTreeSet<(Time, u32)>,
    arrivals: u64,
    /// Highest virtual start time of the sequences that left the waiting queue.
    max_virtual_start_time: Service,
    transfer_ids: u64,
    iterations: u64,
    iteration: Iteration,
    launched: VecDeque<LaunchedIteration>,
    /// Committed iterations whose buffers are reused.
    recycled: Vec<LaunchedIteration>,
    ended: Vec<Ended>,
    freed_slots: Vec<Slot>,
    totals: Load,
    /// Queueing times of the sequences that the last plan has admitted for the first time.
    queueing_times: Vec<(SequenceId, Duration)>,
    history: History,
    resumption: ResumptionEstimator,
    prefill_load: PrefillLoad,
    draft_budget: DraftBudget,
    /// Estimate of how many forced drafts stand, over all sequences.
    forced_acceptance: Acceptance,
    /// Set if the last step stopped admitting only because its token budget was used up.
    group_open: bool,
    log: Option<RecordLog>,
    // Scratch buffers, kept to avoid allocation.
    scratch: Vec<(u32, u32)>,
    /// Prefills of the step that is planned, with their uncomputed tokens.
    prefills: Vec<(u32, u32)>,
    heads: Vec<admit::FlowHead>,
    bypassed: Vec<u32>,
    swap_order: Vec<u32>,
    victims: Vec<u32>,
    /// Sequences with tokens drafted since the last plan.
    drafting: Vec<u32>,
    draft_candidates: Vec<drafts::DraftCandidate>,
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
            device: BlockStore::new(limits.shape, limits.blocks).with_evicted_hashes(),
            host: BlockStore::new(limits.shape, limits.host_blocks),
            sequences: Vec::new(),
            generations: Vec::new(),
            free_indices: Vec::new(),
            free_slots: (0..limits.running_max).rev().collect(),
            running: Vec::with_capacity(limits.running_max as usize),
            flows: BTreeMap::new(),
            waiting: 0,
            swapped: Vec::new(),
            transfers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            arrivals: 0,
            max_virtual_start_time: Service::default(),
            transfer_ids: 0,
            iterations: 0,
            iteration: Iteration::default(),
            launched: VecDeque::new(),
            recycled: Vec::new(),
            ended: Vec::new(),
            freed_slots: Vec::new(),
            totals: Load::default(),
            queueing_times: Vec::new(),
            history: History::new(Self::HISTORY),
            resumption: ResumptionEstimator::default(),
            prefill_load: PrefillLoad::default(),
            draft_budget: DraftBudget::default(),
            forced_acceptance: Acceptance::default(),
            group_open: false,
            log: None,
            scratch: Vec::new(),
            prefills: Vec::new(),
            heads: Vec::new(),
            bypassed: Vec::new(),
            swap_order: Vec::new(),
            victims: Vec::new(),
            drafting: Vec::new(),
            draft_candidates: Vec::new(),
        })
    }

    /// Returns the scheduler's limits.
    pub fn limits(&self) -> &SchedulerLimits {
        &self.limits
    }

    /// Starts recording all inputs, for [`crate::replay`]. Must be called before any input, with the policy
    /// and the prior that the scheduler was created with.
    pub fn record(&mut self, policy: impl Into<Policy>, prior: &CostPrior) {
        debug_assert!(self.arrivals == 0 && self.iterations == 0, "recording started after the first input");
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
        self.max_virtual_start_time
    }

    /// Returns the current load and the counters.
    pub fn load(&self) -> Load {
        let swapping_out =
            |transfer: &&TransferInFlight| transfer.direction == Direction::Out && transfer.owner().is_some();
        let unfilled = |index: &u32| {
            let sequence = self.sequence(*index);
            (sequence.tables.end() * self.limits.block_tokens()).saturating_sub(sequence.computed_tokens)
        };
        Load {
            unfilled_tokens: self.running.iter().map(unfilled).sum(),
            running: (self.limits.running_max as usize - self.free_slots.len()) as u32,
            waiting: self.waiting,
            swapped: (self.swapped.len() + self.transfers.values().filter(swapping_out).count()) as u32,
            blocks_used: self.device.used(),
            blocks: self.device.total(),
            host_blocks_used: self.host.used(),
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
        self.sequences.len() == self.free_indices.len() && self.transfers.is_empty()
    }

    /// Returns the block tables of a sequence, without blocks while it does not run; `None` if it has ended.
    pub fn tables(&self, id: SequenceId) -> Option<&Tables> {
        self.get(id).map(|sequence| &sequence.tables)
    }

    /// Adds a sequence to the waiting queue.
    ///
    /// # Errors
    /// [`SubmitError`]; no sequence is added then.
    pub fn submit(&mut self, new: NewSequence<'_>, now: Time) -> Result<SequenceId, SubmitError> {
        self.log.iter_mut().for_each(|log| log.submit(&new, now));
        if self.waiting >= self.limits.waiting_max {
            return Err(SubmitError::QueueFull { waiting: self.waiting });
        }
        if new.known_tokens == 0 || new.max_tokens == 0 {
            return Err(SubmitError::Empty);
        }
        let tokens = u64::from(new.known_tokens) + u64::from(new.max_tokens);
        let most = self.limits.sequence_tokens_max();
        if tokens > u64::from(most) {
            return Err(SubmitError::TooLong { tokens, most });
        }
        let index = self.free_indices.pop().unwrap_or_else(|| {
            self.sequences.push(None);
            self.generations.push(0);
            self.sequences.len() as u32 - 1
        });
        let id = SequenceId { index, generation: self.generations[index as usize] };
        let full = |tokens: u32| (tokens / self.limits.block_tokens()) as usize;
        // Reserved for the maximum length, so that nothing is allocated while the sequence runs.
        let mut hashes = Vec::new();
        if self.limits.prefix_cache {
            hashes.reserve_exact(full(new.known_tokens + new.max_tokens));
            hashes.extend(new.hashes.iter().take(full(new.known_tokens)));
        }
        let ahead = self.limits.tokens_ahead();
        let tables = Tables::new(&self.limits.shape, new.known_tokens + new.max_tokens, ahead);
        self.arrivals += 1;
        let tenant = self.tenants.arrive(new.tenant, new.weight);
        // A flow is served by arrival, so virtual start times must not decrease within it, whichever router
        // sent them.
        let flow = self.flows.get(&FlowKey { priority: Reverse(new.priority), tenant });
        let last = flow
            .and_then(|flow| flow.last_key_value())
            .map(|(_, last)| self.sequence(*last).virtual_start_time);
        let virtual_start_time =
            new.virtual_start_time.map(|start| start.max(last.flatten().unwrap_or_default()));
        let sequence = Sequence {
            id,
            state: SequenceState::Waiting,
            tenant,
            virtual_start_time,
            priority: new.priority,
            arrival: self.arrivals,
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
            group: new.group,
            scored: ScoredRange { end: new.scored.end.min(new.known_tokens - 1), ..new.scored },
            drafted: 0,
            draft_kind: DraftKind::Guessed,
            drafts_in_flight: 0,
            undrafted: Spans::default(),
            acceptance: Acceptance::default(),
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
        };
        if let Some(deadline) = new.deadline {
            self.deadlines.insert((deadline, index));
        }
        self.sequences[index as usize] = Some(sequence);
        self.enqueue(index);
        Ok(id)
    }

    /// Forces the preemption of a running sequence as soon as no iteration uses it, for drills and tests.
    /// No-op for a sequence that does not run.
    pub fn preempt(&mut self, id: SequenceId) {
        let runs = |sequence: &Sequence| {
            matches!(sequence.state, SequenceState::Prefilling { .. } | SequenceState::Decoding { .. })
        };
        if self.get(id).is_some_and(runs) {
            self.log.iter_mut().for_each(|log| log.of_sequence(RecordKind::Preempt, id));
            let sequence = self.sequence_mut(id.index);
            (sequence.preempt_for, sequence.forced) = (Some(id), true);
        }
    }

    /// Drains the terminal events since the last call, in order.
    pub fn drain_ended(&mut self) -> impl Iterator<Item = Ended> + '_ {
        self.ended.drain(..)
    }

    /// Drains the slots freed since the last call; the driver detaches them before the next iteration runs.
    pub fn drain_freed_slots(&mut self) -> impl Iterator<Item = Slot> + '_ {
        self.freed_slots.drain(..)
    }

    /// Drains the changes of the prefix cache since the last call, in order per tier.
    pub fn drain_cache_events(&mut self) -> impl Iterator<Item = (CacheTier, CacheEvent)> + '_ {
        let device = self.device.drain_events().map(|event| (CacheTier::Device, event));
        device.chain(self.host.drain_events().map(|event| (CacheTier::Host, event)))
    }

    /// Returns the hashes of the spans behind which a sequence can resume, with undrained changes applied: at most one entry per
    /// block of each pool.
    pub fn cache_contents(&self) -> impl Iterator<Item = (CacheTier, BlockHash)> + '_ {
        let device = self.device.cache().contents().map(|hash| (CacheTier::Device, hash));
        device.chain(self.host.cache().contents().map(|hash| (CacheTier::Host, hash)))
    }

    /// Returns the last plan.
    pub fn iteration(&self) -> &Iteration {
        &self.iteration
    }

    /// Returns the number of launched and uncommitted iterations.
    pub fn in_flight(&self) -> usize {
        self.launched.len()
    }

    /// Adds a sequence to its flow.
    fn enqueue(&mut self, index: u32) {
        let sequence = self.sequence_mut(index);
        sequence.state = SequenceState::Waiting;
        let (flow, arrival) = (flow_key(sequence), sequence.arrival);
        self.flows.entry(flow).or_default().insert(arrival, index);
        self.waiting += 1;
    }

    /// Removes a sequence from its flow and advances the system virtual time.
    fn dequeue(&mut self, index: u32) {
        let sequence = self.sequence_mut(index);
        let (flow, arrival, order) = (flow_key(sequence), sequence.arrival, sequence.virtual_start_time);
        self.max_virtual_start_time = self.max_virtual_start_time.max(order.unwrap_or_default());
        self.tenants.start(flow.tenant);
        if let Some(waiting) = self.flows.get_mut(&flow) {
            waiting.remove(&arrival);
            if waiting.is_empty() {
                self.flows.remove(&flow);
            }
        }
        self.waiting -= 1;
    }

    /// Marks a preempted sequence as resumed: it is protected until it makes progress, and for the cool-down.
    fn resume(&mut self, index: u32, now: Time) {
        let protected_until = self.iterations + self.limits.cooldown_steps;
        let sequence = self.sequence_mut(index);
        let Some(since) = sequence.preempted_at.take() else { return };
        (sequence.without_progress, sequence.protected_until) = (true, protected_until);
        let pause = now.since(since);
        self.resumption.record_resumed(pause);
        self.totals.resumed_sequences += 1;
        self.totals.preemption_pause_us += u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
    }

    /// Returns a sequence to the waiting queue at its old position, with nothing computed.
    fn requeue(&mut self, index: u32, now: Time) {
        let sequence = self.sequence_mut(index);
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
        let sequence = self.sequence(index);
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

    /// Returns a sequence that has not ended.
    fn get(&self, id: SequenceId) -> Option<&Sequence> {
        let sequence = self.sequences.get(id.index())?.as_ref()?;
        (sequence.id == id && !matches!(sequence.state, SequenceState::Leaving { .. })).then_some(sequence)
    }

    fn sequence(&self, index: u32) -> &Sequence {
        // Indices come from the scheduler's own lists, which a sequence leaves before `remove`.
        self.sequences[index as usize].as_ref().expect("a scheduled sequence exists")
    }

    fn sequence_mut(&mut self, index: u32) -> &mut Sequence {
        // Indices come from the scheduler's own lists, which a sequence leaves before `remove`.
        self.sequences[index as usize].as_mut().expect("a scheduled sequence exists")
    }
}

fn flow_key(sequence: &Sequence) -> FlowKey {
    FlowKey { priority: Reverse(sequence.priority), tenant: sequence.tenant }
}

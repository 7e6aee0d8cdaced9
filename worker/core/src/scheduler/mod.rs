//! The scheduler: what it holds, how sequences come and go. What a step does is in [`plan`], [`admit`] and
//! [`preempt`], what comes of it in [`commit`].

mod admit;
mod check;
mod commit;
mod error;
mod load;
mod outlook;
mod plan;
mod preempt;
mod resumption;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use inflight_contract::{BlockHash, Charged, FinishReason, Service, Tenant, TenantService};

use crate::cost::{CostModel, CostPrior, StepWork};
use crate::history::History;
use crate::mutant::Mutant;
use crate::policy::{Policy, PolicyKind, View};
use crate::record::Log;
use crate::sequence::{Sequence, State};
use crate::{
    Block, BlockPool, CacheEvent, CacheTier, Chunk, Direction, Iteration, Limits, LimitsError, NewSequence,
    SequenceId, Slot, Time, TransferId,
};
pub use error::{CommitError, SubmitError};
pub use load::{Load, PrefillOutlook};
use resumption::Resumption;

/// A sequence's one terminal event. Its slot is freed apart: an iteration in flight may still use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub id: SequenceId,
    /// Why.
    pub reason: FinishReason,
}

#[derive(Debug, Default)]
struct Flight {
    number: u64,
    chunks: Vec<Chunk>,
    /// Sequences whose blocks the iteration's copies read, each once for each copy.
    sources: Vec<u32>,
    work: StepWork,
}

#[derive(Debug)]
struct Moving {
    direction: Direction,
    purpose: Purpose,
    /// Blocks of the device: all those of its sequence, also where only some are copied.
    device: Vec<Block>,
    host: Vec<Block>,
}

/// Whom a transfer is for.
#[derive(Debug)]
enum Purpose {
    /// A sequence that is swapped, or that finds its prefix on the host.
    Sequence(SequenceId),
    /// A sequence that has ended: the blocks are freed at the fence and that is all.
    Nobody,
    /// The prefix cache: cold blocks are kept on the host under these hashes.
    Offload(Vec<BlockHash>),
}

impl Moving {
    fn owner(&self) -> Option<SequenceId> {
        match self.purpose {
            Purpose::Sequence(owner) => Some(owner),
            Purpose::Nobody | Purpose::Offload(_) => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Lane {
    priority: Reverse<i32>,
    tenant: Tenant,
}

/// Decides, before every forward pass, who takes part and with how many tokens.
///
/// **Invariants**, checked by the property tests: blocks are conserved under every interleaving, and a block in a
/// transfer or in an iteration in flight is not reused before that has ended; each sequence ends exactly once; an
/// iteration never exceeds its budget; nobody gives way to one that goes after it; a step that preempts admits
/// nobody of the same class; whatever is admitted fits alone, so that the first in order always gets on.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    policy: Box<dyn Policy>,
    cost: CostModel,
    tenants: TenantService,
    device: BlockPool,
    host: BlockPool,
    sequences: Vec<Option<Sequence>>,
    generations: Vec<u32>,
    free_indices: Vec<u32>,
    free_slots: Vec<Slot>,
    /// Sequences in `Prefilling` or `Decoding`.
    running: Vec<u32>,
    lanes: BTreeMap<Lane, BTreeMap<u64, u32>>,
    waiting: u32,
    swapped: Vec<u32>,
    transfers: BTreeMap<TransferId, Moving>,
    deadlines: BTreeSet<(Time, u32)>,
    arrivals: u64,
    /// The highest order of those that began.
    begun: Service,
    transfer_ids: u64,
    iterations: u64,
    iteration: Iteration,
    flights: VecDeque<Flight>,
    spare: Vec<Flight>,
    ended: Vec<Ended>,
    freed_slots: Vec<Slot>,
    totals: Load,
    history: History,
    resumption: Resumption,
    /// The last step's admissions ended only because its tokens were used up.
    group_open: bool,
    log: Option<Log>,
    #[cfg(feature = "mutants")]
    mutant: Option<Mutant>,
    scratch: Vec<(u32, u32)>,
    heads: Vec<admit::Head>,
    passed: Vec<u32>,
    swap_order: Vec<u32>,
    victims: Vec<u32>,
}

impl Scheduler {
    /// Idle tenants that are remembered with what they have had.
    pub const TENANTS_MAX: usize = 10_000;

    /// Iterations that are remembered.
    pub const HISTORY: usize = 1024;

    /// An idle scheduler.
    ///
    /// # Errors
    /// [`LimitsError`] if the limits contradict each other.
    pub fn new(
        limits: Limits,
        policy: Box<dyn Policy>,
        cost: CostModel,
        tenants: TenantService,
    ) -> Result<Self, LimitsError> {
        limits.validate()?;
        Ok(Self {
            limits,
            policy,
            cost,
            tenants,
            device: BlockPool::new(limits.blocks),
            host: BlockPool::new(limits.host_blocks),
            sequences: Vec::new(),
            generations: Vec::new(),
            free_indices: Vec::new(),
            free_slots: (0..limits.running_max).rev().collect(),
            running: Vec::with_capacity(limits.running_max as usize),
            lanes: BTreeMap::new(),
            waiting: 0,
            swapped: Vec::new(),
            transfers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            arrivals: 0,
            begun: Service::default(),
            transfer_ids: 0,
            iterations: 0,
            iteration: Iteration::default(),
            flights: VecDeque::new(),
            spare: Vec::new(),
            ended: Vec::new(),
            freed_slots: Vec::new(),
            totals: Load::default(),
            history: History::new(Self::HISTORY),
            resumption: Resumption::default(),
            group_open: false,
            log: None,
            #[cfg(feature = "mutants")]
            mutant: None,
            scratch: Vec::new(),
            heads: Vec::new(),
            passed: Vec::new(),
            swap_order: Vec::new(),
            victims: Vec::new(),
        })
    }

    /// Breaks it on purpose.
    #[cfg(feature = "mutants")]
    pub fn mutate(&mut self, mutant: Mutant) {
        self.mutant = Some(mutant);
    }

    #[cfg(feature = "mutants")]
    fn is_mutant(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    #[cfg(not(feature = "mutants"))]
    fn is_mutant(&self, _: Mutant) -> bool {
        false
    }

    /// The limits it was made with.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Records from now on everything that reaches it, for [`crate::replay`]. To be called before anything does, with
    /// the policy and the prior that it was made with.
    pub fn record(&mut self, policy: PolicyKind, prior: &CostPrior) {
        debug_assert!(self.arrivals == 0 && self.iterations == 0, "the beginning would be missing");
        self.log = Some(Log::new(&self.limits, policy, prior));
    }

    /// Takes what was recorded since the last call; empty if nothing is.
    pub fn take_log(&mut self) -> Vec<u8> {
        self.log.as_mut().map(Log::take).unwrap_or_default()
    }

    /// Teaches the cost model a step that was measured apart from any iteration, as in a calibration.
    pub fn observe_step(&mut self, work: &StepWork, took: Duration) {
        self.log.iter_mut().for_each(|log| log.step(work, took));
        self.cost.observe_step(work, took);
    }

    /// Teaches the cost model a copy of this many blocks.
    pub fn observe_copy(&mut self, blocks: u32, took: Duration) {
        self.log.iter_mut().for_each(|log| log.copy(blocks, took));
        self.cost.observe_copy(blocks, took);
    }

    /// What it has learnt of the device.
    pub fn cost(&self) -> &CostModel {
        &self.cost
    }

    /// What its tenants have had.
    pub fn tenants(&self) -> &TenantService {
        &self.tenants
    }

    /// Takes the tenants charged since the last call, each with all it was charged since it is known.
    pub fn drain_charged(&mut self) -> impl Iterator<Item = (&str, Charged)> + '_ {
        self.tenants.drain_charged()
    }

    /// The highest order of the sequences that began to run: how far service has got.
    pub fn begun(&self) -> Service {
        self.begun
    }

    /// How busy it is now.
    pub fn load(&self) -> Load {
        let moving_out = |moving: &&Moving| moving.direction == Direction::Out && moving.owner().is_some();
        Load {
            running: (self.limits.running_max as usize - self.free_slots.len()) as u32,
            waiting: self.waiting,
            swapped: (self.swapped.len() + self.transfers.values().filter(moving_out).count()) as u32,
            blocks_used: self.device.used(),
            blocks: self.device.total(),
            host_blocks_used: self.host.used(),
            ..self.totals
        }
    }

    /// What the last iterations did, and why not more.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Whether there is nothing to do and nothing under way.
    pub fn is_idle(&self) -> bool {
        self.sequences.len() == self.free_indices.len() && self.transfers.is_empty()
    }

    /// The blocks of a sequence, in the order of its positions; empty while it does not run.
    pub fn block_table(&self, id: SequenceId) -> &[Block] {
        self.get(id).map_or(&[], |sequence| &sequence.table)
    }

    /// Queues a sequence.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing has changed then.
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
        let full = |tokens: u32| (tokens / self.limits.block_tokens) as usize;
        // All the room that it can come to need, so that nothing is allocated while it runs.
        let mut hashes = Vec::new();
        if self.limits.prefix_cache {
            hashes.reserve_exact(full(new.known_tokens + new.max_tokens));
            hashes.extend(new.hashes.iter().take(full(new.known_tokens)));
        }
        let table = Vec::with_capacity(self.limits.blocks_for(new.known_tokens + new.max_tokens) as usize);
        self.arrivals += 1;
        let tenant = self.tenants.arrive(new.tenant, new.weight);
        // A lane is served by arrival, so within it the turns must rise, whichever router sent them.
        let lane = self.lanes.get(&Lane { priority: Reverse(new.priority), tenant });
        let last = lane.and_then(|waiting| waiting.last_key_value()).map(|(_, last)| self.peek(*last).order);
        let order = new.order.map(|order| order.max(last.flatten().unwrap_or_default()));
        let sequence = Sequence {
            id,
            state: State::Waiting,
            tenant,
            order,
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
            table,
            host_table: Vec::new(),
            hashes,
            sealed_blocks: 0,
            group: new.group,
            in_flight: 0,
            evict_for: None,
            forced: false,
            skip_host: false,
            bypassed: 0,
            preempted_at: None,
            dropped_blocks: 0,
            without_progress: false,
            spared_until: 0,
        };
        if let Some(deadline) = new.deadline {
            self.deadlines.insert((deadline, index));
        }
        self.sequences[index as usize] = Some(sequence);
        self.enqueue(index);
        Ok(id)
    }

    /// Withdraws a sequence: it ends at once. An unknown or ended sequence is left alone.
    pub fn cancel(&mut self, id: SequenceId) {
        if self.get(id).is_some() {
            self.log.iter_mut().for_each(|log| log.cancel(id));
            self.end(id.index, FinishReason::Cancelled);
        }
    }

    /// Makes a running sequence give way at the next moment it can, as if another lacked its blocks: for drills, and to
    /// prove that it changes no answer. One that does not run is left alone.
    pub fn preempt(&mut self, id: SequenceId) {
        let runs =
            |sequence: &Sequence| matches!(sequence.state, State::Prefilling { .. } | State::Decoding { .. });
        if self.get(id).is_some_and(runs) {
            self.log.iter_mut().for_each(|log| log.preempt(id));
            let sequence = self.at(id.index);
            (sequence.evict_for, sequence.forced) = (Some(id), true);
        }
    }

    /// Takes the terminal events since the last call, in order.
    pub fn drain_ended(&mut self) -> impl Iterator<Item = Ended> + '_ {
        self.ended.drain(..)
    }

    /// Takes the slots that became free since the last call: detach them before the next iteration runs.
    pub fn drain_freed_slots(&mut self) -> impl Iterator<Item = Slot> + '_ {
        self.freed_slots.drain(..)
    }

    /// Takes the changes of the prefix cache since the last call, those of each tier in order.
    pub fn drain_cache_events(&mut self) -> impl Iterator<Item = (CacheTier, CacheEvent)> + '_ {
        let device = self.device.drain_events().map(|event| (CacheTier::Device, event));
        device.chain(self.host.drain_events().map(|event| (CacheTier::Host, event)))
    }

    /// All that the prefix cache can find again, with the changes that were not taken yet: at most one entry for each
    /// block of each pool.
    pub fn cache_contents(&self) -> impl Iterator<Item = (CacheTier, BlockHash)> + '_ {
        let device = self.device.contents().map(|hash| (CacheTier::Device, hash));
        device.chain(self.host.contents().map(|hash| (CacheTier::Host, hash)))
    }

    /// The iteration planned last.
    pub fn iteration(&self) -> &Iteration {
        &self.iteration
    }

    /// Iterations planned and not yet committed.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Ends what is past its deadline.
    fn expire(&mut self, now: Time) {
        while let Some(&(deadline, index)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.end(index, FinishReason::Deadline);
        }
    }

    /// The one place where a sequence's terminal event is made. What it owns comes back now or, if an iteration
    /// or a transfer still uses it, when that is over.
    fn end(&mut self, index: u32, reason: FinishReason) {
        if reason == FinishReason::Cancelled && self.peek(index).preempted_at.is_some() {
            self.resumption.withdrawn();
        }
        let sequence = self.at(index);
        let (id, state, in_flight) = (sequence.id, sequence.state, sequence.in_flight);
        if let Some(deadline) = sequence.deadline.take() {
            self.deadlines.remove(&(deadline, index));
        }
        self.ended.push(Ended { id, reason });
        match state {
            State::Waiting => self.dequeue(index),
            State::Swapped => self.swapped.retain(|other| *other != index),
            State::SwappingOut { transfer } | State::SwappingIn { transfer, .. } => {
                if let Some(moving) = self.transfers.get_mut(&transfer) {
                    moving.purpose = Purpose::Nobody;
                }
            }
            State::Prefilling { slot } | State::Decoding { slot } => {
                self.running.retain(|other| *other != index);
                if in_flight > 0 {
                    self.at(index).state = State::Leaving { slot };
                    return;
                }
            }
            State::Leaving { .. } => unreachable!("a sequence ends once"),
        }
        self.remove(index);
    }

    /// Takes the entry away and frees what it owns.
    fn remove(&mut self, index: u32) {
        let Some(mut sequence) = self.sequences[index as usize].take() else { return };
        let slot = sequence.slot();
        self.free_slots.extend(slot);
        self.freed_slots.extend(slot);
        self.device.release_table(&mut sequence.table);
        self.host.release_table(&mut sequence.host_table);
        self.tenants.depart(sequence.tenant);
        self.generations[index as usize] = self.generations[index as usize].wrapping_add(1);
        self.free_indices.push(index);
    }

    /// Puts a sequence into its lane.
    fn enqueue(&mut self, index: u32) {
        let sequence = self.at(index);
        sequence.state = State::Waiting;
        let (lane, arrival) = (lane(sequence), sequence.arrival);
        self.lanes.entry(lane).or_default().insert(arrival, index);
        self.waiting += 1;
    }

    fn dequeue(&mut self, index: u32) {
        let sequence = self.at(index);
        let (lane, arrival, order) = (lane(sequence), sequence.arrival, sequence.order);
        self.begun = self.begun.max(order.unwrap_or_default());
        self.tenants.start(lane.tenant);
        if let Some(waiting) = self.lanes.get_mut(&lane) {
            waiting.remove(&arrival);
            if waiting.is_empty() {
                self.lanes.remove(&lane);
            }
        }
        self.waiting -= 1;
    }

    /// It has a slot again after a preemption: it is spared until it got on, and for the cool-down.
    fn resume(&mut self, index: u32, now: Time) {
        let spared_until = self.iterations + self.limits.cooldown_steps;
        let sequence = self.at(index);
        let Some(since) = sequence.preempted_at.take() else { return };
        (sequence.without_progress, sequence.spared_until) = (true, spared_until);
        self.resumption.resumed(now.since(since));
    }

    /// Back to the queue, at its old place, with nothing computed.
    fn requeue(&mut self, index: u32, now: Time) {
        let sequence = self.at(index);
        let lost = u64::from(sequence.committed_tokens);
        (sequence.computed_tokens, sequence.committed_tokens, sequence.sealed_blocks) = (0, 0, 0);
        sequence.queued = now;
        let tenant = sequence.tenant;
        self.totals.recomputed_tokens += lost;
        self.tenants.wait(tenant);
        self.enqueue(index);
    }

    fn view(&self, index: u32, now: Time) -> View {
        let sequence = self.peek(index);
        View {
            priority: sequence.priority,
            arrival: sequence.arrival,
            tokens: sequence.known_tokens + sequence.remaining_tokens,
            tenant: sequence.tenant,
            service: match (sequence.state, sequence.order) {
                (State::Waiting, Some(order)) => order,
                _ => self.tenants.service(sequence.tenant),
            },
            waited: match sequence.state {
                State::Waiting | State::Swapped => now.since(sequence.queued),
                _ => Duration::ZERO,
            },
        }
    }

    fn get(&self, id: SequenceId) -> Option<&Sequence> {
        let sequence = self.sequences.get(id.index())?.as_ref()?;
        (sequence.id == id && !matches!(sequence.state, State::Leaving { .. })).then_some(sequence)
    }

    fn peek(&self, index: u32) -> &Sequence {
        // Indices come from the scheduler's own lists, and `remove` comes after a sequence left them all.
        self.sequences[index as usize].as_ref().expect("a scheduled sequence exists")
    }

    fn at(&mut self, index: u32) -> &mut Sequence {
        // As in `peek`.
        self.sequences[index as usize].as_mut().expect("a scheduled sequence exists")
    }
}

fn lane(sequence: &Sequence) -> Lane {
    Lane { priority: Reverse(sequence.priority), tenant: sequence.tenant }
}

use std::collections::{BTreeMap, BTreeSet};

use inflight_contract::FinishReason;

use crate::sequence::{Rank, Sequence, State};
use crate::{
    Block, BlockPool, Blocked, BlockedBy, Chunk, Iteration, Limits, LimitsError, NewSequence, SequenceId, Slot,
    Time, Verdict,
};

/// Why a sequence was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The waiting queue is full.
    #[error("{waiting} sequences are waiting already, the most this worker queues")]
    QueueFull {
        /// Sequences waiting.
        waiting: u32,
    },
    /// There is nothing to compute or nothing to generate.
    #[error("a sequence needs at least one known token and one to generate")]
    Empty,
    /// It could never run to its end.
    #[error("the sequence may reach {tokens} tokens, but at most {most} fit")]
    TooLong {
        /// Tokens at its full length.
        tokens: u64,
        /// The longest that runs here.
        most: u32,
    },
}

/// The outcome does not belong to the iteration in flight.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// No iteration was planned, or another one.
    #[error("iteration {given} is not in flight (in flight: {in_flight:?})")]
    UnknownIteration {
        /// The number given.
        given: u64,
        /// The one planned.
        in_flight: Option<u64>,
    },
    /// One verdict is needed for each sampling chunk.
    #[error("the iteration samples {expected} tokens, but {given} verdicts came")]
    Verdicts {
        /// Sampling chunks.
        expected: usize,
        /// Verdicts given.
        given: usize,
    },
}

/// A sequence's one terminal event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub id: SequenceId,
    /// Its slot, to be detached, if it had one.
    pub slot: Option<Slot>,
    /// Why.
    pub reason: FinishReason,
}

/// How busy the scheduler is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Sequences with a slot.
    pub running: u32,
    /// Sequences without.
    pub waiting: u32,
    /// Blocks owned.
    pub blocks_used: u32,
    /// Blocks in all.
    pub blocks: u32,
    /// Preemptions since the start.
    pub preemptions: u64,
    /// Tokens whose computation a preemption threw away, since the start.
    pub recomputed_tokens: u64,
}

/// Decides, before every forward pass, who takes part and with how many tokens.
///
/// The order of a step: decodes, each one token, subtracted from the budget; then prefills: half of what is left
/// goes to the oldest one, so that it always gets on, and the rest to the others, the shortest first, so that no
/// short prompt waits behind a long one; then admissions in rank order while tokens are left.
///
/// **Invariants**, checked by the property tests in `tests/`: blocks are conserved; each sequence ends exactly
/// once; an iteration never exceeds its budget; a sequence is preempted only for one of better rank; a step that
/// preempts admits nobody; whatever is admitted fits alone, so the sequence of best rank always gets on.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    sequences: Vec<Option<Sequence>>,
    generations: Vec<u32>,
    free_indices: Vec<u32>,
    free_slots: Vec<Slot>,
    /// Sequences with a slot, best rank first.
    running: Vec<u32>,
    waiting: BTreeMap<Rank, u32>,
    deadlines: BTreeSet<(Time, u32)>,
    arrivals: u64,
    iteration: Iteration,
    in_flight: bool,
    ended: Vec<Ended>,
    preemptions: u64,
    recomputed_tokens: u64,
    scratch: Vec<(u32, u32)>,
}

impl Scheduler {
    /// An idle scheduler.
    ///
    /// # Errors
    /// [`LimitsError`] if the limits contradict each other.
    pub fn new(limits: Limits) -> Result<Self, LimitsError> {
        limits.validate()?;
        Ok(Self {
            limits,
            pool: BlockPool::new(limits.blocks),
            sequences: Vec::new(),
            generations: Vec::new(),
            free_indices: Vec::new(),
            free_slots: (0..limits.running_max).rev().collect(),
            running: Vec::with_capacity(limits.running_max as usize),
            waiting: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            arrivals: 0,
            iteration: Iteration::default(),
            in_flight: false,
            ended: Vec::new(),
            preemptions: 0,
            recomputed_tokens: 0,
            scratch: Vec::new(),
        })
    }

    /// The limits it was made with.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// How busy it is now.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            blocks_used: self.pool.used(),
            blocks: self.pool.total(),
            preemptions: self.preemptions,
            recomputed_tokens: self.recomputed_tokens,
        }
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// The blocks of a sequence, in the order of its positions; empty while it waits.
    pub fn block_table(&self, id: SequenceId) -> &[Block] {
        self.get(id).map_or(&[], |sequence| &sequence.table)
    }

    /// Queues a sequence behind those of its priority.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing has changed then.
    pub fn submit(&mut self, new: NewSequence) -> Result<SequenceId, SubmitError> {
        if self.waiting.len() as u32 >= self.limits.waiting_max {
            return Err(SubmitError::QueueFull { waiting: self.waiting.len() as u32 });
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
        self.arrivals += 1;
        let sequence = Sequence {
            id,
            state: State::Waiting,
            priority: new.priority,
            arrival: self.arrivals,
            deadline: new.deadline,
            known_tokens: new.known_tokens,
            computed_tokens: 0,
            remaining_tokens: new.max_tokens,
            table: Vec::new(),
            withdrawn: None,
        };
        self.waiting.insert(sequence.rank(), index);
        if let Some(deadline) = new.deadline {
            self.deadlines.insert((deadline, index));
        }
        self.sequences[index as usize] = Some(sequence);
        Ok(id)
    }

    /// Withdraws a sequence. It ends at once or, if it takes part in the iteration in flight, at its commit; the
    /// event is among those of [`Scheduler::drain_ended`]. An unknown or ended sequence is left alone.
    pub fn cancel(&mut self, id: SequenceId) {
        self.withdraw(id, FinishReason::Cancelled);
    }

    /// Takes the terminal events since the last call, in order.
    pub fn drain_ended(&mut self) -> impl Iterator<Item = Ended> + '_ {
        self.ended.drain(..)
    }

    /// Decides the next iteration. One with no chunks is nothing to execute and is not committed.
    ///
    /// # Panics
    /// If the iteration before was not committed: that is a fault of the driver, not of any input.
    pub fn plan(&mut self, now: Time) -> &Iteration {
        assert!(!self.in_flight, "plan was called before the iteration in flight was committed");
        self.iteration.clear();
        self.expire(now);
        let mut budget = self.limits.iteration_tokens;
        self.plan_decodes(&mut budget);
        self.plan_prefills(budget);
        if !self.iteration.chunks.is_empty() {
            self.iteration.number += 1;
            self.in_flight = true;
        }
        &self.iteration
    }

    /// The iteration planned last.
    pub fn iteration(&self) -> &Iteration {
        &self.iteration
    }

    /// Takes the results of the iteration in flight: one verdict for each sampling chunk, in order.
    ///
    /// # Errors
    /// [`CommitError`]; nothing has changed then.
    pub fn commit(&mut self, iteration: u64, verdicts: &[Verdict]) -> Result<(), CommitError> {
        self.check_in_flight(iteration)?;
        let expected = self.iteration.chunks.iter().filter(|chunk| chunk.samples).count();
        if expected != verdicts.len() {
            return Err(CommitError::Verdicts { expected, given: verdicts.len() });
        }
        self.in_flight = false;
        let chunks = std::mem::take(&mut self.iteration.chunks);
        let mut verdicts = verdicts.iter();
        for chunk in &chunks {
            let verdict = if chunk.samples { verdicts.next().copied() } else { None };
            self.commit_chunk(chunk, verdict);
        }
        self.iteration.chunks = chunks;
        Ok(())
    }

    /// Ends everything that took part in the iteration in flight: the device failed.
    ///
    /// # Errors
    /// [`CommitError::UnknownIteration`]; nothing has changed then.
    pub fn fail(&mut self, iteration: u64) -> Result<(), CommitError> {
        self.check_in_flight(iteration)?;
        self.in_flight = false;
        let chunks = std::mem::take(&mut self.iteration.chunks);
        for chunk in &chunks {
            self.end(chunk.id.index, FinishReason::Error);
        }
        self.iteration.chunks = chunks;
        Ok(())
    }

    fn check_in_flight(&self, given: u64) -> Result<(), CommitError> {
        let in_flight = self.in_flight.then_some(self.iteration.number);
        if in_flight == Some(given) { Ok(()) } else { Err(CommitError::UnknownIteration { given, in_flight }) }
    }

    fn commit_chunk(&mut self, chunk: &Chunk, verdict: Option<Verdict>) {
        let sequence = self.at(chunk.id.index);
        sequence.computed_tokens += chunk.len;
        if let Some(reason) = sequence.withdrawn {
            return self.end(chunk.id.index, reason);
        }
        let Some(verdict) = verdict else { return };
        sequence.state = State::Decoding { slot: chunk.slot };
        sequence.known_tokens += 1;
        sequence.remaining_tokens -= 1;
        match verdict {
            Verdict::Stop => self.end(chunk.id.index, FinishReason::Stop),
            Verdict::Continue if sequence.remaining_tokens == 0 => self.end(chunk.id.index, FinishReason::Length),
            Verdict::Continue => {}
        }
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

    /// One token for each decoding sequence, the best rank first; makes room by preempting the worst rank.
    fn plan_decodes(&mut self, budget: &mut u32) {
        let mut next = 0;
        while next < self.running.len() {
            let index = self.running[next];
            let sequence = self.at(index);
            let State::Decoding { slot } = sequence.state else {
                next += 1;
                continue;
            };
            let (id, start) = (sequence.id, sequence.computed_tokens);
            if !self.grow(index, start + 1) {
                // Its rank is the worst of all that run, so it gives way itself. It is also the last in
                // `running`, or everything behind it is gone, so the loop ends here or at the next step.
                continue;
            }
            self.iteration.chunks.push(Chunk { id, slot, start, len: 1, samples: true });
            // `running_max` is at most the budget, so this never goes below zero.
            *budget -= 1;
            next += 1;
        }
    }

    /// Gives a sequence blocks for `tokens`, preempting from the worst rank upwards. Returns whether the
    /// sequence still runs: it may itself be the worst.
    fn grow(&mut self, index: u32, tokens: u32) -> bool {
        let needed = self.limits.blocks_for(tokens);
        loop {
            let sequence = self.sequences[index as usize].as_mut();
            // `index` comes from `running`, whose sequences exist.
            let sequence = sequence.expect("a running sequence exists");
            if self.pool.extend(&mut sequence.table, needed) {
                return true;
            }
            let victim = *self.running.last().expect("the needy sequence itself runs");
            self.preempt(victim);
            if victim == index {
                return false;
            }
        }
    }

    /// Takes slot and blocks; the sequence keeps its rank and will be computed again.
    fn preempt(&mut self, index: u32) {
        let sequence = self.sequences[index as usize].as_mut().expect("a running sequence exists");
        let slot = sequence.slot().expect("a running sequence has a slot");
        self.recomputed_tokens += u64::from(sequence.computed_tokens);
        self.preemptions += 1;
        self.pool.give_back(&mut sequence.table);
        sequence.computed_tokens = 0;
        sequence.state = State::Waiting;
        let (id, rank) = (sequence.id, sequence.rank());
        self.waiting.insert(rank, index);
        self.running.retain(|other| *other != index);
        self.free_slots.push(slot);
        self.iteration.preempted.push((id, slot));
    }

    fn plan_prefills(&mut self, mut budget: u32) {
        let mut prefilling = std::mem::take(&mut self.scratch);
        prefilling.clear();
        for &index in &self.running {
            let sequence = self.sequences[index as usize].as_ref().expect("a running sequence exists");
            if matches!(sequence.state, State::Prefilling { .. }) {
                prefilling.push((index, sequence.uncomputed()));
            }
        }
        // The oldest gets half of the budget now and what is left at the end.
        let oldest = (!prefilling.is_empty()).then(|| prefilling.remove(0));
        let oldest = oldest.map(|(index, uncomputed)| {
            let len = uncomputed.min(budget.div_ceil(2));
            budget -= len;
            (index, uncomputed, len)
        });
        prefilling.sort_by_key(|&(_, uncomputed)| uncomputed); // stable: equal ones stay in rank order
        for &(index, uncomputed) in &prefilling {
            let len = uncomputed.min(budget);
            budget -= len;
            self.push_prefill(index, len);
        }
        self.scratch = prefilling;
        self.admit(&mut budget);
        if let Some((index, uncomputed, len)) = oldest {
            self.push_prefill(index, uncomputed.min(len + budget));
        }
    }

    /// Starts waiting sequences in rank order, until one does not fit.
    fn admit(&mut self, budget: &mut u32) {
        while let Some((&rank, &index)) = self.waiting.first_key_value() {
            let sequence = self.sequences[index as usize].as_mut().expect("a waiting sequence exists");
            let id = sequence.id;
            let needed = self.limits.admission_blocks(sequence.known_tokens);
            // Alone, a sequence may use the watermark too: it must be able to run whatever its length.
            let watermark = if self.running.is_empty() { 0 } else { self.limits.watermark_blocks };
            let blocked = |by| Some(Blocked { id, by });
            if !self.iteration.preempted.is_empty() {
                self.iteration.blocked = blocked(BlockedBy::Preemption);
                return;
            }
            if *budget == 0 {
                self.iteration.blocked = blocked(BlockedBy::Budget);
                return;
            }
            if needed + watermark > self.pool.free() {
                let (needed, free) = (needed + watermark, self.pool.free());
                self.iteration.blocked = blocked(BlockedBy::Blocks { needed, free });
                return;
            }
            let Some(slot) = self.free_slots.pop() else {
                self.iteration.blocked = blocked(BlockedBy::Slots);
                return;
            };
            let reserved = self.pool.extend(&mut sequence.table, needed);
            assert!(reserved, "admission checked that {needed} blocks are free");
            sequence.state = State::Prefilling { slot };
            let len = sequence.uncomputed().min(*budget);
            *budget -= len;
            self.waiting.remove(&rank);
            let at = self.running.partition_point(|&other| self.rank_of(other) < rank);
            self.running.insert(at, index);
            self.iteration.admitted.push((id, slot));
            self.push_prefill(index, len);
        }
    }

    fn push_prefill(&mut self, index: u32, len: u32) {
        let sequence = self.sequences[index as usize].as_ref().expect("a prefilling sequence exists");
        let (Some(slot), true) = (sequence.slot(), len > 0) else { return };
        let samples = len == sequence.uncomputed();
        let chunk = Chunk { id: sequence.id, slot, start: sequence.computed_tokens, len, samples };
        self.iteration.chunks.push(chunk);
    }

    fn withdraw(&mut self, id: SequenceId, reason: FinishReason) {
        let in_flight = self.in_flight && self.iteration.chunks.iter().any(|chunk| chunk.id == id);
        let Some(sequence) = self.get_mut(id) else { return };
        if in_flight {
            sequence.withdrawn.get_or_insert(reason);
        } else {
            self.end(id.index, reason);
        }
    }

    /// The one place where a sequence ends: everything it owns comes back, and its event is queued.
    fn end(&mut self, index: u32, reason: FinishReason) {
        let Some(mut sequence) = self.sequences[index as usize].take() else { return };
        let slot = sequence.slot();
        match slot {
            Some(slot) => {
                self.running.retain(|other| *other != index);
                self.free_slots.push(slot);
            }
            None => {
                self.waiting.remove(&sequence.rank());
            }
        }
        if let Some(deadline) = sequence.deadline {
            self.deadlines.remove(&(deadline, index));
        }
        self.pool.give_back(&mut sequence.table);
        self.generations[index as usize] = self.generations[index as usize].wrapping_add(1);
        self.free_indices.push(index);
        self.ended.push(Ended { id: sequence.id, slot, reason });
    }

    fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(id.index())?.as_ref().filter(|sequence| sequence.id == id)
    }

    fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.sequences.get_mut(id.index())?.as_mut().filter(|sequence| sequence.id == id)
    }

    fn at(&mut self, index: u32) -> &mut Sequence {
        // Indices come from `running`, `waiting` or a chunk in flight, and such a sequence ends only in `end`,
        // which takes it out of all of them.
        self.sequences[index as usize].as_mut().expect("a scheduled sequence exists")
    }

    fn rank_of(&self, index: u32) -> Rank {
        self.sequences[index as usize].as_ref().expect("a running sequence exists").rank()
    }

    /// Checks every structural invariant. For tests: it looks at all sequences.
    ///
    /// # Panics
    /// If one is broken.
    pub fn assert_consistent(&self) {
        let mut owner = vec![None; self.pool.total() as usize];
        let mut held = 0;
        for sequence in self.sequences.iter().flatten() {
            for &block in &sequence.table {
                let before = owner[block as usize].replace(sequence.id);
                assert!(before.is_none(), "block {block} is owned by {before:?} and {:?}", sequence.id);
                held += 1;
            }
            let index = sequence.id.index;
            let running = self.running.contains(&index);
            assert_eq!(running, sequence.slot().is_some(), "{:?} and its slot disagree", sequence.id);
            assert_eq!(!running, self.waiting.get(&sequence.rank()) == Some(&index));
            assert!(sequence.computed_tokens <= sequence.known_tokens);
            assert!(
                sequence.computed_tokens as usize <= sequence.table.len() * self.limits.block_tokens as usize,
                "{:?} computed more than its blocks hold",
                sequence.id
            );
            if sequence.slot().is_none() {
                assert!(sequence.table.is_empty(), "a waiting sequence owns blocks");
            }
        }
        assert_eq!(held + self.pool.free(), self.pool.total(), "blocks are not conserved");
        assert_eq!(self.running.len() + self.free_slots.len(), self.limits.running_max as usize);
        assert!(self.running.windows(2).all(|pair| self.rank_of(pair[0]) < self.rank_of(pair[1])));
        assert!(self.waiting.len() as u32 <= self.limits.waiting_max + self.limits.running_max);
    }
}

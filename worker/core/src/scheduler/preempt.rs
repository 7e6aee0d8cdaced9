//! Preemption by recompute or swap: victim selection, transfers to and from the host, and cache offloading.

use std::cmp::Ordering;

use inflight_contract::BlockHash;

use super::plan::PlanDraft;
use super::{Scheduler, TransferInFlight, TransferPurpose};
use crate::memory::{Spans, Tables};
use crate::sequence::SequenceState;
use crate::{
    Block, BlockedBy, Direction, PredictedPreemption, Preempted, Preemption, SequenceId, Time, Transfer,
    TransferId,
};

/// Maximum number of cold prefix-cache blocks copied to the host by one transfer.
const OFFLOAD_MAX: usize = 16;
/// Maximum number of cold blocks examined to find them.
const OFFLOAD_EXAMINED_MAX: usize = 256;

/// Predicted costs of preempting a sequence, in seconds.
#[derive(Debug, Clone, Copy)]
struct PreemptionCost {
    recompute: f64,
    swap: f64,
    /// Whether the host pool has room.
    can_swap: bool,
}

impl PreemptionCost {
    /// Returns the cost of the cheaper mode that is possible, and the mode.
    fn cheaper(self) -> (f64, Preemption) {
        if self.can_swap && self.swap < self.recompute {
            (self.swap, Preemption::Swap)
        } else {
            (self.recompute, Preemption::Recompute)
        }
    }
}

impl Scheduler {
    /// Extends a sequence's block tables to `tokens` tokens, preempting sequences that go after it. Returns
    /// false if the sequence cannot run in this step: it waits for a fence, or was preempted itself.
    #[inline]
    pub(super) fn grow(&mut self, index: u32, tokens: u32, now: Time, draft: &mut PlanDraft) -> bool {
        self.holds(self.sequence(index), tokens) || self.take_blocks(index, tokens, now, draft)
    }

    /// Takes the blocks that a sequence lacks, see [`Scheduler::grow`].
    fn take_blocks(&mut self, index: u32, tokens: u32, now: Time, draft: &mut PlanDraft) -> bool {
        let ends = self.device.ends(tokens);
        loop {
            // Borrows two fields at once, which `sequence_mut` cannot.
            let sequence = self.sequences[index as usize].as_mut().expect("a running sequence exists");
            if self.device.extend(&mut sequence.tables, &ends) {
                return true;
            }
            let missing = sequence.tables.lacking(&ends) - self.device.free();
            if draft.incoming >= missing {
                // A fence will free enough blocks: wait instead of preempting.
                draft.incoming -= missing;
                self.iteration.stalled += 1;
                return false;
            }
            match self.victim(index, now) {
                Some(victim) => self.preempt_or_mark(victim, index, now, draft),
                None if self.running.len() == 1 => {
                    // Alone it fits; the missing blocks belong to ending sequences or transfers.
                    self.iteration.stalled += 1;
                    return false;
                }
                None => {
                    self.preempt_or_mark(index, index, now, draft);
                    return false;
                }
            }
        }
    }

    /// Selects the sequence to preempt for `beneficiary`: one of lower priority, else of another tenant that
    /// goes after, else the youngest of its own tenant. Within the first two classes, the one with the least
    /// cost per freed block. Recently resumed sequences and those that free nothing are selected last.
    fn victim(&self, beneficiary: u32, now: Time) -> Option<u32> {
        let view = self.view(beneficiary, now);
        let goes_after = |index: &u32| {
            *index != beneficiary
                && !self.sequence(*index).is_marked()
                && self.policy.compare(&view, &self.view(*index, now)) == Ordering::Less
        };
        let tier = |index: u32| {
            let sequence = self.sequence(index);
            match (sequence.priority < view.priority, sequence.tenant != view.tenant) {
                (true, _) => 0,
                (false, true) => 1,
                (false, false) => 2,
            }
        };
        let by_cost = |a: u32, b: u32| self.cost_per_block(a, now).total_cmp(&self.cost_per_block(b, now));
        self.running.iter().copied().filter(goes_after).min_by(|&a, &b| {
            let by_tier = (self.victim_penalty(a), tier(a)).cmp(&(self.victim_penalty(b), tier(b)));
            let younger = self.sequence(b).arrival.cmp(&self.sequence(a).arrival);
            let within = if tier(a) == 2 { younger } else { by_cost(a, b).then(younger) };
            by_tier.then(within)
        })
    }

    /// Returns the reasons against preempting a sequence, the strongest first: no progress since its
    /// resumption; in its cool-down; no block would be freed. Sequences with smaller values are preempted
    /// first.
    fn victim_penalty(&self, index: u32) -> (bool, bool, bool) {
        let sequence = self.sequence(index);
        let no_progress = sequence.without_progress && sequence.in_flight == 0;
        (no_progress, sequence.protected_until > self.iterations, self.exclusive_blocks(index) == 0)
    }

    /// Returns the preemption cost of a sequence in seconds per freed block.
    fn cost_per_block(&self, index: u32, now: Time) -> f64 {
        self.preemption_cost(index, now).cheaper().0 / f64::from(self.exclusive_blocks(index).max(1))
    }

    /// Returns the expected costs of preempting a sequence. The cost of resuming counts with the probability of
    /// resumption. Copies overlap with steps, so half of their time counts. Recompute excludes the tokens
    /// expected to be cached still; it is the only mode if the host pool is full.
    fn preemption_cost(&self, index: u32, now: Time) -> PreemptionCost {
        let sequence = self.sequence(index);
        let returns = self.resumption.probability(sequence.deadline, now);
        let tokens = sequence.committed_tokens;
        let (shared, dropped) = self.cached_spans(index);
        let found = f64::from(shared) + self.resumption.found_share() * f64::from(dropped);
        let cached = ((found * f64::from(self.limits.block_tokens())) as u32).min(tokens);
        let blocks = self.blocks_to_swap_out(index);
        PreemptionCost {
            recompute: returns * self.cost.prefill(cached, tokens - cached).as_secs_f64(),
            swap: 0.5 * (1.0 + returns) * self.cost.copy(blocks).as_secs_f64(),
            can_swap: blocks > 0 && blocks <= self.host.free(),
        }
    }

    /// Returns the number of leading cached spans that the first group shares with other owners, and of the cached spans behind
    /// them, which can be evicted once dropped.
    fn cached_spans(&self, index: u32) -> (u32, u32) {
        let sequence = self.sequence(index);
        let Some(table) = sequence.tables.groups().first() else { return (0, 0) };
        let sealed = table.end_span().min(sequence.sealed_spans);
        let is_shared = |span: &u32| table.span(*span).iter().all(|block| self.device.owners(*block) > 1);
        let shared = (table.first_span()..sealed).take_while(is_shared).count() as u32;
        // What a window has passed is as lost as what is dropped.
        if table.first_span() > 0 { (0, sealed) } else { (shared, sealed - shared) }
    }

    /// Returns the number of blocks that only this sequence owns.
    fn exclusive_blocks(&self, index: u32) -> u32 {
        self.device.exclusive(&self.sequence(index).tables)
    }

    /// Returns the number of blocks with rows of a sequence's committed tokens.
    fn blocks_to_swap_out(&self, index: u32) -> u32 {
        let tables = &self.sequence(index).tables;
        let ends = self.device.ends(self.sequence(index).committed_tokens);
        tables.len() - self.limits.blocks_of(&ends, &tables.ends())
    }

    /// Returns the number of blocks that become free without another preemption: those of transfers to the
    /// host, of ended sequences in flight, and of sequences with a pending preemption.
    pub(super) fn incoming_blocks(&self) -> u32 {
        let outgoing = self.transfers.values().filter(|transfer| transfer.direction == Direction::Out);
        let exclusive = |block: &Block| self.device.owners(*block) == 1;
        let outgoing: usize =
            outgoing.map(|transfer| transfer.device_blocks().filter(exclusive).count()).sum();
        let leaves = |sequence: &&crate::sequence::Sequence| {
            sequence.is_marked() || matches!(sequence.state, SequenceState::Leaving { .. })
        };
        let leaving = self.sequences.iter().flatten().filter(leaves);
        let leaving: u32 = leaving.map(|sequence| self.exclusive_blocks(sequence.id.index)).sum();
        outgoing as u32 + leaving
    }

    /// Preempts the marked sequences that no iteration uses any more, unless this has become unnecessary.
    pub(super) fn preempt_marked(&mut self, now: Time, draft: &mut PlanDraft) {
        for position in (0..self.running.len()).rev() {
            let index = self.running[position];
            let Some(beneficiary) = self.sequence(index).preempt_for else { continue };
            if self.get(beneficiary).is_none() {
                self.sequence_mut(index).preempt_for = None;
            } else if self.sequence(index).in_flight == 0 {
                // Without progress in the iteration it waited for, the mark is dropped and a victim selected
                // anew.
                let made_progress = !self.sequence(index).without_progress;
                let needed = made_progress && self.is_still_needed(index, beneficiary, now);
                if needed || self.sequence(index).forced {
                    self.preempt_now(index, beneficiary, now, draft);
                } else {
                    self.sequence_mut(index).preempt_for = None;
                }
            }
        }
    }

    /// Returns true if the beneficiary still goes before the marked sequence and still lacks its blocks or
    /// slot.
    fn is_still_needed(&self, marked: u32, beneficiary: SequenceId, now: Time) -> bool {
        let itself = beneficiary.index == marked;
        if !itself && self.policy.compare(&self.view(beneficiary.index, now), &self.view(marked, now)).is_ge()
        {
            return false;
        }
        let available = self.device.free() + self.incoming_blocks() - self.exclusive_blocks(marked);
        let sequence = self.sequence(beneficiary.index);
        let own = match sequence.state {
            SequenceState::Decoding { .. } if itself => {
                sequence.tables.lacking(&self.device.ends(sequence.computed_tokens + 1))
            }
            SequenceState::Decoding { .. } => 0, // counted in `decode_blocks_needed`
            SequenceState::Prefilling { .. } => {
                match sequence.tables.lacking(&self.device.ends(sequence.computed_tokens + 1)) {
                    0 => return false,
                    blocks => blocks,
                }
            }
            SequenceState::Waiting => match self.blocks_to_admit(beneficiary.index) {
                Some(_) if self.free_slots.is_empty() => return true,
                Some(blocks) => blocks,
                None => return false,
            },
            _ => return false,
        };
        self.decode_blocks_needed() + own > available
    }

    /// Preempts a sequence now or, if an iteration in flight still writes to its blocks, marks it for
    /// preemption.
    pub(super) fn preempt_or_mark(&mut self, index: u32, beneficiary: u32, now: Time, draft: &mut PlanDraft) {
        if self.sequence(index).in_flight == 0 {
            return self.preempt_now(index, self.sequence(beneficiary).id, now, draft);
        }
        draft.incoming += self.exclusive_blocks(index);
        let (id, beneficiary) = (self.sequence(index).id, self.sequence(beneficiary).id);
        self.sequence_mut(index).preempt_for = Some(beneficiary);
        self.iteration.marked.push((id, beneficiary));
    }

    /// Preempts a sequence that no iteration uses, in the cheaper mode.
    fn preempt_now(&mut self, index: u32, beneficiary: SequenceId, now: Time, draft: &mut PlanDraft) {
        let predicted = self.preemption_cost(index, now);
        let (cost, kind) = predicted.cheaper();
        let micros = |seconds: f64| (seconds * 1e6) as u64;
        self.totals.preemption_cost_us += micros(cost);
        self.totals.preemption_recompute_us += micros(predicted.recompute);
        self.totals.preemption_swap_us += micros(predicted.swap);
        let (_, dropped) = self.cached_spans(index);
        let sequence = self.sequence_mut(index);
        (sequence.preempt_for, sequence.forced) = (None, false);
        sequence.queued = now;
        sequence.preempted_at = Some(now);
        let (id, priority) = (sequence.id, sequence.priority);
        draft.preempted = draft.preempted.max(Some(priority));
        self.running.retain(|other| *other != index);
        let slot = self.sequence(index).slot();
        self.free_slots.extend(slot);
        self.freed_slots.extend(slot);
        let tokens = self.sequence(index).committed_tokens;
        let blocks = match kind {
            Preemption::Recompute => self.sequence(index).tables.len(),
            Preemption::Swap => self.blocks_to_swap_out(index),
        };
        let PreemptionCost { recompute, swap, can_swap } = predicted;
        let predicted =
            PredictedPreemption { recompute_us: micros(recompute), swap_us: micros(swap), can_swap };
        let preempted = Preempted { id, kind, beneficiary, blocks, tokens, predicted };
        self.iteration.preempted.push(preempted);
        match kind {
            Preemption::Swap => {
                self.swap_out(index, draft);
                self.totals.swap_preemptions += 1;
            }
            Preemption::Recompute => {
                let sequence = self.sequences[index as usize].as_mut().expect("a running sequence exists");
                sequence.dropped_spans = dropped;
                self.device.release_all(&mut sequence.tables);
                self.requeue(index, now);
                self.totals.recompute_preemptions += 1;
            }
        }
    }

    /// Starts the swap-out of a preempted sequence: the transfer takes the blocks with committed tokens; the
    /// others are freed at once.
    fn swap_out(&mut self, index: u32, draft: &mut PlanDraft) {
        let mut tables = std::mem::take(&mut self.sequence_mut(index).tables);
        let ends = self.device.ends(self.sequence(index).committed_tokens);
        self.device.truncate(&mut tables, &ends);
        let mut host = tables.without_blocks();
        let taken = self.host.extend(&mut host, &ends);
        assert!(taken, "`preemption_cost` found {} free host blocks", tables.len());
        draft.incoming += self.device.exclusive(&tables);
        self.totals.blocks_swapped_out += u64::from(tables.len());
        let transfer = self.start_transfer(index, Direction::Out, tables, 0, host);
        self.sequence_mut(index).state = SequenceState::SwappingOut { transfer };
    }

    /// Starts the swap-in of a sequence with a slot and device blocks. Returns false if it does not fit.
    pub(super) fn swap_in(&mut self, index: u32, now: Time) -> bool {
        if self.blocks_to_swap_in(index) > self.device.free() {
            return false;
        }
        let Some(slot) = self.free_slots.pop() else { return false };
        let ends = self.ends_to_swap_in(index);
        let host = std::mem::take(&mut self.sequence_mut(index).host_tables);
        let sequence = self.sequence(index);
        let (tokens, ahead) = (sequence.known_tokens + sequence.remaining_tokens, self.limits.tokens_ahead());
        let mut device = Tables::new(&self.limits.shape, tokens, ahead);
        device.begin(&host.firsts());
        let taken = self.device.extend(&mut device, &ends);
        assert!(taken, "{} blocks were found free", device.lacking(&ends));
        self.swapped.retain(|other| *other != index);
        self.totals.blocks_swapped_in += u64::from(host.len());
        let id = self.sequence(index).id;
        let transfer = self.start_transfer(index, Direction::In, device, 0, host);
        let sequence = self.sequence_mut(index);
        // Formerly shared blocks are now private copies; the originals stay cached.
        sequence.sealed_spans = 0;
        sequence.state = SequenceState::SwappingIn { transfer, slot };
        self.resume(index, now);
        self.iteration.admitted.push((id, slot));
        true
    }

    /// Returns what a swapped sequence lacks to be swapped in.
    pub(super) fn lacking_for_swap_in(&self, index: u32) -> BlockedBy {
        if self.free_slots.is_empty() {
            return BlockedBy::Slots;
        }
        BlockedBy::Blocks { needed: self.blocks_to_swap_in(index), free: self.device.free() }
    }

    /// Returns the blocks that must be free to swap a sequence in, including the watermark.
    fn blocks_to_swap_in(&self, index: u32) -> u32 {
        let firsts = self.sequence(index).host_tables.firsts();
        let alone = self.running.is_empty() && self.transfers.is_empty();
        let needed = self.limits.blocks_of(&firsts, &self.ends_to_swap_in(index));
        needed + if alone { 0 } else { self.limits.watermark_blocks }
    }

    /// Returns the spans up to which the tables of a swapped sequence reach when it is swapped in: it reserves as many as an
    /// admission, so that it is not preempted again for lack of its next block.
    fn ends_to_swap_in(&self, index: u32) -> Spans {
        let sequence = self.sequence(index);
        let computed = sequence.committed_tokens;
        let mut ends = self.limits.reserved(sequence.known_tokens, sequence.remaining_tokens, computed);
        ends.iter_mut().zip(sequence.host_tables.ends()).for_each(|(end, held)| *end = held.max(*end));
        ends
    }

    /// Starts a transfer for a sequence. It takes ownership of the blocks. In each group, host block `i` is paired with
    /// device block `first + i`.
    pub(super) fn start_transfer(
        &mut self,
        index: u32,
        direction: Direction,
        device: Tables,
        first: usize,
        host: Tables,
    ) -> TransferId {
        let pairs = device.groups().iter().zip(host.groups()).flat_map(|(device, host)| {
            device.blocks().iter().skip(first).copied().zip(host.blocks().iter().copied())
        });
        let blocks = pairs.collect();
        let purpose = TransferPurpose::Sequence(self.sequence(index).id);
        self.begin_transfer(direction, blocks, TransferInFlight { direction, purpose, device, host })
    }

    /// Adds a transfer to the plan and to the transfers in flight.
    fn begin_transfer(
        &mut self,
        direction: Direction,
        blocks: Vec<(u32, u32)>,
        transfer: TransferInFlight,
    ) -> TransferId {
        self.transfer_ids += 1;
        let id = TransferId(self.transfer_ids);
        self.iteration.transfers.push(Transfer { id, direction, blocks });
        self.transfers.insert(id, transfer);
        id
    }

    /// Copies the prefix-cache blocks that would be evicted next to free host blocks, while no other transfer
    /// is in flight.
    pub(super) fn offload(&mut self) {
        // In other shapes a span's blocks are in several groups, and host blocks of one without the others are of no use.
        let applies = self.limits.prefix_cache && self.limits.shape.is_uniform();
        if self.limits.host_blocks == 0 || !applies || !self.transfers.is_empty() {
            return;
        }
        let fresh = |(_, hash): &(Block, BlockHash)| self.host.cache().lookup(*hash).is_none();
        let room = self.host.free() as usize;
        // Examines at most half of the free host blocks; otherwise offloaded blocks would evict each other
        // endlessly.
        let examined = OFFLOAD_EXAMINED_MAX.min(room / 2);
        let cold: Vec<(Block, BlockHash)> =
            self.device.coldest().take(examined).filter(fresh).take(OFFLOAD_MAX).collect();
        if cold.is_empty() {
            return;
        }
        let mut offloaded = Vec::with_capacity(cold.len());
        for (device, hash) in cold {
            self.device.borrow(device);
            let host = self.host.take().expect("at least twice as many host blocks were found free");
            offloaded.push((device, host, hash));
        }
        self.totals.blocks_offloaded += offloaded.len() as u64;
        let blocks = offloaded.iter().map(|(device, host, _)| (*device, *host)).collect();
        let purpose = TransferPurpose::Offload(offloaded);
        let (device, host) = (Tables::default(), Tables::default());
        let transfer = TransferInFlight { direction: Direction::Out, purpose, device, host };
        self.begin_transfer(Direction::Out, blocks, transfer);
    }

    /// Returns true if a running sequence has a low enough priority to be preempted for this one.
    pub(super) fn outranks_any(&self, index: u32) -> bool {
        let highest = self.max_victim_priority(index);
        self.running.iter().any(|other| i64::from(self.sequence(*other).priority) <= highest)
    }

    /// Returns the highest priority that a waiting sequence may preempt.
    fn max_victim_priority(&self, index: u32) -> i64 {
        i64::from(self.sequence(index).priority) - i64::from(self.limits.preemption_threshold)
    }

    /// Preempts running sequences of lower priority to admit a waiting one, only if they free enough blocks
    /// and slots together. Returns true if any was preempted or marked.
    pub(super) fn preempt_lower_priority(
        &mut self,
        index: u32,
        needed: u32,
        now: Time,
        draft: &mut PlanDraft,
    ) -> bool {
        if !self.outranks_any(index) {
            return false;
        }
        let highest = self.max_victim_priority(index);
        let view = self.view(index, now);
        let below = |priority: i32| i64::from(priority) <= highest;
        if self.iteration.admitted.iter().any(|(admitted, _)| below(self.sequence(admitted.index).priority)) {
            return false; // deferred: a step that preempts admits no sequence of the same class
        }
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        let is_victim = |other: &u32| {
            below(self.sequence(*other).priority)
                && !self.sequence(*other).is_marked()
                && self.policy.compare(&view, &self.view(*other, now)) == Ordering::Less
        };
        victims.extend(self.running.iter().copied().filter(is_victim));
        victims.sort_unstable_by(|&a, &b| {
            let (first, second) = (self.sequence(a), self.sequence(b));
            self.victim_penalty(a)
                .cmp(&self.victim_penalty(b))
                .then(first.priority.cmp(&second.priority))
                .then(self.cost_per_block(a, now).total_cmp(&self.cost_per_block(b, now)))
                .then(second.arrival.cmp(&first.arrival))
        });
        let leaving = |index: &&u32| self.sequence(**index).is_marked();
        let slots = self.free_slots.len() + self.running.iter().filter(leaving).count();
        let mut lacks_slot = slots == 0;
        let mut available = self.device.free() + draft.incoming;
        let enough = victims.iter().position(|&victim| {
            available += self.exclusive_blocks(victim);
            lacks_slot = false;
            available >= needed
        });
        // If a fence will free enough, no preemption is needed.
        let incoming = !lacks_slot && slots > 0 && self.device.free() + draft.incoming >= needed;
        let count = enough.filter(|_| !incoming).map_or(0, |last| last + 1);
        for &victim in &victims[..count] {
            self.preempt_or_mark(victim, index, now, draft);
        }
        self.victims = victims;
        count > 0
    }
}

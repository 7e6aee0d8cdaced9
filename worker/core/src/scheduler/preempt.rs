//! Preemption by recompute or swap: victim selection, transfers to and from the host, and cache offloading.

use std::cmp::Ordering;

use inflight_contract::BlockHash;

use super::plan::PlanDraft;
use super::{Scheduler, TransferInFlight, TransferPurpose};
use crate::sequence::SequenceState;
use crate::{
    BlockedBy, Direction, PredictedPreemption, Preempted, Preemption, SequenceId, Time, Transfer, TransferId,
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
    /// Extends a sequence's block table to `tokens` tokens, preempting sequences that go after it. Returns
    /// false if the sequence cannot run in this step: it waits for a fence, or was preempted itself.
    pub(super) fn grow(&mut self, index: u32, tokens: u32, now: Time, draft: &mut PlanDraft) -> bool {
        let needed = self.limits.blocks_for(tokens);
        loop {
            // Borrows two fields at once, which `sequence_mut` cannot.
            let sequence = self.sequences[index as usize].as_mut().expect("a running sequence exists");
            if self.device.extend(&mut sequence.table, needed) {
                return true;
            }
            let missing = needed - sequence.table.len() as u32 - self.device.free();
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
        let (shared, dropped) = self.cached_blocks(index);
        let found = f64::from(shared) + self.resumption.found_share() * f64::from(dropped);
        let cached = ((found * f64::from(self.limits.block_tokens)) as u32).min(tokens);
        let blocks = self.limits.blocks_for(tokens);
        PreemptionCost {
            recompute: returns * self.cost.prefill(cached, tokens - cached).as_secs_f64(),
            swap: 0.5 * (1.0 + returns) * self.cost.copy(blocks).as_secs_f64(),
            can_swap: blocks > 0 && blocks <= self.host.free(),
        }
    }

    /// Returns the number of leading cached blocks shared with other owners, and of the cached blocks behind
    /// them, which can be evicted once dropped.
    fn cached_blocks(&self, index: u32) -> (u32, u32) {
        let sequence = self.sequence(index);
        let sealed = &sequence.table[..sequence.table.len().min(sequence.sealed_blocks as usize)];
        let shared = sealed.iter().take_while(|block| self.device.owners(**block) > 1).count();
        (shared as u32, (sealed.len() - shared) as u32)
    }

    /// Returns the number of blocks that only this sequence owns.
    fn exclusive_blocks(&self, index: u32) -> u32 {
        let table = &self.sequence(index).table;
        table.iter().filter(|block| self.device.owners(**block) == 1).count() as u32
    }

    /// Returns the number of blocks that become free without another preemption: those of transfers to the
    /// host, of ended sequences in flight, and of sequences with a pending preemption.
    pub(super) fn incoming_blocks(&self) -> u32 {
        let outgoing = self.transfers.values().filter(|transfer| transfer.direction == Direction::Out);
        let exclusive = |block: &&u32| self.device.owners(**block) == 1;
        let outgoing: usize = outgoing.map(|transfer| transfer.device.iter().filter(exclusive).count()).sum();
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
            SequenceState::Decoding { .. } if itself => self
                .limits
                .blocks_for(sequence.computed_tokens + 1)
                .saturating_sub(sequence.table.len() as u32),
            SequenceState::Decoding { .. } => 0, // counted in `decode_blocks_needed`
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
        let (_, dropped) = self.cached_blocks(index);
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
        let mut table = std::mem::take(&mut self.sequence_mut(index).table);
        let tokens = self.sequence(index).committed_tokens;
        let blocks = match kind {
            Preemption::Recompute => table.len() as u32,
            Preemption::Swap => self.limits.blocks_for(tokens),
        };
        let PreemptionCost { recompute, swap, can_swap } = predicted;
        let predicted =
            PredictedPreemption { recompute_us: micros(recompute), swap_us: micros(swap), can_swap };
        let preempted = Preempted { id, kind, beneficiary, blocks, tokens, predicted };
        self.iteration.preempted.push(preempted);
        match kind {
            Preemption::Swap => {
                self.swap_out(index, table, draft);
                self.totals.swap_preemptions += 1;
            }
            Preemption::Recompute => {
                self.device.release_table(&mut table);
                self.sequence_mut(index).dropped_blocks = dropped;
                self.requeue(index, now);
                self.totals.recompute_preemptions += 1;
            }
        }
    }

    /// Starts the swap-out of a preempted sequence: the transfer takes the blocks with committed tokens; the
    /// others are freed at once.
    fn swap_out(&mut self, index: u32, mut table: Vec<u32>, draft: &mut PlanDraft) {
        let len = self.limits.blocks_for(self.sequence(index).committed_tokens);
        self.device.release_table(&mut table.split_off(len as usize));
        let mut host = Vec::with_capacity(len as usize);
        let taken = self.host.extend(&mut host, len);
        assert!(taken, "`preemption_cost` found {len} free host blocks");
        draft.incoming += table.iter().filter(|block| self.device.owners(**block) == 1).count() as u32;
        self.totals.blocks_swapped_out += u64::from(len);
        let transfer = self.start_transfer(index, Direction::Out, table, 0, host);
        self.sequence_mut(index).state = SequenceState::SwappingOut { transfer };
    }

    /// Starts the swap-in of a sequence with a slot and device blocks. Returns false if it does not fit.
    pub(super) fn swap_in(&mut self, index: u32, now: Time) -> bool {
        if self.blocks_to_swap_in(index) > self.device.free() {
            return false;
        }
        let sequence = self.sequence(index);
        let needed = self.limits.admission_blocks(sequence.known_tokens, sequence.remaining_tokens);
        let needed = needed.max(sequence.host_table.len() as u32);
        let Some(slot) = self.free_slots.pop() else { return false };
        let mut device = Vec::with_capacity(needed as usize);
        let taken = self.device.extend(&mut device, needed);
        assert!(taken, "{needed} blocks were found free");
        self.swapped.retain(|other| *other != index);
        let host = std::mem::take(&mut self.sequence_mut(index).host_table);
        self.totals.blocks_swapped_in += host.len() as u64;
        let id = self.sequence(index).id;
        let transfer = self.start_transfer(index, Direction::In, device, 0, host);
        let sequence = self.sequence_mut(index);
        // Formerly shared blocks are now private copies; the originals stay cached.
        sequence.sealed_blocks = 0;
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

    /// Returns the blocks that must be free to swap a sequence in, including the watermark. It reserves as many as an admission, so that it is not preempted again for
    /// lack of its next block.
    fn blocks_to_swap_in(&self, index: u32) -> u32 {
        let sequence = self.sequence(index);
        let needed = self.limits.admission_blocks(sequence.known_tokens, sequence.remaining_tokens);
        let alone = self.running.is_empty() && self.transfers.is_empty();
        needed.max(sequence.host_table.len() as u32) + if alone { 0 } else { self.limits.watermark_blocks }
    }

    /// Starts a transfer for a sequence. It takes ownership of the blocks; host block `i` is paired with
    /// device block `first + i`.
    pub(super) fn start_transfer(
        &mut self,
        index: u32,
        direction: Direction,
        device: Vec<u32>,
        first: usize,
        host: Vec<u32>,
    ) -> TransferId {
        let blocks = device.iter().skip(first).copied().zip(host.iter().copied()).collect();
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
        if self.limits.host_blocks == 0 || !self.limits.prefix_cache || !self.transfers.is_empty() {
            return;
        }
        let fresh = |(_, hash): &(u32, BlockHash)| self.host.lookup(*hash).is_none();
        let room = self.host.free() as usize;
        // Examines at most half of the free host blocks; otherwise offloaded blocks would evict each other
        // endlessly.
        let examined = OFFLOAD_EXAMINED_MAX.min(room / 2);
        let cold: Vec<(u32, BlockHash)> =
            self.device.cold().take(examined).filter(fresh).take(OFFLOAD_MAX).collect();
        if cold.is_empty() {
            return;
        }
        let mut host = Vec::with_capacity(cold.len());
        let taken = self.host.extend(&mut host, cold.len() as u32);
        assert!(taken, "{room} host blocks were found free");
        cold.iter().for_each(|(block, _)| self.device.share(*block));
        self.totals.blocks_offloaded += cold.len() as u64;
        let (device, hashes): (Vec<u32>, Vec<BlockHash>) = cold.into_iter().unzip();
        let blocks = device.iter().copied().zip(host.iter().copied()).collect();
        let purpose = TransferPurpose::Offload(hashes);
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

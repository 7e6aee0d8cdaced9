//! Who gives way when blocks or slots are short, and what becomes of its keys and values.

use std::cmp::Ordering;

use inflight_contract::BlockHash;

use super::plan::Draft;
use super::{Moving, Purpose, Scheduler};
use crate::mutant::Mutant;
use crate::sequence::State;
use crate::{Direction, Preempted, Preemption, SequenceId, Time, Transfer, TransferId};

/// Blocks that one transfer moves to the host's part of the prefix cache.
const OFFLOAD_MAX: usize = 16;
/// Cold blocks looked at to find them.
const OFFLOAD_LOOKED_AT: usize = 256;

impl Scheduler {
    /// Gives a sequence blocks for `tokens`, taking from those that go after it. Returns false if it must stand
    /// still in this step: blocks are on their way to it, or it gave way itself.
    pub(super) fn grow(&mut self, index: u32, tokens: u32, now: Time, draft: &mut Draft) -> bool {
        let needed = self.limits.blocks_for(tokens);
        loop {
            // Borrows two fields at once, which `at` can't.
            let sequence = self.sequences[index as usize].as_mut().expect("a running sequence exists");
            if self.device.extend(&mut sequence.table, needed) {
                return true;
            }
            let missing = needed - sequence.table.len() as u32 - self.device.free();
            if draft.incoming >= missing {
                // It preempts nobody while a fence is about to give it what it needs.
                draft.incoming -= missing;
                self.iteration.stalled += 1;
                return false;
            }
            match self.victim(index, now) {
                Some(victim) => self.give_way(victim, index, now, draft),
                None if self.running.len() == 1 => {
                    // Alone it fits; what it lacks is held by what is leaving or arriving.
                    self.iteration.stalled += 1;
                    return false;
                }
                None => {
                    self.give_way(index, index, now, draft);
                    return false;
                }
            }
        }
    }

    /// The sequence that gives way to `needy`: of lower priority if there is one, else of a tenant that goes
    /// after, else the youngest of its own. Within the first two the one that costs least for each block it
    /// frees. While there is another, those are spared that came back lately or would free nothing.
    fn victim(&self, needy: u32, now: Time) -> Option<u32> {
        let needs = self.view(needy, now);
        let goes_after = |index: &u32| {
            *index != needy
                && !self.peek(*index).evicted()
                && self.policy.compare(&needs, &self.view(*index, now)) == Ordering::Less
        };
        let tier = |index: u32| {
            let sequence = self.peek(index);
            match (sequence.priority < needs.priority, sequence.tenant != needs.tenant) {
                (true, _) => 0,
                (false, true) => 1,
                (false, false) => 2,
            }
        };
        let by_cost = |a: u32, b: u32| self.cost_per_block(a, now).total_cmp(&self.cost_per_block(b, now));
        if self.is_mutant(Mutant::VictimOldest) {
            return self.running.iter().copied().min_by_key(|index| self.peek(*index).arrival);
        }
        self.running.iter().copied().filter(goes_after).min_by(|&a, &b| {
            let by_tier = (self.spared(a), tier(a)).cmp(&(self.spared(b), tier(b)));
            let younger = self.peek(b).arrival.cmp(&self.peek(a).arrival);
            let within = if tier(a) == 2 { younger } else { by_cost(a, b).then(younger) };
            by_tier.then(within)
        })
    }

    /// Why a sequence should rather not give way, the weightiest reason first: it came back from a preemption and did
    /// not get on since; it came back lately; nothing would be gained.
    fn spared(&self, index: u32) -> (bool, bool, bool) {
        if self.is_mutant(Mutant::NoProgressForgotten) {
            return (false, false, false);
        }
        let sequence = self.peek(index);
        let idle = sequence.without_progress && sequence.in_flight == 0;
        (idle, sequence.spared_until > self.iterations, self.exclusive_blocks(index) == 0)
    }

    /// Seconds that preempting a sequence costs, for each block it frees.
    fn cost_per_block(&self, index: u32, now: Time) -> f64 {
        self.preemption_cost(index, now).0 / f64::from(self.exclusive_blocks(index).max(1))
    }

    /// What is cheaper to preempt a sequence by, and the seconds that this costs the steps that run beside, weighed by
    /// the probability that the sequence comes back. Copies overlap with steps: half of their time counts. A full host
    /// pool leaves only computing again, of which what will still be found in the prefix cache is left out.
    fn preemption_cost(&self, index: u32, now: Time) -> (f64, Preemption) {
        let sequence = self.peek(index);
        let returns = self.resumption.probability(sequence.deadline, now);
        let tokens = sequence.committed_tokens;
        let (shared, dropped) = self.findable_blocks(index);
        let found = f64::from(shared) + self.resumption.found_share() * f64::from(dropped);
        let kept = ((found * f64::from(self.limits.block_tokens)) as u32).min(tokens);
        let recompute = returns * self.cost.prefill(kept, tokens - kept).as_secs_f64();
        let blocks = self.limits.blocks_for(tokens);
        if blocks == 0 || blocks > self.host.free() {
            return (recompute, Preemption::Recompute);
        }
        let swap = 0.5 * (1.0 + returns) * self.cost.copy(blocks).as_secs_f64();
        if swap < recompute { (swap, Preemption::Swap) } else { (recompute, Preemption::Recompute) }
    }

    /// The leading blocks of a sequence that others have too, and those behind them that can be found only until they
    /// are taken for something else.
    fn findable_blocks(&self, index: u32) -> (u32, u32) {
        let sequence = self.peek(index);
        let sealed = &sequence.table[..sequence.table.len().min(sequence.sealed_blocks as usize)];
        let shared = sealed.iter().take_while(|block| self.device.owners(**block) > 1).count();
        (shared as u32, (sealed.len() - shared) as u32)
    }

    fn exclusive_blocks(&self, index: u32) -> u32 {
        let table = &self.peek(index).table;
        table.iter().filter(|block| self.device.owners(**block) == 1).count() as u32
    }

    /// Blocks that come back without anybody being preempted: those in transfers to the host, of sequences
    /// that have ended but are in flight, and of those that give way once they are not.
    pub(super) fn incoming_blocks(&self) -> u32 {
        let moving = self.transfers.values().filter(|moving| moving.direction == Direction::Out);
        let exclusive = |block: &&u32| self.device.owners(**block) == 1;
        let moving: usize = moving.map(|moving| moving.device.iter().filter(exclusive).count()).sum();
        let leaves = |sequence: &&crate::sequence::Sequence| {
            sequence.evicted() || matches!(sequence.state, State::Leaving { .. })
        };
        let leaving = self.sequences.iter().flatten().filter(leaves);
        let leaving: u32 = leaving.map(|sequence| self.exclusive_blocks(sequence.id.index)).sum();
        moving as u32 + leaving
    }

    /// Preempts those that had to wait for their iteration, unless that became needless in the meantime.
    pub(super) fn evict_marked(&mut self, now: Time, draft: &mut Draft) {
        for place in (0..self.running.len()).rev() {
            let index = self.running[place];
            let Some(needy) = self.peek(index).evict_for else { continue };
            if self.get(needy).is_none() {
                self.at(index).evict_for = None;
            } else if self.peek(index).in_flight == 0 {
                // One that got nothing out of the iteration that it had to wait for is chosen anew, or not.
                let got_on = !self.peek(index).without_progress;
                let needed = got_on && self.is_still_needed(index, needy, now);
                if needed || self.peek(index).forced || self.is_mutant(Mutant::MarkNotRechecked) {
                    self.evict(index, needy, now, draft);
                } else {
                    self.at(index).evict_for = None;
                }
            }
        }
    }

    /// Whether `needy` still goes before the sequence that was marked for it and still lacks what that one holds.
    fn is_still_needed(&self, marked: u32, needy: SequenceId, now: Time) -> bool {
        let itself = needy.index == marked;
        if !itself && self.policy.compare(&self.view(needy.index, now), &self.view(marked, now)).is_ge() {
            return false;
        }
        let available = self.device.free() + self.incoming_blocks() - self.exclusive_blocks(marked);
        let sequence = self.peek(needy.index);
        let own = match sequence.state {
            State::Decoding { .. } if itself => self
                .limits
                .blocks_for(sequence.computed_tokens + 1)
                .saturating_sub(sequence.table.len() as u32),
            State::Decoding { .. } => 0, // among those that grow
            State::Waiting => match self.blocks_to_admit(needy.index) {
                Some(_) if self.free_slots.is_empty() => return true,
                Some(blocks) => blocks,
                None => return false,
            },
            _ => return false,
        };
        self.growing() + own > available
    }

    /// Preempts a sequence now or, if an iteration in flight still writes to its blocks, marks it to be.
    pub(super) fn give_way(&mut self, index: u32, needy: u32, now: Time, draft: &mut Draft) {
        if self.peek(index).in_flight == 0 {
            return self.evict(index, self.peek(needy).id, now, draft);
        }
        draft.incoming += self.exclusive_blocks(index);
        let (id, needy) = (self.peek(index).id, self.peek(needy).id);
        self.at(index).evict_for = Some(needy);
        self.iteration.marked.push((id, needy));
    }

    fn evict(&mut self, index: u32, needy: SequenceId, now: Time, draft: &mut Draft) {
        let (_, kind) = self.preemption_cost(index, now);
        let (_, dropped) = self.findable_blocks(index);
        let sequence = self.at(index);
        (sequence.evict_for, sequence.forced) = (None, false);
        sequence.queued = now;
        sequence.preempted_at = Some(now);
        let (id, priority) = (sequence.id, sequence.priority);
        draft.preempted = draft.preempted.max(Some(priority));
        self.running.retain(|other| *other != index);
        let slot = self.peek(index).slot();
        self.free_slots.extend(slot);
        self.freed_slots.extend(slot);
        let mut table = std::mem::take(&mut self.at(index).table);
        self.iteration.preempted.push(Preempted { id, kind, needy });
        match kind {
            Preemption::Swap => {
                self.swap_out(index, table, draft);
                self.totals.swap_preemptions += 1;
            }
            Preemption::Recompute => {
                self.device.release_table(&mut table);
                self.at(index).dropped_blocks = dropped;
                self.requeue(index, now);
                self.totals.recompute_preemptions += 1;
            }
        }
    }

    /// Hands the blocks that hold something to a transfer; the others are free at once.
    fn swap_out(&mut self, index: u32, mut table: Vec<u32>, draft: &mut Draft) {
        let len = self.limits.blocks_for(self.peek(index).committed_tokens);
        self.device.release_table(&mut table.split_off(len as usize));
        let mut host = Vec::with_capacity(len as usize);
        let taken = self.host.extend(&mut host, len);
        assert!(taken, "`preemption_cost` found {len} free host blocks");
        draft.incoming += table.iter().filter(|block| self.device.owners(**block) == 1).count() as u32;
        self.totals.blocks_swapped_out += u64::from(len);
        let transfer = self.start_transfer(index, Direction::Out, table, 0, host);
        self.at(index).state = State::SwappingOut { transfer };
        if self.is_mutant(Mutant::FreeBeforeFence)
            && let Some(moving) = self.transfers.get_mut(&transfer)
        {
            self.device.release_table(&mut moving.device);
        }
    }

    /// Takes a slot and blocks for a swapped sequence and starts to copy it back. Returns whether it fits.
    pub(super) fn swap_in(&mut self, index: u32, now: Time) -> bool {
        let sequence = self.peek(index);
        // As many as an admission reserves: it must not give way again for want of its first block.
        let needed = self.limits.admission_blocks(sequence.known_tokens, sequence.remaining_tokens);
        let needed = needed.max(sequence.host_table.len() as u32);
        let alone = self.running.is_empty() && self.transfers.is_empty();
        let watermark = if alone { 0 } else { self.limits.watermark_blocks };
        if needed + watermark > self.device.free() {
            return false;
        }
        let Some(slot) = self.free_slots.pop() else { return false };
        let mut device = Vec::with_capacity(needed as usize);
        let taken = self.device.extend(&mut device, needed);
        assert!(taken, "{needed} blocks were found free");
        self.swapped.retain(|other| *other != index);
        let host = std::mem::take(&mut self.at(index).host_table);
        self.totals.blocks_swapped_in += host.len() as u64;
        let id = self.peek(index).id;
        let transfer = self.start_transfer(index, Direction::In, device, 0, host);
        let sequence = self.at(index);
        // What was shared before is this sequence's own now; equal content that is still findable stays so.
        sequence.sealed_blocks = 0;
        sequence.state = State::SwappingIn { transfer, slot };
        self.resume(index, now);
        self.iteration.admitted.push((id, slot));
        true
    }

    /// Hands blocks to a transfer for a sequence: host block i goes with device block `first + i`.
    pub(super) fn start_transfer(
        &mut self,
        index: u32,
        direction: Direction,
        device: Vec<u32>,
        first: usize,
        host: Vec<u32>,
    ) -> TransferId {
        let blocks = device.iter().skip(first).copied().zip(host.iter().copied()).collect();
        let purpose = Purpose::Sequence(self.peek(index).id);
        self.begin(direction, blocks, Moving { direction, purpose, device, host })
    }

    fn begin(&mut self, direction: Direction, blocks: Vec<(u32, u32)>, moving: Moving) -> TransferId {
        self.transfer_ids += 1;
        let id = TransferId(self.transfer_ids);
        self.iteration.transfers.push(Transfer { id, direction, blocks });
        self.transfers.insert(id, moving);
        id
    }

    /// While no other transfer is under way, keeps the blocks of the prefix cache that would be taken next on the
    /// host, as far as it has room that nobody uses.
    pub(super) fn offload(&mut self) {
        if self.limits.host_blocks == 0 || !self.limits.prefix_cache || !self.transfers.is_empty() {
            return;
        }
        let fresh = |(_, hash): &(u32, BlockHash)| self.host.lookup(*hash).is_none();
        let room = self.host.free() as usize;
        // Twice as much room as is looked at: else what was kept first would give way to what is kept next, and be
        // fresh again, for ever.
        let looked_at = OFFLOAD_LOOKED_AT.min(room / 2);
        let cold: Vec<(u32, BlockHash)> =
            self.device.cold().take(looked_at).filter(fresh).take(OFFLOAD_MAX).collect();
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
        let purpose = Purpose::Offload(hashes);
        self.begin(Direction::Out, blocks, Moving { direction: Direction::Out, purpose, device, host });
    }

    /// Whether some running sequence's priority is so much lower that it may be displaced.
    pub(super) fn outranks_any(&self, index: u32) -> bool {
        let highest = self.displaceable(index);
        self.running.iter().any(|other| i64::from(self.peek(*other).priority) <= highest)
    }

    fn displaceable(&self, index: u32) -> i64 {
        i64::from(self.peek(index).priority) - i64::from(self.limits.preemption_threshold)
    }

    /// Makes room for a waiting sequence by preempting those of lower priority, if all of them together free
    /// enough: it is checked in advance, and nobody gives way in vain. Returns whether somebody did.
    pub(super) fn displace(&mut self, index: u32, needed: u32, now: Time, draft: &mut Draft) -> bool {
        if !self.outranks_any(index) {
            return false;
        }
        let highest = self.displaceable(index);
        let view = self.view(index, now);
        let below = |priority: i32| i64::from(priority) <= highest;
        if self.iteration.admitted.iter().any(|(admitted, _)| below(self.peek(admitted.index).priority)) {
            return false; // in the next step: nobody starts in a step in which one of its class gives way
        }
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        let gives_way = |other: &u32| {
            below(self.peek(*other).priority)
                && !self.peek(*other).evicted()
                && self.policy.compare(&view, &self.view(*other, now)) == Ordering::Less
        };
        victims.extend(self.running.iter().copied().filter(gives_way));
        victims.sort_unstable_by(|&a, &b| {
            let (first, second) = (self.peek(a), self.peek(b));
            self.spared(a)
                .cmp(&self.spared(b))
                .then(first.priority.cmp(&second.priority))
                .then(self.cost_per_block(a, now).total_cmp(&self.cost_per_block(b, now)))
                .then(second.arrival.cmp(&first.arrival))
        });
        let leaving = |index: &&u32| self.peek(**index).evicted();
        let slots = self.free_slots.len() + self.running.iter().filter(leaving).count();
        let mut lacks_slot = slots == 0;
        let mut available = self.device.free() + draft.incoming;
        let enough = victims.iter().position(|&victim| {
            available += self.exclusive_blocks(victim);
            lacks_slot = false;
            available >= needed
        });
        // A fence may be about to give it what it needs.
        let incoming = !lacks_slot && slots > 0 && self.device.free() + draft.incoming >= needed;
        let give_way = enough.filter(|_| !incoming).map_or(0, |last| last + 1);
        for &victim in &victims[..give_way] {
            self.give_way(victim, index, now, draft);
        }
        self.victims = victims;
        give_way > 0
    }
}

//! How waiting and swapped sequences start.

use inflight_contract::BlockHash;

use super::plan::Draft;
use super::{Lane, Moving, Scheduler};
use crate::mutant::Mutant;
use crate::policy::View;
use crate::sequence::State;
use crate::{Block, Blocked, BlockedBy, Copy, Direction, Time};

/// Sequences looked at in one step that cannot start; the ones behind them wait for the next step.
const LOOKED_PAST_MAX: usize = 16;

/// The first of a lane that has not been looked at in this step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    lane: Lane,
    index: u32,
    view: View,
}

/// What a sequence finds in the pool already: numbers only, for looking must not allocate.
#[derive(Debug, Default)]
struct Prefix {
    /// Blocks to share: the first of its hashes, or of the sibling's table.
    blocks: u32,
    /// Of these, those that nobody owns.
    unowned: u32,
    sibling: Option<u32>,
    /// A block to copy, for the tokens behind them, and whose it is.
    copy: Option<(Block, u32)>,
    /// Blocks of the host to copy behind the shared ones.
    host: u32,
    /// Tokens that need not be computed.
    tokens: u32,
}

impl Scheduler {
    /// Swapped sequences come back before anything of their priority is admitted; both only while nobody of their
    /// class was preempted in this step.
    pub(super) fn start_waiting(&mut self, now: Time, draft: &mut Draft) {
        if self.waiting == 0 && self.swapped.is_empty() {
            return;
        }
        self.collect_heads(now);
        let best = self.first_head().map(|place| self.heads[place].view);
        let (mut held_up, rest) = self.swap_in_from(best, now, draft);
        self.admit_waiting(held_up, now, draft);
        if rest {
            (held_up, _) = self.swap_in_from(None, now, draft);
            let _ = held_up;
        }
    }

    /// Swaps in while there is room, up to those that are less important than `best`, the first of the waiting, and go
    /// after it. Returns the priority of the first that found no room, and whether others are left.
    fn swap_in_from(&mut self, best: Option<View>, now: Time, draft: &Draft) -> (Option<i32>, bool) {
        let mut order = std::mem::take(&mut self.swap_order);
        order.clear();
        order.extend_from_slice(&self.swapped);
        order.sort_unstable_by(|a, b| self.policy.compare(&self.view(*a, now), &self.view(*b, now)));
        let outcome = self.swap_in_order(&order, best, now, draft);
        self.swap_order = order;
        outcome
    }

    fn swap_in_order(
        &mut self,
        order: &[u32],
        best: Option<View>,
        now: Time,
        draft: &Draft,
    ) -> (Option<i32>, bool) {
        for &index in order {
            let priority = self.peek(index).priority;
            let behind = |best: View| {
                best.priority > priority && self.policy.compare(&best, &self.view(index, now)).is_lt()
            };
            if best.is_some_and(behind) {
                return (None, true);
            }
            if draft.preempted >= Some(priority) || !self.swap_in(index, now) {
                return (Some(priority), false);
            }
        }
        (None, false)
    }

    fn admit_waiting(&mut self, held_up: Option<i32>, now: Time, draft: &mut Draft) {
        let running = self.limits.running_max as usize - self.free_slots.len();
        let admits = self.policy.admits(running, self.group_open);
        self.group_open = false;
        let mut passed = std::mem::take(&mut self.passed);
        passed.clear();
        if admits {
            self.admit_in_order(held_up, now, draft, &mut passed);
        } else if let Some(place) = self.first_head() {
            let id = self.peek(self.heads[place].index).id;
            self.iteration.blocked.get_or_insert(Blocked { id, by: BlockedBy::Policy });
        }
        self.passed = passed;
    }

    fn admit_in_order(&mut self, held_up: Option<i32>, now: Time, draft: &mut Draft, passed: &mut Vec<u32>) {
        let mut looked_past = 0;
        let allowance = self.limits.bypass_max.max(1);
        while let Some(place) = self.first_head() {
            // Each admission passes all of these; once is the least, for those that wait for a prefix.
            let spent = passed.iter().any(|earlier| self.peek(*earlier).bypassed >= allowance);
            if spent && !self.is_mutant(Mutant::PassedForEver) {
                return;
            }
            let index = self.heads[place].index;
            let tried = if draft.budget == 0 {
                Err(BlockedBy::Budget)
            } else if draft.preempted >= Some(self.peek(index).priority) {
                Err(BlockedBy::Preemption)
            } else if held_up >= Some(self.peek(index).priority) {
                let sequence = self.peek(index);
                let needed = self.limits.admission_blocks(sequence.known_tokens, sequence.remaining_tokens);
                Err(BlockedBy::Blocks { needed, free: self.device.free() })
            } else {
                self.admit(index, now, draft)
            };
            match tried {
                // Those behind it share the prefix, most likely: the lane waits for the next step.
                Err(BlockedBy::PrefixUnderWay) => drop(self.heads.swap_remove(place)),
                _ => self.advance_head(place, now),
            }
            let Err(by) = tried else {
                passed.iter().for_each(|&earlier| self.at(earlier).bypassed += 1);
                continue;
            };
            let id = self.peek(index).id;
            self.iteration.blocked.get_or_insert(Blocked { id, by });
            self.group_open |= by == BlockedBy::Budget;
            looked_past += 1;
            match by {
                BlockedBy::PrefixUnderWay => passed.push(index),
                BlockedBy::Blocks { .. } | BlockedBy::Fence
                    if looked_past < LOOKED_PAST_MAX
                        && (self.peek(index).bypassed < self.limits.bypass_max
                            || self.is_mutant(Mutant::PassedForEver)) =>
                {
                    passed.push(index);
                }
                _ => return,
            }
        }
    }

    /// Gives a waiting sequence a slot, shares what is there already, reserves the rest and plans its first
    /// chunk.
    fn admit(&mut self, index: u32, now: Time, draft: &mut Draft) -> Result<(), BlockedBy> {
        if self.free_slots.is_empty() && !self.outranks_any(index) {
            return Err(BlockedBy::Slots);
        }
        let prefix = self.find_prefix(index)?;
        let (total, needed) = self.admission_need(index, &prefix);
        let fits = |scheduler: &Self| scheduler.device.free() >= needed && !scheduler.free_slots.is_empty();
        if !fits(self) && self.displace(index, needed, now, draft) {
            // Those that gave way may have been the ones it would have shared with.
            return if fits(self) { self.admit(index, now, draft) } else { Err(BlockedBy::Fence) };
        }
        if self.device.free() < needed {
            let free = self.device.free();
            let fence = free + draft.incoming >= needed;
            return Err(if fence { BlockedBy::Fence } else { BlockedBy::Blocks { needed, free } });
        }
        let slot = self.free_slots.pop().ok_or(BlockedBy::Slots)?;
        self.dequeue(index);
        let mut table = std::mem::take(&mut self.at(index).table);
        match prefix.sibling {
            Some(sibling) => table.extend_from_slice(&self.peek(sibling).table[..prefix.blocks as usize]),
            None => {
                let hashes = self.peek(index).hashes.iter().take(prefix.blocks as usize);
                table.extend(hashes.filter_map(|hash| self.device.lookup(*hash)));
            }
        }
        table.iter().for_each(|block| self.device.share(*block));
        let shared = table.len();
        let taken = self.device.extend(&mut table, total);
        assert!(taken, "{needed} blocks were found free");
        if let Some((from, owner)) = prefix.copy {
            self.iteration.copies.push(Copy { from, to: table[shared] });
            // The blocks of both must last until the copy was made, also if no chunk of this one fits the step.
            for holder in [owner, index] {
                self.at(holder).in_flight += 1;
                draft.sources.push(holder);
            }
        }
        let sequence = self.at(index);
        sequence.computed_tokens = prefix.tokens;
        sequence.committed_tokens = prefix.tokens;
        sequence.charged_tokens = sequence.charged_tokens.max(prefix.tokens.min(sequence.input_tokens));
        sequence.sealed_blocks = shared as u32;
        sequence.bypassed = 0;
        let dropped = std::mem::take(&mut sequence.dropped_blocks);
        let (id, known) = (sequence.id, sequence.known_tokens);
        self.totals.admitted_tokens += u64::from(known);
        self.totals.cached_tokens += u64::from(prefix.tokens);
        self.resumption.found(prefix.blocks, dropped);
        self.resume(index, now);
        self.iteration.admitted.push((id, slot));
        if prefix.host > 0 {
            self.totals.host_cached_tokens += u64::from(prefix.host) * u64::from(self.limits.block_tokens);
            let hashes = self.peek(index).hashes.iter().skip(shared).take(prefix.host as usize);
            let host: Vec<Block> = hashes.filter_map(|hash| self.host.lookup(*hash)).collect();
            host.iter().for_each(|block| self.host.share(*block));
            let transfer = self.start_transfer(index, Direction::In, table, shared, host);
            self.at(index).state = State::SwappingIn { transfer, slot };
            return Ok(());
        }
        let sequence = self.at(index);
        sequence.table = table;
        sequence.state = State::Prefilling { slot };
        self.running.push(index);
        let len = self.prefill_len(index, draft);
        self.push_prefill(index, len, draft);
        Ok(())
    }

    /// Blocks that a sequence is given at admission, and how many must be free for that.
    fn admission_need(&self, index: u32, prefix: &Prefix) -> (u32, u32) {
        let sequence = self.peek(index);
        let total = self.limits.admission_blocks(sequence.known_tokens, sequence.remaining_tokens);
        // Alone, a sequence may use the watermark too: it must be able to run whatever its length.
        let alone = self.running.is_empty() && self.transfers.is_empty();
        let watermark = if alone { 0 } else { self.limits.watermark_blocks };
        (total, total - prefix.blocks + prefix.unowned + watermark)
    }

    /// Blocks that must be free to admit a waiting sequence; `None` if it waits for something else.
    pub(super) fn blocks_to_admit(&self, index: u32) -> Option<u32> {
        let prefix = self.find_prefix(index).ok()?;
        Some(self.admission_need(index, &prefix).1)
    }

    /// Whether a waiting sequence may still wait to share what another computes: passed too often, it computes
    /// that itself.
    fn may_wait_to_share(&self, index: u32) -> bool {
        self.peek(index).bypassed < self.limits.bypass_max.max(1)
    }

    /// What of a sequence's tokens is in the pool. At least its last known token is always computed: that is
    /// where the next one comes from.
    fn find_prefix(&self, index: u32) -> Result<Prefix, BlockedBy> {
        if let Some(prefix) = self.fork(index)? {
            return Ok(prefix);
        }
        let sequence = self.peek(index);
        let most = ((sequence.known_tokens - 1) / self.limits.block_tokens) as usize;
        let hashes = &sequence.hashes[..sequence.hashes.len().min(most)];
        let (mut next, mut unowned) = (0, 0);
        for block in hashes.iter().map_while(|hash| self.device.lookup(*hash)) {
            next += 1;
            unowned += u32::from(self.device.owners(block) == 0);
        }
        if let Some(hash) = hashes.get(next) {
            // The chain makes equal hashes stand at equal places.
            let computes = |other: &u32| {
                let other = self.peek(*other);
                !other.evicted()
                    && other.sealed_blocks as usize <= next
                    && other.hashes.get(next) == Some(hash)
            };
            if self.may_wait_to_share(index) && self.running.iter().any(computes) {
                return Err(BlockedBy::PrefixUnderWay);
            }
        }
        let host = if sequence.skip_host { 0 } else { self.on_host(index, &hashes[next..], next)? };
        let blocks = next as u32;
        let tokens = (blocks + host) * self.limits.block_tokens;
        Ok(Prefix { blocks, unowned, sibling: None, copy: None, host, tokens })
    }

    /// Shares all known tokens with a sibling that has computed them: full blocks by reference, and the block
    /// that both will write to as a copy.
    fn fork(&self, index: u32) -> Result<Option<Prefix>, BlockedBy> {
        let sequence = self.peek(index);
        let fresh = sequence.known_tokens == sequence.input_tokens;
        let Some(group) = sequence.group.filter(|_| fresh) else { return Ok(None) };
        let is_sibling = |other: &&u32| {
            let other = self.peek(**other);
            other.group == Some(group) && other.input_tokens == sequence.input_tokens && !other.evicted()
        };
        let Some(&sibling) = self.running.iter().find(is_sibling) else { return Ok(None) };
        let sibling = self.peek(sibling);
        if sibling.committed_tokens < sequence.known_tokens {
            return if self.may_wait_to_share(index) { Err(BlockedBy::PrefixUnderWay) } else { Ok(None) };
        }
        let tokens = sequence.known_tokens - 1;
        let full = (tokens / self.limits.block_tokens) as usize;
        let copy = (!tokens.is_multiple_of(self.limits.block_tokens))
            .then(|| (sibling.table[full], sibling.id.index));
        let (blocks, sibling) = (full as u32, Some(sibling.id.index));
        Ok(Some(Prefix { blocks, unowned: 0, sibling, copy, host: 0, tokens }))
    }

    /// The number of blocks of the host that go on where the device's end, if copying them is cheaper than computing them.
    /// `hashes` are those of the blocks from place `next` on.
    fn on_host(&self, index: u32, hashes: &[BlockHash], next: usize) -> Result<u32, BlockedBy> {
        let host = hashes.iter().map_while(|hash| self.host.lookup(*hash)).count() as u32;
        let Some(first) = hashes.first().filter(|_| host > 0) else { return Ok(0) };
        let loads = |moving: &Moving| {
            let owner = moving.owner().filter(|_| moving.direction == Direction::In);
            owner.is_some_and(|owner| self.peek(owner.index).hashes.get(next) == Some(first))
        };
        if self.may_wait_to_share(index) && self.transfers.values().any(loads) {
            return Err(BlockedBy::PrefixUnderWay);
        }
        let (start, tokens) = (next as u32 * self.limits.block_tokens, host * self.limits.block_tokens);
        let cheaper = self.cost.copy(host) < self.cost.prefill(start, tokens);
        Ok(if cheaper { host } else { 0 })
    }

    fn collect_heads(&mut self, now: Time) {
        let mut heads = std::mem::take(&mut self.heads);
        heads.clear();
        for (lane, waiting) in &self.lanes {
            if let Some((_, &index)) = waiting.first_key_value() {
                heads.push(Head { lane: *lane, index, view: self.view(index, now) });
            }
        }
        self.heads = heads;
    }

    fn first_head(&self) -> Option<usize> {
        let places = 0..self.heads.len();
        places.min_by(|&a, &b| self.policy.compare(&self.heads[a].view, &self.heads[b].view))
    }

    /// Replaces a head by the one behind it in its lane; all heads of a tenant see what it was charged.
    fn advance_head(&mut self, place: usize, now: Time) {
        let Head { lane, view, .. } = self.heads[place];
        let behind = (std::ops::Bound::Excluded(view.arrival), std::ops::Bound::Unbounded);
        let next = self.lanes.get(&lane).and_then(|waiting| waiting.range(behind).next());
        match next.map(|(_, index)| *index) {
            Some(index) => self.heads[place] = Head { lane, index, view: self.view(index, now) },
            None => {
                self.heads.swap_remove(place);
            }
        }
    }
}

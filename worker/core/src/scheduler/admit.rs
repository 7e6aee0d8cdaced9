//! Admission of waiting sequences with prefix sharing, and swap-in of swapped ones.

use inflight_contract::{BlockHash, GROUPS_MAX};

use super::plan::PlanDraft;
use super::{FlowKey, Scheduler, TransferInFlight};
use crate::memory::{FoundPrefix, Spans, Tables};
use crate::policy::SequenceView;
use crate::sequence::SequenceState;
use crate::{Blocked, BlockedBy, Copy, Direction, Time};

/// Prompts admitted ahead of their first chunk hold at most one in so many blocks.
const AHEAD_BLOCKS_DIVISOR: u32 = 8;
/// Prompts admitted ahead of their first chunk hold at most one in so many slots.
const AHEAD_SLOTS_DIVISOR: usize = 4;
/// Maximum number of inadmissible sequences examined per step.
const INADMISSIBLE_MAX: usize = 16;

/// First sequence of a flow that was not examined in this step.
#[derive(Debug, Clone, Copy)]
pub(super) struct FlowHead {
    flow: FlowKey,
    index: u32,
    view: SequenceView,
}

/// Result of a prefix-cache lookup. Holds counts only, so that a lookup does not allocate.
#[derive(Debug, Default)]
struct PrefixMatch {
    /// Number of spans that need not be computed: the first of the sequence's hashes or of the sibling's tables. Of these, each
    /// group has those that the next token sees.
    spans: u32,
    /// Number of shared blocks without an owner, which leave the free list.
    unowned: u32,
    /// Sequence of the same group whose tables are shared.
    sibling: Option<u32>,
    /// Whether the partial span behind the shared ones is copied from the sibling.
    copy: bool,
    /// Number of host blocks to load behind the shared ones; of a model with one group only.
    host: u32,
    /// Number of tokens that need not be computed.
    tokens: u32,
    /// Number of spans that are cached in the first group.
    cached: u32,
}

impl Scheduler {
    /// Swaps in and admits sequences. Swapped sequences go before waiting ones of their priority; neither
    /// starts if a sequence of its class was preempted in this step.
    pub(super) fn start_waiting(&mut self, now: Time, draft: &mut PlanDraft) {
        if self.waiting == 0 && self.swapped.is_empty() {
            return;
        }
        self.collect_heads(now);
        let best = self.first_head().map(|head| self.heads[head].view);
        let (blocked, rest) = self.swap_in_from(best, now, draft);
        self.admit_waiting(blocked, now, draft);
        if rest {
            let _ = self.swap_in_from(None, now, draft);
        }
    }

    /// Swaps in sequences in policy order while they fit, up to the first that has lower priority than the
    /// waiting `best` and goes after it. Returns the priority of the first that does not fit, and whether it
    /// stopped at `best`.
    fn swap_in_from(
        &mut self,
        best: Option<SequenceView>,
        now: Time,
        draft: &PlanDraft,
    ) -> (Option<i32>, bool) {
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
        best: Option<SequenceView>,
        now: Time,
        draft: &PlanDraft,
    ) -> (Option<i32>, bool) {
        for &index in order {
            let priority = self.sequence(index).priority;
            let behind = |best: SequenceView| {
                best.priority > priority && self.policy.compare(&best, &self.view(index, now)).is_lt()
            };
            if best.is_some_and(behind) {
                return (None, true);
            }
            let by = if draft.preempted >= Some(priority) {
                BlockedBy::Preemption
            } else if self.swap_in(index, now) {
                continue;
            } else {
                self.lacking_for_swap_in(index)
            };
            self.iteration.not_admitted.push(Blocked { id: self.sequence(index).id, by });
            return (Some(priority), false);
        }
        (None, false)
    }

    /// Admits waiting sequences if the policy allows. `blocked` is the priority of a swapped sequence that
    /// did not fit.
    fn admit_waiting(&mut self, blocked: Option<i32>, now: Time, draft: &mut PlanDraft) {
        let running = self.limits.running_max as usize - self.free_slots.len();
        let admits = self.policy.admits(running, self.group_open);
        self.group_open = false;
        let mut bypassed = std::mem::take(&mut self.bypassed);
        bypassed.clear();
        if admits {
            self.admit_in_order(blocked, now, draft, &mut bypassed);
        } else if let Some(head) = self.first_head() {
            let id = self.sequence(self.heads[head].index).id;
            self.not_admitted(Blocked { id, by: BlockedBy::Policy });
        }
        self.bypassed = bypassed;
    }

    /// Records why a waiting sequence was not admitted.
    fn not_admitted(&mut self, blocked: Blocked) {
        self.iteration.blocked.get_or_insert(blocked);
        self.iteration.not_admitted.push(blocked);
    }

    /// Admits flow heads in policy order, with bounded bypass of heads that do not fit.
    fn admit_in_order(
        &mut self,
        blocked: Option<i32>,
        now: Time,
        draft: &mut PlanDraft,
        bypassed: &mut Vec<u32>,
    ) {
        let mut inadmissible = 0;
        let allowance = self.limits.bypass_max.max(1);
        while let Some(head) = self.first_head() {
            // Each admission bypasses all of these; sequences that wait for a prefix are bypassed at least
            // once.
            let spent = bypassed.iter().any(|earlier| self.sequence(*earlier).bypass_count >= allowance);
            if spent {
                return;
            }
            let index = self.heads[head].index;
            let admission = if !self.has_tokens_left(draft) && !self.may_admit_ahead(index) {
                Err(BlockedBy::Budget)
            } else if draft.preempted >= Some(self.sequence(index).priority) {
                Err(BlockedBy::Preemption)
            } else if blocked >= Some(self.sequence(index).priority) {
                let sequence = self.sequence(index);
                let needed = self.limits.admission_blocks(sequence.known_tokens, sequence.remaining_tokens);
                Err(BlockedBy::Blocks { needed, free: self.device.free() })
            } else {
                self.admit(index, now, draft)
            };
            match admission {
                // The rest of the flow most likely shares the prefix, so the flow waits for the next step.
                Err(BlockedBy::PrefixUnderWay) => drop(self.heads.swap_remove(head)),
                _ => self.advance_head(head, now),
            }
            let Err(by) = admission else {
                bypassed.iter().for_each(|&earlier| self.sequence_mut(earlier).bypass_count += 1);
                continue;
            };
            let id = self.sequence(index).id;
            self.not_admitted(Blocked { id, by });
            self.group_open |= by == BlockedBy::Budget;
            inadmissible += 1;
            match by {
                BlockedBy::PrefixUnderWay => bypassed.push(index),
                BlockedBy::Blocks { .. } | BlockedBy::Fence
                    if inadmissible < INADMISSIBLE_MAX
                        && self.sequence(index).bypass_count < self.limits.bypass_max =>
                {
                    bypassed.push(index);
                }
                _ => return,
            }
        }
    }

    /// Admits a waiting sequence: assigns a slot, shares its cached prefix, reserves the other blocks and adds
    /// it to the prefills of this step.
    fn admit(&mut self, index: u32, now: Time, draft: &mut PlanDraft) -> Result<(), BlockedBy> {
        if self.free_slots.is_empty() && !self.outranks_any(index) {
            return Err(BlockedBy::Slots);
        }
        let prefix = self.match_prefix(index)?;
        let (ends, needed) = self.admission_need(index, &prefix);
        let fits = |scheduler: &Self| scheduler.device.free() >= needed && !scheduler.free_slots.is_empty();
        if !fits(self) && self.preempt_lower_priority(index, needed, now, draft) {
            // The victims may have owned the shared prefix, so it is matched again.
            return if fits(self) { self.admit(index, now, draft) } else { Err(BlockedBy::Fence) };
        }
        if self.device.free() < needed {
            let free = self.device.free();
            let fence = free + draft.incoming >= needed;
            return Err(if fence { BlockedBy::Fence } else { BlockedBy::Blocks { needed, free } });
        }
        let slot = self.free_slots.pop().ok_or(BlockedBy::Slots)?;
        self.dequeue(index);
        let mut tables = std::mem::take(&mut self.sequence_mut(index).tables);
        self.share_prefix(index, &prefix, &mut tables);
        let shared = tables.groups().first().map_or(0, |table| table.blocks().len());
        let taken = self.device.extend(&mut tables, &ends);
        assert!(taken, "{needed} blocks were found free");
        if let Some(owner) = prefix.sibling.filter(|_| prefix.copy) {
            let from = self.sequences[owner as usize].as_ref().map_or(&[][..], |owner| owner.tables.groups());
            for (from, to) in from.iter().zip(tables.groups()) {
                let pairs = from.span(prefix.spans).iter().zip(to.span(prefix.spans));
                self.iteration.copies.extend(pairs.map(|(from, to)| Copy { from: *from, to: *to }));
            }
            // The blocks of both must stay until the copy is made, even if no chunk of this sequence fits the
            // step.
            for holder in [owner, index] {
                let holder_mut = self.sequence_mut(holder);
                (holder_mut.in_flight, holder_mut.copies) = (holder_mut.in_flight + 1, holder_mut.copies + 1);
                draft.sources.push(holder);
            }
        }
        let sequence = self.sequence_mut(index);
        sequence.computed_tokens = prefix.tokens;
        sequence.committed_tokens = prefix.tokens;
        sequence.charged_tokens = sequence.charged_tokens.max(prefix.tokens.min(sequence.input_tokens));
        sequence.sealed_spans = prefix.spans;
        sequence.junction = if prefix.cached > prefix.spans { prefix.cached } else { 0 };
        sequence.bypass_count = 0;
        let dropped = std::mem::take(&mut sequence.dropped_spans);
        let (id, known) = (sequence.id, sequence.known_tokens);
        self.totals.admitted_tokens += u64::from(known);
        self.totals.cached_tokens += u64::from(prefix.tokens);
        self.totals.evicted_hit_tokens += u64::from(self.evicted_hits(index, prefix.spans + prefix.host));
        self.resumption.record_found(prefix.spans, dropped);
        let sequence = self.sequence(index);
        if sequence.preempted_at.is_none() {
            self.queueing_times.push((sequence.id, now.since(sequence.queued)));
        }
        self.resume(index, now);
        self.iteration.admitted.push((id, slot));
        if prefix.host > 0 {
            self.totals.host_cached_tokens += u64::from(prefix.host) * u64::from(self.limits.block_tokens());
            let mut host = Tables::new(&self.limits.shape, prefix.host * self.limits.block_tokens(), 1);
            for position in prefix.spans..prefix.spans + prefix.host {
                let hash = self.sequence(index).hashes[position as usize];
                if let Some(leader) = self.host.cache().lookup(hash) {
                    self.host.share_cached(&mut host, 0, leader);
                }
            }
            let transfer = self.start_transfer(index, Direction::In, tables, shared, host);
            self.sequence_mut(index).state = SequenceState::SwappingIn { transfer, slot };
            return Ok(());
        }
        let sequence = self.sequence_mut(index);
        sequence.tables = tables;
        sequence.state = SequenceState::Prefilling { slot };
        self.running.push(index);
        let len = self.hold(index, self.prefill_len(index, draft));
        self.take_budget(index, len, draft);
        self.prefills.push((index, self.sequence(index).uncomputed()));
        Ok(())
    }

    /// Returns the tokens behind the first `found` blocks of a new sequence whose blocks were evicted from the
    /// prefix cache. A preempted sequence has none: its own blocks are no hits of others.
    fn evicted_hits(&self, index: u32, found: u32) -> u32 {
        let sequence = self.sequence(index);
        if sequence.preempted_at.is_some() {
            return 0;
        }
        let max = sequence.reusable_tokens() / self.limits.block_tokens();
        let hashes = sequence.hashes.iter().take(max as usize).skip(found as usize);
        let evicted = hashes.take_while(|hash| self.device.cache().was_evicted(**hash));
        evicted.count() as u32 * self.limits.block_tokens()
    }

    /// Returns true if the step may have another prefill chunk.
    fn has_tokens_left(&self, draft: &PlanDraft) -> bool {
        draft.budget > 0
            && draft.bound.is_none_or(|bound| self.cost.chunk_within(&draft.work, 0, 1, bound.all) > 0)
    }

    /// Returns true if a prompt for which the step has no tokens may be admitted: while such prompts hold a
    /// bounded part of the blocks and slots.
    fn may_admit_ahead(&self, index: u32) -> bool {
        let uncomputed = self.prefills.iter().map(|(_, uncomputed)| *uncomputed);
        let tokens = uncomputed.fold(self.sequence(index).known_tokens, u32::saturating_add);
        self.limits.shape.blocks(tokens, 1) <= self.device.total() / AHEAD_BLOCKS_DIVISOR
            && self.prefills.len() < self.limits.running_max as usize / AHEAD_SLOTS_DIVISOR
    }

    /// Returns the spans up to which the tables reach at admission, and the blocks that must be free for it.
    fn admission_need(&self, index: u32, prefix: &PrefixMatch) -> (Spans, u32) {
        let sequence = self.sequence(index);
        let ends = self.limits.reserved(sequence.known_tokens, sequence.remaining_tokens, prefix.tokens);
        let new = self.limits.blocks_of(&[prefix.spans; GROUPS_MAX], &ends);
        // Alone, a sequence may also use the watermark, so that one of maximum length can run.
        let alone = self.running.is_empty() && self.transfers.is_empty();
        let watermark = if alone { 0 } else { self.limits.watermark_blocks };
        (ends, new + prefix.unowned + watermark)
    }

    /// Fills the tables of a new sequence with the shared blocks of its prefix.
    fn share_prefix(&mut self, index: u32, prefix: &PrefixMatch, tables: &mut Tables) {
        let firsts = self.limits.first_spans(prefix.tokens);
        tables.begin(&firsts);
        for (group, first) in firsts.iter().enumerate().take(tables.groups().len()) {
            for position in *first..prefix.spans {
                // Borrows two fields at once, which `sequence` cannot.
                let sequence = self.sequences[prefix.sibling.unwrap_or(index) as usize].as_ref();
                let sequence = sequence.expect("a scheduled sequence exists");
                if prefix.sibling.is_some() {
                    self.device.share(tables, group, sequence.tables.groups()[group].span(position));
                } else if let Some(leader) = self.device.cache().lookup(sequence.hashes[position as usize]) {
                    self.device.share_cached(tables, group, leader);
                }
            }
        }
    }

    /// Returns the blocks that must be free to admit a waiting sequence; `None` if it waits for a prefix.
    pub(super) fn blocks_to_admit(&self, index: u32) -> Option<u32> {
        let prefix = self.match_prefix(index).ok()?;
        Some(self.admission_need(index, &prefix).1)
    }

    /// Returns true if a sequence may wait for a prefix that another one computes. After too many bypasses it
    /// computes the prefix itself.
    fn may_wait_to_share(&self, index: u32) -> bool {
        self.sequence(index).bypass_count < self.limits.bypass_max.max(1)
    }

    /// Looks up the cached prefix of a sequence.
    fn match_prefix(&self, index: u32) -> Result<PrefixMatch, BlockedBy> {
        if let Some(prefix) = self.match_sibling(index)? {
            return Ok(prefix);
        }
        let sequence = self.sequence(index);
        let max = (sequence.reusable_tokens() / self.limits.block_tokens()) as usize;
        let hashes = &sequence.hashes[..sequence.hashes.len().min(max)];
        let found = self.device.find_prefix(hashes);
        let next = found.cached as usize;
        if let Some(hash) = hashes.get(next) {
            // Hashes are chained, so equal hashes are at equal positions.
            let computes = |other: &u32| {
                let other = self.sequence(*other);
                !other.is_marked()
                    && other.sealed_spans as usize <= next
                    && other.hashes.get(next) == Some(hash)
            };
            if self.may_wait_to_share(index) && self.running.iter().any(computes) {
                return Err(BlockedBy::PrefixUnderWay);
            }
        }
        let host =
            if sequence.skip_host { 0 } else { self.host_prefix_blocks(index, &hashes[next..], next)? };
        let tokens = (found.spans + host) * self.limits.block_tokens();
        let FoundPrefix { spans, unowned, cached } = found;
        Ok(PrefixMatch { spans, unowned, sibling: None, copy: false, host, tokens, cached })
    }

    /// Matches the prompt of a sibling in the same group that has computed it: full blocks are shared, and
    /// the partial block that both will write to is copied.
    fn match_sibling(&self, index: u32) -> Result<Option<PrefixMatch>, BlockedBy> {
        let sequence = self.sequence(index);
        let fresh = sequence.known_tokens == sequence.input_tokens && sequence.scored.is_empty();
        let Some(group) = sequence.group.filter(|_| fresh) else { return Ok(None) };
        let is_sibling = |other: &&u32| {
            let other = self.sequence(**other);
            other.group == Some(group) && other.input_tokens == sequence.input_tokens && !other.is_marked()
        };
        let Some(&sibling) = self.running.iter().find(is_sibling) else { return Ok(None) };
        let sibling = self.sequence(sibling);
        if sibling.committed_tokens < sequence.known_tokens {
            return if self.may_wait_to_share(index) { Err(BlockedBy::PrefixUnderWay) } else { Ok(None) };
        }
        let tokens = sequence.known_tokens - 1;
        let spans = tokens / self.limits.block_tokens();
        let firsts = self.limits.first_spans(tokens);
        if sibling.tables.groups().iter().zip(firsts).any(|(table, first)| table.first_span() > first) {
            return Ok(None); // a window of the sibling has passed what this sequence needs
        }
        let copy = !tokens.is_multiple_of(self.limits.block_tokens());
        let sibling = Some(sibling.id.index);
        Ok(Some(PrefixMatch { spans, unowned: 0, sibling, copy, host: 0, tokens, cached: spans }))
    }

    /// Returns the number of host blocks that extend the prefix on the device; 0 if computing them is cheaper
    /// than copying. `hashes` are the hashes of the blocks from table position `next` on.
    fn host_prefix_blocks(&self, index: u32, hashes: &[BlockHash], next: usize) -> Result<u32, BlockedBy> {
        if !self.limits.shape.is_uniform() {
            return Ok(0);
        }
        let host = hashes.iter().map_while(|hash| self.host.cache().lookup(*hash)).count() as u32;
        let Some(first) = hashes.first().filter(|_| host > 0) else { return Ok(0) };
        let loads = |transfer: &TransferInFlight| {
            let owner = transfer.owner().filter(|_| transfer.direction == Direction::In);
            owner.is_some_and(|owner| self.sequence(owner.index).hashes.get(next) == Some(first))
        };
        if self.may_wait_to_share(index) && self.transfers.values().any(loads) {
            return Err(BlockedBy::PrefixUnderWay);
        }
        let (start, tokens) = (next as u32 * self.limits.block_tokens(), host * self.limits.block_tokens());
        let cheaper = self.cost.copy(host) < self.cost.prefill(start, tokens);
        Ok(if cheaper { host } else { 0 })
    }

    /// Collects the heads of all flows.
    fn collect_heads(&mut self, now: Time) {
        let mut heads = std::mem::take(&mut self.heads);
        heads.clear();
        for (flow, waiting) in &self.flows {
            if let Some((_, &index)) = waiting.first_key_value() {
                heads.push(FlowHead { flow: *flow, index, view: self.view(index, now) });
            }
        }
        self.heads = heads;
    }

    /// Returns the position in `heads` of the first head in policy order.
    fn first_head(&self) -> Option<usize> {
        let heads = 0..self.heads.len();
        heads.min_by(|&a, &b| self.policy.compare(&self.heads[a].view, &self.heads[b].view))
    }

    /// Replaces a head by the next sequence of its flow.
    fn advance_head(&mut self, head: usize, now: Time) {
        let FlowHead { flow, view, .. } = self.heads[head];
        let behind = (std::ops::Bound::Excluded(view.arrival), std::ops::Bound::Unbounded);
        let next = self.flows.get(&flow).and_then(|waiting| waiting.range(behind).next());
        match next.map(|(_, index)| *index) {
            Some(index) => self.heads[head] = FlowHead { flow, index, view: self.view(index, now) },
            None => {
                self.heads.swap_remove(head);
            }
        }
    }
}

//! Admission of waiting sequences with prefix sharing, and swap-in of swapped ones.

use super::Scheduler;
use super::plan_draft::PlanDraft;
use super::prefix::PrefixMatch;
use super::waiting_queue::FlowKey;
use crate::memory::Tables;
use crate::policy::SequenceView;
use crate::sequence::SequenceState;
use crate::state_progress::StateBegin;
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

impl Scheduler {
    /// Swaps in and admits sequences. Swapped sequences go before waiting ones of their priority; neither
    /// starts if a sequence of its class was preempted in this step.
    pub(super) fn start_waiting(&mut self, now: Time, draft: &mut PlanDraft) {
        if self.waiting.is_empty() && self.swapped.is_empty() {
            return;
        }
        self.collect_heads(now);
        let best = self.first_head().map(|head| self.buffers.heads[head].view);
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
        let mut order = std::mem::take(&mut self.buffers.swapped);
        order.clear();
        order.extend_from_slice(&self.swapped);
        order.sort_unstable_by(|a, b| self.policy.compare(&self.view(*a, now), &self.view(*b, now)));
        let outcome = self.swap_in_order(&order, best, now, draft);
        self.buffers.swapped = order;
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
            let priority = self.sequences[index].priority;
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
            self.iteration.not_admitted.push(Blocked { id: self.sequences[index].id, by });
            return (Some(priority), false);
        }
        (None, false)
    }

    /// Admits waiting sequences if the policy allows. `blocked` is the priority of a swapped sequence that
    /// did not fit.
    fn admit_waiting(&mut self, blocked: Option<i32>, now: Time, draft: &mut PlanDraft) {
        let admits = self.policy.admits(self.slots.used() as usize, self.group_open);
        self.group_open = false;
        let mut bypassed = std::mem::take(&mut self.buffers.bypassed);
        bypassed.clear();
        if admits {
            self.admit_in_order(blocked, now, draft, &mut bypassed);
        } else if let Some(head) = self.first_head() {
            let id = self.sequences[self.buffers.heads[head].index].id;
            self.not_admitted(Blocked { id, by: BlockedBy::Policy });
        }
        self.buffers.bypassed = bypassed;
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
            let spent = bypassed.iter().any(|earlier| self.sequences[*earlier].bypass_count >= allowance);
            if spent {
                return;
            }
            let index = self.buffers.heads[head].index;
            let admission = if !draft.has_tokens_left(&self.cost) && !self.may_admit_ahead(index) {
                Err(BlockedBy::Budget)
            } else if draft.preempted >= Some(self.sequences[index].priority) {
                Err(BlockedBy::Preemption)
            } else if blocked >= Some(self.sequences[index].priority) {
                let sequence = &self.sequences[index];
                let needed = self.limits.admission_blocks(sequence.known_tokens, sequence.remaining_tokens);
                Err(BlockedBy::Blocks { needed, free: self.memory.free() })
            } else {
                self.admit(index, now, draft)
            };
            match admission {
                // The rest of the flow most likely shares the prefix, so the flow waits for the next step.
                Err(BlockedBy::PrefixUnderWay) => {
                    self.want_shared_state(index);
                    self.buffers.heads.swap_remove(head);
                }
                _ => self.advance_head(head, now),
            }
            let Err(by) = admission else {
                bypassed.iter().for_each(|&earlier| self.sequences[earlier].bypass_count += 1);
                continue;
            };
            let id = self.sequences[index].id;
            self.not_admitted(Blocked { id, by });
            self.group_open |= by == BlockedBy::Budget;
            inadmissible += 1;
            match by {
                BlockedBy::PrefixUnderWay => bypassed.push(index),
                BlockedBy::Blocks { .. } | BlockedBy::Fence
                    if inadmissible < INADMISSIBLE_MAX
                        && self.sequences[index].bypass_count < self.limits.bypass_max =>
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
        if self.slots.are_taken() && !self.outranks_any(index) {
            return Err(BlockedBy::Slots);
        }
        let prefix = self.match_prefix(index)?;
        let (ends, needed) = self.admission_need(index, &prefix);
        let fits = |scheduler: &Self| scheduler.memory.free() >= needed && !scheduler.slots.are_taken();
        if !fits(self) && self.preempt_lower_priority(index, needed, now, draft) {
            // The victims may have owned the shared prefix, so it is matched again.
            return if fits(self) { self.admit(index, now, draft) } else { Err(BlockedBy::Fence) };
        }
        if self.memory.free() < needed {
            let free = self.memory.free();
            let fence = free + draft.incoming >= needed;
            return Err(if fence { BlockedBy::Fence } else { BlockedBy::Blocks { needed, free } });
        }
        let slot = self.slots.take().ok_or(BlockedBy::Slots)?;
        self.dequeue(index);
        let mut tables = std::mem::take(&mut self.sequences[index].tables);
        let sibling = prefix.sibling.map(|sibling| &self.sequences[sibling]);
        let hashes = &self.sequences[index].hashes;
        // Before the blocks of the prefix are shared, which are counted as needed.
        let mut state = StateBegin::Empty;
        if let Some(hash) = prefix.snapshot(hashes) {
            let counted = if self.is_alone() { 0 } else { prefix.found.pinned };
            state = self.memory.share_snapshot(&mut tables, hash, needed - counted);
        }
        self.memory.share_prefix(&mut tables, prefix.found.spans, prefix.tokens, sibling, hashes);
        let shared = tables.groups().first().map_or(0, |table| table.blocks().len());
        self.memory.reserve(&mut tables, &ends);
        if let Some(owner) = prefix.sibling.filter(|_| prefix.copy) {
            self.copy_partial_span(owner, index, &prefix, &tables, draft);
        }
        self.begin(index, &prefix, now);
        self.begin_state(index, &prefix, state);
        let id = self.sequences[index].id;
        self.iteration.admitted.push((id, slot));
        if prefix.host > 0 {
            self.totals.host_cached_tokens += u64::from(prefix.host) * u64::from(self.limits.block_tokens());
            let on_host = prefix.found.spans as usize..(prefix.found.spans + prefix.host) as usize;
            let host = self.memory.borrow_from_host(&self.sequences[index].hashes[on_host]);
            let transfer = self.start_transfer(index, Direction::In, tables, shared, host);
            self.sequences[index].state = SequenceState::SwappingIn { transfer, slot };
            return Ok(());
        }
        let sequence = &mut self.sequences[index];
        sequence.tables = tables;
        sequence.state = SequenceState::Prefilling { slot };
        self.running.push(index);
        let len = draft.prefill_len(sequence, &self.memory, &self.cost);
        self.memory.hold(sequence, len);
        draft.take(sequence, len);
        self.buffers.prefills.push((index, sequence.uncomputed()));
        Ok(())
    }

    /// Plans the copy of the partial span behind the shared ones of a sibling. The blocks of both stay until the copy is made, even if no
    /// chunk of this sequence fits the step.
    fn copy_partial_span(
        &mut self,
        owner: u32,
        index: u32,
        prefix: &PrefixMatch,
        tables: &Tables,
        draft: &mut PlanDraft,
    ) {
        for (from, to) in self.sequences[owner].tables.groups().iter().zip(tables.groups()) {
            let pairs = from.span(prefix.found.spans).iter().zip(to.span(prefix.found.spans));
            self.iteration.copies.extend(pairs.map(|(from, to)| Copy { from: *from, to: *to }));
        }
        for holder in [owner, index] {
            let holder_mut = &mut self.sequences[holder];
            (holder_mut.in_flight, holder_mut.copies) = (holder_mut.in_flight + 1, holder_mut.copies + 1);
            draft.sources.push(holder);
        }
    }

    /// Sets what of an admitted sequence is computed, and counts it.
    fn begin(&mut self, index: u32, prefix: &PrefixMatch, now: Time) {
        let sequence = &mut self.sequences[index];
        let spans = prefix.found.spans;
        sequence.computed_tokens = prefix.tokens;
        sequence.committed_tokens = prefix.tokens;
        sequence.charged_tokens = sequence.charged_tokens.max(prefix.tokens.min(sequence.input_tokens));
        sequence.sealed_spans = spans;
        sequence.junction = if prefix.found.cached > spans { prefix.found.cached } else { 0 };
        sequence.bypass_count = 0;
        let dropped = std::mem::take(&mut sequence.dropped_spans);
        self.totals.admitted_tokens += u64::from(sequence.known_tokens);
        self.totals.cached_tokens += u64::from(prefix.tokens);
        self.totals.evicted_hit_tokens += u64::from(self.memory.evicted_hits(sequence, spans + prefix.host));
        self.resumption.record_found(spans, dropped);
        if sequence.preempted_at.is_none() {
            self.queueing_times.push((sequence.id, now.since(sequence.queued)));
        }
        self.resume(index, now);
    }

    /// Returns true if a prompt for which the step has no tokens may be admitted: while such prompts hold a
    /// bounded part of the blocks and slots.
    fn may_admit_ahead(&self, index: u32) -> bool {
        let uncomputed = self.buffers.prefills.iter().map(|(_, uncomputed)| *uncomputed);
        let tokens = uncomputed.fold(self.sequences[index].known_tokens, u32::saturating_add);
        let states = self.limits.shape.state_blocks() * self.buffers.prefills.len() as u32;
        self.limits.shape.blocks(tokens, 1) + states <= self.memory.total() / AHEAD_BLOCKS_DIVISOR
            && self.buffers.prefills.len() < self.limits.running_max as usize / AHEAD_SLOTS_DIVISOR
    }

    /// Collects the heads of all flows.
    fn collect_heads(&mut self, now: Time) {
        let mut heads = std::mem::take(&mut self.buffers.heads);
        heads.clear();
        for (flow, index) in self.waiting.heads() {
            heads.push(FlowHead { flow, index, view: self.view(index, now) });
        }
        self.buffers.heads = heads;
    }

    /// Returns the position in `heads` of the first head in policy order.
    fn first_head(&self) -> Option<usize> {
        let heads = 0..self.buffers.heads.len();
        heads.min_by(|&a, &b| self.policy.compare(&self.buffers.heads[a].view, &self.buffers.heads[b].view))
    }

    /// Replaces a head by the next sequence of its flow.
    fn advance_head(&mut self, head: usize, now: Time) {
        let FlowHead { flow, view, .. } = self.buffers.heads[head];
        match self.waiting.behind(flow, view.arrival) {
            Some(index) => self.buffers.heads[head] = FlowHead { flow, index, view: self.view(index, now) },
            None => {
                self.buffers.heads.swap_remove(head);
            }
        }
    }
}

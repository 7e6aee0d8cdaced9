//! Preemption by recompute or swap, and the selection of its victims.

use std::cmp::Ordering;

use super::Scheduler;
use super::plan_draft::PlanDraft;
use crate::sequence::SequenceState;
use crate::{PredictedPreemption, Preempted, Preemption, SequenceId, Time};

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
        self.memory.holds(&self.sequences[index], tokens) || self.take_blocks(index, tokens, now, draft)
    }

    /// Slow path of [`Scheduler::grow`]: allocates the missing KV blocks of a sequence, with preemptions. Not inlined, so that the
    /// compiler inlines `grow`, which most decodes leave at its first check.
    #[inline(never)]
    fn take_blocks(&mut self, index: u32, tokens: u32, now: Time, draft: &mut PlanDraft) -> bool {
        loop {
            let sequence = &mut self.sequences[index];
            if self.memory.extend(sequence, tokens) {
                return true;
            }
            let missing = self.memory.lacking(sequence, tokens) - self.memory.free();
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
                && !self.sequences[*index].is_marked()
                && self.policy.compare(&view, &self.view(*index, now)) == Ordering::Less
        };
        let tier = |index: u32| {
            let sequence = &self.sequences[index];
            match (sequence.priority < view.priority, sequence.tenant != view.tenant) {
                (true, _) => 0,
                (false, true) => 1,
                (false, false) => 2,
            }
        };
        let by_cost = |a: u32, b: u32| self.cost_per_block(a, now).total_cmp(&self.cost_per_block(b, now));
        self.running.iter().copied().filter(goes_after).min_by(|&a, &b| {
            let by_tier = (self.victim_penalty(a), tier(a)).cmp(&(self.victim_penalty(b), tier(b)));
            let younger = self.sequences[b].arrival.cmp(&self.sequences[a].arrival);
            let within = if tier(a) == 2 { younger } else { by_cost(a, b).then(younger) };
            by_tier.then(within)
        })
    }

    /// Returns the reasons against preempting a sequence, the strongest first: no progress since its
    /// resumption; in its cool-down; no block would be freed. Sequences with smaller values are preempted
    /// first.
    fn victim_penalty(&self, index: u32) -> (bool, bool, bool) {
        let sequence = &self.sequences[index];
        let no_progress = sequence.without_progress && sequence.in_flight == 0;
        let is_protected = sequence.protected_until > self.launches.count();
        (no_progress, is_protected, self.memory.exclusive(sequence) == 0)
    }

    /// Returns the preemption cost of a sequence in seconds per freed block.
    fn cost_per_block(&self, index: u32, now: Time) -> f64 {
        self.preemption_cost(index, now).cheaper().0
            / f64::from(self.memory.exclusive(&self.sequences[index]).max(1))
    }

    /// Returns the expected costs of preempting a sequence. The cost of resuming counts with the probability of
    /// resumption. Copies overlap with steps, so half of their time counts. Recompute excludes the tokens
    /// expected to be cached still; it is the only mode if the host pool is full.
    fn preemption_cost(&self, index: u32, now: Time) -> PreemptionCost {
        let sequence = &self.sequences[index];
        let returns = self.resumption.probability(sequence.deadline, now);
        let tokens = sequence.committed_tokens;
        let (shared, dropped) = self.memory.cached_spans(sequence);
        let found = f64::from(shared) + self.resumption.found_share() * f64::from(dropped);
        let cached = ((found * f64::from(self.limits.block_tokens())) as u32).min(tokens);
        let blocks = self.memory.blocks_to_swap_out(sequence);
        PreemptionCost {
            recompute: returns * self.cost.prefill(cached, tokens - cached).as_secs_f64(),
            swap: 0.5 * (1.0 + returns) * self.cost.copy(blocks).as_secs_f64(),
            can_swap: blocks > 0 && blocks <= self.memory.host_free() && sequence.progress.is_loaded(),
        }
    }

    /// Preempts the marked sequences that no iteration uses any more, unless this has become unnecessary.
    pub(super) fn preempt_marked(&mut self, now: Time, draft: &mut PlanDraft) {
        for position in (0..self.running.len()).rev() {
            let index = self.running[position];
            let Some(beneficiary) = self.sequences[index].preempt_for else { continue };
            if self.sequences.get(beneficiary).is_none() {
                self.sequences[index].preempt_for = None;
            } else if self.sequences[index].in_flight == 0 {
                // Without progress in the iteration it waited for, the mark is dropped and a victim selected
                // anew.
                let made_progress = !self.sequences[index].without_progress;
                let needed = made_progress && self.is_still_needed(index, beneficiary, now);
                if needed || self.sequences[index].forced {
                    self.preempt_now(index, beneficiary, now, draft);
                } else {
                    self.sequences[index].preempt_for = None;
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
        let available =
            self.memory.free() + self.incoming_blocks() - self.memory.exclusive(&self.sequences[marked]);
        let sequence = &self.sequences[beneficiary.index];
        let own = match sequence.state {
            SequenceState::Decoding { .. } if itself => {
                self.memory.lacking(sequence, sequence.computed_tokens + 1)
            }
            SequenceState::Decoding { .. } => 0, // counted in `decode_blocks_needed`
            SequenceState::Prefilling { .. } => {
                match self.memory.lacking(sequence, sequence.computed_tokens + 1) {
                    0 => return false,
                    blocks => blocks,
                }
            }
            SequenceState::Waiting => match self.blocks_to_admit(beneficiary.index) {
                Some(_) if self.slots.are_taken() => return true,
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
        if self.sequences[index].in_flight == 0 {
            return self.preempt_now(index, self.sequences[beneficiary].id, now, draft);
        }
        draft.incoming += self.memory.exclusive(&self.sequences[index]);
        let (id, beneficiary) = (self.sequences[index].id, self.sequences[beneficiary].id);
        self.sequences[index].preempt_for = Some(beneficiary);
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
        let (_, dropped) = self.memory.cached_spans(&self.sequences[index]);
        let sequence = &mut self.sequences[index];
        (sequence.preempt_for, sequence.forced) = (None, false);
        sequence.queued = now;
        sequence.preempted_at = Some(now);
        let (id, priority) = (sequence.id, sequence.priority);
        draft.preempted = draft.preempted.max(Some(priority));
        self.running.retain(|other| *other != index);
        let slot = self.sequences[index].slot();
        self.slots.release(slot);
        let sequence = &self.sequences[index];
        let tokens = sequence.committed_tokens;
        let blocks = match kind {
            Preemption::Recompute => sequence.tables.len(),
            Preemption::Swap => self.memory.blocks_to_swap_out(sequence),
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
                let sequence = &mut self.sequences[index];
                sequence.dropped_spans = dropped;
                Self::give_up_blocks(&mut self.memory, sequence);
                self.requeue(index, now);
                self.totals.recompute_preemptions += 1;
            }
        }
    }

    /// Returns true if a running sequence has a low enough priority to be preempted for this one.
    pub(super) fn outranks_any(&self, index: u32) -> bool {
        let highest = self.max_victim_priority(index);
        self.running.iter().any(|other| i64::from(self.sequences[*other].priority) <= highest)
    }

    /// Returns the highest priority that a waiting sequence may preempt.
    fn max_victim_priority(&self, index: u32) -> i64 {
        i64::from(self.sequences[index].priority) - i64::from(self.limits.preemption_threshold)
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
        if self.iteration.admitted.iter().any(|(admitted, _)| below(self.sequences[admitted.index].priority))
        {
            return false; // deferred: a step that preempts admits no sequence of the same class
        }
        let mut victims = std::mem::take(&mut self.buffers.victims);
        victims.clear();
        let is_victim = |other: &u32| {
            below(self.sequences[*other].priority)
                && !self.sequences[*other].is_marked()
                && self.policy.compare(&view, &self.view(*other, now)) == Ordering::Less
        };
        victims.extend(self.running.iter().copied().filter(is_victim));
        victims.sort_unstable_by(|&a, &b| {
            let (first, second) = (&self.sequences[a], &self.sequences[b]);
            self.victim_penalty(a)
                .cmp(&self.victim_penalty(b))
                .then(first.priority.cmp(&second.priority))
                .then(self.cost_per_block(a, now).total_cmp(&self.cost_per_block(b, now)))
                .then(second.arrival.cmp(&first.arrival))
        });
        let leaving = |index: &&u32| self.sequences[**index].is_marked();
        let slots = self.slots.free() as usize + self.running.iter().filter(leaving).count();
        let mut lacks_slot = slots == 0;
        let mut available = self.memory.free() + draft.incoming;
        let enough = victims.iter().position(|&victim| {
            available += self.memory.exclusive(&self.sequences[victim]);
            lacks_slot = false;
            available >= needed
        });
        // If a fence will free enough, no preemption is needed.
        let incoming = !lacks_slot && slots > 0 && self.memory.free() + draft.incoming >= needed;
        let count = enough.filter(|_| !incoming).map_or(0, |last| last + 1);
        for &victim in &victims[..count] {
            self.preempt_or_mark(victim, index, now, draft);
        }
        self.buffers.victims = victims;
        count > 0
    }
}

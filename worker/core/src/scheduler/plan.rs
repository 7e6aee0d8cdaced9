//! Planning of an iteration: decodes, swap-ins, admissions, prefill chunks.
//!
//! 1. Sequences past their deadline end.
//! 2. Each decoding sequence gets one token, subtracted from the token budget, and drafted tokens where they
//!    are expected to save time (see [`super::drafts`]).
//! 3. Up to half of the rest is reserved for the first running prefill in policy order, so that it always
//!    makes progress.
//! 4. Swapped sequences are resumed, waiting ones admitted by reservation of all blocks of their known tokens.
//!    Prompts for which the step has no tokens are admitted while they hold a small part of the pool: the more
//!    prompts to choose from, the lower the mean TTFT, but their memory is kept from decodes.
//! 5. The other prefills share the rest, the shortest first, so that short prompts do not wait behind long
//!    ones; what they leave goes to the first.
//!
//! With decodes in a step, the cost model bounds the prefill tokens beside them: see [`super::step_bound`].

use std::time::Duration;

use super::Scheduler;
use super::step_bound::StepBound;
use crate::cost::StepWork;
use crate::history::IterationSummary;
use crate::sequence::{Sequence, SequenceState};
use crate::{Chunk, Iteration, Time};

/// Plan under construction.
#[derive(Debug, Default)]
pub(super) struct PlanDraft {
    /// Remaining token budget.
    pub budget: u32,
    /// Remaining positions whose logits may be computed beside the sampled ones.
    pub scores: u32,
    /// Work planned so far.
    pub work: StepWork,
    /// Start position and tokens reserved for the first prefill in policy order.
    pub reserved_prefill: Option<(u32, u32)>,
    /// Bound of the step's duration; `None`: unbounded.
    pub bound: Option<StepBound>,
    /// Blocks that become free at fences, less those that stalled sequences wait for.
    pub incoming: u32,
    /// Highest priority preempted in this step; sequences up to this priority are not admitted.
    pub preempted: Option<i32>,
    /// Sequences whose blocks are used by block copies, once per copy.
    pub sources: Vec<u32>,
}

impl Scheduler {
    /// Plans the next iteration. A plan without chunks is neither executed nor committed, but its transfers
    /// are started.
    ///
    /// # Panics
    /// If `SchedulerLimits::depth` iterations are in flight already: a fault of the driver, not of any input.
    pub fn plan(&mut self, now: Time) -> &Iteration {
        assert!(self.launched.len() < self.limits.depth as usize, "plan was called while a commit was due");
        self.iteration.clear();
        self.queueing_times.clear();
        self.expire(now);
        let (budget, scores) = (self.limits.iteration_tokens, self.limits.iteration_scores);
        let mut draft = PlanDraft { budget, scores, ..PlanDraft::default() };
        self.preempt_marked(now, &mut draft);
        draft.incoming = self.incoming_blocks();
        self.plan_decodes(now, &mut draft);
        self.plan_drafts(now, &mut draft);
        let decodes = draft.work;
        self.plan_prefills(now, &mut draft);
        // The search for cold blocks costs time, so it runs only every few iterations while there is work.
        if self.iteration.chunks.is_empty() || self.iterations.is_multiple_of(8) {
            self.offload();
        }
        if !self.iteration.chunks.is_empty() {
            self.iterations += 1;
            self.iteration.number = self.iterations;
            let mut launched = self.recycled.pop().unwrap_or_default();
            launched.number = self.iterations;
            let predicted = self.cost.step(&draft.work);
            self.push_history(now, predicted, &draft);
            launched.work = draft.work;
            launched.prefill_share = self.prefill_share(&decodes, predicted);
            if let Some(bound) = draft.bound {
                self.prefill_load.spend(self.cost.step_tail(&draft.work) > bound.usual);
            }
            self.count_unmet_objectives(&decodes, now);
            launched.sources.append(&mut draft.sources);
            launched.chunks.extend_from_slice(&self.iteration.chunks);
            self.launched.push_back(launched);
        }
        if let Some(log) = &mut self.log {
            log.plan(&self.iteration, now);
        }
        &self.iteration
    }

    /// Adds the planned iteration to the history.
    fn push_history(&mut self, now: Time, predicted: Duration, draft: &PlanDraft) {
        let plan = &self.iteration;
        // The head of a flow has waited longest; `start_waiting` visits all heads anyway.
        let heads = self.flows.values().filter_map(|flow| flow.first_key_value());
        let longest_wait =
            heads.map(|(_, index)| now.since(self.sequence(*index).queued)).max().unwrap_or_default();
        let load = self.load();
        self.history.push(IterationSummary {
            number: plan.number,
            planned: now,
            took: None,
            predicted,
            bound: draft.bound.map(|bound| bound.all),
            decodes: plan.decodes,
            prefills: plan.chunks.len() as u32 - plan.decodes,
            drafts: plan.drafts,
            prefill_tokens: plan.tokens() - plan.decodes - plan.drafts,
            longest_wait,
            preempted: plan.preempted.len() as u32,
            stalled: plan.stalled,
            blocked: plan.blocked,
            load,
        });
    }

    /// Plans one token for each decoding sequence. The order matters only if blocks are short: then sequences
    /// are served in policy order and preempt from its end, and prefills take the blocks of their next token in the same order.
    fn plan_decodes(&mut self, now: Time, draft: &mut PlanDraft) {
        let short = self.decode_blocks_needed() + self.prefill_blocks_needed() > self.device.free();
        let mut order = std::mem::take(&mut self.scratch);
        order.clear();
        order.extend(self.running.iter().map(|index| (*index, 0)));
        if short {
            order.sort_unstable_by(|a, b| self.policy.compare(&self.view(a.0, now), &self.view(b.0, now)));
        }
        for &(index, _) in &order {
            let sequence = self.sequence(index);
            let slot = match sequence.state {
                SequenceState::Decoding { slot } => slot,
                SequenceState::Prefilling { .. } if short && !sequence.is_marked() => {
                    self.grow(index, sequence.computed_tokens + 1, now, draft);
                    continue;
                }
                _ => continue,
            };
            if sequence.is_marked() || sequence.remaining_tokens == 0 || sequence.drafts_in_flight > 0 {
                continue; // its preemption is pending, its last token is in flight, or its length is unknown
            }
            let start = sequence.computed_tokens;
            if !self.grow(index, start + 1, now, draft) {
                continue;
            }
            draft.budget -= 1; // no underflow: `running_max` is at most the budget
            draft.work.add(start, 1);
            self.iteration.decodes += 1;
            self.push_chunk(index, slot, 1);
        }
        self.scratch = order;
    }

    /// Returns true if a sequence has the blocks of its first `tokens` tokens.
    pub(super) fn holds(&self, sequence: &Sequence, tokens: u32) -> bool {
        sequence.tables.end() * self.limits.block_tokens() >= tokens
    }

    /// Returns the number of new blocks that the decodes of this step need.
    pub(super) fn decode_blocks_needed(&self) -> u32 {
        let grows = |index: &&u32| {
            let sequence = self.sequence(**index);
            matches!(sequence.state, SequenceState::Decoding { .. })
                && !sequence.is_marked()
                && sequence.remaining_tokens > 0
                && sequence.drafts_in_flight == 0
                && !self.holds(sequence, sequence.computed_tokens + 1)
        };
        let lacks = |index: &u32| {
            let sequence = self.sequence(*index);
            sequence.tables.lacking(&self.device.ends(sequence.computed_tokens + 1))
        };
        self.running.iter().filter(grows).map(lacks).sum()
    }

    /// Returns the number of new blocks that the running prefills need for a token each; without windows all are reserved at
    /// admission.
    pub(super) fn prefill_blocks_needed(&self) -> u32 {
        if !self.limits.shape.has_windows() {
            return 0;
        }
        let lacks = |index: &u32| {
            let sequence = self.sequence(*index);
            sequence.tables.lacking(&self.device.ends(sequence.computed_tokens + 1))
        };
        self.running.iter().filter(|index| self.is_prefilling(**index)).map(lacks).sum()
    }

    /// Returns the share of prefills in the predicted duration of a step with these decodes.
    fn prefill_share(&self, decodes: &StepWork, predicted: Duration) -> f64 {
        if decodes.sequences == 0 {
            return 1.0;
        }
        let decodes = self.cost.step(decodes).as_secs_f64();
        (1.0 - decodes / predicted.as_secs_f64().max(1e-9)).clamp(0.0, 1.0)
    }

    /// Starts waiting sequences and plans the prefill chunks.
    fn plan_prefills(&mut self, now: Time, draft: &mut PlanDraft) {
        let mut prefills = std::mem::take(&mut self.prefills);
        prefills.clear();
        for &index in &self.running {
            if self.is_prefilling(index) {
                prefills.push((index, self.sequence(index).uncomputed()));
            }
        }
        let prompts = prefills.len() as u32 + self.waiting;
        let single = if prompts == 1 { self.with_single_prompt(&prefills, &draft.work) } else { None };
        draft.bound = self.step_bound(&draft.work, prompts, single, Some(now));
        let first = self.reserve_first(&mut prefills, now, draft);
        // Blocks for the first prefill may have been taken from others.
        prefills.retain(|(index, _)| self.is_prefilling(*index));
        // The running prefills use the budget before waiting sequences are admitted; then all share it by
        // length.
        let (budget, work, scores) = (draft.budget, draft.work, draft.scores);
        self.shortest_first(&mut prefills);
        for &(index, _) in &prefills {
            let len = self.hold(index, self.prefill_len(index, draft));
            self.take_budget(index, len, draft);
        }
        self.prefills = prefills;
        self.start_waiting(now, draft);
        let mut prefills = std::mem::take(&mut self.prefills);
        (draft.budget, draft.work, draft.scores) = (budget, work, scores);
        // An admission may have preempted some.
        prefills.retain(|(index, _)| self.is_prefilling(*index));
        self.shortest_first(&mut prefills);
        for &(index, _) in &prefills {
            let len = self.prefill_len(index, draft);
            self.push_prefill(index, len, draft);
        }
        self.prefills = prefills;
        if let Some((index, reserved)) = first {
            draft.budget += reserved;
            draft.scores += self.scores(index, reserved);
            draft.reserved_prefill = None;
            let len = self.prefill_len(index, draft).max(reserved);
            self.push_prefill(index, len, draft);
        }
    }

    /// Returns true if a running sequence computes its known tokens and stays.
    fn is_prefilling(&self, index: u32) -> bool {
        let sequence = self.sequence(index);
        matches!(sequence.state, SequenceState::Prefilling { .. }) && !sequence.is_marked()
    }

    /// Returns the work of a step with these decodes and all uncomputed tokens of the only prompt, running or waiting.
    fn with_single_prompt(&self, prefills: &[(u32, u32)], decodes: &StepWork) -> Option<StepWork> {
        let index = match prefills {
            [(index, _)] => *index,
            _ => *self.flows.values().next()?.first_key_value()?.1,
        };
        let sequence = self.sequence(index);
        let mut work = *decodes;
        work.add(sequence.computed_tokens, sequence.uncomputed());
        Some(work)
    }

    fn shortest_first(&self, prefills: &mut [(u32, u32)]) {
        prefills.sort_unstable_by_key(|&(index, uncomputed)| (uncomputed, self.sequence(index).arrival));
    }

    /// Takes the first prefill in policy order out of the list and reserves up to half of the budget for it, and the blocks of that
    /// part, preempting others if not even one token has room. Returns it and its reserved tokens.
    fn reserve_first(
        &mut self,
        prefills: &mut Vec<(u32, u32)>,
        now: Time,
        draft: &mut PlanDraft,
    ) -> Option<(u32, u32)> {
        let order = |a: &(usize, u32), b: &(usize, u32)| {
            self.policy.compare(&self.view(a.1, now), &self.view(b.1, now))
        };
        let indices = prefills.iter().map(|(index, _)| *index).enumerate();
        let (position, index) = indices.min_by(order)?;
        prefills.swap_remove(position);
        let (start, max) = (self.sequence(index).computed_tokens, self.chunk_max(index, draft));
        let len =
            draft.bound.map_or(max, |bound| self.cost.chunk_within(&draft.work, start, max, bound.first));
        let reserved = len.max(1).min(draft.budget.div_ceil(2));
        if max == 0 && draft.budget > 0 && !self.grow(index, start + 1, now, draft) {
            return None; // it waits for blocks, or was preempted itself
        }
        let reserved = self.hold(index, reserved);
        draft.budget -= reserved;
        draft.scores -= self.scores(index, reserved);
        draft.reserved_prefill = Some((start, reserved));
        Some((index, reserved))
    }

    /// Returns the maximum chunk length of a prefill, regardless of the step target.
    fn chunk_max(&self, index: u32, draft: &PlanDraft) -> u32 {
        let sequence = self.sequence(index);
        let scored = sequence.scored.chunk_max(sequence.computed_tokens, draft.scores);
        sequence.uncomputed().min(draft.budget).min(scored).min(self.room(index))
    }

    /// Returns the number of tokens of a prefill for which it holds blocks or for which there are free ones beyond the watermark.
    /// Without windows all blocks are reserved at admission.
    fn room(&self, index: u32) -> u32 {
        if !self.limits.shape.has_windows() {
            return u32::MAX;
        }
        let sequence = self.sequence(index);
        let spare = self.device.free().saturating_sub(self.limits.watermark_blocks);
        let most =
            sequence.computed_tokens.saturating_add(self.limits.iteration_tokens).min(sequence.known_tokens);
        let end = sequence.tables.reachable(self.limits.shape.spans(most), spare);
        (end * self.limits.block_tokens()).saturating_sub(sequence.computed_tokens)
    }

    /// Takes the blocks of the next `len` tokens of a prefill, for which there is room. Returns `len`.
    pub(super) fn hold(&mut self, index: u32, len: u32) -> u32 {
        if self.limits.shape.has_windows() && len > 0 {
            // Borrows two fields at once, which `sequence_mut` cannot.
            let sequence = self.sequences[index as usize].as_mut().expect("a running sequence exists");
            let ends = self.device.ends(sequence.computed_tokens + len);
            let taken = self.device.extend(&mut sequence.tables, &ends);
            assert!(taken, "there is room for {len} tokens");
        }
        len
    }

    /// Returns the positions scored in the next chunk of a prefill, of `len` tokens.
    fn scores(&self, index: u32, len: u32) -> u32 {
        let sequence = self.sequence(index);
        sequence.scored.within(sequence.computed_tokens, len).len()
    }

    /// Returns the chunk length of a prefill within budgets and step target.
    pub(super) fn prefill_len(&self, index: u32, draft: &PlanDraft) -> u32 {
        let (start, max) = (self.sequence(index).computed_tokens, self.chunk_max(index, draft));
        let Some(bound) = draft.bound else { return max };
        let mut work = draft.work;
        if let Some((start, len)) = draft.reserved_prefill {
            work.add(start, len);
        }
        self.cost.chunk_within(&work, start, max, bound.all)
    }

    /// Returns the chunk length of a new prompt in a step with these decodes, while `prompts` prompts share
    /// the steps; at least 1.
    pub(super) fn chunk_beside(&self, decodes: &StepWork, prompts: u32) -> u32 {
        let max = self.limits.iteration_tokens.saturating_sub(decodes.tokens).max(1);
        let bound = self.step_bound(decodes, prompts, None, None);
        let within = |bound: StepBound| self.cost.chunk_within(decodes, 0, max, bound.all.max(bound.first));
        bound.map_or(max, within).max(1)
    }

    /// Takes a prefill chunk of `len` tokens out of the budget.
    pub(super) fn take_budget(&self, index: u32, len: u32, draft: &mut PlanDraft) {
        if len > 0 {
            draft.budget -= len;
            draft.work.add(self.sequence(index).computed_tokens, len);
            draft.scores -= self.scores(index, len);
        }
    }

    /// Adds a prefill chunk of `len` tokens to the plan; no-op for 0.
    pub(super) fn push_prefill(&mut self, index: u32, len: u32, draft: &mut PlanDraft) {
        let sequence = self.sequence(index);
        let (Some(slot), true) = (sequence.slot(), len > 0) else { return };
        self.hold(index, len);
        self.take_budget(index, len, draft);
        self.push_chunk(index, slot, len);
    }

    /// Adds a chunk to the plan and advances the sequence as if it had run: the next plan, made while this
    /// iteration is in flight, continues from there.
    fn push_chunk(&mut self, index: u32, slot: u32, len: u32) {
        let sequence = self.sequence_mut(index);
        let start = sequence.computed_tokens;
        sequence.computed_tokens += len;
        sequence.in_flight += 1;
        let samples = sequence.computed_tokens == sequence.known_tokens;
        if samples {
            sequence.state = SequenceState::Decoding { slot };
            sequence.known_tokens += 1;
            sequence.remaining_tokens -= 1;
        }
        let id = sequence.id;
        self.iteration.chunks.push(Chunk { id, slot, start, len, samples, drafts: 0 });
    }
}

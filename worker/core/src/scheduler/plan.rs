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
//! With decodes in a step, the cost model bounds the prefill tokens beside them: see [`super::step_bounds`].

use std::time::Duration;

use super::Scheduler;
use super::plan_draft::PlanDraft;
use crate::cost::StepWork;
use crate::history::IterationSummary;
use crate::sequence::SequenceState;
use crate::{Chunk, Iteration, Time};

impl Scheduler {
    /// Plans the next iteration. A plan without chunks is neither executed nor committed, but its transfers
    /// are started.
    ///
    /// # Panics
    /// If `SchedulerLimits::depth` iterations are in flight already: a fault of the driver, not of any input.
    pub fn plan(&mut self, now: Time) -> &Iteration {
        assert!(
            self.launches.in_flight() < self.limits.depth as usize,
            "plan was called while a commit was due"
        );
        self.iteration.clear();
        self.queueing_times.clear();
        self.expire(now);
        let (budget, scores) = (self.limits.iteration_tokens, self.limits.iteration_scores);
        let mut draft = PlanDraft { budget, scores, ..PlanDraft::default() };
        self.preempt_marked(now, &mut draft);
        draft.incoming = self.incoming_blocks();
        self.plan_decodes(now, &mut draft);
        self.plan_drafts(now, &mut draft);
        self.note_unused_predictions();
        let decodes = draft.work;
        self.plan_prefills(now, &mut draft);
        self.plan_predictions();
        // The search for cold blocks costs time, so it runs only every few iterations while there is work.
        if self.iteration.chunks.is_empty() || self.launches.count().is_multiple_of(8) {
            self.offload();
        }
        if !self.iteration.chunks.is_empty() {
            let mut launched = self.launches.next();
            self.iteration.number = launched.number;
            self.plan_state_copies();
            let predicted = self.cost.step(&draft.work);
            self.push_history(now, predicted + self.prediction_time(), &draft);
            launched.work = draft.work;
            launched.prefill_share = self.prefill_share(&decodes, predicted);
            if let Some(bound) = draft.bound {
                self.prefill_load.spend(self.cost.step_tail(&draft.work) > bound.usual);
            }
            let (gap, first_token) = self.step_bounds().unmet(&decodes, now);
            self.totals.gap_objective_unmet += u64::from(gap);
            self.totals.first_token_objective_unmet += u64::from(first_token);
            launched.sources.append(&mut draft.sources);
            launched.chunks.extend_from_slice(&self.iteration.chunks);
            self.launches.launch(launched);
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
        let waits = self.waiting.heads().map(|(_, index)| now.since(self.sequences[index].queued));
        let longest_wait = waits.max().unwrap_or_default();
        let load = self.load();
        let predictions = match self.limits.predicted_max {
            0 => 0,
            _ => plan.chunks.iter().map(|chunk| chunk.predictions).sum(),
        };
        self.history.push(IterationSummary {
            number: plan.number,
            planned: now,
            took: None,
            predicted,
            bound: draft.bound.map(|bound| bound.all + self.prediction_time()),
            decodes: plan.decodes,
            prefills: plan.chunks.len() as u32 - plan.decodes,
            drafts: plan.drafts,
            predictions,
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
        let short = self.decode_blocks_needed() + self.prefill_blocks_needed() > self.memory.free();
        let mut order = std::mem::take(&mut self.buffers.decodes);
        order.clear();
        order.extend_from_slice(&self.running);
        if short {
            order.sort_unstable_by(|a, b| self.policy.compare(&self.view(*a, now), &self.view(*b, now)));
        }
        for &index in &order {
            let sequence = &self.sequences[index];
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
        self.buffers.decodes = order;
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
        let mut prefills = std::mem::take(&mut self.buffers.prefills);
        prefills.clear();
        for &index in &self.running {
            if self.is_prefilling(index) {
                prefills.push((index, self.sequences[index].uncomputed()));
            }
        }
        let prompts = prefills.len() as u32 + self.waiting.len();
        let single = if prompts == 1 { self.with_single_prompt(&prefills, &draft.work) } else { None };
        draft.bound = self.step_bounds().bound(&draft.work, prompts, single, Some(now));
        let first = self.reserve_first(&mut prefills, now, draft);
        // Blocks for the first prefill may have been taken from others.
        prefills.retain(|(index, _)| self.is_prefilling(*index));
        // The running prefills use the budget before waiting sequences are admitted; then all share it by
        // length.
        let (budget, work, scores) = (draft.budget, draft.work, draft.scores);
        self.shortest_first(&mut prefills);
        for &(index, _) in &prefills {
            let sequence = &mut self.sequences[index];
            let len = draft.prefill_len(sequence, &self.memory, &self.cost);
            self.memory.hold(sequence, len);
            draft.take(sequence, len);
        }
        self.buffers.prefills = prefills;
        self.start_waiting(now, draft);
        let mut prefills = std::mem::take(&mut self.buffers.prefills);
        (draft.budget, draft.work, draft.scores) = (budget, work, scores);
        // An admission may have preempted some.
        prefills.retain(|(index, _)| self.is_prefilling(*index));
        self.shortest_first(&mut prefills);
        for &(index, _) in &prefills {
            let len = draft.prefill_len(&self.sequences[index], &self.memory, &self.cost);
            self.push_prefill(index, len, draft);
        }
        self.buffers.prefills = prefills;
        if let Some((index, reserved)) = first {
            let sequence = &self.sequences[index];
            draft.unreserve(sequence, reserved);
            let len = draft.prefill_len(sequence, &self.memory, &self.cost).max(reserved);
            // A snapshot may be wanted since.
            let len = len.min(self.memory.until_snapshot(sequence));
            self.push_prefill(index, len, draft);
        }
    }

    /// Returns the work of a step with these decodes and all uncomputed tokens of the only prompt, running or waiting.
    fn with_single_prompt(&self, prefills: &[(u32, u32)], decodes: &StepWork) -> Option<StepWork> {
        let index = match prefills {
            [(index, _)] => *index,
            _ => self.waiting.heads().next()?.1,
        };
        let sequence = &self.sequences[index];
        let mut work = *decodes;
        work.add(sequence.computed_tokens, sequence.uncomputed());
        Some(work)
    }

    fn shortest_first(&self, prefills: &mut [(u32, u32)]) {
        prefills.sort_unstable_by_key(|&(index, uncomputed)| (uncomputed, self.sequences[index].arrival));
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
        let sequence = &self.sequences[index];
        let (start, max) = (sequence.computed_tokens, draft.chunk_max(sequence, &self.memory));
        let len =
            draft.bound.map_or(max, |bound| self.cost.chunk_within(&draft.work, start, max, bound.first));
        let reserved = len.max(1).min(draft.budget.div_ceil(2));
        if max == 0 && draft.budget > 0 && !self.grow(index, start + 1, now, draft) {
            return None; // it waits for blocks, or was preempted itself
        }
        let sequence = &mut self.sequences[index];
        self.memory.hold(sequence, reserved);
        draft.reserve(sequence, reserved);
        Some((index, reserved))
    }

    /// Adds a prefill chunk of `len` tokens to the plan; no-op for 0.
    fn push_prefill(&mut self, index: u32, len: u32, draft: &mut PlanDraft) {
        let sequence = &mut self.sequences[index];
        let (Some(slot), true) = (sequence.slot(), len > 0) else { return };
        self.memory.hold(sequence, len);
        draft.take(sequence, len);
        self.push_chunk(index, slot, len);
    }

    /// Adds a chunk to the plan and advances the sequence as if it had run: the next plan, made while this
    /// iteration is in flight, continues from there.
    fn push_chunk(&mut self, index: u32, slot: u32, len: u32) {
        let sequence = &mut self.sequences[index];
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
        self.iteration.chunks.push(Chunk { id, slot, start, len, samples, drafts: 0, predictions: 0 });
    }
}

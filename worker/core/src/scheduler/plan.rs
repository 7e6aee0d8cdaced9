//! Planning of an iteration: decodes, running prefills (chunked), swap-ins, admissions, in this order.
//!
//! 1. Sequences past their deadline end.
//! 2. Each decoding sequence gets one token, subtracted from the token budget.
//! 3. Half of the rest is reserved for the first running prefill; the others follow, the shortest first.
//! 4. Swapped sequences are resumed, waiting ones admitted by reservation of all blocks of their known tokens.
//!
//! With decodes in a step, the cost model bounds the prefill tokens beside them so that the step keeps its
//! target duration. Where decodes alone take more than half of the target, prefills together get up to three
//! times the decodes' time, in proportion to the number of waiting prompts per decoding sequence; what the
//! first prefill leaves is given to the others.

use std::time::Duration;

use super::Scheduler;
use crate::cost::StepWork;
use crate::history::IterationSummary;
use crate::sequence::SequenceState;
use crate::{Chunk, Iteration, Time};

/// Ratio of decodes to prefilling prompts at which, under a tight step target, both get equal time.
const DECODES_PER_PREFILL: u32 = 24;
/// Maximum prefill time under a tight step target, as a multiple of the decode time. Larger values lower TTFT
/// and raise the longest gaps.
const PREFILL_TIME_FACTOR_MAX: f64 = 3.0;

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
    /// Maximum duration of the step with prefills; `None`: unbounded.
    pub target: Option<Duration>,
    /// Set if the step target is tight, see [`Scheduler::is_tight`]. Then `target` bounds all prefills
    /// together; else the first prefill may take as much time again as the others.
    pub tight: bool,
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
        self.expire(now);
        let (budget, scores) = (self.limits.iteration_tokens, self.limits.iteration_scores);
        let mut draft = PlanDraft { budget, scores, ..PlanDraft::default() };
        self.preempt_marked(now, &mut draft);
        draft.incoming = self.incoming_blocks();
        self.plan_decodes(now, &mut draft);
        let first = self.plan_prefills(now, &mut draft);
        self.start_waiting(now, &mut draft);
        if let Some((index, reserved)) = first {
            // The reserved tokens and the rest of the budget go to the first prefill.
            draft.budget += reserved;
            draft.scores += self.scores(index, reserved);
            draft.reserved_prefill = None;
            let len = self.prefill_len(index, &draft).max(reserved);
            self.push_prefill(index, len, &mut draft);
        }
        // The search for cold blocks costs time, so it runs only every few iterations while there is work.
        if self.iteration.chunks.is_empty() || self.iterations.is_multiple_of(8) {
            self.offload();
        }
        if !self.iteration.chunks.is_empty() {
            self.iterations += 1;
            self.iteration.number = self.iterations;
            let mut launched = self.recycled.pop().unwrap_or_default();
            launched.number = self.iterations;
            self.push_history(now, &draft);
            launched.work = draft.work;
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
    fn push_history(&mut self, now: Time, draft: &PlanDraft) {
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
            predicted: self.cost.step(&draft.work),
            decodes: plan.decodes,
            prefills: plan.chunks.len() as u32 - plan.decodes,
            prefill_tokens: plan.tokens() - plan.decodes,
            longest_wait,
            preempted: plan.preempted.len() as u32,
            stalled: plan.stalled,
            blocked: plan.blocked,
            load,
        });
    }

    /// Plans one token for each decoding sequence. The order matters only if blocks are short: then sequences
    /// are served in policy order and preempt from its end.
    fn plan_decodes(&mut self, now: Time, draft: &mut PlanDraft) {
        let short = self.decode_blocks_needed() > self.device.free();
        let mut order = std::mem::take(&mut self.scratch);
        order.clear();
        order.extend(self.running.iter().map(|index| (*index, 0)));
        if short {
            order.sort_unstable_by(|a, b| self.policy.compare(&self.view(a.0, now), &self.view(b.0, now)));
        }
        for &(index, _) in &order {
            let sequence = self.sequence(index);
            let SequenceState::Decoding { slot } = sequence.state else { continue };
            if sequence.is_marked() || sequence.remaining_tokens == 0 {
                continue; // its preemption is pending, or its last token is in flight
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

    /// Returns the number of new blocks that the decodes of this step need.
    pub(super) fn decode_blocks_needed(&self) -> u32 {
        let grows = |index: &&u32| {
            let sequence = self.sequence(**index);
            matches!(sequence.state, SequenceState::Decoding { .. })
                && !sequence.is_marked()
                && sequence.remaining_tokens > 0
                && sequence.table.len() as u32 * self.limits.block_tokens <= sequence.computed_tokens
        };
        self.running.iter().filter(grows).count() as u32
    }

    /// Plans chunks for the running prefills. Reserves up to half of the budget for the first one in policy
    /// order, so that it always makes progress; the others share the rest, shortest first, so that short
    /// prompts do not wait behind long ones. Returns the first prefill and its reserved tokens, which the
    /// caller plans last.
    fn plan_prefills(&mut self, now: Time, draft: &mut PlanDraft) -> Option<(u32, u32)> {
        let mut prefilling = std::mem::take(&mut self.scratch);
        prefilling.clear();
        for &index in &self.running {
            let sequence = self.sequence(index);
            if matches!(sequence.state, SequenceState::Prefilling { .. }) && !sequence.is_marked() {
                prefilling.push((index, sequence.uncomputed()));
            }
        }
        let first = prefilling
            .iter()
            .copied()
            .min_by(|a, b| self.policy.compare(&self.view(a.0, now), &self.view(b.0, now)));
        let min_time = self.min_step_time(&draft.work, prefilling.len() as u32);
        draft.tight = self.is_tight(&draft.work);
        draft.target =
            self.limits.step_target.map(|target| if draft.tight { target.max(min_time) } else { target });
        let reservation = first.map(|(index, _)| {
            let len = self.prefill_len(index, draft);
            let (start, max) = (self.sequence(index).computed_tokens, self.chunk_max(index, draft));
            let len = len.max(self.cost.chunk_within(&draft.work, start, max, min_time)).max(1);
            let reserved = len.min(draft.budget.div_ceil(2));
            draft.budget -= reserved;
            draft.scores -= self.scores(index, reserved);
            draft.reserved_prefill = Some((start, reserved));
            (index, reserved)
        });
        prefilling.retain(|(index, _)| Some(*index) != reservation.map(|(first, _)| first));
        prefilling.sort_by_key(|&(index, uncomputed)| (uncomputed, self.sequence(index).arrival));
        for &(index, _) in &prefilling {
            let len = self.prefill_len(index, draft);
            self.push_prefill(index, len, draft);
        }
        self.scratch = prefilling;
        reservation
    }

    /// Returns the maximum chunk length of a prefill, regardless of the step target.
    fn chunk_max(&self, index: u32, draft: &PlanDraft) -> u32 {
        let sequence = self.sequence(index);
        let scored = sequence.scored.chunk_max(sequence.computed_tokens, draft.scores);
        sequence.uncomputed().min(draft.budget).min(scored)
    }

    /// Returns the positions scored in the next chunk of a prefill, of `len` tokens.
    fn scores(&self, index: u32, len: u32) -> u32 {
        let sequence = self.sequence(index);
        sequence.scored.within(sequence.computed_tokens, len).len()
    }

    /// Returns the chunk length of a prefill within budgets and step target.
    pub(super) fn prefill_len(&self, index: u32, draft: &PlanDraft) -> u32 {
        let (start, max) = (self.sequence(index).computed_tokens, self.chunk_max(index, draft));
        let target = match draft.target {
            Some(target) if self.iteration.decodes > 0 => target,
            _ => return max, // no decode whose inter-token latency would suffer
        };
        let mut work = draft.work;
        if let (true, Some((start, len))) = (draft.tight, draft.reserved_prefill) {
            work.add(start, len);
        }
        self.cost.chunk_within(&work, start, max, target)
    }

    /// Returns true if the step target leaves prefills less time than the decodes take.
    fn is_tight(&self, decodes: &StepWork) -> bool {
        self.limits.step_target.is_some_and(|target| target < 2 * self.cost.step(decodes))
    }

    /// Returns the step duration allowed beside these decodes regardless of the target, so that prefills make
    /// progress: 1.25 times the decode time for the first prompt. Under a tight target it grows with the
    /// ratio of prompts to decodes, to at most `1 + PREFILL_TIME_FACTOR_MAX` times the decode time for all
    /// prompts together; otherwise a target close to the decode time, as with large models, would leave the
    /// device half empty while prompts wait. The bound is in time, not tokens, since tokens at the end of a
    /// long prompt are expensive.
    fn min_step_time(&self, decodes: &StepWork, prompts: u32) -> Duration {
        let contention =
            f64::from(DECODES_PER_PREFILL * prompts.max(1)) / f64::from(decodes.sequences.max(1));
        let slack =
            if self.is_tight(decodes) { contention.clamp(0.25, PREFILL_TIME_FACTOR_MAX) } else { 0.25 };
        self.cost.target_with_slack(decodes, slack)
    }

    /// Returns the chunk length of a new prompt in a step with these decodes, while `prompts` prompts share
    /// the steps; at least 1.
    pub(super) fn chunk_beside(&self, decodes: &StepWork, prompts: u32) -> u32 {
        let max = self.limits.iteration_tokens.saturating_sub(decodes.tokens).max(1);
        let min = self.cost.chunk_within(decodes, 0, max, self.min_step_time(decodes, prompts));
        let within = match self.limits.step_target {
            Some(target) if decodes.tokens > 0 => self.cost.chunk_within(decodes, 0, max, target),
            _ => max,
        };
        within.max(min).max(1)
    }

    /// Adds a prefill chunk of `len` tokens to the plan; no-op for 0.
    pub(super) fn push_prefill(&mut self, index: u32, len: u32, draft: &mut PlanDraft) {
        let sequence = self.sequence(index);
        let (Some(slot), true) = (sequence.slot(), len > 0) else { return };
        draft.budget -= len;
        draft.work.add(sequence.computed_tokens, len);
        draft.scores -= self.scores(index, len);
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
        self.iteration.chunks.push(Chunk { id, slot, start, len, samples });
    }
}

//! The order of a step: decodes, prefills under way, swap-ins, admissions.

use std::time::Duration;

use super::Scheduler;
use crate::cost::StepWork;
use crate::history::Step;
use crate::mutant::Mutant;
use crate::sequence::State;
use crate::{Chunk, Iteration, Time};

/// Sequences that decode to each that waits for its first token, where a tight target is to leave both as much time.
const PREFILL_WORTH: u32 = 24;
/// Most time that a tight target leaves prompts, in times of what the decodes take: the more it is, the sooner first
/// tokens come, and the longer are the longest times between tokens.
const PREFILL_MOST: f64 = 3.0;

/// What a plan has decided so far.
#[derive(Debug, Default)]
pub(super) struct Draft {
    /// Tokens of the budget that are left.
    pub budget: u32,
    /// What the step computes so far.
    pub work: StepWork,
    /// What is kept for the first prefill: its position, and tokens.
    pub kept: Option<(u32, u32)>,
    /// How long the step may take with prompts in it; none: as long as it does.
    pub target: Option<Duration>,
    /// Whether the limits' target is tight, see [`Scheduler::is_tight`]. Then `target` bounds all prompts together; else the first
    /// may take as much again as the others.
    pub tight: bool,
    /// Blocks that fences will give back, less those that stalled sequences wait for.
    pub incoming: u32,
    /// Priority of the most important sequence preempted in this step: nobody up to it is admitted.
    pub preempted: Option<i32>,
    /// Sequences whose blocks are copied.
    pub sources: Vec<u32>,
}

impl Scheduler {
    /// Decides the next iteration. One with no chunks is nothing to execute and is not committed, but its
    /// transfers are to be started all the same.
    ///
    /// # Panics
    /// If as many iterations are in flight as the limits allow: that is a fault of the driver, not of any input.
    pub fn plan(&mut self, now: Time) -> &Iteration {
        assert!(self.flights.len() < self.limits.depth as usize, "plan was called before a commit was due");
        self.iteration.clear();
        self.expire(now);
        let mut draft = Draft { budget: self.limits.iteration_tokens, ..Draft::default() };
        self.evict_marked(now, &mut draft);
        draft.incoming = self.incoming_blocks();
        self.plan_decodes(now, &mut draft);
        let oldest = self.plan_prefills(now, &mut draft);
        self.start_waiting(now, &mut draft);
        if let Some((index, reserved)) = oldest {
            // What nobody else took.
            draft.budget += reserved;
            draft.kept = None;
            let len = self.prefill_len(index, &draft).max(reserved);
            self.push_prefill(index, len, &mut draft);
        }
        // Looking for what to keep costs a little: now and then is enough while there is work.
        if self.iteration.chunks.is_empty() || self.iterations.is_multiple_of(8) {
            self.offload();
        }
        if !self.iteration.chunks.is_empty() {
            self.iterations += 1;
            self.iteration.number = self.iterations;
            let mut flight = self.spare.pop().unwrap_or_default();
            flight.number = self.iterations;
            self.remember(now, &draft);
            flight.work = draft.work;
            flight.sources.append(&mut draft.sources);
            flight.chunks.extend_from_slice(&self.iteration.chunks);
            self.flights.push_back(flight);
        }
        if let Some(log) = &mut self.log {
            log.plan(&self.iteration, now);
        }
        &self.iteration
    }

    /// Adds the iteration just planned to the history.
    fn remember(&mut self, now: Time, draft: &Draft) {
        let plan = &self.iteration;
        // Within a lane the first has waited longest; heads of all lanes are looked at in `start_waiting` anyway.
        let heads = self.lanes.values().filter_map(|lane| lane.first_key_value());
        let longest_wait =
            heads.map(|(_, index)| now.since(self.peek(*index).queued)).max().unwrap_or_default();
        let load = self.load();
        self.history.push(Step {
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

    /// One token for each decoding sequence. Only where blocks are short does the order matter: then the first
    /// in policy order takes from the last.
    fn plan_decodes(&mut self, now: Time, draft: &mut Draft) {
        let short = self.growing() > self.device.free();
        let mut order = std::mem::take(&mut self.scratch);
        order.clear();
        order.extend(self.running.iter().map(|index| (*index, 0)));
        if short {
            order.sort_unstable_by(|a, b| self.policy.compare(&self.view(a.0, now), &self.view(b.0, now)));
        }
        for &(index, _) in &order {
            let sequence = self.peek(index);
            let State::Decoding { slot } = sequence.state else { continue };
            if sequence.evicted() || sequence.remaining_tokens == 0 {
                continue; // gives way, or waits for its last token's commit
            }
            if self.is_mutant(Mutant::FirstSkipped) && order.len() > 1 && index == order[0].0 {
                continue;
            }
            let start = sequence.computed_tokens;
            if !self.grow(index, start + 1, now, draft) {
                continue;
            }
            if !self.is_mutant(Mutant::BudgetIgnoresDecodes) {
                draft.budget -= 1; // never below zero: `running_max` is at most the budget
            }
            draft.work.add(start, 1);
            self.iteration.decodes += 1;
            self.push_chunk(index, slot, 1);
        }
        self.scratch = order;
    }

    /// Blocks that the decodes of this step need.
    pub(super) fn growing(&self) -> u32 {
        let grows = |index: &&u32| {
            let sequence = self.peek(**index);
            matches!(sequence.state, State::Decoding { .. })
                && !sequence.evicted()
                && sequence.remaining_tokens > 0
                && sequence.table.len() as u32 * self.limits.block_tokens <= sequence.computed_tokens
        };
        self.running.iter().filter(grows).count() as u32
    }

    /// Half of the budget is kept for the first prefill in policy order, so that it always gets on; the rest
    /// goes to the others, the shortest first, so that no short prompt waits behind a long one. Returns the first
    /// with the tokens kept for it.
    fn plan_prefills(&mut self, now: Time, draft: &mut Draft) -> Option<(u32, u32)> {
        let mut prefilling = std::mem::take(&mut self.scratch);
        prefilling.clear();
        for &index in &self.running {
            let sequence = self.peek(index);
            if matches!(sequence.state, State::Prefilling { .. }) && !sequence.evicted() {
                prefilling.push((index, sequence.uncomputed()));
            }
        }
        let first = prefilling
            .iter()
            .copied()
            .min_by(|a, b| self.policy.compare(&self.view(a.0, now), &self.view(b.0, now)));
        let least = self.least_time(&draft.work, prefilling.len() as u32);
        draft.tight = self.is_tight(&draft.work);
        draft.target =
            self.limits.step_target.map(|target| if draft.tight { target.max(least) } else { target });
        let kept = first.map(|(index, _)| {
            let len = self.prefill_len(index, draft);
            let sequence = self.peek(index);
            let (start, most) = (sequence.computed_tokens, sequence.uncomputed().min(draft.budget));
            let len = len.max(self.cost.chunk_within(&draft.work, start, most, least)).max(1);
            let reserved = len.min(draft.budget.div_ceil(2));
            draft.budget -= reserved;
            draft.kept = Some((start, reserved));
            (index, reserved)
        });
        prefilling.retain(|(index, _)| Some(*index) != kept.map(|(first, _)| first));
        prefilling.sort_by_key(|&(index, uncomputed)| (uncomputed, self.peek(index).arrival));
        for &(index, _) in &prefilling {
            let len = self.prefill_len(index, draft);
            self.push_prefill(index, len, draft);
        }
        self.scratch = prefilling;
        kept
    }

    /// The tokens of a prefill that budget and target allow.
    pub(super) fn prefill_len(&self, index: u32, draft: &Draft) -> u32 {
        let sequence = self.peek(index);
        let (start, most) = (sequence.computed_tokens, sequence.uncomputed().min(draft.budget));
        let target = match draft.target {
            Some(target) if self.iteration.decodes > 0 => target,
            _ => return most, // nobody's inter-token latency is at stake
        };
        let mut work = draft.work;
        if let (true, Some((start, len))) = (draft.tight, draft.kept) {
            work.add(start, len);
        }
        self.cost.chunk_within(&work, start, most, target)
    }

    /// Whether the target leaves prompts less time than decodes take.
    fn is_tight(&self, decodes: &StepWork) -> bool {
        self.limits.step_target.is_some_and(|target| target < 2 * self.cost.step(decodes))
    }

    /// How long a step with these decodes may take for the sake of the first prompt, whatever the target says: a quarter more
    /// than without it. Where the target is tight, it is the more the more prompts wait for each sequence that decodes, up to
    /// three times what decodes take, and for all prompts together: else a target that decodes alone come near to, as those of
    /// a large model do, would keep the device half empty while prompts wait. The bound is one of time rather than of tokens,
    /// which are dear at the end of a long prompt.
    fn least_time(&self, decodes: &StepWork, prompts: u32) -> Duration {
        let crowd = f64::from(PREFILL_WORTH * prompts.max(1)) / f64::from(decodes.sequences.max(1));
        let share = if self.is_tight(decodes) { crowd.clamp(0.25, PREFILL_MOST) } else { 0.25 };
        self.cost.longer(decodes, share)
    }

    /// Tokens of a prompt that a step with these decodes takes, one of so many prompts that wait; at least one.
    pub(super) fn chunk_beside(&self, decodes: &StepWork, prompts: u32) -> u32 {
        let most = self.limits.iteration_tokens.saturating_sub(decodes.tokens).max(1);
        let least = self.cost.chunk_within(decodes, 0, most, self.least_time(decodes, prompts));
        let within = match self.limits.step_target {
            Some(target) if decodes.tokens > 0 => self.cost.chunk_within(decodes, 0, most, target),
            _ => most,
        };
        within.max(least).max(1)
    }

    pub(super) fn push_prefill(&mut self, index: u32, len: u32, draft: &mut Draft) {
        let sequence = self.peek(index);
        let (Some(slot), true) = (sequence.slot(), len > 0) else { return };
        draft.budget -= len;
        draft.work.add(sequence.computed_tokens, len);
        self.push_chunk(index, slot, len);
    }

    /// Plans `len` tokens of a sequence as if they had run: the next plan, made while this one runs, goes on
    /// from there.
    fn push_chunk(&mut self, index: u32, slot: u32, len: u32) {
        let sequence = self.at(index);
        let start = sequence.computed_tokens;
        sequence.computed_tokens += len;
        sequence.in_flight += 1;
        let samples = sequence.computed_tokens == sequence.known_tokens;
        if samples {
            sequence.state = State::Decoding { slot };
            sequence.known_tokens += 1;
            sequence.remaining_tokens -= 1;
        }
        let id = sequence.id;
        self.iteration.chunks.push(Chunk { id, slot, start, len, samples });
    }
}

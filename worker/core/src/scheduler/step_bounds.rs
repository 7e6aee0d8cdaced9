//! Bound of the duration of a step with decodes, from the step target, the cost model and the load.

use std::time::Duration;

use super::sequences::Sequences;
use crate::cost::{CostModel, StepWork};
use crate::sequence::SequenceState;
use crate::{LatencyObjectives, PrefillLoad, StepTarget, Time};

/// Ratio of decodes to prefilling prompts at which, under a tight fixed target, both get equal time.
const DECODES_PER_PREFILL: u32 = 24;
/// Maximum prefill time under a tight fixed target, as a multiple of the decode time. Larger values lower
/// TTFT and raise the longest gaps.
const PREFILL_TIME_FACTOR_MAX: f64 = 3.0;
/// Minimum prefill time as a multiple of the decode time, whatever the target, so that prompts make progress.
const PREFILL_TIME_FACTOR_MIN: f64 = 0.25;

/// Durations up to which a step with decodes may be filled with prefill chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StepBound {
    /// Bound for the chunks of all prompts.
    pub all: Duration,
    /// Bound for the chunk that is reserved for the first prompt in policy order; the chunk counts towards
    /// `all`.
    pub first: Duration,
    /// Duration beyond which the step counts as longer, see [`crate::PrefillLoad`].
    pub usual: Duration,
}

/// Prompts and the time to prefill them.
#[derive(Debug, Clone, Copy, Default)]
struct Backlog {
    time: Duration,
    /// Longest time since the submission of one of them.
    age: Duration,
}

/// What bounds the steps of a scheduler.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepBounds<'a> {
    pub target: StepTarget,
    pub cost: &'a CostModel,
    pub prefill_load: &'a PrefillLoad,
    pub sequences: &'a Sequences,
    /// Expected duration of the prediction passes after a step, which lengthen the gap between tokens.
    pub predicting: Duration,
}

impl StepBounds<'_> {
    /// Returns the bound for a step with these decodes while `prompts` prompts compute or wait; `None` without
    /// one. `single`: work of a step with these decodes and all uncomputed tokens of the only prompt; `None` with several
    /// prompts or none. Without `now`, the TTFT objective has no effect.
    pub fn bound(
        &self,
        decodes: &StepWork,
        prompts: u32,
        single: Option<StepWork>,
        now: Option<Time>,
    ) -> Option<StepBound> {
        if decodes.sequences == 0 {
            return None; // no sequence whose inter-token latency would suffer
        }
        match self.target {
            StepTarget::Unbounded => None,
            StepTarget::Fixed(target) => {
                let target = target.saturating_sub(self.predicting);
                let min = self.cost.target_with_slack(decodes, self.fixed_slack(target, decodes, prompts));
                let tight = is_tight(target, self.cost.step(decodes));
                let all = if tight { target.max(min) } else { target };
                Some(StepBound { all, first: all.max(min), usual: all.max(min) })
            }
            StepTarget::Adaptive(objectives) => {
                let mut factor = self.prefill_load.factor(prompts);
                if let (Some(objective), Some(now)) = (objectives.first_token, now) {
                    factor = factor.max(self.factor_for_first_token(objective, now));
                }
                let decode = self.cost.target_with_slack(decodes, 0.0);
                let min = self.cost.target_with_slack(decodes, PREFILL_TIME_FACTOR_MIN);
                let mut usual = self.cost.target_with_slack(decodes, factor);
                let whole = single.map(|work| self.cost.step_tail(&work));
                if let Some(whole) = whole
                    && whole <= self.cost.target_with_slack(decodes, self.prefill_load.factor_undivided())
                {
                    usual = usual.max(whole);
                }
                let needed =
                    whole.map_or(0.0, |whole| whole.as_secs_f64() / decode.as_secs_f64().max(1e-9) - 1.0);
                let target = if self.prefill_load.may_be_longer(needed) {
                    usual.max(self.cost.target_with_slack(decodes, PrefillLoad::FACTOR_LONGER))
                } else {
                    usual
                };
                let gap = objectives.gap.map(|gap| gap.saturating_sub(self.predicting));
                let all = gap.map_or(target, |gap| gap.min(target)).max(min);
                // Half of the prefill time is for the first prompt in policy order; the rest goes to the
                // shortest.
                let first = (decode + (all - decode) / 2).max(min);
                Some(StepBound { all, first, usual: usual.max(min) })
            }
        }
    }

    /// Returns the prefill time allowed beside decodes regardless of a fixed target, as a multiple of the
    /// decode time: [`PREFILL_TIME_FACTOR_MIN`] for the first prompt. Under a tight target it grows with the
    /// ratio of prompts to decodes, to at most [`PREFILL_TIME_FACTOR_MAX`] for all prompts together; otherwise
    /// a target close to the decode time, as with large models, would leave the device half empty while
    /// prompts wait. The bound is in time, not tokens, since tokens at the end of a long prompt are expensive.
    fn fixed_slack(&self, target: Duration, decodes: &StepWork, prompts: u32) -> f64 {
        let contention =
            f64::from(DECODES_PER_PREFILL * prompts.max(1)) / f64::from(decodes.sequences.max(1));
        if is_tight(target, self.cost.step(decodes)) {
            contention.clamp(PREFILL_TIME_FACTOR_MIN, PREFILL_TIME_FACTOR_MAX)
        } else {
            PREFILL_TIME_FACTOR_MIN
        }
    }

    /// Returns the prefill time per decode time with which the backlog is computed before its oldest prompt
    /// exceeds the objective for first tokens.
    fn factor_for_first_token(&self, objective: Duration, now: Time) -> f64 {
        let backlog = self.backlog(now);
        let left = objective.saturating_sub(backlog.age).as_secs_f64();
        let time = backlog.time.as_secs_f64();
        if left > time {
            // With a factor `k`, prefills take `1 + 1 / k` times their time alone.
            time / (left - time)
        } else {
            PrefillLoad::FACTOR_MAX
        }
    }

    fn backlog(&self, now: Time) -> Backlog {
        let mut backlog = Backlog::default();
        for sequence in self.sequences.iter() {
            if matches!(sequence.state, SequenceState::Prefilling { .. } | SequenceState::Waiting) {
                backlog.time += self.cost.prefill(sequence.computed_tokens, sequence.uncomputed());
                backlog.age = backlog.age.max(now.since(sequence.queued));
            }
        }
        backlog
    }

    /// Returns whether a step of these decodes cannot meet the objective for gaps, and whether the prompts cannot all meet the one for
    /// first tokens.
    pub fn unmet(&self, decodes: &StepWork, now: Time) -> (bool, bool) {
        let StepTarget::Adaptive(LatencyObjectives { first_token, gap }) = self.target else {
            return (false, false);
        };
        let decodes_exceed = |gap: Duration| {
            let least = self.cost.target_with_slack(decodes, PREFILL_TIME_FACTOR_MIN) + self.predicting;
            decodes.sequences > 0 && least > gap
        };
        let prompts_exceed = |objective: Duration| {
            let backlog = self.backlog(now);
            backlog.age + backlog.time > objective
        };
        (gap.is_some_and(decodes_exceed), first_token.is_some_and(prompts_exceed))
    }
}

/// Returns true if a fixed target leaves prefills less time than the decodes take.
fn is_tight(target: Duration, decodes: Duration) -> bool {
    target < 2 * decodes
}

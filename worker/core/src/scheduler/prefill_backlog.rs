//! Prefill backlog of a new prompt and its predicted time to first token.

use std::time::Duration;

use super::step_bounds::StepBound;
use super::{PrefillEstimate, Scheduler};
use crate::cost::StepWork;
use crate::sequence::SequenceState;

/// Prefill work ahead of a new prompt.
struct PrefillBacklog {
    /// Work of the running decodes.
    decodes: StepWork,
    /// Uncomputed prompt tokens.
    tokens: u64,
    /// Predicted time to prefill them without decodes.
    time: Duration,
    /// Prompts that will share steps, including the new one; at least 1.
    prompts: u32,
}

impl Scheduler {
    fn prefill_backlog(&self) -> PrefillBacklog {
        let mut backlog =
            PrefillBacklog { decodes: StepWork::default(), tokens: 0, time: Duration::ZERO, prompts: 0 };
        // Only sequences with a slot share steps.
        let (mut prefilling, mut waiting) = (0, 1);
        for sequence in self.sequences.iter() {
            match sequence.state {
                SequenceState::Decoding { .. } => {
                    backlog.decodes.add(sequence.computed_tokens, 1);
                    continue;
                }
                SequenceState::Leaving { .. } => continue,
                SequenceState::Prefilling { .. } => prefilling += 1,
                _ => waiting += 1,
            }
            backlog.tokens += u64::from(sequence.uncomputed());
            backlog.time += self.cost.prefill(sequence.computed_tokens, sequence.uncomputed());
        }
        backlog.prompts = (prefilling + waiting.min(self.slots.free())).max(1);
        backlog
    }

    /// Returns the predicted TTFT of a prompt with `tokens` uncomputed tokens submitted now: the whole
    /// backlog is computed first, in chunks beside the running decodes.
    pub fn predict_first_token(&self, tokens: u32) -> Duration {
        let backlog = self.prefill_backlog();
        let (mut work, tokens) = (backlog.decodes, backlog.tokens + u64::from(tokens));
        let chunk = self.chunk_beside(&work, backlog.prompts);
        let steps = u32::try_from(tokens.div_ceil(u64::from(chunk))).unwrap_or(u32::MAX);
        let last = chunk.min(u32::try_from(tokens).unwrap_or(u32::MAX));
        work.add(0, last);
        self.cost.step(&work).saturating_mul(steps)
    }

    /// Returns the predicted prefill delay of a prompt submitted now.
    pub fn prefill_estimate(&self) -> PrefillEstimate {
        let backlog = self.prefill_backlog();
        let mut work = backlog.decodes;
        let decode_step = if work.sequences > 0 { self.cost.step(&work) } else { Duration::ZERO };
        let chunk = self.chunk_beside(&work, backlog.prompts);
        work.add(0, chunk);
        let (step, alone) = (self.cost.step(&work).as_secs_f64(), self.cost.prefill(0, chunk).as_secs_f64());
        let slowdown = if alone > 0.0 { (step / alone).clamp(1.0, 1000.0) } else { 1.0 };
        PrefillEstimate { backlog: backlog.time, slowdown, decode_step }
    }

    /// Returns the chunk length of a new prompt in a step with these decodes, while `prompts` prompts share
    /// the steps; at least 1.
    fn chunk_beside(&self, decodes: &StepWork, prompts: u32) -> u32 {
        let max = self.limits.iteration_tokens.saturating_sub(decodes.tokens).max(1);
        let bound = self.step_bounds().bound(decodes, prompts, None, None);
        let within = |bound: StepBound| self.cost.chunk_within(decodes, 0, max, bound.all.max(bound.first));
        bound.map_or(max, within).max(1)
    }
}

//! What a prompt that comes now may expect.

use std::time::Duration;

use super::{PrefillOutlook, Scheduler};
use crate::cost::StepWork;
use crate::sequence::State;

/// What a new prompt meets.
struct Ahead {
    /// The decodes that run.
    decodes: StepWork,
    /// Tokens of prompts to compute.
    tokens: u64,
    /// How long those take on their own.
    time: Duration,
    /// Prompts that share the steps with it, itself included.
    prompts: u32,
}

impl Scheduler {
    fn ahead(&self) -> Ahead {
        let mut ahead = Ahead { decodes: StepWork::default(), tokens: 0, time: Duration::ZERO, prompts: 0 };
        // Whoever finds no slot shares no step.
        let (mut prefilling, mut waiting) = (0, 1);
        for sequence in self.sequences.iter().flatten() {
            match sequence.state {
                State::Decoding { .. } => {
                    ahead.decodes.add(sequence.computed_tokens, 1);
                    continue;
                }
                State::Leaving { .. } => continue,
                State::Prefilling { .. } => prefilling += 1,
                _ => waiting += 1,
            }
            ahead.tokens += u64::from(sequence.uncomputed());
            ahead.time += self.cost.prefill(sequence.computed_tokens, sequence.uncomputed());
        }
        ahead.prompts = (prefilling + waiting.min(self.free_slots.len() as u32)).max(1);
        ahead
    }

    /// Predicted time until the first token of a new prompt with this many tokens to compute, were it submitted
    /// now: everything ahead of it is computed first, in chunks beside the decodes that run.
    pub fn predict_first_token(&self, tokens: u32) -> Duration {
        let ahead = self.ahead();
        let (mut work, tokens) = (ahead.decodes, ahead.tokens + u64::from(tokens));
        let chunk = self.chunk_beside(&work, ahead.prompts);
        let steps = u32::try_from(tokens.div_ceil(u64::from(chunk))).unwrap_or(u32::MAX);
        let last = chunk.min(u32::try_from(tokens).unwrap_or(u32::MAX));
        work.add(0, last);
        self.cost.step(&work).saturating_mul(steps)
    }

    /// What a prompt that comes now has ahead of it.
    pub fn prefill_outlook(&self) -> PrefillOutlook {
        let ahead = self.ahead();
        let mut work = ahead.decodes;
        let decode_step = if work.sequences > 0 { self.cost.step(&work) } else { Duration::ZERO };
        let chunk = self.chunk_beside(&work, ahead.prompts);
        work.add(0, chunk);
        let (step, alone) = (self.cost.step(&work).as_secs_f64(), self.cost.prefill(0, chunk).as_secs_f64());
        let stretch = if alone > 0.0 { (step / alone).clamp(1.0, 1000.0) } else { 1.0 };
        PrefillOutlook { ahead: ahead.time, stretch, decode_step }
    }
}

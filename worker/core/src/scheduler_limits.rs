//! Configuration of the scheduler: pool sizes, budgets and thresholds.

use crate::StepTarget;

/// Hard limits of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// KV blocks in the device pool.
    pub blocks: u32,
    /// KV blocks in the host pool; 0 disables swapping.
    pub host_blocks: u32,
    /// Maximum number of running sequences (slots).
    pub running_max: u32,
    /// Maximum number of waiting sequences.
    pub waiting_max: u32,
    /// Token budget of an iteration.
    pub iteration_tokens: u32,
    /// Maximum positions of an iteration whose logits are computed beside the sampled ones.
    pub iteration_scores: u32,
    /// Maximum sampled rows of an iteration, drafts included; at least `running_max`.
    pub iteration_samples: u32,
    /// Maximum length of a sequence in tokens, prompt and output.
    pub sequence_tokens: u32,
    /// Blocks that admission keeps free for the growth of running sequences.
    pub watermark_blocks: u32,
    /// Output tokens for which admission reserves blocks beyond the known tokens.
    pub min_decode_tokens: u32,
    /// Maximum number of iterations in flight: 1, or 2 to plan the next one while one runs.
    pub depth: u32,
    /// Maximum number of sequences admitted past a waiting one that does not fit.
    pub bypass_max: u32,
    /// Iterations after resumption during which a sequence is not preempted again if there is another
    /// candidate.
    pub cooldown_steps: u64,
    /// Enables prefix caching.
    pub prefix_cache: bool,
    /// Bound of the duration of a step with decodes, and so of the prefill chunks beside them.
    pub step_target: StepTarget,
    /// Minimum priority difference for a waiting sequence to preempt a running one.
    pub preemption_threshold: u32,
    /// Maximum drafted tokens of a sequence in an iteration; 0 disables drafts.
    pub drafts_max: u32,
    /// Plans drafts only where they are expected to save time; else as many as fit, for tests.
    pub govern_drafts: bool,
}

/// Invalid or contradictory limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// A limit that must be positive is 0.
    #[error("{0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// The token budget is too small for one token per running sequence, so decodes would starve.
    #[error(
        "iteration_tokens is {iteration_tokens}, less than running_max {running_max}: each running sequence needs \
         a token"
    )]
    BudgetBelowRunning {
        /// Given token budget.
        iteration_tokens: u32,
        /// Given maximum number of running sequences.
        running_max: u32,
    },
    /// Number of iterations in flight is not 1 or 2.
    #[error("depth is {0}; it must be 1 or 2")]
    Depth(u32),
}

impl SchedulerLimits {
    /// Default share of the blocks that admission keeps free: one in a hundred absorbs the growth of running
    /// sequences before any must be preempted.
    pub const WATERMARK_SHARE: f64 = 0.01;
    /// Default of `bypass_max`.
    pub const BYPASS_MAX: u32 = 16;
    /// Default of `preemption_threshold`.
    pub const PREEMPTION_THRESHOLD: u32 = 1;

    /// Returns the blocks that admission keeps free, as a share of the pool, rounded down.
    pub fn watermark_of(blocks: u32, share: f64) -> u32 {
        // A share such as 0.29 is a little less in binary; 100 blocks of it are 29.
        (f64::from(blocks) * share + 1e-6) as u32
    }

    /// Returns limits with these values and defaults for all others.
    pub fn new(block_tokens: u32, blocks: u32, running_max: u32, iteration_tokens: u32) -> Self {
        Self {
            block_tokens,
            blocks,
            host_blocks: 0,
            running_max,
            waiting_max: 1024,
            iteration_tokens,
            iteration_scores: 512,
            iteration_samples: u32::MAX,
            sequence_tokens: u32::MAX,
            watermark_blocks: Self::watermark_of(blocks, Self::WATERMARK_SHARE),
            min_decode_tokens: block_tokens,
            depth: 1,
            bypass_max: Self::BYPASS_MAX,
            cooldown_steps: 32,
            prefix_cache: true,
            step_target: StepTarget::Unbounded,
            preemption_threshold: Self::PREEMPTION_THRESHOLD,
            drafts_max: 0,
            govern_drafts: true,
        }
    }

    /// Checks that the limits are consistent.
    ///
    /// # Errors
    /// [`LimitsError`] with the offending limit.
    pub fn validate(&self) -> Result<(), LimitsError> {
        for (name, value) in [
            ("block_tokens", self.block_tokens),
            ("blocks", self.blocks),
            ("running_max", self.running_max),
            ("waiting_max", self.waiting_max),
            ("iteration_tokens", self.iteration_tokens),
            ("iteration_scores", self.iteration_scores),
            ("sequence_tokens", self.sequence_tokens),
            ("preemption_threshold", self.preemption_threshold),
        ] {
            if value == 0 {
                return Err(LimitsError::Zero(name));
            }
        }
        if !(1..=2).contains(&self.depth) {
            return Err(LimitsError::Depth(self.depth));
        }
        if self.iteration_tokens < self.running_max {
            return Err(LimitsError::BudgetBelowRunning {
                iteration_tokens: self.iteration_tokens,
                running_max: self.running_max,
            });
        }
        Ok(())
    }

    /// Returns the capacity of the device pool in tokens.
    pub fn pool_tokens(&self) -> u32 {
        self.blocks.saturating_mul(self.block_tokens)
    }

    /// Returns the maximum length of a sequence in tokens: bounded by the limit and by the whole pool.
    pub fn sequence_tokens_max(&self) -> u32 {
        self.sequence_tokens.min(self.pool_tokens())
    }

    /// Returns the number of blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }

    /// Returns the number of blocks reserved at admission of a sequence with `known` tokens that may generate
    /// `remaining` more.
    pub fn admission_blocks(&self, known: u32, remaining: u32) -> u32 {
        let reserved = known.saturating_add(self.min_decode_tokens.min(remaining));
        self.blocks_for(reserved.min(self.sequence_tokens_max()))
    }
}

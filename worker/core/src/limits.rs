use std::time::Duration;

/// What bounds a scheduler. All are hard: nothing grows past them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens in a KV block.
    pub block_tokens: u32,
    /// Blocks in the KV pool.
    pub blocks: u32,
    /// Blocks in the host pool; 0: no swapping.
    pub host_blocks: u32,
    /// Sequences that run at once: slots.
    pub running_max: u32,
    /// Sequences that wait at once.
    pub waiting_max: u32,
    /// Tokens computed in one iteration.
    pub iteration_tokens: u32,
    /// Tokens of one sequence, prompt and output together.
    pub sequence_tokens: u32,
    /// Blocks that admission leaves free for the growth of what runs.
    pub watermark_blocks: u32,
    /// Tokens of output for which admission reserves blocks beyond the prompt.
    pub min_decode_tokens: u32,
    /// Iterations planned before the oldest of them is committed: 1, or 2 to plan one while another runs.
    pub depth: u32,
    /// Sequences admitted past one that does not fit, before nobody passes it any more.
    pub bypass_max: u32,
    /// Steps in which a sequence that was preempted is not preempted again while another candidate is there.
    pub cooldown_steps: u64,
    /// Whether blocks whose content is known are shared and found again.
    pub prefix_cache: bool,
    /// A step with decodes in it should not take longer: bounds the prefill chunks beside them.
    pub step_target: Option<Duration>,
    /// A waiting sequence may displace running ones whose priority is at least this much lower.
    pub preemption_threshold: u32,
}

/// Limits that contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// A limit that must be positive is 0.
    #[error("{0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// An iteration could not hold one token of each running sequence, so decodes would starve.
    #[error(
        "iteration_tokens is {iteration_tokens}, less than running_max {running_max}: each running sequence needs \
         a token"
    )]
    BudgetBelowRunning {
        /// Tokens of an iteration.
        iteration_tokens: u32,
        /// Running sequences.
        running_max: u32,
    },
    /// More iterations in flight than a token can be unknown for.
    #[error("depth is {0}; it must be 1 or 2")]
    Depth(u32),
}

impl Limits {
    /// Limits with everything optional at its default.
    pub fn new(block_tokens: u32, blocks: u32, running_max: u32, iteration_tokens: u32) -> Self {
        Self {
            block_tokens,
            blocks,
            host_blocks: 0,
            running_max,
            waiting_max: 1024,
            iteration_tokens,
            sequence_tokens: u32::MAX,
            // One block in a hundred absorbs the growth of what runs before anything must be preempted.
            watermark_blocks: blocks / 100,
            min_decode_tokens: block_tokens,
            depth: 1,
            bypass_max: 16,
            cooldown_steps: 32,
            prefix_cache: true,
            step_target: None,
            preemption_threshold: 1,
        }
    }

    /// Checks that a scheduler can work within these limits.
    ///
    /// # Errors
    /// [`LimitsError`] naming the limit at fault.
    pub fn validate(&self) -> Result<(), LimitsError> {
        for (name, value) in [
            ("block_tokens", self.block_tokens),
            ("blocks", self.blocks),
            ("running_max", self.running_max),
            ("waiting_max", self.waiting_max),
            ("iteration_tokens", self.iteration_tokens),
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

    /// Tokens that the whole pool holds.
    pub fn pool_tokens(&self) -> u32 {
        self.blocks.saturating_mul(self.block_tokens)
    }

    /// The longest sequence that can ever run: alone, it has the whole pool.
    pub fn sequence_tokens_max(&self) -> u32 {
        self.sequence_tokens.min(self.pool_tokens())
    }

    /// Blocks that hold this many tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }

    /// Blocks that admitting a sequence reserves, which has `known` tokens and may generate `remaining` more.
    pub fn admission_blocks(&self, known: u32, remaining: u32) -> u32 {
        let reserved = known.saturating_add(self.min_decode_tokens.min(remaining));
        self.blocks_for(reserved.min(self.sequence_tokens_max()))
    }
}

//! Configuration of the scheduler: pool sizes, budgets and thresholds.

use inflight_contract::{GROUPS_MAX, MemoryShape};

use crate::memory::Spans;
use crate::{SnapshotShape, StepTarget};

/// Hard limits of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Groups of layers, and tokens of a span.
    pub shape: MemoryShape,
    /// What of a recurrent state is kept in the prefix cache; `None`: no prefix of a model with recurrent layers is cached.
    pub snapshot: Option<SnapshotShape>,
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
    /// Maximum tokens that the MTP layer predicts for a sequence in an iteration; 0 without one.
    pub predicted_max: u32,
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
    /// A snapshot is no part of a state, or has no positions.
    #[error(
        "a snapshot has 1 to {state} blocks, those of a state, every 1 or more positions; not {blocks} every {every}"
    )]
    Snapshot {
        /// Given blocks.
        blocks: u32,
        /// Given positions between two of them.
        every: u32,
        /// Blocks of a state.
        state: u32,
    },
}

impl SchedulerLimits {
    /// Default share of the blocks that admission keeps free: one in a hundred absorbs the growth of running
    /// sequences before any must be preempted.
    pub const WATERMARK_SHARE: f64 = 0.01;
    /// Default of `bypass_max`.
    pub const BYPASS_MAX: u32 = 16;
    /// Default of `preemption_threshold`.
    pub const PREEMPTION_THRESHOLD: u32 = 1;

    /// A snapshot saves at least one in so many of the tokens that its blocks could hold.
    const SNAPSHOT_WORTH: u32 = 16;

    /// Returns the blocks that admission keeps free, as a share of the pool, rounded down.
    pub fn watermark_of(blocks: u32, share: f64) -> u32 {
        // A share such as 0.29 is a little less in binary; 100 blocks of it are 29.
        (f64::from(blocks) * share + 1e-6) as u32
    }

    /// Returns limits with these values and defaults for all others, for a model whose layers all have full attention.
    pub fn new(block_tokens: u32, blocks: u32, running_max: u32, iteration_tokens: u32) -> Self {
        Self {
            shape: MemoryShape::uniform(block_tokens),
            snapshot: None,
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
            predicted_max: 0,
            govern_drafts: true,
        }
    }

    /// Checks that the limits are consistent.
    ///
    /// # Errors
    /// [`LimitsError`] with the offending limit.
    pub fn validate(&self) -> Result<(), LimitsError> {
        for (name, value) in [
            ("block_tokens", self.shape.block_tokens()),
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
        if let Some(SnapshotShape { blocks, every }) = self.snapshot {
            let state = self.shape.state_blocks();
            if blocks == 0 || blocks > state || every == 0 {
                return Err(LimitsError::Snapshot { blocks, every, state });
            }
        }
        Ok(())
    }

    /// Returns the tokens of a span.
    pub fn block_tokens(&self) -> u32 {
        self.shape.block_tokens()
    }

    /// Returns the length of the longest sequence that the device pool holds, in tokens.
    pub fn pool_tokens(&self) -> u32 {
        self.shape.tokens(self.blocks)
    }

    /// Returns the maximum length of a sequence in tokens: bounded by the limit and by the whole pool.
    pub fn sequence_tokens_max(&self) -> u32 {
        self.sequence_tokens.min(self.pool_tokens())
    }

    /// Returns the positions between two ends of spans at which a state can be kept; `None` if no prefix is cached, or for a model without
    /// recurrent layers.
    pub(crate) fn snapshot_every(&self) -> Option<u32> {
        let every = self.snapshot.filter(|_| self.prefix_cache)?.every;
        // The least common multiple.
        let (mut a, mut b) = (every, self.block_tokens());
        while b > 0 {
            (a, b) = (b, a % b);
        }
        (every / a.max(1)).checked_mul(self.block_tokens())
    }

    /// Returns the tokens behind an earlier state, or the start, that a snapshot must save to be worth its blocks: one in
    /// [`SNAPSHOT_WORTH`](Self::SNAPSHOT_WORTH) of those whose keys and values they could hold.
    pub(crate) fn snapshot_worth(&self) -> u32 {
        let blocks = self.snapshot.map_or(0, |snapshot| snapshot.blocks);
        (blocks / self.shape.span_blocks()).saturating_mul(self.block_tokens()) / Self::SNAPSHOT_WORTH
    }

    /// Returns the maximum number of tokens behind the committed ones for which a sequence holds blocks in groups with a window.
    pub fn tokens_ahead(&self) -> u32 {
        let window = self.shape.groups().iter().filter_map(|group| group.window).max().unwrap_or(0);
        self.depth.saturating_mul(self.iteration_tokens).max(window)
    }

    /// Returns the spans that are reserved, by group, at the admission of a sequence with `known` tokens, of which `computed` are
    /// cached, that may generate `remaining` more: all that it needs in groups with full attention; in the others a window ahead or,
    /// if the pool is too small for that, a token.
    pub(crate) fn reserved(&self, known: u32, remaining: u32, computed: u32) -> Spans {
        let reserved = known.saturating_add(self.min_decode_tokens.min(remaining));
        let reserved = reserved.min(self.sequence_tokens_max());
        let ends = |most: u32| {
            let mut ends = [0; GROUPS_MAX];
            for (group, end) in self.shape.groups().iter().zip(&mut ends) {
                let ahead = group.window.map(|window| computed.saturating_add(window.min(most)));
                *end = self.shape.spans(ahead.unwrap_or(reserved).min(reserved));
            }
            ends
        };
        let windows = ends(u32::MAX);
        let needed = || self.blocks_of(&self.first_spans(computed), &windows) + self.shape.state_blocks();
        let fits = self.shape.is_uniform() || needed() <= self.blocks;
        if fits { windows } else { ends(1) }
    }

    /// Returns the first spans, by group, that a sequence needs to compute the token at `position`.
    pub(crate) fn first_spans(&self, position: u32) -> Spans {
        let mut firsts = [0; GROUPS_MAX];
        for (group, first) in self.shape.groups().iter().zip(&mut firsts) {
            *first = group.first_span(position, self.shape.block_tokens());
        }
        firsts
    }

    /// Returns the number of blocks reserved at admission of a sequence with `known` tokens that may generate
    /// `remaining` more, if none of them are cached.
    pub fn admission_blocks(&self, known: u32, remaining: u32) -> u32 {
        self.blocks_of(&[0; GROUPS_MAX], &self.reserved(known, remaining, 0)) + self.shape.state_blocks()
    }

    /// Returns the blocks of these spans: by group, from the first one to the one before the end; not those of a state.
    pub(crate) fn blocks_of(&self, firsts: &Spans, ends: &Spans) -> u32 {
        let spans = firsts.iter().zip(ends).map(|(first, end)| end.saturating_sub(*first));
        self.shape.groups().iter().zip(spans).map(|(group, spans)| group.blocks * spans).sum()
    }
}

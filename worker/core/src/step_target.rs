//! Step target: how long a step with decodes may take, which bounds the prefill chunks in it.

use std::time::Duration;

/// Bound of the duration of steps that decode and prefill.
///
/// Prefill chunks lengthen a step and so the gap between two tokens of every decoding sequence; the shorter
/// the chunks, the later the first tokens. Decodes are delayed by prefills in sum by the same time however it
/// is divided, so the target distributes a delay and does not avoid it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepTarget {
    /// Only the token budget bounds prefill chunks.
    Unbounded,
    /// A duration. Where decodes alone take more than half of it, prefills together get up to three times the
    /// decodes' time, in proportion to the number of waiting prompts per decoding sequence.
    Fixed(Duration),
    /// A multiple of the decodes' time, which follows the prefill load; see [`crate::PrefillLoad`].
    Adaptive(LatencyObjectives),
}

/// Latencies that an adaptive step target aims at; `None`: none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LatencyObjectives {
    /// Time to first token, from submission. Raises the target while the prefill backlog would exceed it.
    pub first_token: Option<Duration>,
    /// Gap between two tokens, at the 0.9 quantile of steps with prefills. Bounds the target, whatever the
    /// other objective.
    pub gap: Option<Duration>,
}

impl StepTarget {
    /// Returns the adaptive target without objectives.
    pub fn adaptive() -> Self {
        Self::Adaptive(LatencyObjectives::default())
    }
}

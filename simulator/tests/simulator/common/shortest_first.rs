//! Shortest-job-first policy, for comparison.

use std::cmp::Ordering;

use inflight_worker_core::policy::{SchedulingPolicy, SequenceView};

/// Orders by maximum length in tokens, then by arrival.
///
/// Trade-off: minimum mean latency, but long requests starve under a stream of short ones. All requests of
/// one tenant and priority must have equal lengths, since a flow is served in order of arrival.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShortestFirst;

impl SchedulingPolicy for ShortestFirst {
    fn name(&self) -> &'static str {
        "shortest-first"
    }

    fn compare(&self, a: &SequenceView, b: &SequenceView) -> Ordering {
        a.tokens.cmp(&b.tokens).then(a.arrival.cmp(&b.arrival))
    }
}

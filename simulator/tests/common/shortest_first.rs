use std::cmp::Ordering;

use inflight_worker_core::policy::{SchedulingPolicy, SequenceView};

/// The shortest first, by all the tokens that a request may come to hold; equals by arrival.
///
/// Trade-off: the least mean latency there is, and the long starve while short ones keep coming. All requests
/// of one tenant and priority must be of one length here, for a lane is served in order of arrival.
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

use std::cmp::Ordering;

use super::{Policy, View};

/// Request-level batching: a group starts together, and the next one when its last member has ended.
///
/// The baseline that continuous batching is measured against, and nothing to serve with: three slots with outputs
/// of 1000, 200 and 400 tokens stand empty for 1,400 of 3,000 slot iterations.
#[derive(Debug, Clone, Copy, Default)]
pub struct StaticBatch;

impl Policy for StaticBatch {
    fn name(&self) -> &'static str {
        "static"
    }

    fn compare(&self, a: &View, b: &View) -> Ordering {
        a.arrival.cmp(&b.arrival)
    }

    fn admits(&self, running: usize, group_open: bool) -> bool {
        running == 0 || group_open
    }
}

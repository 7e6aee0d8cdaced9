use std::cmp::Ordering;
use std::time::Duration;

use super::{Policy, View};

/// The more important first; equals by arrival.
///
/// A waiting sequence gains a level for each `level_every` in the queue, at most `levels_max`, so that a steady
/// stream of somewhat more important requests does not starve it. The term is additive and clamped, and counts
/// queue time only: a running sequence keeps its plain priority.
///
/// Trade-off: latency for the important; tenants of equal priority share by how much they send.
#[derive(Debug, Clone, Copy)]
pub struct Priority {
    /// Time in the queue worth one level.
    pub level_every: Duration,
    /// Levels gained at most.
    pub levels_max: u32,
}

impl Default for Priority {
    fn default() -> Self {
        Self { level_every: Duration::from_secs(10), levels_max: 10 }
    }
}

impl Priority {
    fn level(&self, view: &View) -> i64 {
        let every = self.level_every.as_nanos().max(1);
        let gained = (view.waited.as_nanos() / every).min(u128::from(self.levels_max));
        i64::from(view.priority) + gained as i64
    }
}

impl Policy for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }

    fn compare(&self, a: &View, b: &View) -> Ordering {
        self.level(b).cmp(&self.level(a)).then(a.arrival.cmp(&b.arrival))
    }
}

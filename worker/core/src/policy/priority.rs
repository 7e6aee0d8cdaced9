//! Priority policy with bounded aging.

use std::cmp::Ordering;
use std::time::Duration;

use super::{Aging, SchedulingPolicy, SequenceView};

/// Orders by priority, then by arrival.
///
/// Aging: a waiting sequence gains one level per `level_every` of queueing time, at most `levels_max`, so
/// that a steady stream of slightly more important requests does not starve it. A running sequence keeps its
/// plain priority.
///
/// Trade-off: low latency for high priorities; tenants of equal priority share in proportion to their load.
#[derive(Debug, Clone, Copy)]
pub struct Priority {
    /// Queueing time per level gained.
    pub level_every: Duration,
    /// Maximum number of levels gained.
    pub levels_max: u32,
}

impl Default for Priority {
    fn default() -> Self {
        let Aging { level_every, levels_max, .. } = Aging::default();
        Self { level_every, levels_max }
    }
}

impl Priority {
    /// Returns the priority after aging.
    fn level(&self, view: &SequenceView) -> i64 {
        let every = self.level_every.as_nanos().max(1);
        let gained = (view.waited.as_nanos() / every).min(u128::from(self.levels_max));
        i64::from(view.priority) + gained as i64
    }
}

impl SchedulingPolicy for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }

    fn compare(&self, a: &SequenceView, b: &SequenceView) -> Ordering {
        self.level(b).cmp(&self.level(a)).then(a.arrival.cmp(&b.arrival))
    }
}

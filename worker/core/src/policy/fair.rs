//! Fair policy: virtual token counters (Sheng et al., OSDI 2024) beneath priorities.

use std::cmp::Ordering;
use std::time::Duration;

use super::{Aging, SchedulingPolicy, SequenceView};

/// Orders by priority, then by the tenant's virtual time (service over weight), then by arrival.
///
/// Aging: the tenant's virtual time is reduced by `tokens_per_second` for each second that the sequence has
/// queued, by at most `tokens_max`. The fairness bound between two tenants grows by `tokens_max`, so it is
/// small, and 0 by default.
///
/// Trade-off: a tenant within its share waits little under any load of others; tenants over their share wait
/// longer.
#[derive(Debug, Clone, Copy)]
pub struct Fair {
    /// Service forgiven per second in the queue, in tokens at weight 1.
    pub tokens_per_second: f64,
    /// Maximum service forgiven, in tokens at weight 1.
    pub tokens_max: f64,
    /// Queueing time after which a sequence goes before all that have waited less, whatever their priorities.
    pub wait_max: Duration,
}

impl Default for Fair {
    fn default() -> Self {
        let Aging { tokens_per_second, tokens_max, threshold, .. } = Aging::default();
        Self { tokens_per_second, tokens_max, wait_max: threshold }
    }
}

impl Fair {
    /// Returns the virtual time after aging, in tokens at weight 1.
    fn aged(&self, view: &SequenceView) -> f64 {
        view.service.tokens() - (self.tokens_per_second * view.waited.as_secs_f64()).min(self.tokens_max)
    }
}

impl SchedulingPolicy for Fair {
    fn name(&self) -> &'static str {
        "fair"
    }

    fn compare(&self, a: &SequenceView, b: &SequenceView) -> Ordering {
        // An overdue sequence has no priority: else, where all wait for long, the lowest would starve.
        let urgency = |view: &SequenceView| {
            let overdue = view.waited > self.wait_max;
            (overdue, if overdue { 0 } else { view.priority })
        };
        urgency(b)
            .cmp(&urgency(a))
            .then(self.aged(a).total_cmp(&self.aged(b)))
            .then(a.arrival.cmp(&b.arrival))
    }
}

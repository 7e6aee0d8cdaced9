use std::cmp::Ordering;
use std::time::Duration;

use super::{Policy, View};

/// The more important first; among equals the tenant that has had the least service over its weight; within a
/// tenant by arrival. This is VTC (Sheng et al., OSDI 2024) beneath priorities.
///
/// Ageing: a waiting sequence's tenant counts as if it had had `tokens_per_second` less for each second that the
/// sequence has queued, at most `tokens_max`. The bound on the difference of two tenants' services grows by
/// `tokens_max`, which is why it is small, and 0 by default.
///
/// Trade-off: a tenant within its share waits little whatever others send; those over their share wait for it.
#[derive(Debug, Clone, Copy)]
pub struct Fair {
    /// Service forgiven for each second in the queue, in tokens of weight 1.
    pub tokens_per_second: f64,
    /// Service forgiven at most.
    pub tokens_max: f64,
    /// Past this time in the queue, a sequence goes before everything of a higher priority.
    pub wait_max: Duration,
}

impl Default for Fair {
    fn default() -> Self {
        Self { tokens_per_second: 0.0, tokens_max: 0.0, wait_max: Duration::from_secs(600) }
    }
}

impl Fair {
    fn aged(&self, view: &View) -> f64 {
        view.service.tokens() - (self.tokens_per_second * view.waited.as_secs_f64()).min(self.tokens_max)
    }
}

impl Policy for Fair {
    fn name(&self) -> &'static str {
        "fair"
    }

    fn compare(&self, a: &View, b: &View) -> Ordering {
        let overdue = |view: &View| view.waited > self.wait_max;
        let by_wait = overdue(b).cmp(&overdue(a));
        by_wait
            .then(b.priority.cmp(&a.priority))
            .then(self.aged(a).total_cmp(&self.aged(b)))
            .then(a.arrival.cmp(&b.arrival))
    }
}

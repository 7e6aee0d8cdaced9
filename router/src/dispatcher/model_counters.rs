//! Counts and times of ended requests by model.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Number of times, and their sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TimeSum {
    pub(crate) count: u64,
    pub(crate) sum: Duration,
}

impl TimeSum {
    fn add(&mut self, time: Duration) {
        self.count += 1;
        self.sum = self.sum.saturating_add(time);
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Completed,
    Failed,
    Cancelled,
}

/// Times of an ended request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndedRequest {
    pub(crate) end: End,
    /// Arrival, since the Unix epoch.
    pub(crate) arrived: Duration,
    /// Time from its arrival to its end.
    pub(crate) total: Duration,
    /// Time from its arrival to its first worker, if it was dispatched.
    pub(crate) queued: Option<Duration>,
    /// Time from its first worker to its last token, if it has any.
    pub(crate) computed: Option<Duration>,
}

/// Counters of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ModelCounters {
    pub(crate) completed: TimeSum,
    pub(crate) failed: TimeSum,
    pub(crate) queued: TimeSum,
    pub(crate) computed: TimeSum,
    /// Arrival of the latest request that ended, since the Unix epoch.
    pub(crate) last_arrived: Duration,
}

/// Counters of the models that the router has served.
#[derive(Debug, Default)]
pub(crate) struct CountersByModel(Mutex<BTreeMap<String, ModelCounters>>);

impl CountersByModel {
    /// Counts a request.
    pub(crate) fn count(&self, model: &str, request: &EndedRequest) {
        let mut models = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !models.contains_key(model) {
            models.insert(model.to_owned(), ModelCounters::default());
        }
        let Some(counters) = models.get_mut(model) else { return };
        match request.end {
            End::Completed => counters.completed.add(request.total),
            End::Failed => counters.failed.add(request.total),
            End::Cancelled => {}
        }
        request.queued.into_iter().for_each(|time| counters.queued.add(time));
        request.computed.into_iter().for_each(|time| counters.computed.add(time));
        counters.last_arrived = counters.last_arrived.max(request.arrived);
    }

    /// Returns the counters of a model.
    pub(crate) fn of(&self, model: &str) -> ModelCounters {
        let models = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        models.get(model).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_count_by_model_and_end() {
        let counters = CountersByModel::default();
        let ms = Duration::from_millis;
        let request =
            |end, queued, computed| EndedRequest { end, arrived: ms(7), total: ms(10), queued, computed };
        counters.count("a", &request(End::Completed, Some(ms(2)), Some(ms(5))));
        counters.count("a", &request(End::Completed, Some(ms(1)), None));
        counters.count("a", &request(End::Failed, None, None));
        counters.count("a", &EndedRequest { arrived: ms(3), ..request(End::Cancelled, Some(ms(4)), None) });
        let sum = |count, time| TimeSum { count, sum: ms(time) };
        let expected = ModelCounters {
            completed: sum(2, 20),
            failed: sum(1, 10),
            queued: sum(3, 7),
            computed: sum(1, 5),
            last_arrived: ms(7),
        };
        assert_eq!((counters.of("a"), counters.of("b")), (expected, ModelCounters::default()));
    }
}

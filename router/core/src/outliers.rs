//! Outlier ejection: workers that fail repeatedly are excluded from placement for a while.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::WorkerId;

/// Thresholds of outlier ejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutlierLimits {
    /// Consecutive failures before an ejection.
    pub failures: u32,
    /// Duration of the first ejection; doubles with each further one without a success between.
    pub eject: Duration,
    /// Maximum duration of an ejection.
    pub eject_max: Duration,
}

impl Default for OutlierLimits {
    fn default() -> Self {
        Self { failures: 5, eject: Duration::from_secs(5), eject_max: Duration::from_secs(300) }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct FailureRecord {
    /// Failures since the last success.
    failures: u32,
    /// Ejections since the last success.
    ejections: u32,
    /// End of the ejection; from then on one request at a time, until one succeeds.
    ejected_until: Option<Duration>,
}

/// Outlier detection by consecutive failures with half-open probing, like a circuit breaker.
///
/// A worker with too many consecutive failures is ejected. After the ejection it gets one request at a time:
/// a success readmits it, a failure ejects it for twice as long. At most half of the workers are ejected:
/// when more fail, the cause is hardly theirs. Times are relative to a fixed epoch.
#[derive(Debug, Default)]
pub struct OutlierDetector {
    limits: OutlierLimits,
    workers: BTreeMap<WorkerId, FailureRecord>,
    /// Workers that are ejected or probed; mostly none, so that most placements look up none.
    impaired: usize,
}

impl OutlierDetector {
    /// Creates a detector without workers.
    pub fn new(limits: OutlierLimits) -> Self {
        Self { limits, workers: BTreeMap::new(), impaired: 0 }
    }

    /// Adds a worker; a known one keeps its record.
    pub fn join(&mut self, worker: WorkerId) {
        self.workers.entry(worker).or_default();
    }

    /// Removes a worker.
    pub fn leave(&mut self, worker: WorkerId) {
        let record = self.workers.remove(&worker);
        self.impaired -= usize::from(record.is_some_and(|record| record.ejected_until.is_some()));
    }

    /// Records a new token or a regular end. Does not count during an ejection: the request was dispatched
    /// before.
    pub fn success(&mut self, worker: WorkerId, now: Duration) {
        if let Some(record) = self.workers.get_mut(&worker)
            && record.ejected_until.is_none_or(|until| now >= until)
        {
            self.impaired -= usize::from(record.ejected_until.is_some());
            *record = FailureRecord::default();
        }
    }

    /// Records a failure of the worker. Returns the duration of the ejection, if one starts now.
    pub fn failure(&mut self, worker: WorkerId, now: Duration) -> Option<Duration> {
        let room = (self.ejected(now) + 1) * 2 <= self.workers.len();
        let limits = self.limits;
        let record = self.workers.get_mut(&worker)?;
        record.failures = record.failures.saturating_add(1);
        let due = match record.ejected_until {
            None => record.failures >= limits.failures.max(1),
            Some(until) => now >= until,
        };
        if !due || !room {
            return None;
        }
        let doubled = 1u32.checked_shl(record.ejections).unwrap_or(u32::MAX);
        let time = limits.eject.saturating_mul(doubled.max(1)).min(limits.eject_max);
        record.ejections = (record.ejections + 1).min(31);
        self.impaired += usize::from(record.ejected_until.replace(now + time).is_none());
        Some(time)
    }

    /// Whether a worker with `in_flight` requests accepts another one.
    pub fn admits(&self, worker: WorkerId, in_flight: usize, now: Duration) -> bool {
        if self.impaired == 0 {
            return true;
        }
        match self.workers.get(&worker).and_then(|record| record.ejected_until) {
            None => true,
            Some(until) => now >= until && in_flight == 0,
        }
    }

    /// Returns the number of ejected workers.
    pub fn ejected(&self, now: Duration) -> usize {
        self.workers.values().filter(|w| w.ejected_until.is_some_and(|until| now < until)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn outliers(workers: u32) -> OutlierDetector {
        let limits = OutlierLimits { failures: 3, eject: SECOND, eject_max: 8 * SECOND };
        let mut outliers = OutlierDetector::new(limits);
        (0..workers).for_each(|worker| outliers.join(WorkerId(worker)));
        outliers
    }

    #[test]
    fn an_ejected_worker_is_probed_and_each_failed_probe_doubles_the_ejection() {
        let mut outliers = outliers(2);
        let mut now = Duration::ZERO;
        assert_eq!(outliers.failure(WorkerId(0), now), None);
        outliers.success(WorkerId(0), now);
        let began = [
            outliers.failure(WorkerId(0), now),
            outliers.failure(WorkerId(0), now),
            outliers.failure(WorkerId(0), now),
        ];
        assert_eq!(began, [None, None, Some(SECOND)]);
        for seconds in [1, 2, 4, 8, 8] {
            assert!(!outliers.admits(WorkerId(0), 0, now));
            outliers.success(WorkerId(0), now);
            assert!(!outliers.admits(WorkerId(0), 0, now), "what it had before says nothing");
            now += seconds * SECOND;
            assert!(outliers.admits(WorkerId(0), 0, now) && !outliers.admits(WorkerId(0), 1, now));
            let longer = if seconds == 8 { 8 } else { seconds * 2 };
            assert_eq!(outliers.failure(WorkerId(0), now), Some(longer * SECOND));
        }
        now += 8 * SECOND;
        outliers.success(WorkerId(0), now);
        assert!(outliers.admits(WorkerId(0), 100, now));
        assert_eq!(outliers.failure(WorkerId(0), now), None, "a success wipes the slate");
    }

    proptest! {
        #[test]
        fn at_most_half_are_ejected_and_every_worker_is_probed_eventually(
            workers in 1u32..6, steps in proptest::collection::vec((0u32..6, 0u64..500, 0u8..8), 0..300)) {
            let mut outliers = outliers(workers);
            let mut now = Duration::ZERO;
            for (worker, millis, action) in steps {
                now += Duration::from_millis(millis);
                match action {
                    0 => outliers.success(WorkerId(worker), now),
                    _ => { outliers.failure(WorkerId(worker), now); }
                }
                let impaired = outliers.workers.values().filter(|record| record.ejected_until.is_some()).count();
                prop_assert_eq!(outliers.impaired, impaired);
                prop_assert!(outliers.ejected(now) * 2 <= workers as usize);
                let admitted = (0..workers).filter(|w| outliers.admits(WorkerId(*w), 0, now)).count();
                prop_assert!(admitted >= 1);
                prop_assert!((0..workers).all(|w| outliers.admits(WorkerId(w), 0, now + 8 * SECOND)));
            }
        }
    }
}

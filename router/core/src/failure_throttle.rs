//! Throttle of failed attempts by their source, in a bounded table.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::rate::{Gcra, RateLimit};

/// Limits of a [`FailureThrottle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailureLimits {
    /// Failures per minute and source.
    pub per_minute: u64,
    /// Maximum sources in the table.
    pub sources_max: usize,
}

/// Rate limiters of failed attempts, one for each source. Times are relative to a fixed epoch.
///
/// A source whose bucket is empty again is forgotten. In a full table, a new source replaces the one whose bucket
/// is empty first, which loses the least by it. Cost: O(log sources).
#[derive(Debug, Clone)]
pub struct FailureThrottle<K> {
    limits: FailureLimits,
    buckets: BTreeMap<K, Gcra>,
    /// Sources by the time at which their bucket is empty.
    by_time: BTreeSet<(Duration, K)>,
}

impl<K: Ord + Copy> FailureThrottle<K> {
    /// Creates an empty throttle.
    pub fn new(limits: FailureLimits) -> Self {
        Self { limits, buckets: BTreeMap::new(), by_time: BTreeSet::new() }
    }

    /// Counts a failed attempt.
    ///
    /// # Errors
    /// The source is over its rate: time until its next failure is counted. The attempt is not charged.
    pub fn fail(&mut self, source: K, now: Duration) -> Result<(), Duration> {
        self.forget(now);
        let rate = RateLimit { per_minute: self.limits.per_minute, routers: 1 };
        let mut bucket = self.buckets.get(&source).copied().unwrap_or_default();
        bucket.check(rate, 1, now)?;
        let known = self.by_time.remove(&(bucket.empty_at(), source));
        if !known
            && self.buckets.len() >= self.limits.sources_max
            && let Some((_, replaced)) = self.by_time.pop_first()
        {
            self.buckets.remove(&replaced);
        }
        bucket.take(rate, 1, now);
        self.buckets.insert(source, bucket);
        self.by_time.insert((bucket.empty_at(), source));
        Ok(())
    }

    /// Returns the number of sources in the table.
    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// Removes the sources whose buckets are empty.
    fn forget(&mut self, now: Duration) {
        while let Some((empty_at, source)) = self.by_time.first().copied()
            && empty_at <= now
        {
            self.by_time.pop_first();
            self.buckets.remove(&source);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: FailureLimits = FailureLimits { per_minute: 60, sources_max: 8 };

    #[test]
    fn a_source_over_its_rate_waits_and_others_do_not() {
        let mut throttle = FailureThrottle::new(LIMITS);
        let start = Duration::from_secs(5);
        // A burst is ten seconds of the rate.
        assert!((0..10).all(|_| throttle.fail(1, start).is_ok()));
        assert_eq!(throttle.fail(1, start), Err(Duration::from_secs(1)));
        assert_eq!(throttle.fail(2, start), Ok(()));
        let later = start + Duration::from_secs(1);
        assert_eq!(throttle.fail(1, later), Ok(()));
        assert!(throttle.fail(1, later).is_err());
        assert_eq!(throttle.len(), 1, "the bucket of the other source is empty");
    }

    proptest! {
        /// Against an unbounded reference, while the sources fit the table; beyond, the table stays bounded.
        #[test]
        fn a_bounded_table_decides_like_an_unbounded_one_while_its_sources_fit(
            sources in 1u32..20, steps in prop::collection::vec((any::<u32>(), 0u64..3_000), 1..300)
        ) {
            let mut throttle = FailureThrottle::new(LIMITS);
            let mut reference: BTreeMap<u32, Gcra> = BTreeMap::new();
            let rate = RateLimit { per_minute: LIMITS.per_minute, routers: 1 };
            let mut now = Duration::ZERO;
            for (source, pause) in steps {
                now += Duration::from_millis(pause);
                let source = source % sources;
                let bucket = reference.entry(source).or_default();
                let expected = bucket.check(rate, 1, now);
                if expected.is_ok() {
                    bucket.take(rate, 1, now);
                }
                let decided = throttle.fail(source, now);
                if sources as usize <= LIMITS.sources_max {
                    prop_assert_eq!(decided, expected);
                }
                prop_assert!(throttle.len() <= LIMITS.sources_max);
                prop_assert_eq!(throttle.len(), throttle.by_time.len());
            }
        }
    }
}

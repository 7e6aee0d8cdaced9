//! Rate limiter: generic cell rate algorithm (GCRA).

use std::time::Duration;

/// Rate divided among routers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// Amount per minute.
    pub per_minute: u64,
    /// Number of routers that share the rate.
    pub routers: u32,
}

/// Burst allowed beyond the rate.
const BURST: Duration = Duration::from_secs(10);
const MINUTE_NANOS: u128 = 60_000_000_000;

impl RateLimit {
    /// Returns the time that `amount` takes at this rate, in nanoseconds.
    fn span(self, amount: u64) -> u128 {
        MINUTE_NANOS * u128::from(amount) * u128::from(self.routers.max(1))
            / u128::from(self.per_minute.max(1))
    }

    /// Returns the burst in nanoseconds: ten seconds of the rate, and at least one item.
    fn burst(self) -> u128 {
        BURST.as_nanos().max(self.span(1))
    }
}

/// Amount charged, with its duration at the rate of the charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateCharge {
    amount: u64,
    nanos: u128,
}

/// Rate limiter by the generic cell rate algorithm (ITU-T I.371): a leaky bucket whose only state is the time
/// at which it is empty. Times are relative to a fixed epoch.
///
/// An amount larger than a burst is admitted when the bucket is empty and delays later ones, so that no
/// amount is rejected forever. The rate may change between calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gcra {
    /// Time at which the bucket is empty, in nanoseconds.
    paid_at: u128,
}

impl Gcra {
    /// Checks whether `amount` is admitted now.
    ///
    /// # Errors
    /// Time until it is admitted.
    pub fn check(&self, limit: RateLimit, amount: u64, now: Duration) -> Result<(), Duration> {
        let (now, burst) = (now.as_nanos(), limit.burst());
        let after = self.paid_at.max(now) + limit.span(amount).min(burst);
        match after.checked_sub(now + burst) {
            None | Some(0) => Ok(()),
            Some(over) => Err(Duration::from_nanos(u64::try_from(over).unwrap_or(u64::MAX))),
        }
    }

    /// Returns the time at which the bucket is empty.
    pub fn empty_at(&self) -> Duration {
        Duration::from_nanos(u64::try_from(self.paid_at).unwrap_or(u64::MAX))
    }

    /// Charges `amount` without a check.
    pub fn take(&mut self, limit: RateLimit, amount: u64, now: Duration) -> RateCharge {
        let nanos = limit.span(amount);
        self.paid_at = self.paid_at.max(now.as_nanos()).saturating_add(nanos);
        RateCharge { amount, nanos }
    }

    /// Refunds `unused` of a charge, at the rate of the charge.
    pub fn refund(&mut self, taken: RateCharge, unused: u64) {
        let share = taken.nanos * u128::from(unused.min(taken.amount)) / u128::from(taken.amount.max(1));
        self.paid_at = self.paid_at.saturating_sub(share);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Oracle: over any window, at most the rate's share of the window plus one burst passes (plus one
        /// item, where items are larger than a burst).
        #[test]
        fn over_any_window_no_more_passes_than_the_rate_and_one_burst(
            per_minute in 1u64..10_000, routers in 1u32..5,
            steps in prop::collection::vec((0u64..3_000, 1u64..50), 1..300)
        ) {
            let limit = RateLimit { per_minute, routers };
            let mut bucket = Gcra::default();
            let mut now = Duration::ZERO;
            let mut taken: Vec<(Duration, u64)> = Vec::new();
            for (pause_ms, amount) in steps {
                now += Duration::from_millis(pause_ms);
                match bucket.check(limit, amount, now) {
                    Ok(()) => {
                        bucket.take(limit, amount, now);
                        taken.push((now, amount));
                    }
                    Err(wait) => {
                        prop_assert!(!wait.is_zero());
                        prop_assert_eq!(bucket.check(limit, amount, now + wait), Ok(()), "told the truth");
                    }
                }
            }
            let rate = per_minute as f64 / 60.0 / f64::from(routers);
            let burst = (rate * 10.0).max(1.0);
            for first in 0..taken.len() {
                let mut sum = 0;
                for (at, amount) in &taken[first..] {
                    sum += amount;
                    let allowed = rate * (*at - taken[first].0).as_secs_f64() + burst + 50.0;
                    prop_assert!(sum as f64 <= allowed + 1e-3, "{sum} in {:?}", *at - taken[first].0);
                }
            }
        }

        #[test]
        fn a_refund_equals_never_having_been_charged(amount in 1u64..1000, used in 0u64..1000) {
            let limit = RateLimit { per_minute: 600, routers: 1 };
            let used = used.min(amount);
            let (mut refunded, mut exact) = (Gcra::default(), Gcra::default());
            let taken = refunded.take(limit, amount, Duration::from_secs(1));
            refunded.refund(taken, amount - used);
            exact.take(limit, used, Duration::from_secs(1));
            prop_assert_eq!(refunded, exact);
        }
    }

    #[test]
    fn two_routers_together_admit_what_one_admits_alone() {
        let passed = |routers: u32| {
            let limit = RateLimit { per_minute: 600, routers };
            let mut buckets = vec![Gcra::default(); routers as usize];
            let mut passed = 0;
            for ms in 0..120_000 {
                for bucket in &mut buckets {
                    let now = Duration::from_millis(ms);
                    if bucket.check(limit, 1, now).is_ok() {
                        bucket.take(limit, 1, now);
                        passed += 1;
                    }
                }
            }
            passed
        };
        let (one, two) = (passed(1), passed(2));
        assert!((1_298..=1_301).contains(&one) && (1_298..=1_302).contains(&two), "{one} {two}");
    }
}

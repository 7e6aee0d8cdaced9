//! Retry budget: token bucket over resubmissions.

use std::time::Duration;

/// Token bucket over all resubmissions after losses: a burst, then a rate; resubmissions beyond it wait. So
/// the loss of many workers costs the others no more repeated prefill than the rate.
///
/// Times are relative to a fixed epoch; if time goes backwards, nothing is added.
#[derive(Debug, Clone)]
pub struct RetryBudget {
    /// Resubmissions per second.
    rate: u32,
    /// Maximum resubmissions at once, in millionths.
    burst: u64,
    /// Remaining budget, in millionths of a resubmission.
    level: u64,
    at: Duration,
}

impl RetryBudget {
    const ONE: u64 = 1_000_000;

    /// Creates a full bucket. At least one resubmission fits.
    pub fn new(rate: u32, burst: u32) -> Self {
        let burst = u64::from(burst.max(1)) * Self::ONE;
        Self { rate, burst, level: burst, at: Duration::ZERO }
    }

    /// Takes one resubmission out of the budget. Returns whether there was one.
    pub fn take(&mut self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.at);
        // Microseconds times resubmissions per second are millionths of a resubmission. The remainder of a
        // microsecond counts next time.
        let micros = u64::try_from(passed.as_micros()).unwrap_or(u64::MAX);
        self.at += Duration::from_micros(micros);
        self.level = self.level.saturating_add(micros.saturating_mul(u64::from(self.rate))).min(self.burst);
        let enough = self.level >= Self::ONE;
        if enough {
            self.level -= Self::ONE;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_window_exceeds_burst_plus_rate_and_waiting_always_helps(
            rate in 1u32..1000, burst in 0u32..50,
            steps in proptest::collection::vec((0u64..200_000, 1usize..20), 1..100)) {
            let mut budget = RetryBudget::new(rate, burst);
            let mut now = Duration::ZERO;
            let mut taken: Vec<Duration> = Vec::new();
            for (micros, tries) in steps {
                now += Duration::from_micros(micros);
                taken.extend((0..tries).filter(|_| budget.take(now)).map(|_| now));
            }
            for (first, from) in taken.iter().enumerate() {
                let window = (now - *from).as_micros() as u64;
                let most = u64::from(burst.max(1)) + window * u64::from(rate) / 1_000_000 + 1;
                prop_assert!((taken.len() - first) as u64 <= most);
            }
            while budget.take(now) {}
            prop_assert!(budget.take(now + Duration::from_micros(1_000_000u64.div_ceil(rate.into()))));
        }
    }
}

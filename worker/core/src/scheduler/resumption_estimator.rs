//! Statistics of preempted sequences: probability and delay of resumption, and prefix-cache survival.

use std::time::Duration;

use crate::Time;

/// Prior pseudo-counts of resumed and cancelled sequences.
const PRIOR: (f64, f64) = (9.0, 1.0);
/// Sum of the counts at which both are halved.
const COUNT_MAX: f64 = 256.0;
/// Gain of the exponential transfer averages.
const GAIN: f64 = 1.0 / 16.0;

/// Estimator updated by every preemption. Uses no randomness and no libm functions, so a replay gives equal
/// bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct ResumptionEstimator {
    /// Count of resumed sequences.
    resumed: f64,
    /// Count of sequences cancelled while preempted.
    cancelled: f64,
    /// Mean seconds from a preemption to the next slot.
    wait_s: f64,
    /// Mean share of the dropped cached blocks that were still cached at resumption.
    found_share: f64,
}

impl Default for ResumptionEstimator {
    fn default() -> Self {
        Self { resumed: PRIOR.0, cancelled: PRIOR.1, wait_s: 0.0, found_share: 0.5 }
    }
}

impl ResumptionEstimator {
    /// Records that a preempted sequence got a slot again after this time.
    pub fn record_resumed(&mut self, after: Duration) {
        self.wait_s += (after.as_secs_f64() - self.wait_s) * GAIN;
        self.resumed += 1.0;
        self.decay();
    }

    /// Records that a sequence was cancelled while preempted.
    pub fn record_cancelled(&mut self) {
        self.cancelled += 1.0;
        self.decay();
    }

    /// Records that `found` of `dropped` cached blocks were still cached at the next admission.
    pub fn record_found(&mut self, found: u32, dropped: u32) {
        if dropped > 0 {
            self.found_share +=
                (f64::from(found.min(dropped)) / f64::from(dropped) - self.found_share) * GAIN;
        }
    }

    /// Returns the expected share of dropped blocks that will still be cached.
    pub fn found_share(&self) -> f64 {
        self.found_share
    }

    /// Returns the probability that a sequence preempted now resumes: it is not cancelled, and gets a slot
    /// before its deadline. Waiting times are modelled with a heavy tail: `left / (left + mean)` are at most
    /// `left`.
    pub fn probability(&self, deadline: Option<Time>, now: Time) -> f64 {
        let stays = self.resumed / (self.resumed + self.cancelled);
        let in_time = match deadline.map(|deadline| deadline.since(now).as_secs_f64()) {
            Some(left) if left <= 0.0 => 0.0,
            Some(left) => left / (left + self.wait_s),
            None => 1.0,
        };
        stays * in_time
    }

    /// Halves both counts when they exceed the maximum, so that old observations lose weight.
    fn decay(&mut self) {
        if self.resumed + self.cancelled > COUNT_MAX {
            (self.resumed, self.cancelled) = (self.resumed / 2.0, self.cancelled / 2.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_probability_follows_the_observations_and_the_time_left(
            cancelled in 0.0f64..1.0, waits in prop::collection::vec(1u64..1000, 400), left in 1u64..100_000
        ) {
            let mut estimator = ResumptionEstimator::default();
            let mut owed = 0.0;
            for wait in waits {
                owed += cancelled;
                if owed >= 1.0 {
                    owed -= 1.0;
                    estimator.record_cancelled();
                } else {
                    estimator.record_resumed(Duration::from_millis(wait));
                }
            }
            let at = |ms: u64| Time::from_nanos(ms * 1_000_000);
            let open = estimator.probability(None, at(5));
            prop_assert!((open - (1.0 - cancelled)).abs() < 0.1, "{open} with {cancelled} cancelled");
            let soon = estimator.probability(Some(at(5 + left)), at(5));
            let late = estimator.probability(Some(at(5 + 2 * left)), at(5));
            prop_assert!((0.0..=1.0).contains(&soon) && soon <= late && late <= open);
            prop_assert_eq!(estimator.probability(Some(at(5)), at(5)), 0.0);
        }
    }

    #[test]
    fn the_found_share_follows_the_observations() {
        let mut estimator = ResumptionEstimator::default();
        (0..100).for_each(|_| estimator.record_found(9, 12));
        assert!((estimator.found_share() - 0.75).abs() < 0.01);
        estimator.record_found(5, 0);
        (0..200).for_each(|_| estimator.record_found(0, 3));
        assert!(estimator.found_share() < 0.01);
    }
}

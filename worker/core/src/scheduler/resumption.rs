//! What is known of how preempted sequences go on: whether they come back, when, and what they find then.

use std::time::Duration;

use crate::Time;

/// Preempted sequences that the prior counts as seen: nine of ten came back.
const PRIOR: (f64, f64) = (9.0, 1.0);
/// Beyond this many seen, old ones count half.
const SEEN_MAX: f64 = 256.0;
/// How much one observation moves a mean.
const STEP: f64 = 1.0 / 16.0;

/// Learns from every preemption. No randomness and no function of a mathematics library: a replay gives the same bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resumption {
    resumed: f64,
    withdrawn: f64,
    /// Mean seconds from a preemption to the next slot.
    wait: f64,
    /// Mean share of the findable blocks dropped at a preemption that were found again.
    found: f64,
}

impl Default for Resumption {
    fn default() -> Self {
        Self { resumed: PRIOR.0, withdrawn: PRIOR.1, wait: 0.0, found: 0.5 }
    }
}

impl Resumption {
    /// A preempted sequence has a slot again after this time.
    pub fn resumed(&mut self, after: Duration) {
        self.wait += (after.as_secs_f64() - self.wait) * STEP;
        self.resumed += 1.0;
        self.fade();
    }

    /// A preempted sequence was cancelled before that.
    pub fn withdrawn(&mut self) {
        self.withdrawn += 1.0;
        self.fade();
    }

    /// Of `dropped` findable blocks, so many were found at the next admission.
    pub fn found(&mut self, found: u32, dropped: u32) {
        if dropped > 0 {
            self.found += (f64::from(found.min(dropped)) / f64::from(dropped) - self.found) * STEP;
        }
    }

    /// The share of dropped blocks that will be found again.
    pub fn found_share(&self) -> f64 {
        self.found
    }

    /// The probability that a sequence preempted now comes back: it is not cancelled, and there is room again before
    /// its deadline. Times until then have a heavy tail: half of them are over the mean where that is all the time
    /// left.
    pub fn probability(&self, deadline: Option<Time>, now: Time) -> f64 {
        let stays = self.resumed / (self.resumed + self.withdrawn);
        let in_time = match deadline.map(|deadline| deadline.since(now).as_secs_f64()) {
            Some(left) if left <= 0.0 => 0.0,
            Some(left) => left / (left + self.wait),
            None => 1.0,
        };
        stays * in_time
    }

    fn fade(&mut self) {
        if self.resumed + self.withdrawn > SEEN_MAX {
            (self.resumed, self.withdrawn) = (self.resumed / 2.0, self.withdrawn / 2.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_probability_follows_what_was_seen_and_the_time_left(
            withdrawn in 0.0f64..1.0, waits in prop::collection::vec(1u64..1000, 400), left in 1u64..100_000
        ) {
            let mut seen = Resumption::default();
            let mut owed = 0.0;
            for wait in waits {
                owed += withdrawn;
                if owed >= 1.0 {
                    owed -= 1.0;
                    seen.withdrawn();
                } else {
                    seen.resumed(Duration::from_millis(wait));
                }
            }
            let at = |ms: u64| Time::from_nanos(ms * 1_000_000);
            let open = seen.probability(None, at(5));
            prop_assert!((open - (1.0 - withdrawn)).abs() < 0.1, "{open} with {withdrawn} withdrawn");
            let soon = seen.probability(Some(at(5 + left)), at(5));
            let late = seen.probability(Some(at(5 + 2 * left)), at(5));
            prop_assert!((0.0..=1.0).contains(&soon) && soon <= late && late <= open);
            prop_assert_eq!(seen.probability(Some(at(5)), at(5)), 0.0);
        }
    }

    #[test]
    fn the_share_found_again_follows_what_was_found() {
        let mut seen = Resumption::default();
        (0..100).for_each(|_| seen.found(9, 12));
        assert!((seen.found_share() - 0.75).abs() < 0.01);
        seen.found(5, 0);
        (0..200).for_each(|_| seen.found(0, 3));
        assert!(seen.found_share() < 0.01);
    }
}

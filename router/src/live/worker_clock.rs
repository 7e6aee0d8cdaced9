//! Clock of a worker, read by its observer.

use std::time::{Duration, Instant};

/// Rate by which the clocks of two machines drift apart, at most.
const DRIFT_MAX: f64 = 200e-6;

/// Relation of a worker's clock to this router's. A report takes some time to arrive, so that the report that took least shows it best.
#[derive(Debug, Default)]
pub(super) struct WorkerClock {
    /// Time of this router at a time of the worker, in microseconds.
    reference: Option<(Instant, u64)>,
}

impl WorkerClock {
    /// Takes up a report that has arrived `now`, made when the worker's clock read `now_us`; 0 is no reading.
    pub(super) fn observe(&mut self, now_us: u64, now: Instant) {
        if now_us == 0 {
            return;
        }
        let earlier = self.reference.is_none_or(|(_, at_us)| {
            let passed = Duration::from_micros(now_us.saturating_sub(at_us));
            now <= self.at(now_us, now) + passed.mul_f64(DRIFT_MAX)
        });
        if earlier {
            self.reference = Some((now, now_us));
        }
    }

    /// Returns a time of the worker's clock as one of this router's, at most `now`; `now` if it is unknown.
    pub(super) fn at(&self, at_us: u64, now: Instant) -> Instant {
        let Some((time, reference_us)) = self.reference.filter(|_| at_us > 0) else { return now };
        let distance = Duration::from_micros(at_us.abs_diff(reference_us));
        let at = match at_us < reference_us {
            true => time.checked_sub(distance),
            false => time.checked_add(distance),
        };
        at.map_or(now, |at| at.min(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_that_took_least_sets_the_clock_and_drift_moves_it() {
        let start = Instant::now();
        let after = |millis: u64| start + Duration::from_millis(millis);
        let mut clock = WorkerClock::default();
        assert_eq!(clock.at(5, after(9)), after(9), "no reading yet");
        // Made at 0 ms by this router's clock, where the worker's reads a second.
        clock.observe(1_000_000, after(40));
        assert_eq!(clock.at(1_000_000, after(50)), after(40));
        clock.observe(1_100_000, after(103));
        assert_eq!(clock.at(1_000_000, after(200)), after(3));
        clock.observe(1_200_000, after(290));
        assert_eq!(clock.at(1_000_000, after(300)), after(3), "that report took longer");
        assert_eq!(clock.at(9_000_000, after(300)), after(300), "nothing has happened in the future");
        assert_eq!(clock.at(0, after(300)), after(300));
        // An hour later, the worker's clock is 0.3 s behind.
        clock.observe(3_600_900_000, after(3_600_200));
        assert_eq!(clock.at(3_600_900_000, after(3_601_000)), after(3_600_200));
    }
}

//! Figures over the last seconds: percentiles of durations, and rates of counters.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::view::Percentiles;

/// Buckets of a histogram: eight for each power of two, so that a percentile is right to 9 %.
const BUCKETS: usize = 8 * 30;
/// Duration of one part of a window.
const PART: Duration = Duration::from_secs(5);
/// Parts of a window: a minute, and the one that is being filled.
const PARTS: usize = 13;

/// Percentiles of durations over the last minute. Recording is one atomic addition.
pub(super) struct RollingPercentiles {
    parts: [[AtomicU32; BUCKETS]; PARTS],
    /// Part that is being filled.
    current: AtomicUsize,
}

impl RollingPercentiles {
    pub(super) fn new() -> Self {
        Self {
            parts: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU32::new(0))),
            current: AtomicUsize::new(0),
        }
    }

    /// Records a duration.
    pub(super) fn record(&self, value: Duration) {
        let part = self.current.load(Ordering::Relaxed);
        self.parts[part][bucket_of(value)].fetch_add(1, Ordering::Relaxed);
    }

    /// Starts the next part, and forgets the oldest one.
    fn advance(&self) {
        let next = (self.current.load(Ordering::Relaxed) + 1) % PARTS;
        self.parts[next].iter().for_each(|bucket| bucket.store(0, Ordering::Relaxed));
        self.current.store(next, Ordering::Relaxed);
    }

    /// Returns the percentiles; zeros without durations.
    pub(super) fn percentiles(&self) -> Percentiles {
        let mut sums = [0u64; BUCKETS];
        for part in &self.parts {
            for (sum, bucket) in sums.iter_mut().zip(part) {
                *sum += u64::from(bucket.load(Ordering::Relaxed));
            }
        }
        let total: u64 = sums.iter().sum();
        let percentile = |share: f64| {
            let rank = (share * total as f64).ceil().max(1.0) as u64;
            let mut below = 0;
            let found = sums.iter().position(|count| {
                below += count;
                below >= rank
            });
            found.filter(|_| total > 0).map_or(0.0, middle_ms)
        };
        Percentiles { p50: percentile(0.5), p90: percentile(0.9), p99: percentile(0.99) }
    }
}

/// Returns the bucket of a duration: by its power of two in microseconds, and the three bits after it.
fn bucket_of(value: Duration) -> usize {
    let micros = u64::try_from(value.as_micros()).unwrap_or(u64::MAX).max(8);
    let power = micros.ilog2();
    let eighth = (micros >> (power - 3)) & 7;
    ((power as usize - 3) * 8 + eighth as usize).min(BUCKETS - 1)
}

/// Returns the middle of a bucket, in milliseconds.
fn middle_ms(bucket: usize) -> f64 {
    let (power, eighth) = (bucket / 8 + 3, bucket % 8);
    let low = (8 + eighth) as f64 * f64::from(1u32 << (power - 3).min(31));
    let width = f64::from(1u32 << (power - 3).min(31));
    (low + width / 2.0) / 1000.0
}

/// Starts the next parts of windows as time passes.
#[derive(Debug)]
pub(super) struct PartClock {
    next: Instant,
}

impl PartClock {
    pub(super) fn new(now: Instant) -> Self {
        Self { next: now + PART }
    }

    /// Advances the windows to `now`.
    pub(super) fn advance(&mut self, now: Instant, windows: &[&RollingPercentiles]) {
        for _ in 0..PARTS {
            if now < self.next {
                return;
            }
            windows.iter().for_each(|window| window.advance());
            self.next += PART;
        }
        // Everything in the windows is older than a minute.
        self.next = now + PART;
    }
}

/// Time over which rates are taken.
const RATE_SPAN: Duration = Duration::from_secs(5);
/// Interval of the samples of a counter.
const RATE_STEP: Duration = Duration::from_millis(500);

/// Rate of a growing counter over the last five seconds.
#[derive(Debug, Default)]
pub(super) struct Rate {
    samples: VecDeque<(Instant, u64)>,
}

impl Rate {
    /// Samples the counter; more often than twice a second has no effect.
    pub(super) fn sample(&mut self, now: Instant, total: u64) {
        let due = self.samples.back().is_none_or(|(at, _)| now.saturating_duration_since(*at) >= RATE_STEP);
        if due {
            self.samples.push_back((now, total));
        }
        // One sample stays that is older than the span.
        while self.samples.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= RATE_SPAN) {
            self.samples.pop_front();
        }
    }

    /// Returns the growth a second since the oldest sample.
    pub(super) fn per_second(&self, now: Instant, total: u64) -> f64 {
        let Some((since, before)) = self.samples.front() else { return 0.0 };
        let seconds = now.saturating_duration_since(*since).as_secs_f64();
        // Over a shorter time, a single token would be a high rate.
        if seconds < RATE_STEP.as_secs_f64() {
            return 0.0;
        }
        total.saturating_sub(*before) as f64 / seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_to_a_tenth_and_a_minute_later_forgotten() {
        let window = RollingPercentiles::new();
        let start = Instant::now();
        let mut clock = PartClock::new(start);
        assert_eq!(window.percentiles(), Percentiles::default());
        for millis in 1..=1000 {
            window.record(Duration::from_millis(millis));
        }
        let near = |got: f64, wanted: f64| assert!((got / wanted - 1.0).abs() < 0.1, "{got} is not {wanted}");
        let Percentiles { p50, p90, p99 } = window.percentiles();
        near(p50, 500.0);
        near(p90, 900.0);
        near(p99, 990.0);
        clock.advance(start + Duration::from_secs(58), &[&window]);
        near(window.percentiles().p50, 500.0);
        clock.advance(start + Duration::from_secs(66), &[&window]);
        assert_eq!(window.percentiles(), Percentiles::default());
        window.record(Duration::from_micros(3));
        window.record(Duration::from_secs(1 << 30));
        assert!(window.percentiles().p50 < 0.02 && window.percentiles().p99 > 1e6);
        clock.advance(start + Duration::from_secs(4000), &[&window]);
        assert_eq!(window.percentiles(), Percentiles::default());
    }

    #[test]
    fn a_rate_is_that_of_the_last_five_seconds() {
        let start = Instant::now();
        let mut rate = Rate::default();
        assert!(rate.per_second(start, 7).abs() < 1e-9);
        for tenth in 0..200u64 {
            // 100 a second for ten seconds, then none.
            rate.sample(start + Duration::from_millis(100 * tenth), (10 * tenth).min(1000));
        }
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(rate.per_second(at(20), 1000) < 1.0);
        assert!((rate.per_second(at(20), 1500) - 100.0).abs() < 10.0);
        assert!(rate.samples.len() <= 12, "{}", rate.samples.len());
    }
}

//! Anticipation: a short wait for the requests that follow those that have just ended.
//!
//! A client that sends its next request when the last one has ended misses the iteration that begins at that
//! moment by one round trip, and waits for the whole of it. A device that idles for that round trip instead
//! serves it an iteration earlier: "deceptive idleness" and its remedy are from anticipatory disk scheduling
//! (Iyer and Druschel, SOSP 2001). The waits take a bounded share of the time, and where no request follows in
//! time, as with clients far away, they stop but for probes.

use std::time::Duration;

/// Decides how long to wait before the next iteration.
#[derive(Debug, Clone)]
pub struct Anticipation {
    /// Time that may be spent waiting, in seconds.
    credit_s: f64,
    /// Moving average of the waits that were followed by a request.
    hits: f64,
    /// Moving average of the time until a request followed, in seconds.
    delay_s: f64,
    /// Moving average of the deviation from `delay_s`, in seconds.
    deviation_s: f64,
    /// Ends since the last wait.
    ends: u32,
}

impl Default for Anticipation {
    fn default() -> Self {
        let delay_s = Self::WAIT_MAX.as_secs_f64() / 4.0;
        Self { credit_s: 0.0, hits: Self::HITS_MIN, delay_s, deviation_s: delay_s, ends: 0 }
    }
}

impl Anticipation {
    /// Maximum share of the busy time that is spent waiting.
    pub const SHARE_MAX: f64 = 0.02;
    /// Longest wait.
    pub const WAIT_MAX: Duration = Duration::from_millis(10);
    /// Share of waits followed by a request below which waits are only probes.
    const HITS_MIN: f64 = 0.5;
    /// Ends per probe.
    const PROBE_EVERY: u32 = 32;
    /// Weight of an observation in the moving averages.
    const GAIN: f64 = 1.0 / 16.0;

    /// Earns the waiting time of an iteration.
    pub fn observe_step(&mut self, took: Duration) {
        let earned = Self::SHARE_MAX * took.as_secs_f64();
        // As much as a few waits need: credit is for the ends of now, not of the last hour.
        self.credit_s = (self.credit_s + earned).min(2.0 * Self::WAIT_MAX.as_secs_f64());
    }

    /// Returns how long to wait for the requests that follow `ended` sequences, at most; zero: not at all.
    pub fn wait(&mut self, ended: u32) -> Duration {
        if ended == 0 {
            return Duration::ZERO;
        }
        self.ends = self.ends.saturating_add(ended);
        let needed = if self.hits >= Self::HITS_MIN {
            self.delay_s + 4.0 * self.deviation_s
        } else if self.ends >= Self::PROBE_EVERY {
            Self::WAIT_MAX.as_secs_f64()
        } else {
            return Duration::ZERO;
        };
        let needed = needed.min(Self::WAIT_MAX.as_secs_f64());
        // A wait that is too short would only cost.
        if self.credit_s < needed {
            return Duration::ZERO;
        }
        self.ends = 0;
        Duration::from_secs_f64(needed)
    }

    /// Learns from a wait: how long it took, and whether a request followed.
    pub fn observe_wait(&mut self, took: Duration, followed: bool) {
        let took = took.as_secs_f64();
        self.credit_s = (self.credit_s - took).max(0.0);
        self.hits += (f64::from(u8::from(followed)) - self.hits) * Self::GAIN;
        if followed {
            self.deviation_s += ((took - self.delay_s).abs() - self.deviation_s) * Self::GAIN;
            self.delay_s += (took - self.delay_s) * Self::GAIN;
        }
    }

    /// Returns the moving average of the waits that were followed by a request.
    pub fn hits(&self) -> f64 {
        self.hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends one sequence every `every` steps of `step`; a request follows each after `delay`. Returns the share
    /// of ends that a request followed in time, and the share of the time spent waiting.
    fn simulate(step: Duration, every: u32, delay: Duration) -> (f64, f64) {
        let mut anticipation = Anticipation::default();
        let (mut hits, mut ends, mut waited, mut busy) = (0, 0, Duration::ZERO, Duration::ZERO);
        for number in 0..20_000u32 {
            anticipation.observe_step(step);
            busy += step;
            if !number.is_multiple_of(every) {
                continue;
            }
            ends += 1;
            let most = anticipation.wait(1);
            if most > Duration::ZERO {
                let took = most.min(delay);
                anticipation.observe_wait(took, delay <= most);
                waited += took;
                hits += u32::from(delay <= most);
            }
        }
        (f64::from(hits) / f64::from(ends), waited.as_secs_f64() / busy.as_secs_f64())
    }

    #[test]
    fn near_clients_are_awaited_and_far_ones_are_not() {
        for (step_ms, every) in [(10, 15), (70, 2), (13, 4), (160, 4)] {
            let step = Duration::from_millis(step_ms);
            let (hits, waited) = simulate(step, every, Duration::from_micros(800));
            assert!(hits > 0.9, "{hits} of the ends, steps of {step_ms} ms");
            assert!(waited <= Anticipation::SHARE_MAX, "{waited}");
            let (hits, waited) = simulate(step, every, Duration::from_millis(50));
            assert!(hits == 0.0 && waited < 0.01, "{hits}, {waited}, steps of {step_ms} ms");
        }
    }

    #[test]
    fn waits_never_exceed_their_share_of_the_time() {
        for delay in [100, 900, 3000, 9000, 11_000] {
            let (_, waited) = simulate(Duration::from_millis(2), 1, Duration::from_micros(delay));
            assert!(waited <= Anticipation::SHARE_MAX * 1.01, "{waited} with a delay of {delay} us");
        }
    }
}

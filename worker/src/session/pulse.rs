use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use inflight_worker_core::Time;

/// Since when the engine is in a turn. Sessions have tasks of their own, so without this a device that never answers
/// would go unnoticed: heartbeats would go on, and streams would wait for ever.
///
/// A turn may take [`Pulse::MARGIN`] times what the largest step is predicted to take, or three heartbeats if that is longer:
/// then the engine is taken for hung, and its sessions end, so that routers move what they have here.
#[derive(Debug)]
pub(crate) struct Pulse {
    /// When the turn under way began, in nanoseconds; 0 between turns.
    began: AtomicU64,
    /// How long it may take, in nanoseconds.
    limit: AtomicU64,
    least: Duration,
}

impl Pulse {
    const MARGIN: u32 = 20;
    /// A device may be slow for a moment, as with memory that is touched for the first time.
    const TURN_MIN: Duration = Duration::from_secs(3);
    /// No turn takes this long, however large its step.
    const TURN_MAX: Duration = Duration::from_secs(60);

    /// Between turns, of a worker with this heartbeat.
    pub fn new(heartbeat: Duration) -> Self {
        let least = (3 * heartbeat).clamp(Self::TURN_MIN, Self::TURN_MAX);
        Self { began: AtomicU64::new(0), limit: AtomicU64::new(u64::MAX), least }
    }

    /// A turn begins. `step_max` is what the largest step is predicted to take.
    pub fn begin(&self, now: Time, step_max: Duration) {
        let limit = step_max.saturating_mul(Self::MARGIN).clamp(self.least, Self::TURN_MAX);
        self.limit.store(limit.as_nanos() as u64, Ordering::Relaxed);
        self.began.store(now.as_nanos().max(1), Ordering::Relaxed);
    }

    /// It has ended.
    pub fn end(&self) {
        self.began.store(0, Ordering::Relaxed);
    }

    /// Whether the engine hangs.
    pub fn is_stuck(&self, now: Time) -> bool {
        match self.began.load(Ordering::Relaxed) {
            0 => false,
            began => now.as_nanos().saturating_sub(began) > self.limit.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_turn_that_takes_far_longer_than_any_step_should_is_a_hang() {
        let pulse = Pulse::new(Duration::from_secs(1));
        let at = |seconds: u64| Time::from_nanos(seconds * 1_000_000_000);
        assert!(!pulse.is_stuck(at(1000)), "idle is no hang");
        for (step_max, limit) in [(0, 3), (100, 3), (500, 10), (10_000, 60), (u64::MAX, 60)] {
            pulse.begin(at(1000), Duration::from_millis(step_max));
            assert!(!pulse.is_stuck(at(1000 + limit)) && pulse.is_stuck(at(1001 + limit)), "{step_max} ms");
        }
        pulse.end();
        assert!(!pulse.is_stuck(at(2000)));
    }
}

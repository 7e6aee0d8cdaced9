//! Watchdog of the engine: detects a device that does not respond.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use inflight_worker_core::Time;

/// Start time and time limit of the engine's current step. Sessions run on their own tasks, so without it a
/// hung device would go unnoticed: heartbeats would continue, and streams would wait forever.
///
/// A step may take [`Watchdog::MARGIN`] times the predicted duration of the largest step, but at least three
/// heartbeats. Past that the engine counts as hung and its sessions close, so that routers resubmit their
/// requests.
#[derive(Debug)]
pub(crate) struct Watchdog {
    /// Start of the current step in nanoseconds; 0 between steps.
    began: AtomicU64,
    /// Time limit of the current step in nanoseconds.
    limit: AtomicU64,
    limit_min: Duration,
}

impl Watchdog {
    /// Time limit as a multiple of the predicted duration of the largest step.
    const MARGIN: u32 = 20;
    /// Lower bound of `limit_min`: a device may stall briefly, as when memory is touched for the first time.
    const LIMIT_MIN: Duration = Duration::from_secs(3);
    const LIMIT_MAX: Duration = Duration::from_secs(60);

    /// Creates an idle watchdog for a worker with this heartbeat interval.
    pub fn new(heartbeat: Duration) -> Self {
        let limit_min = (3 * heartbeat).clamp(Self::LIMIT_MIN, Self::LIMIT_MAX);
        Self { began: AtomicU64::new(0), limit: AtomicU64::new(u64::MAX), limit_min }
    }

    /// Marks the start of a step; `step_max` is the predicted duration of the largest step.
    pub fn begin(&self, now: Time, step_max: Duration) {
        let limit = step_max.saturating_mul(Self::MARGIN).clamp(self.limit_min, Self::LIMIT_MAX);
        self.limit.store(limit.as_nanos() as u64, Ordering::Relaxed);
        self.began.store(now.as_nanos().max(1), Ordering::Relaxed);
    }

    /// Marks the end of the step.
    pub fn end(&self) {
        self.began.store(0, Ordering::Relaxed);
    }

    /// Returns whether the current step has exceeded its time limit.
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
    fn only_a_step_far_beyond_the_predicted_duration_is_a_hang() {
        let watchdog = Watchdog::new(Duration::from_secs(1));
        let at = |seconds: u64| Time::from_nanos(seconds * 1_000_000_000);
        assert!(!watchdog.is_stuck(at(1000)), "idle is no hang");
        for (step_max, limit) in [(0, 3), (100, 3), (500, 10), (10_000, 60), (u64::MAX, 60)] {
            watchdog.begin(at(1000), Duration::from_millis(step_max));
            assert!(
                !watchdog.is_stuck(at(1000 + limit)) && watchdog.is_stuck(at(1001 + limit)),
                "{step_max} ms"
            );
        }
        watchdog.end();
        assert!(!watchdog.is_stuck(at(2000)));
    }
}

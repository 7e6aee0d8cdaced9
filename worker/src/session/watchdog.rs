//! Watchdog of the engine: detects a device that does not respond.

use std::sync::atomic::Ordering;
use std::time::Duration;

use inflight_worker_core::Time;

use crate::sync::AtomicU64;

/// Deadline of the engine's current step. Sessions run on their own tasks, so without it a
/// hung device would go unnoticed: heartbeats would continue, and streams would wait forever.
///
/// A step may take [`Watchdog::MARGIN`] times the predicted duration of the largest step, but at least three
/// heartbeats. Past that the engine counts as hung and its sessions close, so that routers resubmit their
/// requests.
#[derive(Debug)]
pub(crate) struct Watchdog {
    /// End of the current step's time limit in nanoseconds; [`Self::IDLE`] between steps. One number: of start and limit in
    /// two, a session could read those of different steps.
    deadline: AtomicU64,
    limit_min: Duration,
}

impl Watchdog {
    /// Time limit as a multiple of the predicted duration of the largest step.
    const MARGIN: u32 = 20;
    /// Lower bound of `limit_min`: a device may stall briefly, as when memory is touched for the first time.
    const LIMIT_MIN: Duration = Duration::from_secs(3);
    const LIMIT_MAX: Duration = Duration::from_secs(60);
    const IDLE: u64 = u64::MAX;

    /// Creates an idle watchdog for a worker with this heartbeat interval.
    pub fn new(heartbeat: Duration) -> Self {
        let limit_min = (3 * heartbeat).clamp(Self::LIMIT_MIN, Self::LIMIT_MAX);
        Self { deadline: AtomicU64::new(Self::IDLE), limit_min }
    }

    /// Marks the start of a step; `step_max` is the predicted duration of the largest step.
    pub fn begin(&self, now: Time, step_max: Duration) {
        let limit = step_max.saturating_mul(Self::MARGIN).clamp(self.limit_min, Self::LIMIT_MAX);
        let deadline = now.as_nanos().saturating_add(limit.as_nanos() as u64);
        self.deadline.store(deadline, Ordering::Relaxed);
    }

    /// Marks the end of the step.
    pub fn end(&self) {
        self.deadline.store(Self::IDLE, Ordering::Relaxed);
    }

    /// Returns whether the current step has exceeded its time limit.
    pub fn is_stuck(&self, now: Time) -> bool {
        now.as_nanos() > self.deadline.load(Ordering::Relaxed)
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

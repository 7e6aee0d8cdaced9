use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use inflight_worker_core::Time;

/// Since when the engine is in a turn. Sessions have tasks of their own, so without this a device that never answers
/// would go unnoticed: heartbeats would go on, and streams would wait for ever.
#[derive(Debug, Default)]
pub(crate) struct Pulse(AtomicU64);

impl Pulse {
    /// No turn takes this long, however long its prompts: past it the engine is taken for hung, and its sessions end, so
    /// that routers move what they have here.
    const TURN_MAX: Duration = Duration::from_secs(60);

    /// A turn begins.
    pub fn begin(&self, now: Time) {
        self.0.store(now.as_nanos().max(1), Ordering::Relaxed);
    }

    /// It has ended.
    pub fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Whether the engine hangs.
    pub fn is_stuck(&self, now: Time) -> bool {
        match self.0.load(Ordering::Relaxed) {
            0 => false,
            began => now.as_nanos().saturating_sub(began) > Self::TURN_MAX.as_nanos() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_turn_that_does_not_end_is_a_hang() {
        let pulse = Pulse::default();
        let at = |seconds: u64| Time::from_nanos(seconds * 1_000_000_000);
        assert!(!pulse.is_stuck(at(1000)), "idle is no hang");
        pulse.begin(at(1000));
        assert!(!pulse.is_stuck(at(1060)) && pulse.is_stuck(at(1061)));
        pulse.end();
        assert!(!pulse.is_stuck(at(2000)));
    }
}

//! Dispatch rate of a lane and the queueing time predicted from it.

use std::time::Duration;

use crate::RequestsAhead;

/// Dispatch rate of a lane over a sliding window of ten seconds, counted only while requests wait; predicts
/// the queueing time of a new request.
///
/// With `n` requests ahead and rate `r`, a request waits about `n / r`; within its tenant's share `s`, at
/// most about `own / (r * s)`. The minimum of both holds, because a light tenant goes before the requests of
/// heavy ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct DispatchRate {
    /// Dispatches in the window, decayed.
    dispatches: f64,
    /// Seconds with waiting requests in the window, decayed.
    busy: f64,
    last: Duration,
}

const WINDOW_SECONDS: f64 = 10.0;
/// Dispatches below which nothing is predicted.
const DISPATCHES_MIN: f64 = 4.0;

impl DispatchRate {
    /// Advances time; `waiting` if requests waited since the previous call.
    pub fn advance(&mut self, now: Duration, waiting: bool) {
        let seconds = now.saturating_sub(self.last).as_secs_f64();
        self.last = self.last.max(now);
        if waiting {
            let kept = (-seconds / WINDOW_SECONDS).exp();
            self.dispatches *= kept;
            // Integral of the decay over the time passed.
            self.busy = self.busy * kept + WINDOW_SECONDS * (1.0 - kept);
        }
    }

    /// Counts the dispatch of a request that had waited.
    pub fn record_dispatch(&mut self) {
        self.dispatches += 1.0;
    }

    /// Returns the predicted queueing time behind `ahead`; `None` if too few dispatches were seen.
    pub fn predict_wait(&self, ahead: RequestsAhead) -> Option<Duration> {
        if ahead.all == 0 {
            return Some(Duration::ZERO);
        }
        if self.dispatches < DISPATCHES_MIN || self.busy <= 0.0 {
            return None;
        }
        let rate = self.dispatches / self.busy;
        let seconds = (ahead.all as f64).min((ahead.own + 1) as f64 / ahead.share) / rate;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_dispatch_rate_predicts_the_queueing_time() {
        let mut pace = DispatchRate::default();
        let all = |all: usize| RequestsAhead { all, own: all, share: 1.0 };
        assert_eq!(pace.predict_wait(all(0)), Some(Duration::ZERO));
        assert_eq!(pace.predict_wait(all(5)), None, "nothing was seen yet");
        for step in 1..=600 {
            pace.advance(Duration::from_millis(step * 50), true);
            pace.record_dispatch();
        }
        let wait = pace.predict_wait(all(100)).unwrap().as_secs_f64();
        assert!((wait - 5.0).abs() < 0.1, "100 requests at 20 a second: {wait}");
        let light = RequestsAhead { all: 100, own: 0, share: 0.5 };
        let wait = pace.predict_wait(light).unwrap().as_secs_f64();
        assert!((wait - 0.1).abs() < 0.01, "its turn comes next but one: {wait}");
        // Idle time leaves the rate unchanged.
        pace.advance(Duration::from_secs(3600), false);
        assert!((pace.predict_wait(all(100)).unwrap().as_secs_f64() - 5.0).abs() < 0.1);
        // The rate halves: the window forgets.
        for step in 1..=400 {
            pace.advance(Duration::from_secs(3600) + Duration::from_millis(step * 100), true);
            pace.record_dispatch();
        }
        let wait = pace.predict_wait(all(100)).unwrap().as_secs_f64();
        assert!((wait - 10.0).abs() < 0.4, "100 requests at 10 a second: {wait}");
    }
}

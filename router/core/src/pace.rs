use std::time::Duration;

use crate::Ahead;

/// How fast a lane of the queue is served: handovers over a sliding window of ten seconds, counted only while
/// something waits, from which the wait of a newcomer is predicted.
///
/// With `n` requests that go before it and the lane's pace `r`, a request waits about `n / r`; within its tenant's
/// share `s`, at most about `own / (r * s)`. The smaller holds, for a light tenant goes before what heavy ones sent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// Handovers in the part of the window that counts, decayed.
    handed: f64,
    /// Seconds that count, decayed.
    busy: f64,
    last: Duration,
}

const WINDOW_SECONDS: f64 = 10.0;
/// Less than this was seen: nothing can be said.
const KNOWN_HANDOVERS: f64 = 4.0;

impl Pace {
    /// Time goes on; `waiting` says whether something waited since the call before.
    pub fn pass(&mut self, now: Duration, waiting: bool) {
        let seconds = now.saturating_sub(self.last).as_secs_f64();
        self.last = self.last.max(now);
        if waiting {
            let kept = (-seconds / WINDOW_SECONDS).exp();
            self.handed *= kept;
            // The integral of the decay over the time that passed.
            self.busy = self.busy * kept + WINDOW_SECONDS * (1.0 - kept);
        }
    }

    /// A request that had waited was handed over.
    pub fn hand(&mut self) {
        self.handed += 1.0;
    }

    /// How long a request waits that has this before it; `None` where too little was seen.
    pub fn wait(&self, ahead: Ahead) -> Option<Duration> {
        if ahead.all == 0 {
            return Some(Duration::ZERO);
        }
        if self.handed < KNOWN_HANDOVERS || self.busy <= 0.0 {
            return None;
        }
        let rate = self.handed / self.busy;
        let seconds = (ahead.all as f64).min((ahead.own + 1) as f64 / ahead.share) / rate;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_pace_is_learnt_and_predicts_the_wait() {
        let mut pace = Pace::default();
        let all = |all: usize| Ahead { all, own: all, share: 1.0 };
        assert_eq!(pace.wait(all(0)), Some(Duration::ZERO));
        assert_eq!(pace.wait(all(5)), None, "nothing was seen yet");
        for step in 1..=600 {
            pace.pass(Duration::from_millis(step * 50), true);
            pace.hand();
        }
        let wait = pace.wait(all(100)).unwrap().as_secs_f64();
        assert!((wait - 5.0).abs() < 0.1, "100 requests at 20 a second: {wait}");
        let light = Ahead { all: 100, own: 0, share: 0.5 };
        let wait = pace.wait(light).unwrap().as_secs_f64();
        assert!((wait - 0.1).abs() < 0.01, "its turn comes next but one: {wait}");
        // An idle hour teaches nothing.
        pace.pass(Duration::from_secs(3600), false);
        assert!((pace.wait(all(100)).unwrap().as_secs_f64() - 5.0).abs() < 0.1);
        // It halves: the window forgets.
        for step in 1..=400 {
            pace.pass(Duration::from_secs(3600) + Duration::from_millis(step * 100), true);
            pace.hand();
        }
        let wait = pace.wait(all(100)).unwrap().as_secs_f64();
        assert!((wait - 10.0).abs() < 0.4, "100 requests at 10 a second: {wait}");
    }
}

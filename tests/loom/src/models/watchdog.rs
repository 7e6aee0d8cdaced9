//! Model of the watchdog: a session asks it while the engine begins and ends steps of different lengths.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use inflight_worker_core::Time;
use loom::sync::atomic::AtomicU64;
use loom::thread;

use super::check;
use crate::watchdog::Watchdog;

/// Duration of the predicted largest step, and of the step that runs, in seconds: a long one, then a short one, each of which
/// ends just within its time limit. The limit is twenty times the prediction.
const STEPS: [(u64, u64); 2] = [(2, 40), (1, 20)];

/// No step within its time limit counts as a hang, whenever the session looks; the one that never ends does.
///
/// # Panics
/// If not.
pub fn watchdog() {
    check(3, || {
        let watchdog = Arc::new(Watchdog::new(Duration::from_secs(1)));
        // The clock that both threads read, in seconds.
        let clock = Arc::new(AtomicU64::new(1));
        let engine = {
            let (watchdog, clock) = (watchdog.clone(), clock.clone());
            thread::spawn(move || {
                for (predicted, duration) in STEPS {
                    let now = clock.load(Ordering::Acquire);
                    watchdog.begin(seconds(now), Duration::from_secs(predicted));
                    clock.store(now + duration, Ordering::Release);
                    watchdog.end();
                }
            })
        };
        for _ in 0..2 {
            let now = clock.load(Ordering::Acquire);
            assert!(!watchdog.is_stuck(seconds(now)), "a false alarm");
        }
        engine.join().unwrap_or_else(|_| unreachable!("the engine's thread does not panic"));
        let began = clock.load(Ordering::Acquire);
        watchdog.begin(seconds(began), Duration::from_secs(1));
        assert!(!watchdog.is_stuck(seconds(began + 20)) && watchdog.is_stuck(seconds(began + 21)));
    });
}

fn seconds(seconds: u64) -> Time {
    Time::from_nanos(seconds * 1_000_000_000)
}

//! Time that polls of connections and calls take a runtime's thread, on which the others wait.

use std::cell::Cell;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::metrics;

/// Time of a poll from which on it counts as slow.
const SLOW: Duration = Duration::from_millis(50);

thread_local! {
    /// Time of the present poll in which no other task waited for the thread.
    static UNMEASURED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Runs work for which the runtime has moved the thread's other tasks to another one, as `tokio::task::block_in_place` does: it does not count in
/// the time of a poll.
pub fn unmeasured<T>(work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let outcome = work();
    UNMEASURED.set(UNMEASURED.get() + begun.elapsed());
    outcome
}

/// Longest and slow polls of a listener's connections and calls. Their time includes that in which the system gave the thread to others.
#[derive(Debug)]
pub(crate) struct PollTimes {
    listener: &'static str,
    /// Longest so far, in microseconds.
    longest: AtomicU64,
}

impl PollTimes {
    pub fn new(listener: &'static str) -> Arc<Self> {
        metrics::longest_poll(listener, Duration::ZERO);
        metrics::slow_polls(listener, 0);
        Arc::new(Self { listener, longest: AtomicU64::new(0) })
    }

    /// Runs a poll and counts its time.
    pub fn measure<T>(&self, poll: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        UNMEASURED.set(Duration::ZERO);
        let outcome = poll();
        let took = begun.elapsed().saturating_sub(UNMEASURED.take());
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        if micros > self.longest.load(Ordering::Relaxed) {
            self.longest.fetch_max(micros, Ordering::Relaxed);
            metrics::longest_poll(self.listener, took);
        }
        if took >= SLOW {
            metrics::slow_polls(self.listener, 1);
        }
        outcome
    }
}

/// Future whose polls are measured.
pub(crate) struct Measured<F> {
    future: Pin<Box<F>>,
    times: Arc<PollTimes>,
}

impl<F> Measured<F> {
    pub fn new(future: F, times: Arc<PollTimes>) -> Self {
        Self { future: Box::pin(future), times }
    }
}

impl<F: Future> Future for Measured<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.get_mut();
        this.times.measure(|| this.future.as_mut().poll(context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_longest_poll_counts_and_waiting_does_not() {
        let times = PollTimes::new("test");
        let calls = async {
            unmeasured(|| std::thread::sleep(Duration::from_millis(40)));
            std::thread::sleep(Duration::from_millis(2));
            tokio::time::sleep(Duration::from_millis(40)).await;
            std::thread::sleep(Duration::from_millis(4));
        };
        Measured::new(calls, times.clone()).await;
        let longest = times.longest.load(Ordering::Relaxed);
        assert!((4_000..40_000).contains(&longest), "{longest} us");
    }
}

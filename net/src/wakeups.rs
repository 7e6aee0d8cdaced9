//! Batched wake-ups: a thread-local list defers the wake-ups of a piece of work until it ends.

use std::cell::RefCell;
use std::task::Waker;

use crate::sync::thread_local;

thread_local! {
    /// Wakers deferred by the innermost active batch on this thread; `None` outside a batch.
    static DEFERRED: RefCell<Option<Vec<Waker>>> = const { RefCell::new(None) };
}

/// Runs work that wakes many streams, and defers the wake-ups of [`HttpServer`](crate::HttpServer)
/// connections until it returns. Otherwise a connection could start on another thread at the first stream and
/// write a few frames.
pub fn batch_wakeups<T>(work: impl FnOnce() -> T) -> T {
    let outer = DEFERRED.with(|deferred| deferred.replace(Some(Vec::new())));
    let batch = WakeupBatch { outer };
    let output = work();
    drop(batch);
    output
}

/// Guard of a batch: its drop wakes the deferred tasks, also while unwinding.
struct WakeupBatch {
    /// Wakers deferred so far by the enclosing batch, restored at the end.
    outer: Option<Vec<Waker>>,
}

impl Drop for WakeupBatch {
    fn drop(&mut self) {
        let deferred = DEFERRED.with(|deferred| deferred.replace(self.outer.take()));
        deferred.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Wakes a task at once, or at the end of the enclosing [`batch_wakeups`].
pub(crate) fn wake(task: Waker) {
    let immediate = DEFERRED.with(|deferred| match &mut *deferred.borrow_mut() {
        Some(deferred) => {
            deferred.push(task);
            None
        }
        None => Some(task),
    });
    if let Some(task) = immediate {
        task.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct CountingTask(AtomicU32);

    impl Wake for CountingTask {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn wakeups_are_deferred_to_the_end_of_a_batch_and_immediate_outside() {
        let task = Arc::new(CountingTask::default());
        let waker = Waker::from(task.clone());
        let woken = || task.0.load(Ordering::Relaxed);
        wake(waker.clone());
        assert_eq!(woken(), 1);
        batch_wakeups(|| {
            wake(waker.clone());
            batch_wakeups(|| wake(waker.clone()));
            assert_eq!(woken(), 2, "the inner batch has ended, the outer has not");
        });
        assert_eq!(woken(), 3);
        let panicked = std::panic::catch_unwind(|| {
            batch_wakeups(|| {
                wake(waker.clone());
                panic!("work that fails");
            })
        });
        assert!(panicked.is_err());
        assert_eq!(woken(), 4);
        wake(waker.clone());
        assert_eq!(woken(), 5, "no batch is active any more");
    }
}

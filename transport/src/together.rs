use std::cell::RefCell;
use std::task::Waker;

thread_local! {
    /// Tasks to be woken when the work under way on this thread is over, if it is to be.
    static HELD: RefCell<Option<Vec<Waker>>> = const { RefCell::new(None) };
}

/// Does work that wakes many streams. A connection of [`Http2`](crate::Http2) runs when the work is over, not at its
/// first stream: on another thread it would write what little is there by then, and again.
pub fn together<T>(work: impl FnOnce() -> T) -> T {
    let around = HELD.replace(Some(Vec::new()));
    let release = Release { around };
    let done = work();
    drop(release);
    done
}

/// Wakes what was held, also after a panic.
struct Release {
    /// What work around this one has held so far.
    around: Option<Vec<Waker>>,
}

impl Drop for Release {
    fn drop(&mut self) {
        let held = HELD.replace(self.around.take());
        held.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Wakes a task at once, or when the work is over that is done [`together`].
pub(crate) fn wake(task: Waker) {
    let at_once = HELD.with_borrow_mut(|held| match held {
        Some(held) => {
            held.push(task);
            None
        }
        None => Some(task),
    });
    if let Some(task) = at_once {
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
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn what_is_woken_by_work_done_together_runs_when_it_is_over_and_anything_else_at_once() {
        let task = Arc::new(Count::default());
        let waker = Waker::from(task.clone());
        let woken = || task.0.load(Ordering::Relaxed);
        wake(waker.clone());
        assert_eq!(woken(), 1);
        together(|| {
            wake(waker.clone());
            together(|| wake(waker.clone()));
            assert_eq!(woken(), 2, "the inner work is over, the outer is not");
        });
        assert_eq!(woken(), 3);
        let panicked = std::panic::catch_unwind(|| {
            together(|| {
                wake(waker.clone());
                panic!("work that fails");
            })
        });
        assert!(panicked.is_err());
        assert_eq!(woken(), 4);
        wake(waker.clone());
        assert_eq!(woken(), 5, "nothing is held any more");
    }
}

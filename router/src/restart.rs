//! Supervision of background tasks: restart after a panic.

use std::future::Future;
use std::time::Duration;

use tokio_util::task::AbortOnDropHandle;

use crate::metrics as names;

/// Pause before a task that panicked runs again, so that one that panics at once does not spin.
const PAUSE: Duration = Duration::from_millis(100);

/// Runs the future that `make` returns as a task, and restarts it after each panic, until it returns. Panics
/// are counted by `task`. Dropping the future aborts the task.
pub(crate) async fn restart_on_panic<F>(task: &'static str, mut make: impl FnMut() -> F) -> F::Output
where
    F: Future<Output: Send> + Send + 'static,
{
    loop {
        match AbortOnDropHandle::new(tokio::spawn(make())).await {
            Ok(output) => return output,
            Err(error) if error.is_panic() => {
                // The panic hook has logged message and location.
                tracing::error!(task, "restarting background task after a panic");
                metrics::counter!(names::TASK_PANICS, "task" => task).increment(1);
                tokio::time::sleep(PAUSE).await;
            }
            // Cancelled only by the shutdown of the runtime.
            Err(_) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_task_is_restarted_after_each_panic_until_it_returns() {
        let runs = AtomicU32::new(0);
        let make = || {
            let run = runs.fetch_add(1, Ordering::Relaxed);
            async move {
                assert!(run >= 2, "run {run}");
                run
            }
        };
        assert_eq!(restart_on_panic("test", make).await, 2);
    }

    #[tokio::test]
    async fn dropping_the_supervisor_aborts_its_task() {
        let (held, dropped) = tokio::sync::oneshot::channel::<()>();
        let mut held = Some(held);
        let running = restart_on_panic("test", move || {
            let held = held.take();
            async move {
                let _held = held;
                std::future::pending::<()>().await;
            }
        });
        tokio::select! {
            biased;
            () = running => {}
            () = tokio::task::yield_now() => {}
        }
        assert!(dropped.await.is_err());
    }
}

//! Options, runtime and graceful shutdown shared by the long-running roles.

use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::exit::{CommandError, Exit};
use crate::units::Span;

/// Options of every long-running role.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct Args {
    /// Time for open requests to finish after SIGTERM or Ctrl-C; a second signal ends at once
    #[arg(long, value_name = "DURATION", default_value = "2m", env = "INFLIGHT_DRAIN_TIMEOUT")]
    pub drain_timeout: Span,
    /// Also stop when the standard input ends; set by `inflight up`
    #[arg(long, hide = true)]
    pub supervised: bool,
}

/// Runs a future on a new Tokio runtime with `threads` worker threads, by default one per core.
///
/// # Errors
/// The error of the future, or a failure to start the runtime.
pub fn block_on(
    threads: Option<usize>,
    future: impl Future<Output = Result<(), CommandError>>,
) -> Result<(), CommandError> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = threads {
        builder.worker_threads(threads);
    }
    let runtime = builder
        .enable_all()
        .build()
        .map_err(|error| CommandError::chain("cannot start the runtime", &error))?;
    let outcome = runtime.block_on(future);
    // Loading of a model cannot be interrupted; the process exits without waiting for it.
    runtime.shutdown_timeout(Duration::from_millis(100));
    outcome
}

/// Waits for `serving` to end, for at most `timeout` after `drain` is cancelled.
///
/// # Errors
/// The error of the server, or that it did not drain in time.
pub async fn within_drain<E>(
    serving: impl Future<Output = Result<(), E>>,
    drain: &CancellationToken,
    timeout: Duration,
) -> Result<(), CommandError>
where
    E: std::error::Error + 'static,
{
    let overdue = async {
        drain.cancelled().await;
        tokio::time::sleep(timeout).await;
    };
    tokio::select! {
        served = serving => served.map_err(|error| CommandError::chain("", &error)),
        () = overdue => {
            let message = format!("streams were still in flight {} after draining began", Span(timeout));
            Err(CommandError::new(Exit::Failure, message))
        }
    }
}

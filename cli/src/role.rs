//! What the long-running roles have in common.

use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::exit::{Exit, Failure};
use crate::units::Span;

/// Options of every long-running role.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Time for open requests to finish after SIGTERM or Ctrl-C; a second signal ends at once
    #[arg(long, value_name = "DURATION", default_value = "2m", env = "INFLIGHT_DRAIN_TIMEOUT")]
    pub drain_timeout: Span,
    /// Also stop when the standard input ends; set by `inflight up`
    #[arg(long, hide = true)]
    pub supervised: bool,
}

/// Runs a future on a runtime of its own, with `threads` threads or one for each core.
///
/// # Errors
/// The future's, or that there is no runtime.
pub fn block_on(
    threads: Option<usize>,
    future: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = threads {
        builder.worker_threads(threads);
    }
    let runtime =
        builder.enable_all().build().map_err(|error| Failure::chain("cannot start the runtime", &error))?;
    let outcome = runtime.block_on(future);
    // A model that is still being loaded cannot be interrupted; the process ends without it.
    runtime.shutdown_timeout(Duration::from_millis(100));
    outcome
}

/// Waits for a server that drains by itself, but no longer than `timeout` after draining began.
///
/// # Errors
/// The server's, or that it did not finish in time.
pub async fn within_drain<E>(
    serving: impl Future<Output = Result<(), E>>,
    drain: &CancellationToken,
    timeout: Duration,
) -> Result<(), Failure>
where
    E: std::error::Error + 'static,
{
    let overdue = async {
        drain.cancelled().await;
        tokio::time::sleep(timeout).await;
    };
    tokio::select! {
        served = serving => served.map_err(|error| Failure::chain("", &error)),
        () = overdue => {
            let message = format!("streams were still in flight {} after draining began", Span(timeout));
            Err(Failure::new(Exit::Failure, message))
        }
    }
}

//! Options, runtime and graceful shutdown shared by the long-running roles.

use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use inflight_net::raise_open_file_limit;

use crate::exit::{CommandError, Exit};
use crate::metrics_endpoint;
use inflight_options::{ByteSize, Span};

/// Options of every long-running role.
#[derive(Debug, Clone, clap::Args)]
// Without a group: clap names it after the struct, and commands have several of the name `Args`.
#[group(skip)]
pub struct Args {
    /// Time for open requests to finish after SIGTERM or Ctrl-C; a second signal ends at once
    #[arg(long, value_name = "DURATION", default_value = "2m", env = "INFLIGHT_DRAIN_TIMEOUT")]
    pub drain_timeout: Span,
    /// Memory of the processes that compile grammars of structured output, each up to 256 MiB, beside the vocabulary of the
    /// model; at least one process, at most one per core
    #[arg(long, value_name = "BYTES", default_value = "512MiB", env = "INFLIGHT_GRAMMAR_MEMORY_MAX")]
    pub grammar_memory_max: ByteSize,
    /// Also stop when the standard input ends; set by `inflight up`
    #[arg(long, hide = true)]
    pub supervised: bool,
}

/// Raises the limit of open files, and warns if it is too small for `connections` of the role's own listeners, its
/// metrics endpoint and to other processes; `advice` says which option lowers them.
pub fn check_open_files(connections: usize, advice: &str) {
    let Some(limit) = raise_open_file_limit() else { return };
    let connections = connections.saturating_add(metrics_endpoint::CONNECTIONS_MAX);
    if let Err(needed) = limit.check(connections as u64) {
        let (limit, connections) = (limit.files(), connections as u64);
        tracing::warn!(
            limit,
            needed,
            connections,
            "the hard limit of open files (ulimit -Hn) is below what the connection limits need: raise it, or {advice}"
        );
    }
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

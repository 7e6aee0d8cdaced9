//! Shutdown signals: SIGINT, SIGTERM and, under a supervisor, end of file on standard input.

use std::io::{self, Read as _};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::exit::Exit;

/// Cancellation tokens of the two stages of shutdown.
#[derive(Debug, Clone)]
pub struct Stop {
    /// Graceful shutdown: cancelled at the first SIGINT or SIGTERM, or when the supervisor is gone.
    pub drain: CancellationToken,
    /// Immediate shutdown: cancelled at the second signal.
    pub abort: CancellationToken,
}

/// Watches SIGINT, SIGTERM and, if `supervised`, standard input: a pipe whose other end the supervisor holds
/// and never writes to, so end of file means that the supervisor is gone.
///
/// # Errors
/// The operating system rejects a signal handler.
pub fn watch(supervised: bool) -> io::Result<Stop> {
    let stop = Stop { drain: CancellationToken::new(), abort: CancellationToken::new() };
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let tokens = stop.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                received = interrupt.recv() => if received.is_none() { return },
                received = terminate.recv() => if received.is_none() { return },
            }
            if tokens.drain.is_cancelled() {
                tokens.abort.cancel();
            }
            tokens.drain.cancel();
        }
    });
    if supervised {
        let drain = stop.drain.clone();
        // A separate thread: a blocking read of standard input would delay the runtime's shutdown.
        std::thread::Builder::new().name("supervisor-watch".to_owned()).spawn(move || {
            let mut sink = [0u8; 64];
            let mut input = io::stdin().lock();
            loop {
                match input.read(&mut sink) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            drain.cancel();
        })?;
    }
    Ok(stop)
}

/// Exits the process at the second signal, for roles without resources to clean up.
pub fn exit_on_abort(stop: &Stop) {
    let abort = stop.abort.clone();
    tokio::spawn(async move {
        abort.cancelled().await;
        crate::exit::print_stderr(format_args!("stopped at once: second signal"));
        std::process::exit(Exit::Interrupted as i32);
    });
}

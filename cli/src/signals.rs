//! When to stop: signals, and the supervisor's end of the standard input.

use std::io::{self, Read as _};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::exit::Exit;

/// Two stages of stopping.
#[derive(Debug, Clone)]
pub struct Stop {
    /// Finish what is in flight and end: the first SIGINT or SIGTERM, or the supervisor's death.
    pub drain: CancellationToken,
    /// End at once: the second signal.
    pub abort: CancellationToken,
}

/// Watches SIGINT and SIGTERM and, if `supervised`, the standard input, whose end means that the supervisor
/// is gone: it holds the other end and never writes.
///
/// # Errors
/// The operating system refuses a signal handler.
pub fn watch(supervised: bool) -> io::Result<Stop> {
    let stop = Stop { drain: CancellationToken::new(), abort: CancellationToken::new() };
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let seen = stop.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                received = interrupt.recv() => if received.is_none() { return },
                received = terminate.recv() => if received.is_none() { return },
            }
            if seen.drain.is_cancelled() {
                seen.abort.cancel();
            }
            seen.drain.cancel();
        }
    });
    if supervised {
        let drain = stop.drain.clone();
        // A thread of its own: a blocked read of the standard input would hold up the runtime's shutdown.
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

/// Ends the process at the second signal, for roles that have nothing of their own to clean up.
pub fn exit_on_abort(stop: &Stop) {
    let abort = stop.abort.clone();
    tokio::spawn(async move {
        abort.cancelled().await;
        crate::exit::say(format_args!("stopped at once: second signal"));
        std::process::exit(Exit::Interrupted as i32);
    });
}

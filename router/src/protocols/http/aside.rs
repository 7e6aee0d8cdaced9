//! Work on megabytes: aside from the threads on which other calls wait.

use inflight_net::{Holder, Turns};
use tokio::runtime::RuntimeFlavor;

/// Bytes of a body that are read, and positions with log probabilities that are written, where they arrive: some milliseconds.
pub(crate) const SMALL_BODY_BYTES: usize = 64 << 10;
pub(crate) const SMALL_POSITIONS: usize = 256;

/// Builds a response, one `large` one at a time, in turns between holders.
pub(crate) async fn aside<T>(holder: Option<Holder>, large: bool, build: impl FnOnce() -> T) -> T {
    static TURNS: Turns = Turns::new(1);
    run(&TURNS, holder, large, build).await
}

/// Reads a body, one large one at a time, in turns between holders.
pub(crate) async fn read_body<T>(holder: Option<Holder>, body: &[u8], read: impl FnOnce(&[u8]) -> T) -> T {
    read_aside(holder, body.len() > SMALL_BODY_BYTES, || read(body)).await
}

/// Reads a message, one `large` one at a time, in turns between holders, as bodies.
pub(crate) async fn read_aside<T>(holder: Option<Holder>, large: bool, read: impl FnOnce() -> T) -> T {
    static TURNS: Turns = Turns::new(1);
    run(&TURNS, holder, large, read).await
}

/// Runs `work`; if it is large, in its holder's turn, on a thread whose other tasks have been moved to others.
async fn run<T>(turns: &Turns, holder: Option<Holder>, large: bool, work: impl FnOnce() -> T) -> T {
    if !large {
        return work();
    }
    let _turn = turns.turn(holder.as_ref()).await;
    match tokio::runtime::Handle::current().runtime_flavor() {
        // The only thread, as in simulations.
        RuntimeFlavor::CurrentThread => work(),
        _ => inflight_net::unmeasured(|| tokio::task::block_in_place(work)),
    }
}

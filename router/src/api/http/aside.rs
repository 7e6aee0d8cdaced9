//! Work on megabytes: aside from the threads on which other calls wait.

use tokio::runtime::RuntimeFlavor;
use tokio::sync::Semaphore;

/// Bytes of a body that are read where they arrive: some milliseconds.
const SMALL_BODY_BYTES: usize = 64 << 10;

/// Builds a response, one `large` one at a time.
pub(super) async fn aside<T>(large: bool, build: impl FnOnce() -> T) -> T {
    static TURN: Semaphore = Semaphore::const_new(1);
    run(&TURN, large, build).await
}

/// Reads a body, one large one at a time.
pub(super) async fn read_body<T>(body: &[u8], read: impl FnOnce(&[u8]) -> T) -> T {
    static TURN: Semaphore = Semaphore::const_new(1);
    run(&TURN, body.len() > SMALL_BODY_BYTES, || read(body)).await
}

/// Runs `work`; if it is large, in turn and on a thread whose other tasks have been moved to others, so that no call waits for it.
async fn run<T>(turns: &Semaphore, large: bool, work: impl FnOnce() -> T) -> T {
    if !large {
        return work();
    }
    // It is never closed.
    let _turn = turns.acquire().await;
    match tokio::runtime::Handle::current().runtime_flavor() {
        // The only thread, as in simulations.
        RuntimeFlavor::CurrentThread => work(),
        _ => inflight_net::unmeasured(|| tokio::task::block_in_place(work)),
    }
}

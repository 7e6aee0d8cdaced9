//! What the next attempt of a request waits for.

use serde::Serialize;

/// What the next attempt of a request waits for, after its worker was lost or has returned it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum RetryWait {
    /// Waits for a worker with room, in the queue, ahead of all new requests.
    Queue,
    /// Waits for the retry budget, outside the queue.
    Budget,
    /// Quarantined: waits for a worker of its own, outside the queue.
    Quarantine,
}

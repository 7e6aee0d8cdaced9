//! What the next attempt of a request waits for.

use serde::Serialize;

/// What the next attempt of a request waits for, after its worker was lost or has returned it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum RetryWait {
    /// A worker with room: it is in the queue, ahead of all new requests.
    Queue,
    /// The retry budget, outside the queue.
    Budget,
    /// A worker of its own, outside the queue: it is quarantined.
    Quarantine,
}

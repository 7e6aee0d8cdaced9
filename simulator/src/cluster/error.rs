//! Errors of a cluster simulation.

use inflight_worker_core::CommitError;

/// Reason why a cluster simulation cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A scheduler rejected a completion: a fault of the simulation.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// Requests are left, but nothing is in flight and none will arrive.
    #[error("{0} requests are left and nothing is in flight: the cluster makes no progress")]
    Stalled(usize),
    /// A queue or worker rejected a request.
    #[error("request {0} is refused: {1}")]
    Refused(usize, String),
    /// A worker sent what a router rejects as a protocol violation: a fault of the simulation.
    #[error("a simulated worker violated the protocol: {0}")]
    Violation(String),
    /// A router's prefix index differs from the worker's cache although no update is in flight.
    #[error("the index of router {router} differs from what worker {worker} has, in {blocks} blocks")]
    Index {
        /// Index of the router.
        router: usize,
        /// Index of the worker.
        worker: usize,
        /// Number of blocks that only one of them contains.
        blocks: usize,
    },
}

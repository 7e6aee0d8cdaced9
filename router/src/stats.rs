//! Load figures of a running router.

/// Numbers of calls, requests and credits in use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RouterStats {
    /// Open calls.
    pub open: usize,
    /// Requests in the queue, in the retry queue or in quarantine.
    pub waiting: usize,
    /// Requests in flight at workers.
    pub in_flight: usize,
    /// Sequences charged to workers' grants.
    pub sequences: u32,
    /// Blocks charged to workers' grants.
    pub blocks: u32,
}

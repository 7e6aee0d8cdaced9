//! Figures of a running router.

/// Number of calls, requests and credits that a router holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RouterStats {
    /// Calls whose streams are open.
    pub open: usize,
    /// Requests that wait for a worker or for the retry budget.
    pub waiting: usize,
    /// Requests in flight at workers.
    pub in_flight: usize,
    /// Sequences charged to workers' grants.
    pub sequences: u32,
    /// Blocks charged to workers' grants.
    pub blocks: u32,
}

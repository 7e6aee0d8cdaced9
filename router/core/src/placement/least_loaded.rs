//! Placement policy `least-loaded`.

use super::{Candidate, PlacementRequest, Policy, TieBreaker};

/// Worker with the lowest relative load after dispatch; round-robin among equals.
///
/// - **Inputs**: sequences and blocks of the session in flight as a fraction of its grant, which shrinks by
///   the usage of other routers.
/// - **Defaults**: none.
/// - **Trade-offs**: balances requests in flight, whatever work they still are, and weighs workers by their
///   size. Considers every worker, so many routers with the same information choose the same one until their
///   own requests count; prefixes are hit by chance.
#[derive(Debug)]
pub struct LeastLoaded {
    tie_breaker: TieBreaker,
}

impl LeastLoaded {
    /// Creates the policy; the seed chooses the first worker among equals.
    pub fn new(seed: u64) -> Self {
        Self { tie_breaker: TieBreaker::new(seed) }
    }
}

impl Policy for LeastLoaded {
    fn pick(&mut self, _: &PlacementRequest, workers: &[Candidate]) -> usize {
        self.tie_breaker.best(workers, Candidate::load)
    }
}

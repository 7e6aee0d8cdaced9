//! Placement policy `round-robin`.

use super::{Candidate, PlacementRequest, Policy, TieBreaker};

/// One worker after the other.
///
/// - **Inputs**: which workers have room.
/// - **Defaults**: the seed chooses the first worker.
/// - **Trade-offs**: even in numbers of requests and in nothing else: requests of very different lengths
///   leave some workers with most of the work, and prefixes are hit by chance. The baseline, and right where
///   all requests are alike and short.
#[derive(Debug)]
pub struct RoundRobin {
    tie_breaker: TieBreaker,
}

impl RoundRobin {
    /// Creates the policy; the seed chooses the first worker.
    pub fn new(seed: u64) -> Self {
        Self { tie_breaker: TieBreaker::new(seed) }
    }
}

impl Policy for RoundRobin {
    fn pick(&mut self, _: &PlacementRequest, workers: &[Candidate]) -> usize {
        self.tie_breaker.best(workers, |_| ())
    }
}

//! Placement policy `prefix`.

use std::cmp::Reverse;

use super::{Candidate, PlacementRequest, Policy, TieBreaker};

/// Worker with the longest cached prefix of the prompt, if it is long enough; else the least loaded.
///
/// - **Inputs**: the prefix index of each worker, with the blocks of requests in flight; the load of
///   `least-loaded`.
/// - **Defaults**: at least half of the prompt.
/// - **Trade-offs**: conversations stay on a worker and compute each turn once, but a busy worker with the
///   prefix is preferred until it has no room at all, so a popular prefix makes a hot spot; and a prefix
///   below the threshold counts for nothing. `cost` weighs both.
#[derive(Debug)]
pub struct Prefix {
    tie_breaker: TieBreaker,
}

impl Prefix {
    /// A prefix counts if it is at least the prompt divided by this.
    const PART: u64 = 2;

    /// Creates the policy; the seed chooses the first worker among equals.
    pub fn new(seed: u64) -> Self {
        Self { tie_breaker: TieBreaker::new(seed) }
    }
}

impl Policy for Prefix {
    fn pick(&mut self, request: &PlacementRequest, workers: &[Candidate]) -> usize {
        self.tie_breaker.best(workers, |worker| {
            let cached = worker.estimate.cached;
            let enough = u64::from(cached.tokens()) * Self::PART >= u64::from(request.prompt_tokens).max(1);
            // Device blocks are worth more than host blocks.
            let found = if enough { (cached.tokens(), cached.device_tokens) } else { (0, 0) };
            (Reverse(found), worker.load())
        })
    }

    fn reads_prefixes(&self) -> bool {
        true
    }
}

//! Placement policy `power-of-two`.

use super::{Candidate, PlacementRequest, Policy, Random};

/// Less loaded of two workers chosen at random (Mitzenmacher, "The Power of Two Choices in Randomized Load
/// Balancing", 2001).
///
/// - **Inputs**: the load of `least-loaded`, of two workers only.
/// - **Defaults**: two choices.
/// - **Trade-offs**: nearly as even as `least-loaded`, and many routers with the same stale information do
///   not all choose the same worker. Prefixes are hit by chance.
#[derive(Debug)]
pub struct PowerOfTwo {
    random: Random,
}

impl PowerOfTwo {
    /// Creates the policy; equal seeds give equal choices.
    pub fn new(seed: u64) -> Self {
        Self { random: Random::new(seed) }
    }
}

impl Policy for PowerOfTwo {
    fn pick(&mut self, _: &PlacementRequest, workers: &[Candidate]) -> usize {
        let first = self.random.below(workers.len());
        if workers.len() < 2 {
            return first;
        }
        // Drawn from the remaining workers.
        let second = (first + 1 + self.random.below(workers.len() - 1)) % workers.len();
        if workers[second].load() < workers[first].load() { second } else { first }
    }
}

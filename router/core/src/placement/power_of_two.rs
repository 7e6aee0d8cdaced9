use super::{Ask, Candidate, Policy, Random};

/// The less loaded of two workers chosen at random (Mitzenmacher, "The Power of Two Choices in Randomized Load
/// Balancing", 2001).
///
/// - **Inputs**: as `least-loaded`, of two workers only: what is in flight, with what was handed over a moment ago.
/// - **Defaults**: two choices.
/// - **Trade-offs**: nearly as even as `least-loaded`, and many routers with the same stale news don't all go to the same
///   worker. Finds prefixes by chance.
#[derive(Debug)]
pub struct PowerOfTwo {
    random: Random,
}

impl PowerOfTwo {
    /// The same choices for the same seed.
    pub fn new(seed: u64) -> Self {
        Self { random: Random::new(seed) }
    }
}

impl Policy for PowerOfTwo {
    fn pick(&mut self, _: &Ask, workers: &[Candidate]) -> usize {
        let first = self.random.below(workers.len());
        if workers.len() < 2 {
            return first;
        }
        // The second is another one: drawn from those left.
        let second = (first + 1 + self.random.below(workers.len() - 1)) % workers.len();
        if workers[second].load() < workers[first].load() { second } else { first }
    }
}

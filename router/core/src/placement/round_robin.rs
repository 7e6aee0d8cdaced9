//! Placement policy `round-robin`.

use super::{Ask, Candidate, Policy, Turn};

/// One worker after the other.
///
/// - **Inputs**: which workers have room.
/// - **Defaults**: the seed chooses the first worker.
/// - **Trade-offs**: even in numbers of requests and in nothing else: requests of very different lengths
///   leave some workers with most of the work, and prefixes are hit by chance. The baseline, and right where
///   all requests are alike and short.
#[derive(Debug)]
pub struct RoundRobin {
    turn: Turn,
}

impl RoundRobin {
    /// Creates the policy; the seed chooses the first worker.
    pub fn new(seed: u64) -> Self {
        Self { turn: Turn::new(seed) }
    }
}

impl Policy for RoundRobin {
    fn pick(&mut self, _: &Ask, workers: &[Candidate]) -> usize {
        self.turn.best(workers, |_| ())
    }
}

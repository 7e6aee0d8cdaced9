use super::{Ask, Candidate, Policy, Turn};

/// One worker after the other.
///
/// - **Inputs**: none but who has room.
/// - **Defaults**: begins behind a worker that the seed chooses.
/// - **Trade-offs**: even in numbers of requests and in nothing else: requests of very different lengths leave some
///   workers with most of the work, and a conversation finds its prefix only by chance. The baseline, and right
///   where all requests are alike and short.
#[derive(Debug)]
pub struct RoundRobin {
    turn: Turn,
}

impl RoundRobin {
    /// Begins at a place that the seed chooses.
    pub fn new(seed: u64) -> Self {
        Self { turn: Turn::new(seed) }
    }
}

impl Policy for RoundRobin {
    fn pick(&mut self, _: &Ask, workers: &[Candidate]) -> usize {
        self.turn.best(workers, |_| ())
    }
}

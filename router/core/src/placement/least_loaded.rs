use super::{Ask, Candidate, Policy, Turn};

/// The worker that is relatively least loaded after taking the request; among equals, one after the other.
///
/// - **Inputs**: the sequences and blocks of the session in flight, those handed over a moment ago included, as a
///   fraction of its grant, which shrinks by what other routers have there.
/// - **Defaults**: none.
/// - **Trade-offs**: balances what is in flight, whatever work that still is, and large and small workers by their
///   size. It looks at every worker, so many routers with the same news agree on the same one, though each
///   only until its own requests count; and prefixes are found by chance.
#[derive(Debug)]
pub struct LeastLoaded {
    turn: Turn,
}

impl LeastLoaded {
    /// Begins at a place that the seed chooses.
    pub fn new(seed: u64) -> Self {
        Self { turn: Turn::new(seed) }
    }
}

impl Policy for LeastLoaded {
    fn pick(&mut self, _: &Ask, workers: &[Candidate]) -> usize {
        self.turn.best(workers, Candidate::load)
    }
}

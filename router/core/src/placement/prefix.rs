use std::cmp::Reverse;

use super::{Ask, Candidate, Policy, Turn};

/// The worker that has most of the prompt, if it is enough; else the least loaded.
///
/// - **Inputs**: the index of what each worker holds, with what was just placed there and will be; the load as
///   `least-loaded` has it.
/// - **Defaults**: enough is half of the prompt.
/// - **Trade-offs**: conversations stay where they are and compute each turn once, but it does not see that a worker with
///   the prefix is busy until it has no room at all, so a popular prefix makes a hot spot; and a prefix below
///   the threshold counts for nothing. `cost` weighs both.
#[derive(Debug)]
pub struct Prefix {
    turn: Turn,
}

impl Prefix {
    /// A prefix counts if it is at least one part in this many of the prompt.
    const PART: u64 = 2;

    /// Begins at a place that the seed chooses.
    pub fn new(seed: u64) -> Self {
        Self { turn: Turn::new(seed) }
    }
}

impl Policy for Prefix {
    fn pick(&mut self, ask: &Ask, workers: &[Candidate]) -> usize {
        self.turn.best(workers, |worker| {
            let cached = worker.estimate.cached;
            let enough = u64::from(cached.tokens()) * Self::PART >= u64::from(ask.prompt_tokens).max(1);
            // What lies on the device is worth more than the same on the host.
            let found = if enough { (cached.tokens(), cached.device_tokens) } else { (0, 0) };
            (Reverse(found), worker.load())
        })
    }

    fn reads_prefixes(&self) -> bool {
        true
    }
}

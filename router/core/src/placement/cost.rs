use super::{Ask, Candidate, Ordered, Policy, Turn};

/// The worker where the request is predicted to be complete first, at the least expense of the next. The default.
///
/// - **Inputs**: each worker's own cost model, as it learnt it from its steps; the prefill that it has taken on, and what
///   was handed to it since; how long its decodes make a step, and how much longer a prefill takes beside them; what of
///   the prompt it has on its device, or on its host for the price of a copy.
/// - **Defaults**: predicted seconds are stretch * (prefill ahead + 2 * (own uncached prefill and copies from the host)),
///   plus a step with the decodes there and this one for each token of output; see [`super::Estimate::completion`]. The
///   own prefill counts twice, because whoever comes next waits for it, too. There are no other weights: affinity
///   and balance are in the same unit, so a prefix is followed as long as waiting for it is cheaper than computing it
///   elsewhere.
/// - **Trade-offs**: as good as the workers' cost models and the guess of the output's length. It needs the hash of
///   each block of the prompt (below a microsecond each).
#[derive(Debug)]
pub struct Cost {
    turn: Turn,
}

impl Cost {
    /// Begins at a place that the seed chooses.
    pub fn new(seed: u64) -> Self {
        Self { turn: Turn::new(seed) }
    }
}

impl Policy for Cost {
    fn pick(&mut self, ask: &Ask, workers: &[Candidate]) -> usize {
        self.turn.best(workers, |worker| {
            let estimate = &worker.estimate;
            let completion = estimate.completion(ask.prompt_tokens, ask.output_tokens);
            (Ordered(completion + estimate.burden(ask.prompt_tokens)), worker.load())
        })
    }

    fn reads_prefixes(&self) -> bool {
        true
    }
}

//! Placement policy `cost`: minimal predicted completion time.

use super::{Candidate, Ordered, PlacementRequest, Policy, TieBreaker};

/// Worker with the earliest predicted completion of the request, plus the delay it causes to the next. The
/// default.
///
/// - **Inputs**: each worker's own cost model, fitted online; its accepted prefill backlog and what was
///   dispatched since; its step time with the current decodes and the slowdown of prefills beside them; the
///   prompt's blocks cached on the device, or on the host at the price of a copy.
/// - **Defaults**: predicted seconds are stretch * (prefill ahead + 2 * (own uncached prefill and copies from
///   the host)), plus one step with the current decodes and this one per output token; see
///   [`super::Estimate::completion`]. The own prefill counts twice, because the next request waits for it,
///   too. There are no other weights: affinity and balance are in the same unit, so a prefix is followed as
///   long as waiting for it is cheaper than computing it elsewhere.
/// - **Trade-offs**: as good as the workers' cost models and the guess of the output's length. Needs the hash
///   of each block of the prompt (below a microsecond each).
#[derive(Debug)]
pub struct Cost {
    tie_breaker: TieBreaker,
}

impl Cost {
    /// Creates the policy; the seed chooses the first worker among equals.
    pub fn new(seed: u64) -> Self {
        Self { tie_breaker: TieBreaker::new(seed) }
    }
}

impl Policy for Cost {
    fn pick(&mut self, request: &PlacementRequest, workers: &[Candidate]) -> usize {
        self.tie_breaker.best(workers, |worker| {
            let estimate = &worker.estimate;
            let completion = estimate.completion(request.prompt_tokens, request.output_tokens);
            (Ordered(completion + estimate.delay_to_next(request.prompt_tokens)), worker.load())
        })
    }

    fn reads_prefixes(&self) -> bool {
        true
    }
}

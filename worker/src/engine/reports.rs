//! What an engine reports to sessions beside its events: recording, prefix cache, costs, charges, predictions.

use std::time::Duration;

use inflight_contract::{BlockHash, CostCoefficients, Service, ServiceCounter};
use inflight_worker_core::{CacheEvent, CacheTier, PrefillEstimate};

use super::Engine;

impl Engine {
    /// Takes the recording since the last call; empty unless [`EngineOptions::record`](super::EngineOptions::record).
    pub fn take_log(&mut self) -> Vec<u8> {
        self.scheduler.take_log()
    }

    /// Takes the prefix-cache events since the last call, in order.
    pub fn drain_cache_events(&mut self) -> impl Iterator<Item = (CacheTier, CacheEvent)> + '_ {
        self.cache_events.extend(self.scheduler.drain_cache_events());
        self.cache_events.drain(..)
    }

    /// Blocks in the prefix cache, including changes whose events were not taken yet.
    pub fn cache_contents(&self) -> impl Iterator<Item = (CacheTier, BlockHash)> + '_ {
        self.scheduler.cache_contents()
    }

    /// Coefficients of the cost model.
    pub fn cost_coefficients(&self) -> CostCoefficients {
        self.scheduler.cost().coefficients()
    }

    /// Estimated prefill backlog ahead of a prompt that arrives now.
    pub fn prefill_estimate(&self) -> PrefillEstimate {
        self.scheduler.prefill_estimate()
    }

    /// Takes the tenants charged since the last call, with their total charges.
    pub fn drain_charged(&mut self) -> impl Iterator<Item = (&str, ServiceCounter)> + '_ {
        self.scheduler.drain_charged()
    }

    /// Total charges of all known tenants.
    pub fn charged(&self) -> impl Iterator<Item = (&str, ServiceCounter)> + '_ {
        self.scheduler.tenants().charged()
    }

    /// Virtual time: the highest virtual start time of the sequences that have started.
    pub fn virtual_time(&self) -> Service {
        self.scheduler.virtual_time()
    }

    /// Predicted TTFT of a new prompt with `tokens` tokens to compute.
    pub fn predict_first_token(&self, tokens: u32) -> Duration {
        self.scheduler.predict_first_token(tokens)
    }

    /// Predicted duration of the largest iteration: a full token budget at the end of the longest contexts.
    pub fn predict_largest_step(&self) -> Duration {
        let limits = self.scheduler.limits();
        let seconds = self.cost_coefficients().largest_step(
            limits.iteration_tokens,
            limits.running_max,
            limits.sequence_tokens,
        );
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

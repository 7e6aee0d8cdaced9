//! What an engine reports to sessions beside its events: recording, prefix cache, costs, charges, predictions.

use std::time::Duration;

use inflight_contract::{
    BlockHash, CostCoefficients, GROUPS_MAX, ModelLimits, Service, ServiceCounter, TenantCharge,
};
use inflight_runtime::RuntimeFacts;
use inflight_worker_core::{CacheEvent, CacheTier, Grant, History, Load, PrefillEstimate, SchedulerLimits};

use super::{Engine, SessionId};

/// Queueing time of a sequence that was admitted for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueingTime {
    /// Time in the worker's queue.
    pub worker: Duration,
    /// Time since the request's arrival at its router; `None` if it had output before.
    pub total: Option<Duration>,
}

impl Engine {
    /// Limits that the model sets on requests.
    pub fn model_limits(&self) -> ModelLimits {
        self.model
    }

    /// Limits of the scheduler.
    pub fn limits(&self) -> &SchedulerLimits {
        self.scheduler.limits()
    }

    /// Bytes of a KV block; 0 for simulated devices.
    pub fn block_bytes(&self) -> u64 {
        self.runtime.capabilities().block_bytes
    }

    /// Device and memory, for operators.
    pub fn facts(&self) -> &RuntimeFacts {
        &self.runtime.capabilities().facts
    }

    /// Blocks in the tables of the running sequences, by group of layers.
    pub fn group_blocks(&self) -> [u32; GROUPS_MAX] {
        self.scheduler.group_blocks()
    }

    /// Blocks of the recurrent states of the running sequences, and snapshots in the prefix cache.
    pub fn state_use(&self) -> (u32, u32) {
        self.scheduler.state_use()
    }

    /// Load of the scheduler.
    pub fn load(&self) -> Load {
        self.scheduler.load()
    }

    /// Statistics of recent iterations.
    pub fn history(&self) -> &History {
        self.scheduler.history()
    }

    /// Number of the iteration planned last.
    pub fn iteration(&self) -> u64 {
        self.scheduler.iteration().number
    }

    /// Grant of each open session.
    pub fn grants(&self) -> impl Iterator<Item = (SessionId, Grant)> + '_ {
        self.granting.divide(self.scheduler.load().blocks_used)
    }

    /// Priority sequences that each session may have in flight beyond its grant: such that outrank one in
    /// flight.
    pub fn priority_sequences(&self) -> impl Iterator<Item = (SessionId, u32)> + '_ {
        self.granting.priority_sequences()
    }

    /// Maximum queueing times kept for [`Engine::drain_queueing_times`]; further ones are dropped.
    const QUEUEING_TIMES_MAX: usize = 4096;

    /// Keeps the queueing times of the sequences that the last plan has admitted for the first time.
    pub(super) fn keep_queueing_times(&mut self) {
        let room = Self::QUEUEING_TIMES_MAX.saturating_sub(self.queueing_times.len());
        for &(id, worker) in self.scheduler.queueing_times().iter().take(room) {
            let queued = self.live.get(id).and_then(|live| live.queued);
            let total = queued.map(|queued| queued.saturating_add(worker));
            self.queueing_times.push(QueueingTime { worker, total });
        }
    }

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

    /// Takes the queueing times of the sequences that were admitted for the first time since the last call. The driver
    /// takes them after every step.
    pub fn drain_queueing_times(&mut self) -> impl Iterator<Item = QueueingTime> + '_ {
        self.queueing_times.drain(..)
    }

    /// Coefficients of the cost model.
    pub fn cost_coefficients(&self) -> CostCoefficients {
        self.scheduler.cost().coefficients()
    }

    /// Estimated prefill backlog ahead of a prompt that arrives now.
    pub fn prefill_estimate(&self) -> PrefillEstimate {
        self.scheduler.prefill_estimate()
    }

    /// Takes the charges of the tenants charged since the last call.
    pub fn drain_charged(&mut self) -> impl Iterator<Item = TenantCharge<'_>> + '_ {
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

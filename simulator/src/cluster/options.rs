//! Configuration of a simulated cluster.

use std::time::Duration;

use inflight_router_core::Policy;
use inflight_worker_core::{DeviceProfile, SchedulerLimits, StepTarget};

/// Configuration of a simulated cluster.
#[derive(Debug, Clone, Copy)]
pub struct ClusterOptions {
    /// Number of independent routers; requests are assigned to them round-robin.
    pub routers: usize,
    /// Number of workers.
    pub workers: usize,
    /// Device profile of each worker.
    pub profile: DeviceProfile,
    /// Scheduler limits of each worker.
    pub limits: SchedulerLimits,
    /// Sequences that may be in flight at a worker beyond the running ones.
    pub queue_ahead: u32,
    /// One-way network delay between a router and a worker.
    pub hop: Duration,
    /// Whether requests that outrank those in flight may exceed a router's grant.
    pub outranking: bool,
    /// Creates a router's placement policy from a seed.
    pub policy: fn(u64) -> Box<dyn Policy>,
}

impl ClusterOptions {
    /// Returns options for one router and `workers` workers with the pools of the profile.
    pub fn new(workers: usize, profile: DeviceProfile, policy: fn(u64) -> Box<dyn Policy>) -> Self {
        let block_tokens = 64;
        let limits = SchedulerLimits {
            host_blocks: profile.host_tokens / block_tokens,
            waiting_max: 4096,
            step_target: StepTarget::adaptive(),
            ..SchedulerLimits::new(block_tokens, profile.pool_tokens / block_tokens, 256, 2048)
        };
        Self {
            routers: 1,
            workers,
            profile,
            limits,
            queue_ahead: 32,
            hop: Duration::from_micros(200),
            outranking: true,
            policy,
        }
    }
}

//! Order and bounds of the queue.

use std::time::Duration;

use inflight_contract::TokenCost;

use crate::queue_bounds::QueueLimits;

/// Order and bounds of a [`FairQueue`](crate::FairQueue).
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize, clap::Args)]
pub struct FairQueueOptions {
    /// Bounds on the waiting requests over all tenants and lanes.
    #[command(flatten)]
    pub limits: QueueLimits,
    /// Service charged per prompt and output token.
    #[arg(skip)]
    pub cost: TokenCost,
    /// Ageing: service, in tokens of weight 1, forgiven per second of queueing
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 0.0,
        env = "INFLIGHT_ROUTER_AGING_TOKENS_PER_SECOND"
    )]
    pub aging_tokens_per_second: f64,
    /// Ageing: maximum service forgiven
    // The bound on the difference of two tenants' services grows by it.
    #[arg(long, value_name = "TOKENS", default_value_t = 0.0, env = "INFLIGHT_ROUTER_AGING_TOKENS_MAX")]
    pub aging_tokens_max: f64,
    /// Queueing time after which a request goes first within its tenant, at the highest priority
    // The priority is that of the tenant's first request. It gains nothing against other tenants, so that a tenant that floods the queue
    // does not profit.
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "5m",
        value_parser = inflight_options::duration,
        env = "INFLIGHT_ROUTER_AGING_THRESHOLD"
    )]
    pub aging_threshold: Duration,
    /// Head-of-line bypass: how many later requests may be dispatched ahead of one that fits on no worker now
    #[arg(long, value_name = "N", default_value_t = 16, env = "INFLIGHT_ROUTER_BYPASS_MAX")]
    pub bypass_max: u32,
    /// Number of requests behind the head that are considered for a bypass.
    #[arg(skip = 8_usize)]
    pub lookahead: usize,
    /// Maximum number of idle tenants whose service a lane remembers.
    #[arg(skip = 10_000_usize)]
    pub idle_tenants_max: usize,
}

impl Default for FairQueueOptions {
    fn default() -> Self {
        inflight_options::defaults()
    }
}

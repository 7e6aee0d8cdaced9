//! Bounds of a queue and the usage counted against them.

use inflight_contract::Weight;

/// Bounds of a queue, or of a tenant in it. As command-line options: the bounds of the router's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::Args)]
pub struct QueueLimits {
    /// Maximum requests in the queue
    #[arg(
        id = "queue_requests_max",
        long = "queue-requests-max",
        value_name = "N",
        default_value_t = 1024,
        env = "INFLIGHT_ROUTER_QUEUE_REQUESTS_MAX"
    )]
    pub requests: usize,
    /// Maximum tokens in the queue, counting each request's prompt and max_tokens of all its choices
    #[arg(
        id = "queue_tokens_max",
        long = "queue-tokens-max",
        value_name = "N",
        default_value_t = 4 << 20,
        env = "INFLIGHT_ROUTER_QUEUE_TOKENS_MAX"
    )]
    pub tokens: u64,
}

impl QueueLimits {
    /// No bound.
    pub const NONE: Self = Self { requests: usize::MAX, tokens: u64::MAX };

    /// Returns one of `routers` equal shares, each of at least one request and one token.
    pub fn divided(self, routers: u32) -> Self {
        let routers = routers.max(1);
        Self {
            requests: (self.requests / routers as usize).max(1),
            tokens: (self.tokens / u64::from(routers)).max(1),
        }
    }
}

/// Queue usage of a tenant, or of all tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueUsage {
    /// Waiting requests.
    pub requests: usize,
    /// Maximum tokens of these requests.
    pub tokens: u64,
    /// Fair-share weight of the tenant.
    pub weight: Weight,
}

impl QueueUsage {
    /// Returns the bound that one more request with `tokens` would exceed, if any. An empty queue accepts any
    /// number of tokens.
    pub(crate) fn exceeded(&self, tokens: u64, limits: QueueLimits) -> Option<QueueFull> {
        if self.requests >= limits.requests {
            return Some(QueueFull {
                tenant: None,
                bound: QueueBound::Requests { held: self.requests, limit: limits.requests },
            });
        }
        if self.requests > 0 && self.tokens.saturating_add(tokens) > limits.tokens {
            let (held, limit) = (self.tokens, limits.tokens);
            return Some(QueueFull {
                tenant: None,
                bound: QueueBound::Tokens { held, asked: tokens, limit },
            });
        }
        None
    }

    pub(crate) fn minus(self, requests: usize, tokens: u64) -> Self {
        Self { requests: self.requests - requests, tokens: self.tokens - tokens, ..self }
    }
}

/// Queue bound that an arrival would exceed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct QueueFull {
    /// Tenant whose bound it is; `None` for the bound of the whole queue.
    pub tenant: Option<String>,
    /// The bound.
    pub bound: QueueBound,
}

/// Kind of a queue bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum QueueBound {
    /// Bound on requests.
    Requests {
        /// Requests held.
        held: usize,
        /// The limit.
        limit: usize,
    },
    /// Bound on tokens.
    Tokens {
        /// Tokens held.
        held: u64,
        /// Tokens of the request.
        asked: u64,
        /// The limit.
        limit: u64,
    },
}

impl QueueFull {
    pub(crate) fn of_tenant(self, tenant: &str) -> Self {
        Self { tenant: Some(tenant.to_owned()), ..self }
    }

    /// Returns the command-line option or the tenants file's field that sets the limit.
    fn option(&self) -> &'static str {
        match (&self.tenant, self.bound) {
            (None, QueueBound::Requests { .. }) => "--queue-requests-max",
            (None, QueueBound::Tokens { .. }) => "--queue-tokens-max",
            (Some(_), QueueBound::Requests { .. }) => "queue_requests in the tenants file",
            (Some(_), QueueBound::Tokens { .. }) => "queue_tokens in the tenants file",
        }
    }

    /// Returns a stable name of the bound.
    pub fn quota(&self) -> &'static str {
        match (&self.tenant, self.bound) {
            (None, QueueBound::Requests { .. }) => "queue_requests",
            (None, QueueBound::Tokens { .. }) => "queue_tokens",
            (Some(_), QueueBound::Requests { .. }) => "tenant_queue_requests",
            (Some(_), QueueBound::Tokens { .. }) => "tenant_queue_tokens",
        }
    }
}

impl std::fmt::Display for QueueFull {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.tenant {
            None => write!(out, "the queue holds ")?,
            Some(tenant) => write!(out, "the queue holds for the tenant {tenant:?} ")?,
        }
        match self.bound {
            QueueBound::Requests { held, limit } => write!(out, "{held} requests; the limit is {limit}")?,
            QueueBound::Tokens { held, asked, limit } => {
                write!(out, "{held} tokens, and this request would add {asked}; the limit is {limit}")?;
            }
        }
        write!(out, " ({}); try again later", self.option())
    }
}

impl std::error::Error for QueueFull {}

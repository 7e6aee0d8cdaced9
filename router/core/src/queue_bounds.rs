use inflight_contract::Weight;

/// What a queue, or a tenant in it, may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Most requests that wait.
    pub requests: usize,
    /// Most tokens that the waiting requests may come to hold together.
    pub tokens: u64,
}

impl QueueLimits {
    /// No bound at all.
    pub const NONE: Self = Self { requests: usize::MAX, tokens: u64::MAX };

    /// One of `routers` equal parts, each of at least one request and one token.
    pub fn divided(self, routers: u32) -> Self {
        let routers = routers.max(1);
        Self {
            requests: (self.requests / routers as usize).max(1),
            tokens: (self.tokens / u64::from(routers)).max(1),
        }
    }
}

/// What a tenant, or everybody together, holds in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hold {
    /// Requests that wait.
    pub requests: usize,
    /// Tokens that they may come to hold.
    pub tokens: u64,
    /// The tenant's share.
    pub weight: Weight,
}

impl Hold {
    /// Why one more request of so many tokens is too much; `None` if it is not. Where nothing waits, any number of
    /// tokens is taken.
    pub(crate) fn full(&self, tokens: u64, limits: QueueLimits) -> Option<QueueFull> {
        if self.requests >= limits.requests {
            return Some(QueueFull {
                tenant: None,
                bound: Bound::Requests { held: self.requests, limit: limits.requests },
            });
        }
        if self.requests > 0 && self.tokens.saturating_add(tokens) > limits.tokens {
            let (held, limit) = (self.tokens, limits.tokens);
            return Some(QueueFull { tenant: None, bound: Bound::Tokens { held, asked: tokens, limit } });
        }
        None
    }

    pub(crate) fn less(self, requests: usize, tokens: u64) -> Self {
        Self { requests: self.requests - requests, tokens: self.tokens - tokens, ..self }
    }
}

/// A bound that an arrival would pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueFull {
    /// Whose bound it is; `None` is everybody's.
    pub tenant: Option<String>,
    /// The bound.
    pub bound: Bound,
}

/// Which bound it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// That on requests.
    Requests {
        /// Requests held.
        held: usize,
        /// The limit.
        limit: usize,
    },
    /// That on tokens.
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

    /// A stable name of the bound.
    pub fn quota(&self) -> &'static str {
        match (&self.tenant, self.bound) {
            (None, Bound::Requests { .. }) => "queue_requests",
            (None, Bound::Tokens { .. }) => "queue_tokens",
            (Some(_), Bound::Requests { .. }) => "tenant_queue_requests",
            (Some(_), Bound::Tokens { .. }) => "tenant_queue_tokens",
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
            Bound::Requests { held, limit } => {
                write!(out, "{held} requests, its limit being {limit}; try again later")
            }
            Bound::Tokens { held, asked, limit } => write!(
                out,
                "{held} tokens and this request would add {asked}, over its limit of {limit}; try again later"
            ),
        }
    }
}

impl std::error::Error for QueueFull {}

//! Limits of a tenant on rates, concurrency and connections, and their usage at one router.

use std::time::Duration;

use crate::{BudgetExceeded, DailyLimit, Gcra, QueueLimits, RateCharge, RateLimit};
use inflight_contract::{Priority, Weight};

/// Limits of a tenant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TenantLimits {
    /// Fair-share weight.
    pub weight: Weight,
    /// Maximum priority of its requests.
    pub priority_max: Priority,
    /// Maximum requests per minute; `None` for no limit.
    pub requests_per_minute: Option<u64>,
    /// Maximum tokens per minute, prompts and output together; `None` for no limit.
    pub tokens_per_minute: Option<u64>,
    /// Maximum tokens per UTC day, prompts and output together; `None` for no limit.
    pub tokens_per_day: Option<u64>,
    /// Maximum open requests, waiting and streaming; `None` for no limit.
    pub concurrent_requests: Option<u32>,
    /// Maximum connections; `None` for no limit.
    pub connections: Option<u32>,
    /// Bounds on its waiting requests.
    pub queue: QueueLimits,
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self {
            weight: Weight::default(),
            priority_max: Priority::MAX,
            requests_per_minute: None,
            tokens_per_minute: None,
            tokens_per_day: None,
            concurrent_requests: None,
            connections: None,
            queue: QueueLimits::NONE,
        }
    }
}

/// Limit of a tenant that a request would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OverLimit {
    /// Too many requests per minute.
    #[error("more than {per_minute} requests a minute")]
    Requests {
        /// The limit.
        per_minute: u64,
        /// Time until the request would be admitted.
        wait: Duration,
    },
    /// Too many tokens per minute.
    #[error("more than {per_minute} tokens a minute")]
    Tokens {
        /// The limit.
        per_minute: u64,
        /// Time until the request would be admitted.
        wait: Duration,
    },
    /// Too many tokens per UTC day.
    #[error(
        "more than {} tokens a UTC day, of which {} are this router's share: {} are used, {} reserved by open requests, and this request may take {asked}", limit.per_day, limit.share(), exceeded.used, exceeded.reserved
    )]
    DailyTokens {
        /// The limit.
        limit: DailyLimit,
        /// Maximum tokens of the request.
        asked: u64,
        /// Use of the budget.
        exceeded: BudgetExceeded,
    },
    /// Too many open requests.
    #[error("more than {limit} requests at once")]
    Concurrent {
        /// The limit.
        limit: u32,
    },
    /// Too many connections.
    #[error("more than {limit} connections at once")]
    Connections {
        /// The limit.
        limit: u32,
    },
}

impl OverLimit {
    /// Returns the time until a retry would be admitted, if known.
    pub fn wait(&self) -> Option<Duration> {
        match self {
            Self::Requests { wait, .. } | Self::Tokens { wait, .. } => Some(*wait),
            Self::DailyTokens { exceeded, .. } => exceeded.wait,
            Self::Concurrent { .. } | Self::Connections { .. } => None,
        }
    }

    /// Returns a stable name of the limit.
    pub fn quota(&self) -> &'static str {
        match self {
            Self::Requests { .. } => "requests_per_minute",
            Self::Tokens { .. } => "tokens_per_minute",
            Self::DailyTokens { .. } => "tokens_per_day",
            Self::Concurrent { .. } => "concurrent_requests",
            Self::Connections { .. } => "connections",
        }
    }
}

/// Usage of a tenant's limits at one router. Limits are passed with each call, because they may change. Rates
/// and concurrent requests are divided by the number of routers, so that more routers do not raise them; each
/// router admits at least one request.
///
/// Invariant: `open` and `connections` count what has entered and not yet left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantGate {
    requests: Gcra,
    tokens: Gcra,
    open: u32,
    connections: u32,
}

impl TenantGate {
    /// Admits a request, until [`TenantGate::leave`].
    ///
    /// # Errors
    /// [`OverLimit`]; nothing is counted then.
    pub fn enter(&mut self, limits: &TenantLimits, routers: u32, now: Duration) -> Result<(), OverLimit> {
        if let Some(limit) = limits.concurrent_requests
            && self.open >= (limit / routers.max(1)).max(1)
        {
            return Err(OverLimit::Concurrent { limit });
        }
        if let Some(per_minute) = limits.requests_per_minute {
            let rate = RateLimit { per_minute, routers };
            self.requests.check(rate, 1, now).map_err(|wait| OverLimit::Requests { per_minute, wait })?;
            self.requests.take(rate, 1, now);
        }
        self.open += 1;
        Ok(())
    }

    /// Records the end of a request.
    pub fn leave(&mut self) {
        debug_assert!(self.open > 0, "more requests left than entered");
        self.open = self.open.saturating_sub(1);
    }

    /// Charges up to `tokens` to the tenant's rate. Unused tokens of the returned charge, if there is a
    /// limit, are refunded by [`TenantGate::return_tokens`].
    ///
    /// # Errors
    /// [`OverLimit::Tokens`]; nothing is counted then.
    pub fn take_tokens(
        &mut self,
        limits: &TenantLimits,
        routers: u32,
        tokens: u64,
        now: Duration,
    ) -> Result<Option<RateCharge>, OverLimit> {
        let Some(per_minute) = limits.tokens_per_minute else { return Ok(None) };
        let rate = RateLimit { per_minute, routers };
        self.tokens.check(rate, tokens, now).map_err(|wait| OverLimit::Tokens { per_minute, wait })?;
        Ok(Some(self.tokens.take(rate, tokens, now)))
    }

    /// Refunds `unused` tokens of a charge, at the rate of the charge: the limits may have changed since.
    pub fn return_tokens(&mut self, taken: RateCharge, unused: u64) {
        self.tokens.refund(taken, unused);
    }

    /// Counts a connection of the tenant.
    ///
    /// # Errors
    /// [`OverLimit::Connections`]; nothing is counted then.
    pub fn connect(&mut self, limits: &TenantLimits) -> Result<(), OverLimit> {
        match limits.connections {
            Some(limit) if self.connections >= limit => Err(OverLimit::Connections { limit }),
            _ => {
                self.connections += 1;
                Ok(())
            }
        }
    }

    /// Records the end of a connection.
    pub fn disconnect(&mut self) {
        debug_assert!(self.connections > 0, "more connections ended than began");
        self.connections = self.connections.saturating_sub(1);
    }

    /// Returns the number of open requests.
    pub fn open(&self) -> u32 {
        self.open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: TenantLimits = TenantLimits {
        weight: Weight::ONE,
        priority_max: Priority::clamped(5),
        requests_per_minute: Some(60),
        tokens_per_minute: Some(6_000),
        tokens_per_day: None,
        concurrent_requests: Some(4),
        connections: Some(1),
        queue: QueueLimits::NONE,
    };

    #[test]
    fn each_limit_rejects_by_its_name_and_counts_nothing_then() {
        let mut gate = TenantGate::default();
        let at = Duration::from_secs;
        for _ in 0..4 {
            gate.enter(&LIMITS, 1, at(0)).unwrap();
        }
        assert_eq!(gate.enter(&LIMITS, 1, at(0)), Err(OverLimit::Concurrent { limit: 4 }));
        gate.leave();
        assert_eq!(
            gate.enter(&LIMITS, 2, at(0)),
            Err(OverLimit::Concurrent { limit: 4 }),
            "half of it is two"
        );
        for _ in 0..6 {
            gate.enter(&LIMITS, 1, at(0)).unwrap();
            gate.leave();
        }
        let refused = gate.enter(&LIMITS, 1, at(0));
        assert_eq!(refused, Err(OverLimit::Requests { per_minute: 60, wait: at(1) }));
        assert_eq!(gate.open(), 3);
        gate.enter(&LIMITS, 1, at(1)).unwrap();

        let taken = gate.take_tokens(&LIMITS, 1, 1_000, at(1)).unwrap().unwrap();
        let refused = gate.take_tokens(&LIMITS, 1, 100, at(1));
        assert_eq!(refused, Err(OverLimit::Tokens { per_minute: 6_000, wait: at(1) }));
        gate.return_tokens(taken, 900);
        gate.take_tokens(&LIMITS, 1, 900, at(1)).unwrap();

        gate.connect(&LIMITS).unwrap();
        assert_eq!(gate.connect(&LIMITS), Err(OverLimit::Connections { limit: 1 }));
        gate.disconnect();
        gate.connect(&LIMITS).unwrap();
    }

    proptest::proptest! {
        /// A change of the limits or of the number of routers between charge and refund does not change the
        /// refund.
        #[test]
        fn unused_tokens_are_refunded_at_the_rate_of_the_charge(
            limits in proptest::collection::vec((proptest::option::of(1u64..100_000), 1u32..5, 1u64..1_000), 1..20)
        ) {
            let mut gate = TenantGate::default();
            let mut taken = Vec::new();
            for (tokens_per_minute, routers, tokens) in limits {
                let limits = TenantLimits { tokens_per_minute, ..LIMITS };
                // Far apart in time, so that every charge is admitted.
                let at = Duration::from_secs(1_000_000) * (taken.len() as u32 + 1);
                let before = gate.clone();
                if let Some(taking) = gate.take_tokens(&limits, routers, tokens, at).unwrap() {
                    let mut back = gate.clone();
                    back.return_tokens(taking, tokens);
                    let again = back.take_tokens(&limits, routers, tokens, at).unwrap();
                    proptest::prop_assert_eq!((again, &back), (Some(taking), &gate));
                }
                taken.push(before);
            }
        }
    }

    #[test]
    fn half_of_a_charge_is_refunded_and_nothing_without_a_limit() {
        let at = Duration::from_secs;
        let mut gate = TenantGate::default();
        let free = TenantLimits { tokens_per_minute: None, ..LIMITS };
        assert_eq!(gate.take_tokens(&free, 1, 1_000_000, at(0)), Ok(None), "nothing was taken");
        let taken = gate.take_tokens(&LIMITS, 1, 1_000, at(0)).unwrap().unwrap();
        gate.return_tokens(taken, 500);
        let refused = gate.take_tokens(&LIMITS, 1, 1_000, at(0));
        assert_eq!(refused, Err(OverLimit::Tokens { per_minute: 6_000, wait: at(5) }));
    }
}

//! Tokens of a request, charged to its tenant.

use std::sync::Arc;
use std::time::Duration;

use inflight_router_core::{DailyLimit, OverLimit, RateCharge};

use super::Tenant;
use crate::clock;

/// Tokens charged to a tenant's rate and daily budget; unused ones are returned on drop.
pub(crate) struct TokenCharge {
    tenant: Arc<Tenant>,
    /// Charge at the rate in force then; `None` without a limit.
    taken: Option<RateCharge>,
    /// Tokens reserved of the daily budget; 0 without one.
    reserved: u64,
    /// Maximum tokens of the request.
    tokens: u64,
    used: u64,
}

impl TokenCharge {
    /// Charges tokens to the tenant's rate and reserves them of its daily budget. `now` is the time since the start of the router, and
    /// `routers` the number of routers among which the limits are divided.
    ///
    /// # Errors
    /// [`OverLimit`]: nothing is charged.
    pub(crate) fn take(
        tenant: &Arc<Tenant>,
        tokens: u64,
        routers: u32,
        now: Duration,
    ) -> Result<Self, OverLimit> {
        let mut state = tenant.lock();
        let limits = state.limits;
        let today = clock::since_unix_epoch();
        let daily = limits.tokens_per_day.map(|per_day| DailyLimit { per_day, routers });
        if let Some(limit) = daily {
            let reserved = state.budget.reserve(limit, tokens, today);
            reserved.map_err(|exceeded| OverLimit::DailyTokens { limit, asked: tokens, exceeded })?;
        }
        let reserved = if daily.is_some() { tokens } else { 0 };
        let taken = state.gate.take_tokens(&limits, routers, tokens, now);
        if taken.is_err() {
            state.budget.settle(reserved, 0, today);
        }
        drop(state);
        Ok(Self { tenant: tenant.clone(), taken: taken?, reserved, tokens, used: 0 })
    }

    /// Marks tokens as used.
    pub(crate) fn used(&mut self, tokens: u64) {
        self.used = self.used.saturating_add(tokens).min(self.tokens);
    }
}

impl Drop for TokenCharge {
    fn drop(&mut self) {
        let mut state = self.tenant.lock();
        if let Some(taken) = self.taken {
            state.gate.return_tokens(taken, self.tokens - self.used);
        }
        // Counted without a limit too, which a reload may set.
        state.budget.settle(self.reserved, self.used, clock::since_unix_epoch());
    }
}

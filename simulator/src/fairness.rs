//! Fairness measures: VTC's service difference over windows, and the maximum service gap between two
//! backlogged tenants, which start-time fair queueing bounds.

use std::collections::BTreeMap;

use inflight_contract::TokenCost;
use inflight_traces::ServedRequest;
use inflight_worker_core::Time;

use crate::{Observer, Request, RequestEvent};

/// Returns the cost of a request's prompt and output.
fn cost_of(served: &ServedRequest, cost: TokenCost) -> f64 {
    f64::from(served.prompt_tokens) * f64::from(cost.input)
        + f64::from(served.output_tokens) * f64::from(cost.output)
}

/// Service difference of Sheng et al., *Fairness in Serving Large Language Models* (OSDI 2024), section 5.1.
///
/// Evaluated at ticks, each over the window that begins there. A tenant's service is the cost of its requests
/// per second, spread evenly from first to last token; its demand is the cost of its arrivals. The difference
/// is the sum over all tenants of their distance to the best-served tenant, or to their demand if that is
/// less.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServiceDifference {
    /// Maximum over the ticks.
    pub max: f64,
    /// Mean over the ticks.
    pub mean: f64,
    /// Population variance over the ticks.
    pub variance: f64,
}

impl ServiceDifference {
    /// Length of a window in seconds.
    pub const WINDOW_S: f64 = 60.0;

    /// Returns the ticks used by the paper for ten minutes, in seconds.
    pub fn paper_ticks() -> Vec<f64> {
        (1..=19).map(|tick| 28.5 * f64::from(tick)).collect()
    }

    /// Measures served requests at these ticks (in seconds).
    pub fn measure(requests: &[ServedRequest], cost: TokenCost, ticks: &[f64]) -> Self {
        let at_ticks: Vec<f64> = ticks.iter().map(|tick| difference(requests, cost, *tick)).collect();
        let count = at_ticks.len().max(1) as f64;
        let mean = at_ticks.iter().sum::<f64>() / count;
        let variance = at_ticks.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        Self { max: at_ticks.iter().copied().fold(0.0, f64::max), mean, variance }
    }
}

/// Returns the service difference over the window that begins at `tick`, in cost units per second.
fn difference(requests: &[ServedRequest], cost: TokenCost, tick: f64) -> f64 {
    let end = tick + ServiceDifference::WINDOW_S;
    // Service and demand by tenant.
    let mut tenants: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
    for request in requests {
        let (service, demand) = tenants.entry(request.tenant).or_default();
        let overlap = request.end_s.min(end) - request.first_token_s.max(tick);
        let lasts = request.end_s - request.first_token_s;
        if overlap > 0.0 && lasts > 0.0 {
            *service += cost_of(request, cost) * overlap / lasts;
        }
        if request.arrival_s >= tick && request.arrival_s < end {
            *demand += cost_of(request, cost);
        }
    }
    let per_second = |(service, demand): &(f64, f64)| {
        (service / ServiceDifference::WINDOW_S, demand / ServiceDifference::WINDOW_S)
    };
    let best = tenants.values().map(|tenant| per_second(tenant).0).fold(0.0, f64::max);
    let below = tenants.values().map(|tenant| {
        let (service, demand) = per_second(tenant);
        (best - service).min((demand - service).abs())
    });
    below.sum()
}

/// Accounting of one tenant.
#[derive(Debug, Clone, Copy, Default)]
struct TenantAccount {
    weight: f64,
    /// Service over weight since the start, computed from events and not from the scheduler's counters.
    service: f64,
    waiting: u32,
    longest_prompt: u32,
    /// Cost of its most expensive request.
    max_cost: f64,
}

/// Minimum and maximum service difference of two tenants since both are backlogged.
#[derive(Debug, Clone, Copy)]
struct BackloggedInterval {
    min: f64,
    max: f64,
}

/// Observer of the maximum gap between the services of any two tenants while both are backlogged, that is,
/// while both have waiting requests.
///
/// Bound (VTC): over any interval in which tenants f and g stay backlogged, `|W_f/w_f - W_g/w_g|` is at most
/// `2 * max(w_in * L_in, w_out * M) / min(w_f, w_g)`, with `L_in` the longest prompt and `M` the token
/// capacity of the device and host pools.
///
/// Each head-of-line bypass at admission may add a request's cost to the gap: see
/// [`ServiceGap::with_bypasses`].
#[derive(Debug, Clone)]
pub struct ServiceGap {
    cost: TokenCost,
    pool_tokens: u32,
    bypasses: u32,
    aging: f64,
    tenants: BTreeMap<u32, TenantAccount>,
    /// Current intervals by pair of backlogged tenants, the smaller number first.
    intervals: BTreeMap<(u32, u32), BackloggedInterval>,
    largest: f64,
    largest_share: f64,
}

impl ServiceGap {
    /// Creates an observer for a scheduler with these token costs and pools of `pool_tokens` tokens.
    pub fn new(cost: TokenCost, pool_tokens: u32) -> Self {
        Self {
            cost,
            pool_tokens,
            bypasses: 0,
            aging: 0.0,
            tenants: BTreeMap::new(),
            intervals: BTreeMap::new(),
            largest: 0.0,
            largest_share: 0.0,
        }
    }

    /// Widens the bound by `bypasses` times the cost of the most expensive request of the two tenants, for
    /// [`bypass_max`](inflight_worker_core::SchedulerLimits::bypass_max).
    pub fn with_bypasses(mut self, bypasses: u32) -> Self {
        self.bypasses = bypasses;
        self
    }

    /// Widens the bound by the maximum service forgiven by aging, in tokens at weight 1, for each of the two
    /// tenants.
    pub fn with_aging(mut self, tokens_max: f64) -> Self {
        self.aging = tokens_max;
        self
    }

    /// Returns the largest gap, in tokens at weight 1.
    pub fn largest(&self) -> f64 {
        self.largest
    }

    /// Returns the largest gap relative to the bound of its two tenants; at most 1 if the bound holds.
    pub fn largest_share(&self) -> f64 {
        self.largest_share
    }

    /// Returns the bound for two tenants, in tokens at weight 1.
    pub fn bound(&self, f: u32, g: u32) -> f64 {
        let account = |tenant: u32| self.tenants.get(&tenant).copied().unwrap_or_default();
        let (f, g) = (account(f), account(g));
        let input = f64::from(self.cost.input) * f64::from(f.longest_prompt.max(g.longest_prompt));
        let output = f64::from(self.cost.output) * f64::from(self.pool_tokens);
        let bypasses = f64::from(self.bypasses) * f.max_cost.max(g.max_cost);
        (2.0 * input.max(output) + bypasses) / f.weight.min(g.weight) + 2.0 * self.aging
    }

    /// Returns the difference of two tenants' services since the start, in tokens at weight 1.
    pub fn difference(&self, f: u32, g: u32) -> f64 {
        let service = |tenant: u32| self.tenants.get(&tenant).map_or(0.0, |account| account.service);
        service(f) - service(g)
    }

    fn backlogged(&self, tenant: u32) -> bool {
        self.tenants.get(&tenant).is_some_and(|account| account.waiting > 0)
    }

    /// Updates the gaps after a change of a tenant's service or backlog.
    fn update(&mut self, tenant: u32) {
        let others: Vec<u32> = self.tenants.keys().copied().filter(|other| *other != tenant).collect();
        for other in others {
            let pair = (tenant.min(other), tenant.max(other));
            if !self.backlogged(tenant) || !self.backlogged(other) {
                self.intervals.remove(&pair);
                continue;
            }
            let now = self.difference(pair.0, pair.1);
            let interval = self.intervals.entry(pair).or_insert(BackloggedInterval { min: now, max: now });
            interval.min = interval.min.min(now);
            interval.max = interval.max.max(now);
            let gap = interval.max - interval.min;
            self.largest = self.largest.max(gap);
            self.largest_share = self.largest_share.max(gap / self.bound(pair.0, pair.1));
        }
    }
}

impl Observer for ServiceGap {
    fn request(&mut self, _: Time, _: usize, request: &Request, event: &RequestEvent) {
        let account = self.tenants.entry(request.tenant).or_default();
        account.weight = request.weight.get();
        account.longest_prompt = account.longest_prompt.max(request.prompt_tokens);
        let cost = f64::from(request.prompt_tokens) * f64::from(self.cost.input)
            + f64::from(request.output_tokens) * f64::from(self.cost.output);
        account.max_cost = account.max_cost.max(cost);
        match event {
            RequestEvent::Arrived | RequestEvent::Preempted(_) => account.waiting += 1,
            RequestEvent::Started => account.waiting -= 1,
            RequestEvent::Served { prompt_tokens, output_tokens } => {
                let tokens = u64::from(*prompt_tokens) * u64::from(self.cost.input)
                    + u64::from(*output_tokens) * u64::from(self.cost.output);
                account.service += tokens as f64 / account.weight;
            }
            RequestEvent::Refused(_) | RequestEvent::Ended(_) => return,
        }
        self.update(request.tenant);
    }
}

//! Two measures of fairness: the service difference over windows, as published for VTC, and the largest gap that
//! ever opens between two backlogged tenants, which the design bounds.

use std::collections::BTreeMap;

use inflight_contract::TokenCost;
use inflight_worker_core::Time;

use crate::{Event, Observer, Record, Request};

/// A request as far as the service difference depends on it. Times in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServedRequest {
    /// Whose it is.
    pub tenant: u32,
    /// When it arrived.
    pub arrival_s: f64,
    /// When its first token was there.
    pub first_token_s: f64,
    /// When its last was.
    pub end_s: f64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
}

impl ServedRequest {
    /// From the record of a request that is over.
    pub fn of(record: &Record) -> Option<Self> {
        let seconds = |at: Time| at.since(Time::ZERO).as_secs_f64();
        Some(Self {
            tenant: record.request.tenant,
            arrival_s: seconds(record.request.arrival),
            first_token_s: seconds(record.first_token?),
            end_s: seconds(record.ended?),
            prompt_tokens: record.request.prompt_tokens,
            output_tokens: record.output_tokens,
        })
    }

    fn cost(&self, cost: TokenCost) -> f64 {
        f64::from(self.prompt_tokens) * f64::from(cost.input)
            + f64::from(self.output_tokens) * f64::from(cost.output)
    }
}

/// The service difference of Sheng et al., *Fairness in Serving Large Language Models* (OSDI 2024), section 5.1.
///
/// At each tick, over the window that begins there: a tenant's service is the cost of its requests, spread evenly
/// from first to last token, per second; its demand the cost of those that arrived. The difference is the sum over
/// the tenants of how far each is below the best served, or below its demand if that is less.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServiceDifference {
    /// Largest over the ticks.
    pub max: f64,
    /// Mean over the ticks.
    pub mean: f64,
    /// Population variance over the ticks.
    pub variance: f64,
}

impl ServiceDifference {
    /// Length of a window.
    pub const WINDOW_S: f64 = 60.0;

    /// The ticks that the paper's ten minutes are looked at.
    pub fn paper_ticks() -> Vec<f64> {
        (1..=19).map(|tick| 28.5 * f64::from(tick)).collect()
    }

    /// Measures served requests at these ticks, in seconds.
    pub fn measure(requests: &[ServedRequest], cost: TokenCost, ticks: &[f64]) -> Self {
        let at_ticks: Vec<f64> = ticks.iter().map(|tick| difference(requests, cost, *tick)).collect();
        let count = at_ticks.len().max(1) as f64;
        let mean = at_ticks.iter().sum::<f64>() / count;
        let variance = at_ticks.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        Self { max: at_ticks.iter().copied().fold(0.0, f64::max), mean, variance }
    }
}

fn difference(requests: &[ServedRequest], cost: TokenCost, tick: f64) -> f64 {
    let end = tick + ServiceDifference::WINDOW_S;
    // Service and demand by tenant.
    let mut tenants: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
    for request in requests {
        let (service, demand) = tenants.entry(request.tenant).or_default();
        let overlap = request.end_s.min(end) - request.first_token_s.max(tick);
        let lasts = request.end_s - request.first_token_s;
        if overlap > 0.0 && lasts > 0.0 {
            *service += request.cost(cost) * overlap / lasts;
        }
        if request.arrival_s >= tick && request.arrival_s < end {
            *demand += request.cost(cost);
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

#[derive(Debug, Clone, Copy, Default)]
struct TenantState {
    weight: f64,
    /// Service over weight since the start: computed from events, not from the scheduler's counters.
    service: f64,
    waiting: u32,
    longest_prompt: u32,
    /// Cost of its dearest request.
    dearest: f64,
}

/// The gap between two tenants since both have been backlogged: least and largest difference of their services.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    least: f64,
    largest: f64,
}

/// Watches, at every instant, how far the services of any two tenants drift apart while both are backlogged, that
/// is while both have requests waiting.
///
/// The design's bound: over any interval in which tenants f and g stay backlogged, `|W_f/w_f - W_g/w_g|` is at most
/// `2 * max(w_in * L_in, w_out * M) / min(w_f, w_g)`, with `L_in` the longest prompt and `M` the tokens that admitted
/// requests can hold: those of the pool, and of the host pool if there is one.
///
/// Where the scheduler admits requests past one that does not fit, each such pass may add a request's cost to the gap:
/// see [`ServiceGap::with_passes`].
#[derive(Debug, Clone)]
pub struct ServiceGap {
    cost: TokenCost,
    pool_tokens: u32,
    passes: u32,
    ageing: f64,
    tenants: BTreeMap<u32, TenantState>,
    /// Of both tenants backlogged, the first being the smaller number.
    stretches: BTreeMap<(u32, u32), Stretch>,
    largest: f64,
    largest_share: f64,
}

impl ServiceGap {
    /// Watches a scheduler with these costs, whose admitted requests hold at most so many tokens.
    pub fn new(cost: TokenCost, pool_tokens: u32) -> Self {
        Self {
            cost,
            pool_tokens,
            passes: 0,
            ageing: 0.0,
            tenants: BTreeMap::new(),
            stretches: BTreeMap::new(),
            largest: 0.0,
            largest_share: 0.0,
        }
    }

    /// Widens the bound by the cost of this many requests, the longest and dearest of the two tenants: what
    /// [`bypass_max`](inflight_worker_core::Limits::bypass_max) passes can come to.
    pub fn with_passes(mut self, passes: u32) -> Self {
        self.passes = passes;
        self
    }

    /// Widens the bound by the service that ageing forgives at most, in tokens of weight 1: each of two tenants may be that
    /// far ahead of the other.
    pub fn with_ageing(mut self, tokens_max: f64) -> Self {
        self.ageing = tokens_max;
        self
    }

    /// The largest gap seen, in tokens of weight 1.
    pub fn largest(&self) -> f64 {
        self.largest
    }

    /// The largest gap seen as a share of the bound of its two tenants: at most 1 if the bound holds.
    pub fn largest_share(&self) -> f64 {
        self.largest_share
    }

    /// The bound for these two tenants, in tokens of weight 1.
    pub fn bound(&self, f: u32, g: u32) -> f64 {
        let state = |tenant: u32| self.tenants.get(&tenant).copied().unwrap_or_default();
        let (f, g) = (state(f), state(g));
        let input = f64::from(self.cost.input) * f64::from(f.longest_prompt.max(g.longest_prompt));
        let output = f64::from(self.cost.output) * f64::from(self.pool_tokens);
        let passes = f64::from(self.passes) * f.dearest.max(g.dearest);
        (2.0 * input.max(output) + passes) / f.weight.min(g.weight) + 2.0 * self.ageing
    }

    /// The difference of two tenants' services since the start, in tokens of weight 1.
    pub fn difference(&self, f: u32, g: u32) -> f64 {
        let service = |tenant: u32| self.tenants.get(&tenant).map_or(0.0, |state| state.service);
        service(f) - service(g)
    }

    fn backlogged(&self, tenant: u32) -> bool {
        self.tenants.get(&tenant).is_some_and(|state| state.waiting > 0)
    }

    /// A tenant's service or backlog has changed.
    fn update(&mut self, tenant: u32) {
        let others: Vec<u32> = self.tenants.keys().copied().filter(|other| *other != tenant).collect();
        for other in others {
            let pair = (tenant.min(other), tenant.max(other));
            if !self.backlogged(tenant) || !self.backlogged(other) {
                self.stretches.remove(&pair);
                continue;
            }
            let now = self.difference(pair.0, pair.1);
            let stretch = self.stretches.entry(pair).or_insert(Stretch { least: now, largest: now });
            stretch.least = stretch.least.min(now);
            stretch.largest = stretch.largest.max(now);
            let gap = stretch.largest - stretch.least;
            self.largest = self.largest.max(gap);
            self.largest_share = self.largest_share.max(gap / self.bound(pair.0, pair.1));
        }
    }
}

impl Observer for ServiceGap {
    fn request(&mut self, _: Time, _: usize, request: &Request, event: &Event) {
        let state = self.tenants.entry(request.tenant).or_default();
        state.weight = request.weight.get();
        state.longest_prompt = state.longest_prompt.max(request.prompt_tokens);
        let cost = f64::from(request.prompt_tokens) * f64::from(self.cost.input)
            + f64::from(request.output_tokens) * f64::from(self.cost.output);
        state.dearest = state.dearest.max(cost);
        match event {
            Event::Arrived | Event::Preempted(_) => state.waiting += 1,
            Event::Started => state.waiting -= 1,
            Event::Served { prompt_tokens, output_tokens } => {
                let tokens = u64::from(*prompt_tokens) * u64::from(self.cost.input)
                    + u64::from(*output_tokens) * u64::from(self.cost.output);
                state.service += tokens as f64 / state.weight;
            }
            Event::Refused(_) | Event::Ended(_) => return,
        }
        self.update(request.tenant);
    }
}

//! What the proofs share: where the traces are, and the machine that VTC's figures were measured on.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::PathBuf;

use inflight_contract::{TenantService, TokenCost};
use inflight_fixtures::skipped;
use inflight_simulator::{
    Device, ProfiledDevice, Records, Request, ServedRequest, ServiceDifference, ServiceGap, Simulation,
    percentile,
};
use inflight_worker_core::policy::{PolicyKind, SchedulingPolicy};
use inflight_worker_core::{CostModel, CostPrior, Limits, Scheduler, Time};

/// Tokens of the KV pool of the published runs.
pub const POOL_TOKENS: u32 = 10_000;

/// A file of the published traces; `None`, with a line that says so, where `INFLIGHT_TRACES` is not set.
pub fn trace(file: &str) -> Option<PathBuf> {
    match std::env::var_os("INFLIGHT_TRACES") {
        Some(root) => Some(PathBuf::from(root).join(file)),
        None => {
            skipped(file, "INFLIGHT_TRACES is not set; a seeded workload like it runs");
            None
        }
    }
}

/// Entries of a device much like an A10G with Llama-2-7B, for where the published profile is not at hand: 29
/// ms a decode step, 1.1 us for each key and 0.2 ms for each sequence or prompt token.
pub const LIKE_AN_A10G: [(u32, u32, u32, f64, f64); 4] = [
    (512, 1, 19, 0.1100, 0.0021026),
    (256, 1, 38, 0.0540, 0.0010980),
    (64, 256, 38, 0.0145, 0.2620500),
    (64, 1, 150, 0.0135, 0.0004040),
];

pub fn a10g() -> ProfiledDevice {
    match trace("calibration/vtc_a10g_llama2_7b_cost_profile.json") {
        Some(path) => ProfiledDevice::read(&path, 20e-6).unwrap(),
        None => ProfiledDevice::from_entries(LIKE_AN_A10G, 20e-6).unwrap(),
    }
}

/// The pool of the server that VTC was measured on, paged by single tokens. That server knew each output's
/// length and admitted a request only where all of it would fit; the scheduler does not know it, and reserves
/// the mean one.
pub fn vtc_limits() -> Limits {
    Limits {
        min_decode_tokens: 256,
        waiting_max: 10_000,
        prefix_cache: false,
        ..Limits::new(1, POOL_TOKENS, 256, 4096)
    }
}

pub fn scheduler(limits: Limits, policy: PolicyKind) -> Scheduler {
    scheduler_with(limits, policy.build())
}

pub fn scheduler_with(limits: Limits, policy: Box<dyn SchedulingPolicy>) -> Scheduler {
    let tenants = TenantService::new(TokenCost::default(), 1000);
    Scheduler::new(limits, policy, CostModel::new(CostPrior::default()), tenants).unwrap()
}

pub struct Run {
    pub records: Records,
    pub gap: ServiceGap,
}

impl Run {
    pub fn service_difference(&self) -> ServiceDifference {
        let served: Vec<ServedRequest> = self.records.iter().filter_map(ServedRequest::of).collect();
        ServiceDifference::measure(&served, TokenCost::default(), &ServiceDifference::paper_ticks())
    }

    /// A row of a table: service difference, throughput, memory, waiting.
    pub fn print(&self, name: &str) {
        let difference = self.service_difference();
        let waits = self.records.times_to_first_token();
        println!(
            "{name:28} max {:7.2}  mean {:7.2}  {:6.1} tok/s  {:6.1} s  {:4.1} at once  {:4} preemptions  \
             TTFT P50 {:6.1} P99 {:6.1} s  largest gap {:7.0}",
            difference.max,
            difference.mean,
            self.records.tokens_per_second(),
            self.records.makespan().since(Time::ZERO).as_secs_f64(),
            self.records.kv().concurrency(),
            self.records.preemptions(),
            percentile(&waits, 0.5),
            percentile(&waits, 0.99),
            self.gap.largest(),
        );
    }
}

pub fn simulate(
    limits: Limits,
    policy: PolicyKind,
    device: impl Device,
    requests: &[Request],
    until: Option<Time>,
) -> Run {
    let mut simulation = Simulation::new(scheduler(limits, policy), device);
    if let Some(until) = until {
        simulation = simulation.until(until);
    }
    let mut observers = (Records::new(requests), ServiceGap::new(TokenCost::default(), limits.pool_tokens()));
    simulation.run(requests, &mut observers).unwrap();
    let (records, gap) = observers;
    Run { records, gap }
}

/// The seeds that `INFLIGHT_SEEDS=FIRST..END` asks for, or these.
pub fn seeds(otherwise: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let parse = |text: &str| {
        let (first, end) = text.split_once("..")?;
        Some(first.parse().ok()?..end.parse().ok()?)
    };
    match std::env::var("INFLIGHT_SEEDS") {
        Ok(text) => parse(&text).unwrap_or_else(|| panic!("INFLIGHT_SEEDS={text}: write it as FIRST..END")),
        Err(_) => otherwise,
    }
}

//! Shared test helpers: location of traces, and the machine on which the VTC results were measured.

pub mod shortest_first;

use std::path::PathBuf;

use inflight_contract::{TokenCost, VirtualTokenCounters};
use inflight_fixtures::skipped;
use inflight_simulator::{
    Device, ProfiledDevice, Records, Request, ServiceDifference, ServiceGap, Simulation, percentile,
};
use inflight_worker_core::policy::{Policy, PolicyKind, SchedulingPolicy};
use inflight_worker_core::{CostModel, CostPrior, Scheduler, SchedulerLimits, Time};

/// Capacity in tokens of the KV pool of the published runs.
pub const POOL_TOKENS: u32 = 10_000;

/// Returns the path of a published trace; `None`, reported as a skipped test, without `INFLIGHT_TRACES`.
pub fn trace(file: &str) -> Option<PathBuf> {
    match std::env::var_os("INFLIGHT_TRACES") {
        Some(root) => Some(PathBuf::from(root).join(file)),
        None => {
            skipped(file, "INFLIGHT_TRACES is not set; a seeded workload like it runs");
            None
        }
    }
}

/// Profile entries similar to an A10G with Llama-2-7B, used without the published profile: 29 ms per decode
/// step, 1.1 us per key and 0.2 ms per sequence or prompt token.
pub const LIKE_AN_A10G: [(u32, u32, u32, f64, f64); 4] = [
    (512, 1, 19, 0.1100, 0.0021026),
    (256, 1, 38, 0.0540, 0.0010980),
    (64, 256, 38, 0.0145, 0.2620500),
    (64, 1, 150, 0.0135, 0.0004040),
];

/// Returns the device of the VTC runs.
pub fn a10g() -> ProfiledDevice {
    match trace("calibration/vtc_a10g_llama2_7b_cost_profile.json") {
        Some(path) => ProfiledDevice::read(&path, 20e-6).unwrap(),
        None => ProfiledDevice::from_entries(LIKE_AN_A10G, 20e-6).unwrap(),
    }
}

/// Returns the limits of the server of the VTC runs, with blocks of one token. That server knew each output
/// length and reserved all of it at admission; the scheduler does not know it, and reserves the mean.
pub fn vtc_limits() -> SchedulerLimits {
    SchedulerLimits {
        min_decode_tokens: 256,
        waiting_max: 10_000,
        prefix_cache: false,
        ..SchedulerLimits::new(1, POOL_TOKENS, 256, 4096)
    }
}

pub fn scheduler(limits: SchedulerLimits, policy: impl Into<Policy>) -> Scheduler {
    scheduler_with(limits, policy.into().build())
}

pub fn scheduler_with(limits: SchedulerLimits, policy: Box<dyn SchedulingPolicy>) -> Scheduler {
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 1000);
    Scheduler::new(limits, policy, CostModel::new(CostPrior::default()), tenants).unwrap()
}

/// Result of a simulation.
pub struct Run {
    pub records: Records,
    pub gap: ServiceGap,
}

impl Run {
    pub fn service_difference(&self) -> ServiceDifference {
        let served: Vec<_> =
            self.records.iter().filter_map(inflight_simulator::RequestRecord::served).collect();
        ServiceDifference::measure(&served, TokenCost::default(), &ServiceDifference::paper_ticks())
    }

    /// Prints one row: service difference, throughput, memory, waiting times.
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
    limits: SchedulerLimits,
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

/// Returns the seeds of `INFLIGHT_SEEDS=FIRST..END`, or `default`.
pub fn seeds(default: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let parse = |text: &str| {
        let (first, end) = text.split_once("..")?;
        Some(first.parse().ok()?..end.parse().ok()?)
    };
    match std::env::var("INFLIGHT_SEEDS") {
        Ok(text) => parse(&text).unwrap_or_else(|| panic!("INFLIGHT_SEEDS={text}: write it as FIRST..END")),
        Err(_) => default,
    }
}

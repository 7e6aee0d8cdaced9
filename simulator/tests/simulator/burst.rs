//! Bursts on simulated clusters: the requests of a tenant with little service start soon although another tenant's burst was before them,
//! and neither shares nor throughput suffer for it.

use std::sync::Arc;

use inflight_contract::{Priority, Weight};
use inflight_router_core::PlacementKind;
use inflight_simulator::cluster::{ClusterOptions, ClusterReport, ClusterRequest, ClusterTenant, simulate};
use inflight_traces::SplitMix64;
use inflight_worker_core::{DeviceProfile, SchedulerLimits, Time};

const SEEDS: std::ops::Range<u64> = 0..20;

/// Cluster and workload.
#[derive(Debug, Clone, Copy)]
struct Variant {
    name: &'static str,
    routers: usize,
    workers: usize,
    /// Fixed duration of a step; `None`: that of the profile.
    step_s: Option<f64>,
    /// Whether a third tenant has requests of a higher priority, and the crowd some of a lower one.
    priorities: bool,
    /// Whether most of a prompt of a crowd is cached after the first one.
    cached: bool,
    /// Capacity of a worker's KV pool in tokens; that of slots is 256 requests, some 40,000 tokens.
    pool_tokens: u32,
}

const BASE: Variant = Variant {
    name: "one worker",
    routers: 1,
    workers: 1,
    step_s: None,
    priorities: false,
    cached: false,
    pool_tokens: 200_000,
};

const VARIANTS: [Variant; 7] = [
    BASE,
    Variant { name: "priorities", priorities: true, ..BASE },
    Variant { name: "two routers, four workers", routers: 2, workers: 4, ..BASE },
    Variant { name: "steps of 0.3 ms", step_s: Some(0.3e-3), ..BASE },
    Variant { name: "cached prompts", cached: true, ..BASE },
    Variant { name: "little KV memory", pool_tokens: 25_000, ..BASE },
    Variant {
        name: "all of them",
        routers: 2,
        workers: 4,
        step_s: Some(0.3e-3),
        priorities: true,
        cached: true,
        ..BASE
    },
];

impl Variant {
    fn options(&self, slots: u32, outranking: bool) -> ClusterOptions {
        let mut profile = DeviceProfile::built_in("a10g-llama2-7b").unwrap();
        profile.set("pool_tokens", f64::from(self.pool_tokens)).unwrap();
        if let Some(step_s) = self.step_s {
            profile.set("step", step_s).unwrap();
            profile.set("prompt_token", 1e-6).unwrap();
            profile.set("sequence", 1e-7).unwrap();
            profile.set("decode_key", 1e-10).unwrap();
            profile.set("prompt_key", 1e-12).unwrap();
        }
        let base = ClusterOptions::new(self.workers, profile, |seed| PlacementKind::Cost.build(seed));
        let limits = SchedulerLimits {
            waiting_max: 4096,
            step_target: base.limits.step_target,
            ..SchedulerLimits::new(64, profile.pool_tokens / 64, slots, 512)
        };
        ClusterOptions { routers: self.routers, limits, outranking, ..base }
    }

    /// Requests of a tenant that arrive within `within` seconds from `first` on.
    fn requests(
        &self,
        random: &mut SplitMix64,
        tenant: &Arc<ClusterTenant>,
        count: usize,
        (first, within): (f64, f64),
    ) -> Vec<ClusterRequest> {
        let one = |nth: usize, random: &mut SplitMix64| {
            let at = first + within * random.unit();
            let own = (random.bits() >> 8) | 1 << 40 | nth as u64;
            let shared = self.cached && tenant.name != "small";
            let prompt_tokens = if shared { 512 } else { 0 } + 60 + (80.0 * random.unit()) as u32;
            ClusterRequest {
                tenant: tenant.clone(),
                arrival: Time::from_nanos((at * 1e9) as u64),
                prompt_tokens,
                output_tokens: 30 + (40.0 * random.unit()) as u32,
                blocks: if shared { vec![7, own] } else { vec![own] },
            }
        };
        (0..count).map(|nth| one(nth, random)).collect()
    }

    /// A burst of the crowd, and the small tenant's requests while it is served; in seconds of one worker.
    fn burst(&self, seed: u64) -> Vec<ClusterRequest> {
        let mut random = SplitMix64::new(seed);
        let tenant = |name: &str| ClusterTenant::new(name, Weight::default());
        let priority = |name: &str, priority: i32| {
            let priority = Priority::try_from(priority).unwrap();
            Arc::new(ClusterTenant { priority, ..(*tenant(name)).clone() })
        };
        // The time in which the crowd is served.
        let length = if self.step_s.is_some() { 0.05 } else { 8.0 };
        let crowd = 400 * self.workers;
        let mut all = self.requests(&mut random, &tenant("crowd"), crowd, (0.0, 0.02));
        all.extend(self.requests(&mut random, &tenant("small"), 20, (0.03, length)));
        if self.priorities {
            all.extend(self.requests(&mut random, &priority("urgent", 1), 20, (0.0, length)));
            all.extend(self.requests(&mut random, &priority("crowd", -1), crowd / 4, (0.0, 0.02)));
        }
        all.sort_by_key(|request| request.arrival);
        all
    }

    /// Two tenants with weights of 3 and 1, both with more requests than are served.
    fn backlog(&self, seed: u64) -> Vec<ClusterRequest> {
        // What is in flight at first, and delays of a step and more, take long to make up for.
        let count = match self.step_s {
            Some(_) if self.workers > 1 => 1600,
            _ if self.workers > 1 => 1000,
            _ => 600,
        } * self.workers;
        let mut random = SplitMix64::new(seed);
        let (three, one) = (Weight::try_from(3.0).unwrap(), Weight::default());
        let mut all = self.requests(&mut random, &ClusterTenant::new("three", three), count, (0.0, 0.02));
        all.extend(self.requests(&mut random, &ClusterTenant::new("one", one), count, (0.0, 0.02)));
        all.sort_by_key(|request| request.arrival);
        all
    }
}

/// Service charged to a tenant until a time.
fn service(report: &ClusterReport, tenant: &str, to: Time) -> f64 {
    let charges = report.charges.iter().flatten();
    let until = charges.filter(|charge| charge.tenant == tenant && charge.at < to);
    until.map(|charge| charge.service as f64).sum()
}

fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() as f64 * share).ceil() as usize).clamp(1, values.len()) - 1]
}

#[test]
fn a_tenant_with_little_service_starts_soon_behind_a_burst_and_nobody_pays_for_it() {
    for variant in VARIANTS {
        let (mut waits, mut waits_without) = (Vec::new(), Vec::new());
        let (mut lost, mut idle, mut idle_without) = (0.0f64, 0.0f64, 0.0f64);
        for seed in SEEDS {
            let requests = variant.burst(seed);
            let report = simulate(&variant.options(256, true), &requests).unwrap();
            let without = simulate(&variant.options(256, false), &requests).unwrap();
            let of_small = |report: &ClusterReport| -> Vec<f64> {
                let times = report.times_to_first_token(&requests);
                times
                    .iter()
                    .zip(&requests)
                    .filter(|(_, request)| request.tenant.name == "small")
                    .map(|(time, _)| *time)
                    .collect()
            };
            waits.extend(of_small(&report));
            waits_without.extend(of_small(&without));
            // Until nine tenths are served: the end depends on who is left.
            let seconds = |report: &ClusterReport| {
                let mut charges: Vec<_> = report.charges.iter().flatten().collect();
                charges.sort_by_key(|charge| charge.at);
                let all: u64 = charges.iter().map(|charge| charge.service).sum();
                let mut served = 0;
                let reached = charges.iter().find(|charge| {
                    served += charge.service;
                    served * 10 >= all * 9
                });
                reached.map_or(0.0, |charge| charge.at.since(Time::ZERO).as_secs_f64())
            };
            lost = lost.max(1.0 - seconds(&without) / seconds(&report));
            idle = idle.max(report.idle_slots);
            idle_without = idle_without.max(without.idle_slots);
        }
        let p99 = percentile(&mut waits, 0.99);
        println!(
            "{}: first token of the small tenant p50 {:.3} s, p99 {p99:.3} s ({:.3} s without outranking), throughput {:.2} % less at most, {:.3} % of slots idle ({:.3} %)",
            variant.name,
            percentile(&mut waits, 0.5),
            percentile(&mut waits_without, 0.99),
            100.0 * lost,
            100.0 * idle,
            100.0 * idle_without,
        );
        assert!(p99 <= 1.5, "{}: {p99} s", variant.name);
        assert!(lost <= 0.01, "{}: throughput is {:.2} % less", variant.name, 100.0 * lost);
        assert!(idle <= idle_without + 0.002, "{}: {:.3} % of slots are idle", variant.name, 100.0 * idle);
    }
}

#[test]
fn two_tenants_that_always_wait_share_three_to_one() {
    // Those that differ where tenants have one priority and enough memory; by day the first one and all of them together.
    let variants = VARIANTS.into_iter().enumerate().filter(|(at, variant)| {
        let differs = !variant.priorities && variant.pool_tokens > 100_000;
        variant.name == "all of them" || *at == 0 || (differs && inflight_fixtures::is_thorough())
    });
    for (_, variant) in variants {
        let mut ratios = Vec::new();
        for seed in SEEDS {
            let requests = variant.backlog(seed);
            let report = simulate(&variant.options(64, true), &requests).unwrap();
            let last_start = |tenant: &str| {
                let of_tenant =
                    report.placed.iter().zip(&requests).filter(|(_, request)| request.tenant.name == tenant);
                of_tenant.map(|(placed, _)| placed.first_token).max().unwrap_or_default()
            };
            let end = last_start("three").min(last_start("one"));
            // Before the first tenant's last requests: counters make up for the start, when both get as many slots.
            let to = Time::from_nanos(end.as_nanos() * 17 / 20);
            let of = |tenant| service(&report, tenant, to);
            ratios.push(of("three") / of("one"));
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        let (least, most) = ratios
            .iter()
            .fold((f64::MAX, 0.0f64), |(least, most), ratio| (least.min(*ratio), most.max(*ratio)));
        println!("{}: shares {mean:.3} on average, {least:.3} to {most:.3}", variant.name);
        assert!((mean - 3.0).abs() <= 0.05, "{}: {mean}", variant.name);
    }
}

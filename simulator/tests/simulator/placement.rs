//! Placement policies on simulated clusters, with the real fair queue, credit ledgers, prefix index and
//! scheduler.

use std::time::Duration;

use inflight_router_core::{PlacementKind, Policy, Random};
use inflight_simulator::cluster::{
    ClusterOptions, ClusterReport, ClusterRequest, ClusterTenant, conversations, read_mooncake, simulate,
};
use inflight_simulator::workload::LengthDistribution;
use inflight_traces::SplitMix64;
use inflight_worker_core::{DeviceProfile, SchedulerLimits, Time};

const WORKERS: usize = 4;

type MakePolicy = fn(u64) -> Box<dyn Policy>;

fn options(policy: MakePolicy) -> ClusterOptions {
    ClusterOptions::new(WORKERS, DeviceProfile::built_in("h200-llama3-8b").unwrap(), policy)
}

fn mean_first_token(report: &ClusterReport, requests: &[ClusterRequest]) -> f64 {
    let times = report.times_to_first_token(requests);
    times.iter().sum::<f64>() / times.len() as f64
}

/// Asserts that the mean TTFT decreases in the order of the listed policies.
fn assert_ordering(requests: &[ClusterRequest], of: &str) {
    let policies: [(&str, MakePolicy); 4] = [
        ("random", |seed| Box::new(Random::new(seed))),
        ("least-loaded", |seed| PlacementKind::LeastLoaded.build(seed)),
        ("prefix", |seed| PlacementKind::Prefix.build(seed)),
        ("cost", |seed| PlacementKind::Cost.build(seed)),
    ];
    let means = policies.map(|(name, policy)| {
        let report = simulate(&options(policy), requests).unwrap();
        let mean = mean_first_token(&report, requests);
        println!("{of}, {name:13}: mean TTFT {mean:6.3} s, hits {:4.1} %", 100.0 * report.hit_rate(requests));
        mean
    });
    for (two, names) in means.windows(2).zip(policies.windows(2)) {
        assert!(two[0] > two[1], "{of}: {} {} against {} {}", names[0].0, two[0], names[1].0, two[1]);
    }
}

#[test]
fn each_placement_beats_the_simpler_one_on_the_mooncake_trace() {
    let Some(path) = crate::common::trace("mooncake/conversation_trace.first45min.jsonl") else { return };
    assert_ordering(&read_mooncake(&path, 2500, 1).unwrap(), "Mooncake");
}

#[test]
fn each_placement_beats_the_simpler_one_on_generated_conversations() {
    assert_ordering(&conversations(2500, 3.31, 1), "generated");
}

/// Generates bursts of prompts without common prefixes, of very different lengths, each within ten
/// milliseconds.
fn bursts(seed: u64, count: usize, size: usize) -> Vec<ClusterRequest> {
    let mut random = SplitMix64::new(seed);
    let lengths = LengthDistribution::new(&[(0.0, 100.0), (0.5, 1500.0), (0.9, 6000.0), (1.0, 16_000.0)]);
    let tenant = ClusterTenant::only();
    let mut requests: Vec<ClusterRequest> = (0..count * size)
        .map(|nth| {
            let at = (nth / size) as f64 * 60.0 + 0.01 * random.unit();
            ClusterRequest {
                tenant: tenant.clone(),
                arrival: Time::from_nanos((at * 1e9) as u64),
                prompt_tokens: lengths.sample(&mut random),
                output_tokens: 1 + (random.unit() * 400.0) as u32,
                blocks: (0..40).map(|block| ((nth as u64 + 1) << 8) | block).collect(),
            }
        })
        .collect();
    requests.sort_by_key(|request| request.arrival);
    requests
}

#[test]
fn a_burst_is_balanced_with_one_router_and_with_two_independent_ones() {
    let size = 40 * WORKERS;
    for routers in [1, 2] {
        let options = ClusterOptions { routers, ..options(|seed| PlacementKind::Cost.build(seed)) };
        let mut all = Vec::new();
        for seed in 7..13 {
            let requests = bursts(seed, 5, size);
            let report = simulate(&options, &requests).unwrap();
            for nth in 0..5 {
                let in_burst = |index: usize| (nth * size..(nth + 1) * size).contains(&index);
                let tokens = report.imbalance(|index, _| {
                    if in_burst(index) { f64::from(requests[index].prompt_tokens) } else { 0.0 }
                });
                let count = report.imbalance(|index, _| f64::from(u8::from(in_burst(index))));
                println!(
                    "{routers} routers, seed {seed}, burst {nth}: max over mean {tokens:.3} in tokens, {count:.3} in requests"
                );
                // The longest prompt alone can be an eighth of a worker's share.
                assert!(tokens <= 1.4, "{routers} routers, seed {seed}, burst {nth}: {tokens}");
                all.push(tokens);
            }
        }
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        println!("{routers} routers: max over mean {mean:.3} on average");
        assert!(mean <= 1.16, "{routers} routers: {mean} on average");
    }
}

#[test]
fn simultaneous_requests_with_a_new_common_prefix_share_its_computation() {
    // The prefix is not computed yet at their arrival: only recent placements predict where it will be
    // cached.
    let mut requests = bursts(7, 1, 64);
    for (nth, request) in requests.iter_mut().enumerate() {
        request.prompt_tokens = 8192;
        request.output_tokens = 8;
        request.blocks = (0..15).map(|block| (1 << 40) | ((nth as u64 % 8) << 20) | block).collect();
        request.blocks.push((2 << 40) | nth as u64);
    }
    let report = simulate(&options(|seed| PlacementKind::Cost.build(seed)), &requests).unwrap();
    // 8 families; the first request of each computes 15 of 16 blocks for all.
    let hits = report.hit_rate(&requests);
    println!("hits {:.1} %", 100.0 * hits);
    assert!(hits > 0.95 * 15.0 / 16.0 * 56.0 / 64.0, "{hits}");
    let spread = report.imbalance(|_, _| 1.0);
    assert!(spread <= 2.0, "the families are not balanced: {spread}");
}

#[test]
fn prefix_indexes_stay_exact_with_two_routers_and_a_host_tier() {
    // At the end, `simulate` compares each router's index with each worker's cache.
    let requests = conversations(600, 6.0, 3);
    let requests: Vec<ClusterRequest> =
        requests.into_iter().filter(|request| request.prompt_tokens < 20_000).collect();
    for kind in [PlacementKind::Prefix, PlacementKind::Cost] {
        let policy: MakePolicy = match kind {
            PlacementKind::Prefix => |seed| PlacementKind::Prefix.build(seed),
            _ => |seed| PlacementKind::Cost.build(seed),
        };
        let base = options(policy);
        let limits = SchedulerLimits { blocks: 1000, host_blocks: 500, watermark_blocks: 10, ..base.limits };
        let report = simulate(&ClusterOptions { routers: 2, limits, ..base }, &requests).unwrap();
        assert_eq!(report.placed.len(), requests.len());
        assert!(report.hit_rate(&requests) > 0.1);
    }
}

#[test]
fn equal_requests_give_equal_simulations() {
    let requests = conversations(200, 4.0, 5);
    let run = || {
        let options = ClusterOptions {
            routers: 2,
            hop: Duration::from_millis(1),
            ..options(|seed| PlacementKind::Cost.build(seed))
        };
        simulate(&options, &requests).unwrap().placed
    };
    assert!(run() == run());
}

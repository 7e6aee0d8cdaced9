//! Effects of the scheduling policy: static against continuous batching, head-of-line blocking, starvation.

use std::time::Duration;

use inflight_contract::CostCoefficients;
use inflight_simulator::workload::{LengthDistribution, Workload};
use inflight_simulator::{BatchWork, Device, Records, Request, Simulation, percentile};
use inflight_worker_core::policy::{PolicyKind, SchedulingPolicy};
use inflight_worker_core::{CostModel, CostPrior, SchedulerLimits, Time};

use crate::common::shortest_first::ShortestFirst;
use crate::common::{a10g, scheduler, scheduler_with};

const SEED: u64 = 64;

fn serve(limits: SchedulerLimits, policy: PolicyKind, requests: &[Request]) -> Records {
    let mut simulation = Simulation::new(scheduler(limits, policy), a10g());
    let mut records = Records::new(requests);
    simulation.run(requests, &mut records).unwrap();
    records
}

/// Device on which static batching computes ended sequences as padding until the batch ends: every decode
/// step has the full batch size, with the mean number of keys for the padding.
struct Padded<D> {
    device: D,
    slots: u32,
}

impl<D: Device> Device for Padded<D> {
    fn step(&self, work: &BatchWork) -> Duration {
        let mut work = *work;
        if work.decode.sequences > 0 {
            let share = f64::from(self.slots) / f64::from(work.decode.sequences);
            work.decode.keys = (work.decode.keys as f64 * share) as u64;
            (work.decode.tokens, work.decode.sequences) = (self.slots, self.slots);
        }
        self.device.step(&work)
    }

    fn copy(&self, blocks: u32) -> Duration {
        self.device.copy(blocks)
    }
}

#[test]
fn continuous_batching_beats_static_batching_at_the_same_cap() {
    // Heavy-tailed outputs, all queued at the start; 32 slots with enough memory for all of them.
    let outputs = LengthDistribution::new(&[(0.0, 4.0), (0.5, 64.0), (0.9, 300.0), (1.0, 1500.0)]);
    let workload = Workload { requests: 1000, outputs, ..Workload::chat() };
    let mut requests = workload.generate(SEED);
    requests.iter_mut().for_each(|request| request.arrival = Time::ZERO);
    let limits = SchedulerLimits {
        waiting_max: 10_000,
        prefix_cache: false,
        ..SchedulerLimits::new(16, 32 * 2600 / 16, 32, 4096)
    };
    let continuous = ("continuous", PolicyKind::Fair, false);
    let [continuous, grouped, padded] = [
        continuous,
        ("static", PolicyKind::Static, false),
        ("static, padded", PolicyKind::Static, true),
    ]
    .map(|(name, policy, padded)| {
        let records = if padded {
            let mut records = Records::new(&requests);
            let device = Padded { device: a10g(), slots: limits.running_max };
            Simulation::new(scheduler(limits, policy), device).run(&requests, &mut records).unwrap();
            records
        } else {
            serve(limits, policy, &requests)
        };
        let (first, between) = (records.times_to_first_token(), records.times_per_token());
        println!(
            "{name:14} {:6.1} tok/s  TTFT P50 {:6.1} P99 {:6.1} s  per token P50 {:5.1} P99 {:5.1} ms  \
             slots in use {:5.1} %  KV efficiency {:5.2} %",
            records.tokens_per_second(),
            percentile(&first, 0.5),
            percentile(&first, 0.99),
            1e3 * percentile(&between, 0.5),
            1e3 * percentile(&between, 0.99),
            100.0 * records.kv().occupancy(),
            100.0 * (1.0 - records.kv().empty()),
        );
        records
    });
    assert!(continuous.kv().occupancy() >= 0.94, "{}", continuous.kv().occupancy());
    assert!(continuous.tokens_per_second() >= 2.0 * padded.tokens_per_second());
    assert!(grouped.tokens_per_second() >= padded.tokens_per_second(), "padding computes more, not less");
    assert_eq!(grouped.steps(), padded.steps(), "padding changes the number of steps");
    let median = |records: &Records| percentile(&records.times_to_first_token(), 0.5);
    assert!(median(&continuous) < median(&grouped));
}

#[test]
fn a_static_batch_of_three_wastes_1400_of_3000_slot_steps() {
    /// Device on which each step takes one second.
    struct Clock;
    impl Device for Clock {
        fn step(&self, _: &BatchWork) -> std::time::Duration {
            std::time::Duration::from_secs(1)
        }
        fn copy(&self, _: u32) -> std::time::Duration {
            std::time::Duration::ZERO
        }
    }
    let requests = [1000, 200, 400].map(|output| Request::new(Time::ZERO, 0, 1, output));
    let limits = SchedulerLimits { prefix_cache: false, ..SchedulerLimits::new(16, 1000, 3, 64) };
    let mut simulation = Simulation::new(scheduler(limits, PolicyKind::Static), Clock);
    let mut records = Records::new(&requests);
    simulation.run(&requests, &mut records).unwrap();
    assert_eq!(records.steps(), 1000);
    assert_eq!((records.kv().slots, records.kv().running), (3000.0, 1600.0));
}

#[test]
fn under_fcfs_short_requests_queue_behind_long_ones() {
    // Three of four slots are busy on average, half of that with short requests and half with a few long
    // ones.
    let fixed = |tokens: f64| LengthDistribution::new(&[(0.0, tokens), (1.0, tokens)]);
    let short =
        Workload { rate: 2.0, requests: 900, shares: vec![1.0], prompts: fixed(32.0), outputs: fixed(24.0) };
    let long = Workload {
        rate: 0.04,
        requests: 18,
        prompts: fixed(1500.0),
        outputs: fixed(1000.0),
        ..short.clone()
    };
    let limits = SchedulerLimits {
        waiting_max: 10_000,
        prefix_cache: false,
        ..SchedulerLimits::new(16, 1000, 4, 2048)
    };
    let alone = short.generate(SEED);
    let mut mixed = long.generate(SEED + 1);
    mixed.extend(&alone);
    mixed.sort_by_key(|request| request.arrival);

    // Latency relative to the same request on an idle server.
    let slowdown = |records: &Records, output_tokens: u32| {
        let of = |record: &&inflight_simulator::RequestRecord| record.request.output_tokens == output_tokens;
        let request = Request { arrival: Time::ZERO, ..records.iter().find(of).unwrap().request };
        let idle = serve(limits, PolicyKind::Fcfs, &[request]).makespan().since(Time::ZERO).as_secs_f64();
        let latencies = records.iter().filter(of).filter_map(|record| record.latency());
        let mut slowdowns: Vec<f64> = latencies.map(|latency| latency.as_secs_f64() / idle).collect();
        slowdowns.sort_by(f64::total_cmp);
        (percentile(&slowdowns, 0.5), percentile(&slowdowns, 0.99))
    };
    let (alone, mixed) = (serve(limits, PolicyKind::Fcfs, &alone), serve(limits, PolicyKind::Fcfs, &mixed));
    let rows = [slowdown(&alone, 24), slowdown(&mixed, 24), slowdown(&mixed, 1000)];
    for (name, (p50, p99)) in ["short, alone", "short, with long ones", "long"].iter().zip(rows) {
        println!("{name:24} slowdown P50 {p50:6.2}  P99 {p99:6.2}");
    }
    let [alone, short, long] = rows.map(|(_, p99)| p99);
    assert!(short > 5.0 * alone, "long requests do not delay short ones");
    assert!(short > 5.0 * long, "long requests are delayed as much as short ones");
}

#[test]
fn under_shortest_first_long_requests_starve() {
    // Short requests alone overload four slots for five minutes; ten long ones arrive in the first second.
    let fixed = |tokens: f64| LengthDistribution::new(&[(0.0, tokens), (1.0, tokens)]);
    let short = Workload {
        rate: 12.0,
        requests: 3600,
        shares: vec![1.0],
        prompts: fixed(32.0),
        outputs: fixed(24.0),
    };
    let mut requests = short.generate(SEED);
    let long = |nth: u64| Request::new(Time::from_nanos(nth * 100_000_000), 1, 1500, 400);
    requests.extend((0..10).map(long));
    requests.sort_by_key(|request| request.arrival);
    let last_arrival = requests.last().unwrap().arrival;
    let limits = SchedulerLimits {
        waiting_max: 10_000,
        prefix_cache: false,
        ..SchedulerLimits::new(16, 1000, 4, 2048)
    };
    let wait_of_the_long = |policy: Box<dyn SchedulingPolicy>| {
        let name = policy.name();
        let mut records = Records::new(&requests);
        Simulation::new(scheduler_with(limits, policy), a10g()).run(&requests, &mut records).unwrap();
        let of = |tenant: u32| records.iter().filter(move |record| record.request.tenant == tenant);
        // The first few may find a free slot, before the short ones fill the server.
        let starved = of(1).filter(|record| record.started.unwrap() > last_arrival).count();
        let seconds = |tenant: u32| {
            let mut waits: Vec<f64> =
                of(tenant).map(|r| r.started.unwrap().since(r.request.arrival).as_secs_f64()).collect();
            waits.sort_by(f64::total_cmp);
            waits
        };
        let (short, long) = (percentile(&seconds(0), 0.5), percentile(&seconds(1), 0.5));
        println!("{name:16} median wait: short {short:6.1} s, long {long:6.1} s, {starved} of 10 starve");
        (starved, short, long)
    };
    let (starved, short, long) = wait_of_the_long(Box::new(ShortestFirst));
    assert!(starved >= 6, "only {starved} of ten long ones wait until the last short one has arrived");
    for kind in [PolicyKind::Fcfs, PolicyKind::Fair] {
        let (starved, others_short, others_long) = wait_of_the_long(kind.build());
        assert_eq!(starved, 0, "a request starves under {kind}");
        assert!(others_long * 2.0 < long && short <= others_short, "{kind}");
    }
}

#[test]
fn the_cost_model_predicts_the_simulated_device() {
    let requests = Workload::chat().generate(SEED);
    let limits = crate::common::vtc_limits();
    let error = |name: &str, records: &Records| {
        println!(
            "{name}: {} steps, off by {:.2} % on average",
            records.steps(),
            100.0 * records.prediction_error()
        );
        records.prediction_error()
    };
    // A device that is linear like the model, with coefficients far from the prior.
    let prior = CostPrior::default();
    let cost =
        CostCoefficients { step_s: 2e-2, token_s: 2e-4, decode_key_s: 1e-6, sequence_s: 2e-4, ..prior.cost };
    let linear = CostPrior { cost, ..prior };
    let mut records = Records::new(&requests);
    let mut simulation = Simulation::new(scheduler(limits, PolicyKind::Fair), CostModel::new(linear));
    simulation.run(&requests, &mut records).unwrap();
    assert!(error("linear", &records) < 0.02, "including the first steps, before the fit");
    // A measured device is not linear.
    assert!(error("profiled", &serve(limits, PolicyKind::Fair, &requests)) < 0.25);
}

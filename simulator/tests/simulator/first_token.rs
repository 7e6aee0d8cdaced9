//! Time to first token against gaps between tokens: the adaptive step target and fixed ones, in closed loops
//! and on published traces.

use std::cell::Cell;
use std::time::Duration;

use inflight_contract::{CostCoefficients, TokenCost, VirtualTokenCounters};
use inflight_simulator::workload::LognormalLengths;
use inflight_simulator::{BatchWork, Device, Observer, Records, Request, Simulation, StepSample, percentile};
use inflight_traces::{SplitMix64, read_trace};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CostModel, CostPrior, LatencyObjectives, Scheduler, SchedulerLimits, StepTarget, Time,
};

use crate::common::trace;

const SEED: u64 = 7;
/// Time from the end of a request to the next one of its client at the worker.
const THINK: Duration = Duration::from_millis(1);
/// Simultaneous clients of the closed loops.
const LOADS: [usize; 5] = [1, 4, 16, 32, 64];
/// Fixed targets in milliseconds.
const FIXED: [u64; 4] = [20, 50, 100, 250];

/// Device of a closed loop, with requests of a size that suits it.
struct Profile {
    name: &'static str,
    cost: CostCoefficients,
    /// Size of prompts relative to short chats.
    scale: f64,
    iteration_tokens: u32,
}

/// A model of 135 million and one of 1.1 billion parameters on two CPU cores, 7 billion on an A10G and 8
/// billion on an H100, the last two by memory bandwidth and arithmetic.
fn profiles() -> [Profile; 4] {
    let cost = |[step_s, token_s, decode_key_s, prefill_key_s, sequence_s]: [f64; 5]| CostCoefficients {
        step_s,
        token_s,
        prefill_key_s,
        decode_key_s,
        sequence_s,
        copy_s: 2e-5,
        copy_block_s: 2e-5,
    };
    [
        ("CPU 135M", [6e-3, 3.9e-4, 4e-7, 1e-7, 2e-4], 1.0, 512),
        ("CPU 1.1B", [40e-3, 2.6e-3, 1e-6, 3e-7, 5e-4], 1.0, 512),
        ("A10G 7B", [29e-3, 2e-4, 1.1e-6, 2e-8, 1e-5], 4.0, 2048),
        ("H100 8B", [6e-3, 1.6e-5, 4e-8, 1e-9, 2e-6], 16.0, 8192),
    ]
    .map(|(name, coefficients, scale, iteration_tokens)| Profile {
        name,
        cost: cost(coefficients),
        scale,
        iteration_tokens,
    })
}

fn device(cost: CostCoefficients) -> CostModel {
    CostModel::new(CostPrior { cost, trust: 0.001 })
}

fn scheduler(step_target: StepTarget, iteration_tokens: u32) -> Scheduler {
    let limits = SchedulerLimits {
        prefix_cache: false,
        waiting_max: 100_000,
        step_target,
        ..SchedulerLimits::new(16, 1 << 16, 256, iteration_tokens)
    };
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 1000);
    Scheduler::new(limits, PolicyKind::Fair.build(), CostModel::new(CostPrior::default()), tenants).unwrap()
}

/// Requests of chats whose prompts are `scale` times as long as short ones, and whose outputs grow with the
/// square root.
fn chats(count: usize, scale: f64) -> Vec<Request> {
    let mut random = SplitMix64::new(SEED);
    let prompts = LognormalLengths { mean: 118.0 * scale, sigma: 0.8, max: (500.0 * scale) as u32 };
    let root = scale.sqrt();
    let outputs = LognormalLengths { mean: 63.0 * root, sigma: 0.9, max: (390.0 * root) as u32 };
    (0..count)
        .map(|_| Request::new(Time::ZERO, 0, prompts.sample(&mut random), outputs.sample(&mut random)))
        .collect()
}

/// Latencies of a run in milliseconds.
#[derive(Debug, Clone, Copy)]
struct Latencies {
    first_mean: f64,
    gap_p99: f64,
}

fn latencies(name: &str, load: &str, target: StepTarget, records: &Records) -> Latencies {
    let (first, gaps) = (records.times_to_first_token(), records.gaps());
    let mean = 1e3 * first.iter().sum::<f64>() / first.len() as f64;
    let target = match target {
        StepTarget::Adaptive(_) => "adaptive".to_owned(),
        StepTarget::Unbounded => "unbounded".to_owned(),
        StepTarget::Fixed(target) => format!("{target:?}"),
    };
    let ms = |values: &[f64], p| 1e3 * percentile(values, p);
    println!(
        "{name:9} {load:>8} {target:9}  first token: mean {mean:6.0}, P50 {:6.0}, P90 {:6.0} ms  gap: P50 {:6.1}, \
         P99 {:6.1} ms  {:7.1} tok/s",
        ms(&first, 0.5),
        ms(&first, 0.9),
        ms(&gaps, 0.5),
        ms(&gaps, 0.99),
        records.tokens_per_second(),
    );
    Latencies { first_mean: mean, gap_p99: ms(&gaps, 0.99) }
}

/// Checks that no fixed target has both an earlier first token and a shorter gap, by more than 5 %.
fn assert_undominated(what: &str, serve: impl Fn(StepTarget) -> Latencies) {
    let adaptive = serve(StepTarget::adaptive());
    for target in FIXED {
        let fixed = serve(StepTarget::Fixed(Duration::from_millis(target)));
        let undominated =
            adaptive.first_mean <= 1.05 * fixed.first_mean || adaptive.gap_p99 <= 1.05 * fixed.gap_p99;
        assert!(undominated, "{what}: {adaptive:?}, with a target of {target} ms {fixed:?}");
    }
    serve(StepTarget::Unbounded);
}

#[test]
fn in_closed_loops_no_fixed_step_target_is_better_in_first_tokens_and_gaps() {
    for profile in profiles() {
        for clients in LOADS {
            let requests = chats(1500, profile.scale);
            let load = format!("{clients}");
            assert_undominated(&format!("{}, {clients} clients", profile.name), |target| {
                let mut simulation =
                    Simulation::new(scheduler(target, profile.iteration_tokens), device(profile.cost))
                        .anticipating();
                let mut records = Records::new(&requests);
                simulation.run_closed(&requests, clients, THINK, &mut records).unwrap();
                latencies(profile.name, &load, target, &records)
            });
        }
    }
}

#[test]
fn anticipation_brings_first_tokens_earlier_for_near_clients_and_costs_far_ones_little() {
    for profile in profiles() {
        let requests = chats(1500, profile.scale);
        let serve = |think: Duration, anticipates: bool| {
            let scheduler = scheduler(StepTarget::adaptive(), profile.iteration_tokens);
            let mut simulation = Simulation::new(scheduler, device(profile.cost));
            if anticipates {
                simulation = simulation.anticipating();
            }
            let mut records = Records::new(&requests);
            simulation.run_closed(&requests, 32, think, &mut records).unwrap();
            let found = latencies(profile.name, &format!("{think:?}"), StepTarget::adaptive(), &records);
            (found.first_mean, records.tokens_per_second())
        };
        let (with, without) = (serve(THINK, true), serve(THINK, false));
        assert!(with.0 < 0.85 * without.0, "{}: {with:?}, without {without:?}", profile.name);
        assert!(with.1 > 0.98 * without.1, "{}: {with:?}, without {without:?}", profile.name);
        let far = Duration::from_millis(30);
        let (with, without) = (serve(far, true), serve(far, false));
        assert!(with.1 > 0.99 * without.1, "{}: {with:?}, without {without:?}", profile.name);
    }
}

#[test]
fn on_published_traces_no_fixed_step_target_is_better_in_first_tokens_and_gaps() {
    let [.., profile] = profiles();
    for (file, nth) in [
        ("azure/AzureLLMInferenceTrace_conv.csv", 1),
        ("azure/AzureLLMInferenceTrace_code.csv", 1),
        ("mooncake/conversation_trace.first45min.jsonl", 6),
    ] {
        let Some(path) = trace(file) else { continue };
        let traced = read_trace(&path).unwrap();
        let requests: Vec<Request> = (traced.iter().step_by(nth).take(3000))
            .map(|request| {
                let at = Time::from_nanos((request.arrival_s.unwrap() * 1e9) as u64);
                Request::new(at, 0, request.prompt_tokens, request.output_tokens)
            })
            .collect();
        let name = file.rsplit(['_', '/']).next().unwrap();
        assert_undominated(file, |target| {
            let mut simulation =
                Simulation::new(scheduler(target, profile.iteration_tokens), device(profile.cost));
            let mut records = Records::new(&requests);
            simulation.run(&requests, &mut records).unwrap();
            latencies(profile.name, &name[..name.len().min(8)], target, &records)
        });
    }
}

/// Prefill tokens of the steps that decode and prefill.
#[derive(Default)]
struct Chunks(Vec<f64>);

impl Observer for Chunks {
    fn step(&mut self, step: &StepSample) {
        if step.work.decode.sequences > 0 && step.work.prefill.tokens > 0 {
            self.0.push(f64::from(step.work.prefill.tokens));
        }
    }
}

/// Returns the autocorrelation at a lag.
fn autocorrelation(values: &[f64], lag: usize) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let product = |a: f64, b: f64| (a - mean) * (b - mean);
    let variance: f64 = values.iter().map(|value| product(*value, *value)).sum();
    let shifted: f64 = values.iter().zip(&values[lag..]).map(|(a, b)| product(*a, *b)).sum();
    shifted / variance
}

/// A controller that overshoots alternates between large and small chunks, which is a strongly negative
/// autocorrelation at the half period, and a positive one at the period.
#[test]
fn chunk_sizes_do_not_oscillate() {
    for profile in profiles() {
        for clients in [4, 32] {
            // Prompts of equal length that never leave the prefill idle.
            let requests: Vec<Request> =
                (0..400).map(|_| Request::new(Time::ZERO, 0, (1000.0 * profile.scale) as u32, 60)).collect();
            let target = StepTarget::adaptive();
            let mut simulation =
                Simulation::new(scheduler(target, profile.iteration_tokens), device(profile.cost));
            let mut chunks = Chunks::default();
            simulation.run_closed(&requests, clients, THINK, &mut chunks).unwrap();
            // The first steps calibrate the cost model.
            let chunks = &chunks.0[chunks.0.len() / 4..];
            for lag in 1..=8 {
                let found = autocorrelation(chunks, lag);
                println!("{:9} {clients:2} clients, lag {lag:2}: {found:.2}", profile.name);
                assert!(found > -0.4, "{}, {clients} clients, lag {lag}: {found}", profile.name);
            }
        }
    }
}

/// Device whose speed changes tenfold, and back.
struct Erratic {
    device: CostModel,
    steps: Cell<u32>,
}

impl Device for Erratic {
    fn step(&self, work: &BatchWork) -> Duration {
        let step = self.steps.replace(self.steps.get() + 1);
        let slow = if (2000..6000).contains(&step) { 10 } else { 1 };
        Device::step(&self.device, work) * slow
    }

    fn copy(&self, blocks: u32) -> Duration {
        Device::copy(&self.device, blocks)
    }
}

/// Steps with their decodes and durations.
#[derive(Default)]
struct Steps(Vec<(u32, f64, f64)>);

impl Observer for Steps {
    fn step(&mut self, step: &StepSample) {
        let decodes = step.work.decode.sequences;
        self.0.push((decodes, f64::from(step.work.prefill.tokens), step.took.as_secs_f64()));
    }
}

#[test]
fn a_tenfold_change_of_the_devices_speed_keeps_the_ratio_of_mixed_steps_to_decode_steps() {
    let [profile, ..] = profiles();
    let requests = chats(4000, profile.scale);
    let device = Erratic { device: device(profile.cost), steps: Cell::new(0) };
    let mut simulation = Simulation::new(scheduler(StepTarget::adaptive(), 512), device);
    let mut steps = Steps::default();
    simulation.run_closed(&requests, 16, THINK, &mut steps).unwrap();
    // The cost model forgets with a time constant of 500 steps.
    for (range, what) in [(500..2000, "before"), (4000..6000, "slow"), (8000..10_000, "after")] {
        let full = |step: &&(u32, f64, f64)| step.0 >= 12;
        let of = |prefill: bool| {
            let steps = steps.0[range.clone()].iter().filter(full);
            let mut times: Vec<f64> =
                steps.filter(|step| (step.1 > 0.0) == prefill).map(|step| step.2).collect();
            times.sort_by(f64::total_cmp);
            times
        };
        let ratio = percentile(&of(true), 0.9) / percentile(&of(false), 0.5);
        println!("{what}: mixed steps take {ratio:.2} times as long as decodes alone");
        assert!((2.0..8.0).contains(&ratio), "{what}: {ratio}");
    }
}

#[test]
fn prompts_of_one_token_are_served_beside_prompts_of_a_hundred_thousand() {
    let [.., profile] = profiles();
    let mut requests = Vec::new();
    for turn in 0..60u64 {
        let at = |offset: u64| Time::from_nanos((turn * 1000 + offset) * 1_000_000);
        if turn % 10 == 0 {
            requests.push(Request::new(at(0), 0, 100_000, 20));
        }
        requests.extend((1..20).map(|step| Request::new(at(step * 50), 1, 1, 20)));
    }
    let mut simulation =
        Simulation::new(scheduler(StepTarget::adaptive(), profile.iteration_tokens), device(profile.cost));
    let mut records = Records::new(&requests);
    simulation.run(&requests, &mut records).unwrap();
    let of = |long: bool| {
        let records = records.iter().filter(|record| (record.request.prompt_tokens > 1) == long);
        let mut times: Vec<f64> =
            records.map(|record| record.time_to_first_token().unwrap().as_secs_f64()).collect();
        times.sort_by(f64::total_cmp);
        times
    };
    let (short, long) = (of(false), of(true));
    println!(
        "first token: short P99 {:.3} s, long P50 {:.2} s",
        percentile(&short, 0.99),
        percentile(&long, 0.5)
    );
    // Alone, a long prompt takes 1.6 s and its keys 5 s.
    assert!(percentile(&short, 0.99) < 0.2 && percentile(&long, 1.0) < 1.5 * 6.6, "{short:?} {long:?}");
}

#[test]
fn objectives_hold_where_they_can_and_are_counted_where_they_cannot() {
    let [small, large, ..] = profiles();
    let requests = chats(1500, 1.0);
    let serve = |profile: &Profile, first_token: Option<u64>, gap: Option<u64>| {
        let objectives = LatencyObjectives {
            first_token: first_token.map(Duration::from_millis),
            gap: gap.map(Duration::from_millis),
        };
        let target = StepTarget::Adaptive(objectives);
        let mut simulation = Simulation::new(scheduler(target, 512), device(profile.cost));
        let mut records = Records::new(&requests);
        simulation.run_closed(&requests, 16, THINK, &mut records).unwrap();
        let found = latencies(profile.name, &format!("{first_token:?} {gap:?}"), target, &records);
        (found, simulation.scheduler().load())
    };
    let (default, _) = serve(&small, None, None);
    let (short, load) = serve(&small, None, Some(40));
    assert!(short.gap_p99 < 45.0 && short.gap_p99 < default.gap_p99, "{short:?}, {default:?}");
    assert_eq!(load.gap_objective_unmet, 0);
    let ((early, _), (default, _)) = (serve(&large, Some(500), None), serve(&large, None, None));
    assert!(early.first_mean < 0.97 * default.first_mean, "{early:?}, {default:?}");
    // Sixteen decodes take longer than the objective: requests are served, in steps as short as possible.
    let (unmet, load) = serve(&small, Some(1), Some(2));
    assert!(load.gap_objective_unmet > 100 && load.first_token_objective_unmet > 100, "{load:?}");
    assert!(unmet.gap_p99 < short.gap_p99, "{unmet:?}, {short:?}");
}

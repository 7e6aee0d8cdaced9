//! Drafts under the governor: they save time where output repeats, and cost nothing where it does not, however the
//! batch changes.

use std::time::Duration;

use inflight_contract::CostCoefficients;
use inflight_simulator::{AcceptanceTrace, Observer, Request, RequestEvent, Simulation, StepSample};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{CostModel, CostPrior, Load, SchedulerLimits, Time};

use crate::common::scheduler;

/// Device on which a row costs a ninth of reading the weights: drafts of a single stream are cheap, those beside
/// about ten others are not.
fn device() -> CostModel {
    let cost = CostCoefficients {
        step_s: 8e-3,
        token_s: 9e-4,
        prefill_key_s: 1e-9,
        decode_key_s: 1e-8,
        sequence_s: 1e-4,
        copy_s: 1e-5,
        copy_block_s: 1e-5,
    };
    CostModel::new(CostPrior { cost, trust: 1e-6 })
}

/// Counts rows, decodes and generated tokens.
#[derive(Default)]
struct Rows {
    rows: u64,
    decodes: u64,
    tokens: u64,
}

impl Observer for Rows {
    fn request(&mut self, _: Time, _: usize, _: &Request, event: &RequestEvent) {
        if let RequestEvent::Served { output_tokens, .. } = event {
            self.tokens += u64::from(*output_tokens);
        }
    }

    fn step(&mut self, step: &StepSample) {
        self.rows += u64::from(step.work.total().tokens);
        self.decodes += u64::from(step.work.decode.sequences);
    }
}

/// Result of a workload.
struct Outcome {
    took: Duration,
    load: Load,
    rows: u64,
    decodes: u64,
    tokens: u64,
}

impl Outcome {
    fn wasted(&self) -> f64 {
        (self.load.drafted_tokens - self.load.accepted_drafts) as f64 / self.rows as f64
    }
}

fn serve(requests: &[Request], drafts: Option<AcceptanceTrace>, depth: u32, streams: usize) -> Outcome {
    let limits = SchedulerLimits {
        depth,
        waiting_max: 10_000,
        prefix_cache: false,
        drafts_max: if drafts.is_some() { 8 } else { 0 },
        ..SchedulerLimits::new(16, 4000, 32, 512)
    };
    let mut simulation = Simulation::new(scheduler(limits, PolicyKind::Fcfs), device());
    if let Some(trace) = drafts {
        simulation = simulation.drafting(trace);
    }
    let mut rows = Rows::default();
    match streams {
        0 => simulation.run(requests, &mut rows).unwrap(),
        streams => simulation.run_closed(requests, streams, Duration::ZERO, &mut rows).unwrap(),
    }
    Outcome {
        took: simulation.now().since(Time::ZERO),
        load: simulation.scheduler().load(),
        rows: rows.rows,
        decodes: rows.decodes,
        tokens: rows.tokens,
    }
}

fn requests(count: usize, output: u32) -> Vec<Request> {
    (0..count).map(|_| Request::new(Time::ZERO, 0, 64, output)).collect()
}

#[test]
fn output_that_repeats_takes_fewer_steps_and_less_time() {
    for depth in [1, 2] {
        let requests = requests(4, 400);
        let without = serve(&requests, None, depth, 1);
        let with = serve(&requests, Some(AcceptanceTrace::random(1.0, 0.9, 3)), depth, 1);
        assert_eq!(with.tokens, without.tokens);
        let per_step = with.tokens as f64 / with.decodes as f64;
        let gain = without.took.as_secs_f64() / with.took.as_secs_f64();
        assert!(per_step >= 1.6 && gain >= 1.5, "{per_step:.2} tokens per step, {gain:.2} times as fast");
        // Copied and new text in turns, a hundred tokens each.
        let counts = (0..200u32).map(|position| 100u32.saturating_sub(position)).collect();
        let with = serve(&requests, Some(AcceptanceTrace::recorded(counts)), depth, 1);
        let ratio = with.took.as_secs_f64() / without.took.as_secs_f64();
        println!("depth {depth}: {ratio:.3} of the time with copied and new text in turns");
        assert!(ratio < 0.75, "{ratio:.3}");
    }
}

#[test]
fn output_without_repetition_wastes_less_than_one_row_in_a_hundred_while_the_batch_swings() {
    for (seed, proposal) in [(1, 1.0), (2, 0.2), (3, 0.02)] {
        // Bursts of twelve requests over a lone one: the batch swings around the governor's threshold.
        let mut requests = Vec::new();
        for burst in 0..60u64 {
            let at = |ms: u64| Time::ZERO.after(Duration::from_millis(2000 * burst + ms));
            requests.push(Request::new(at(0), 0, 32, 150));
            requests.extend((0..12).map(|nth| Request::new(at(200 + 30 * nth), 0, 32, 30)));
        }
        let without = serve(&requests, None, 1, 0);
        for acceptance in [0.0, 0.03] {
            let trace = AcceptanceTrace::random(proposal, acceptance, seed);
            let with = serve(&requests, Some(trace), 1, 0);
            assert_eq!(with.tokens, without.tokens);
            let wasted = with.wasted();
            assert!(wasted <= 0.01, "{:.2} % of rows wasted at {acceptance}", 100.0 * wasted);
            let ratio = with.took.as_secs_f64() / without.took.as_secs_f64();
            assert!(ratio < 1.005, "{ratio:.4} times the time without drafts at {acceptance}");
        }
    }
}

#[test]
fn drafts_are_never_slower_than_none_whatever_stands_and_however_many_streams_there_are() {
    for depth in [1, 2] {
        for streams in [1, 4, 8, 16] {
            for acceptance in [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0] {
                let requests = requests(12 * streams, 100);
                let without = serve(&requests, None, depth, streams);
                let trace = AcceptanceTrace::random(1.0, acceptance, 7);
                let with = serve(&requests, Some(trace), depth, streams);
                let ratio = with.took.as_secs_f64() / without.took.as_secs_f64();
                println!("depth {depth}, {streams} streams, acceptance {acceptance}: {ratio:.3}");
                // Requests end at other times, which alone changes the total by a percent.
                assert!(ratio < 1.015, "{streams} streams, acceptance {acceptance}: {ratio:.3}");
            }
        }
    }
}

//! Time to first token against gaps between tokens: step targets on closed loops, in simulation.
//!
//! `cargo bench -p inflight-simulator --bench first_token`

use std::time::Duration;

use inflight_contract::{CostCoefficients, TokenCost, VirtualTokenCounters};
use inflight_simulator::{Records, Request, Simulation, percentile};
use inflight_traces::SplitMix64;
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{CostModel, CostPrior, Scheduler, SchedulerLimits, StepTarget, Time};

/// Time from the end of a request to the next one of its stream at the worker.
const THINK: Duration = Duration::from_millis(2);
const REQUESTS: usize = 4000;

fn device(cost: CostCoefficients) -> CostModel {
    CostModel::new(CostPrior { cost, trust: 0.001 })
}

fn devices() -> [(&'static str, CostCoefficients, usize); 4] {
    let copies = CostCoefficients {
        step_s: 0.0,
        token_s: 0.0,
        prefill_key_s: 0.0,
        decode_key_s: 0.0,
        sequence_s: 0.0,
        copy_s: 2e-5,
        copy_block_s: 2e-5,
    };
    [
        (
            "cpu 135m",
            CostCoefficients {
                step_s: 6e-3,
                token_s: 3.9e-4,
                decode_key_s: 4e-7,
                prefill_key_s: 1e-7,
                sequence_s: 2e-4,
                ..copies
            },
            1,
        ),
        (
            "cpu 1.1b",
            CostCoefficients {
                step_s: 40e-3,
                token_s: 2.6e-3,
                decode_key_s: 1e-6,
                prefill_key_s: 3e-7,
                sequence_s: 5e-4,
                ..copies
            },
            1,
        ),
        (
            "a10g 7b",
            CostCoefficients {
                step_s: 29e-3,
                token_s: 2e-4,
                decode_key_s: 1.1e-6,
                prefill_key_s: 2e-8,
                sequence_s: 1e-5,
                ..copies
            },
            4,
        ),
        (
            "h100 8b",
            CostCoefficients {
                step_s: 6e-3,
                token_s: 1.6e-5,
                decode_key_s: 4e-8,
                prefill_key_s: 1e-9,
                sequence_s: 2e-6,
                ..copies
            },
            16,
        ),
    ]
}

fn lognormal(random: &mut SplitMix64, mean: f64, sigma: f64, max: u32) -> u32 {
    let value = mean.ln() - sigma * sigma / 2.0 + sigma * random.normal();
    (value.exp().round() as u32).clamp(1, max)
}

/// Requests whose prompts and outputs are `scale` times those of short chats.
fn requests(scale: usize, seed: u64) -> Vec<Request> {
    let mut random = SplitMix64::new(seed);
    let scale = scale as f64;
    (0..REQUESTS)
        .map(|_| {
            let prompt = lognormal(&mut random, 118.0 * scale, 0.8, (500.0 * scale) as u32);
            let output = lognormal(&mut random, 63.0 * scale.sqrt(), 0.9, (390.0 * scale.sqrt()) as u32);
            Request::new(Time::ZERO, 0, prompt, output)
        })
        .collect()
}

fn main() {
    let targets = |with_peer: bool| {
        let ms = |ms| StepTarget::Fixed(Duration::from_millis(ms));
        let mut all = vec![
            ("adaptive", StepTarget::adaptive(), 0),
            ("20 ms", ms(20), 0),
            ("50 ms", ms(50), 0),
            ("100 ms", ms(100), 0),
            ("250 ms", ms(250), 0),
        ];
        if with_peer {
            all.push(("unbounded", StepTarget::Unbounded, 2048));
        }
        all
    };
    for (name, cost, scale) in devices() {
        for streams in [1usize, 4, 16, 32, 64] {
            let requests = requests(scale, 7);
            for (label, target, tokens) in targets(true) {
                let tokens = if tokens == 0 { 512.max(512 * scale as u32) } else { tokens * scale as u32 };
                let limits = SchedulerLimits {
                    prefix_cache: false,
                    waiting_max: 10_000,
                    step_target: target,
                    ..SchedulerLimits::new(16, 1 << 16, 256, tokens)
                };
                let tenants = VirtualTokenCounters::new(TokenCost::default(), 1000);
                let prior = CostModel::new(CostPrior::default());
                let scheduler = Scheduler::new(limits, PolicyKind::Fair.build(), prior, tenants).unwrap();
                let mut simulation = Simulation::new(scheduler, device(cost));
                let mut records = Records::new(&requests);
                simulation.run_closed(&requests, streams, THINK, &mut records).unwrap();
                let (first, gaps) = (records.times_to_first_token(), records.gaps());
                let mean = first.iter().sum::<f64>() / first.len() as f64;
                println!(
                    "{name:9} {streams:3} {label:10} TTFT mean {:7.0} P50 {:7.0} P90 {:7.0} ms, gap P50 {:6.1} P90 {:6.1} P99 {:6.1} max {:6.0} ms, {:7.1} tok/s, step {:5.1} ms",
                    1e3 * mean,
                    1e3 * percentile(&first, 0.5),
                    1e3 * percentile(&first, 0.9),
                    1e3 * percentile(&gaps, 0.5),
                    1e3 * percentile(&gaps, 0.9),
                    1e3 * percentile(&gaps, 0.99),
                    1e3 * percentile(&gaps, 1.0),
                    records.tokens_per_second(),
                    1e3 * records.kv().busy_s / records.steps() as f64
                );
            }
        }
    }
}

//! Fairness bound between backlogged tenants at every event, for random tenants on small pools.

use std::time::Duration;

use inflight_contract::{TokenCost, Weight};
use inflight_simulator::{Request, ServiceGap, Simulation};
use inflight_worker_core::policy::Fair;
use inflight_worker_core::{CostModel, CostPrior, SchedulerLimits, StepTarget, Time};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use crate::common::scheduler_with;

/// Generates requests of up to four tenants that overload a small pool.
fn requests() -> impl Strategy<Value = Vec<Request>> {
    let tenants = prop::collection::vec((0.2f32..5.0, 1u32..60, 1u32..60, 1u64..30), 2..=4);
    let picks = prop::collection::vec((any::<prop::sample::Index>(), 0.1f64..1.0, 0.1f64..1.0), 20..200);
    (tenants, picks).prop_map(|(tenants, picks)| {
        let mut at = Time::ZERO;
        let request = |(pick, prompt, output): (prop::sample::Index, f64, f64)| {
            let tenant = pick.index(tenants.len());
            let (weight, prompt_max, output_max, pause_ms) = tenants[tenant];
            at = at.after(Duration::from_millis(pause_ms));
            let scaled = |share: f64, most: u32| ((share * f64::from(most)) as u32).max(1);
            let (prompt, output) = (scaled(prompt, prompt_max), scaled(output, output_max));
            let weight = Weight::try_from(weight).unwrap();
            Request { weight, max_tokens: output_max, ..Request::new(at, tenant as u32, prompt, output) }
        };
        picks.into_iter().map(request).collect()
    })
}

fn limits() -> impl Strategy<Value = SchedulerLimits> {
    (0u32..=4, 128u32..400, 2u32..12, 0u32..64, 0u32..64, prop_oneof![Just(0u32), 1u32..20], prop::bool::ANY)
        .prop_map(|(block_log, tokens, running_max, extra, min_decode_tokens, bypass_max, swaps)| {
            let blocks = tokens >> block_log;
            SchedulerLimits {
                min_decode_tokens,
                bypass_max,
                host_blocks: if swaps { blocks } else { 0 },
                prefix_cache: false,
                step_target: if extra % 2 == 0 { StepTarget::adaptive() } else { StepTarget::Unbounded },
                ..SchedulerLimits::new(1 << block_log, blocks, running_max, running_max + extra)
            }
        })
}

/// Without host pool, bypass and aging, this is the bound of VTC.
/// `INFLIGHT_SEEDS=FIRST..END` replaces the default seed.
#[test]
fn the_service_gap_of_two_backlogged_tenants_never_exceeds_the_bound() {
    let aging = prop::option::of((0.0f64..10_000.0, 0.0f64..500.0));
    let workloads = (requests(), limits(), aging);
    for seed in crate::common::seeds(0..1) {
        let config = Config {
            cases: 400,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(seed),
            ..Config::default()
        };
        let outcome = TestRunner::new(config).run(&workloads, |(requests, limits, aging)| {
            let (tokens_per_second, tokens_max) = aging.unwrap_or((0.0, 0.0));
            let policy = Fair { tokens_per_second, tokens_max, ..Fair::default() };
            let cost = CostModel::new(CostPrior::default());
            let mut simulation = Simulation::new(scheduler_with(limits, Box::new(policy)), cost);
            // Admitted requests may also hold the host pool.
            let tokens = limits.pool_tokens() + limits.host_blocks * limits.block_tokens();
            let gap = ServiceGap::new(TokenCost::default(), tokens);
            let mut gap = gap.with_bypasses(limits.bypass_max).with_aging(tokens_max);
            simulation.run(&requests, &mut gap).unwrap();
            simulation.scheduler().assert_consistent();
            prop_assert!(gap.largest_share() <= 1.0, "a gap of {} of the bound", gap.largest_share());
            Ok(())
        });
        if let Err(error) = outcome {
            panic!("seed {seed} (INFLIGHT_SEEDS={seed}..{}): {error}", seed + 1);
        }
    }
}

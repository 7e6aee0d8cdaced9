//! Random workloads under random interleavings of submission, cancellation, deadline, transfer and failure:
//! blocks are conserved, every sequence ends once, and no sequence reads foreign KV.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use crate::harness::{Harness, limits, op, policy, seeds};

/// Number of schedules per seed.
const SCHEDULES: u32 = 1000;

#[test]
fn every_schedule_conserves_blocks_and_ends_each_sequence_once() {
    let seeds = seeds::seeds();
    for seed in seeds.clone() {
        let config = Config {
            cases: SCHEDULES,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(seed),
            ..Config::default()
        };
        let schedules = (limits(), policy(), prop::collection::vec(op(), 1..120));
        let outcome = TestRunner::new(config).run(&schedules, |(limits, policy, ops)| {
            let mut harness = Harness::new(limits, policy);
            ops.iter().enumerate().for_each(|(at, op)| harness.apply(at, op));
            harness.finish();
            Ok(())
        });
        if let Err(error) = outcome {
            panic!("seed {seed} (INFLIGHT_SEEDS={seed}..{}): {error}", seed + 1);
        }
    }
    println!("seeds {seeds:?}, {SCHEDULES} schedules each: all hold");
}

//! Random workloads under random interleavings of submission, cancellation, deadline, transfer and failure:
//! blocks are conserved, every sequence ends once, and no sequence reads foreign KV.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use inflight_worker_core::{SchedulerLimits, SnapshotShape};

use crate::harness::{Harness, limits, op, policy, seeds, shape, shape_with_state};

/// Number of schedules per seed.
const SCHEDULES: u32 = 1000;

#[test]
fn every_schedule_conserves_blocks_and_ends_each_sequence_once() {
    check(limits());
}

/// Layers with windows beside full attention, alone and of two sizes, each with too few blocks: no sequence lacks a row that its
/// window still sees.
#[test]
fn every_schedule_with_windows_conserves_blocks_and_ends_each_sequence_once() {
    check((limits(), shape(), 1u32..=3).prop_map(|(limits, shape, part)| SchedulerLimits {
        shape,
        // From a part of the blocks that full attention in all groups would need.
        blocks: limits.blocks * shape.span_blocks() / part + shape.span_blocks(),
        host_blocks: limits.host_blocks * shape.span_blocks() / part,
        ..limits
    }));
}

/// Recurrent layers beside others, with and without snapshots: no sequence computes with a state of another one, or of other tokens.
#[test]
fn every_schedule_with_recurrent_states_conserves_blocks_and_ends_each_sequence_once() {
    let snapshot = prop::option::weighted(0.8, (1u32..=5, 0u32..=4));
    check((limits(), shape_with_state(), 1u32..=3, snapshot).prop_map(|(limits, shape, part, snapshot)| {
        let (span, state) = (shape.span_blocks(), shape.state_blocks());
        let of_state =
            |(blocks, log): (u32, u32)| SnapshotShape { blocks: blocks.min(state), every: 1 << log };
        SchedulerLimits {
            shape,
            snapshot: snapshot.map(of_state),
            blocks: limits.blocks * span / part + span + state * (1 + limits.running_max / part),
            host_blocks: (limits.host_blocks * span + limits.running_max * state) / part,
            ..limits
        }
    }));
}

fn check(limits: impl Strategy<Value = SchedulerLimits>) {
    let seeds = seeds::seeds();
    let schedules = (limits, policy(), prop::collection::vec(op(), 1..120));
    let cached = Cell::new(0);
    for seed in seeds.clone() {
        let config = Config {
            cases: SCHEDULES,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(seed),
            ..Config::default()
        };
        let outcome = TestRunner::new(config).run(&schedules, |(limits, policy, ops)| {
            let mut harness = Harness::new(limits, policy);
            ops.iter().enumerate().for_each(|(at, op)| harness.apply(at, op));
            harness.finish();
            cached.set(cached.get() + harness.scheduler.load().cached_tokens);
            Ok(())
        });
        if let Err(error) = outcome {
            panic!("seed {seed} (INFLIGHT_SEEDS={seed}..{}): {error}", seed + 1);
        }
    }
    let cached = cached.get();
    assert!(cached > 0, "no sequence resumed from the prefix cache");
    println!(
        "seeds {seeds:?}, {SCHEDULES} schedules each: all hold, with {cached} tokens of the prefix cache"
    );
}

//! Mutation tests: the properties must catch each deliberate fault of the scheduler.

mod harness;

use std::panic::{AssertUnwindSafe, catch_unwind};

use harness::{Harness, limits, op, policy};
use inflight_worker_core::Mutant;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Maximum number of schedules to catch a mutant.
const SCHEDULES: u32 = 20_000;

/// Returns the number of schedules until the properties catch the mutant.
fn caught_after(mutant: Option<Mutant>) -> Option<u32> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config { failure_persistence: None, ..Config::default() }, rng);
    let schedules = (limits(), policy(), prop::collection::vec(op(), 1..120));
    std::panic::set_hook(Box::new(|_| {})); // panics are expected
    let caught = (1..=if mutant.is_some() { SCHEDULES } else { 2000 }).find(|_| {
        let (limits, policy, ops) =
            schedules.new_tree(&mut runner).expect("a schedule can be drawn").current();
        catch_unwind(AssertUnwindSafe(|| {
            let mut harness = Harness::new(limits, policy);
            if let Some(mutant) = mutant {
                harness.scheduler.mutate(mutant);
            }
            ops.iter().enumerate().for_each(|(at, op)| harness.apply(at, op));
            harness.finish();
        }))
        .is_err()
    });
    let _ = std::panic::take_hook();
    caught
}

#[test]
fn every_mutant_is_caught_and_the_correct_scheduler_passes() {
    assert_eq!(caught_after(None), None, "the properties reject the correct scheduler");
    for mutant in [
        Mutant::FreeBeforeFence,
        Mutant::VictimOldest,
        Mutant::BudgetIgnoresDecodes,
        Mutant::ProgressNotRequired,
        Mutant::MarkNotRechecked,
        Mutant::UnboundedBypass,
        Mutant::FirstSkipped,
    ] {
        let caught = caught_after(Some(mutant));
        println!("{mutant:?} is caught after {caught:?} schedules");
        assert!(caught.is_some(), "{mutant:?} was not caught");
    }
}

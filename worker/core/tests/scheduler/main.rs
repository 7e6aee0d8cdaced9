//! Tests of the scheduler: random schedules against a model memory, an upper bound on waiting, known faults of other engines,
//! virtual time, invalid input, allocations of a plan. `tests/mutants/run` checks that they detect deliberate faults.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(clippy::disallowed_methods, reason = "the seeds come from the environment")]

mod bad_input;
mod bounded_wait;
mod cost;
mod harness;
mod known_faults;
mod predictions;
mod properties;
mod virtual_time;

//! The CUDA kernels, their very sources, run on the host by the harness, or on a GPU, against references in f64 and the CPU's
//! kernels, over random ragged shapes. Where no C++ compiler was found, nothing is tested and each test says so.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "buffers are as large as the parameters beside them say"
)]

mod attention;
mod e4m3;
mod faults;
mod machine;
mod mutants;
mod numbers;
mod overlap;
mod product;
mod rows;
mod sampling;
mod sources;
mod timing;

use std::cell::Cell;

use inflight_kernels::cuda::{Half, KvStore};
use inflight_kernels::philox4x32;
use machine::{Buffer, Machine};
use proptest::prelude::*;

/// Random numbers by formula, so that a failure replays.
pub(crate) struct Dice {
    key: u32,
    count: u32,
}

impl Dice {
    pub(crate) fn new(key: u32) -> Self {
        Self { key, count: 0 }
    }

    pub(crate) fn word(&mut self) -> u32 {
        self.count += 1;
        philox4x32([self.count, 0, 0, 0], [self.key, 1])[0]
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.word() as usize % bound
    }

    /// From -1 to 1.
    pub(crate) fn number(&mut self) -> f32 {
        self.word() as f32 / 2f32.powi(31) - 1.0
    }

    pub(crate) fn numbers(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.number() * scale).collect()
    }

    /// Numbers that fit a type, as its bits.
    pub(crate) fn halves(&mut self, half: Half, count: usize, scale: f32) -> Vec<u16> {
        (0..count).map(|_| half.narrow(self.number() * scale)).collect()
    }

    pub(crate) fn shuffled(&mut self, count: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..count as u32).collect();
        for i in (1..count).rev() {
            let j = self.below(i + 1);
            all.swap(i, j);
        }
        all
    }
}

pub(crate) fn store() -> impl Strategy<Value = KvStore> {
    prop_oneof![Just(KvStore::Half), Just(KvStore::Fp8)]
}

pub(crate) fn half() -> impl Strategy<Value = Half> {
    prop_oneof![Just(Half::Bf16), Just(Half::F16)]
}

/// The relative error of rounding to a type.
pub(crate) fn unit(half: Half) -> f64 {
    match half {
        Half::Bf16 => 2f64.powi(-8),
        Half::F16 => 2f64.powi(-11),
    }
}

pub(crate) fn widen(half: Half, memory: &Buffer, count: usize) -> Vec<f32> {
    memory.read::<u16>(count).into_iter().map(|bits| half.widen(bits)).collect()
}

thread_local! {
    static SHRINKING: Cell<bool> = const { Cell::new(true) };
}

/// Runs properties of which only whether they hold is of interest.
pub(crate) fn without_shrinking<T>(work: impl FnOnce() -> T) -> T {
    SHRINKING.set(false);
    let outcome = work();
    SHRINKING.set(true);
    outcome
}

/// Runs cases of a property, or says why not.
pub(crate) fn on_harness<S: Strategy>(
    cases: u32,
    strategy: S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    if !Machine::available() {
        inflight_fixtures::skipped("CUDA kernels", "there was no C++ compiler to build the harness with");
        return;
    }
    // Checkers are slow: they run fewer.
    let few = std::env::var("INFLIGHT_TEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let config = ProptestConfig {
        cases: few.unwrap_or(cases),
        failure_persistence: None,
        max_shrink_iters: if SHRINKING.get() { 1024 } else { 0 },
        ..ProptestConfig::default()
    };
    proptest::test_runner::TestRunner::new(config)
        .run(&strategy, test)
        .unwrap_or_else(|error| panic!("{error}"));
}

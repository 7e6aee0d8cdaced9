//! Tests of the CUDA kernels against references in f64 and the CPU kernels, over random ragged shapes. The
//! kernels' own sources run on the host in the harness, or on a GPU. Without a C++ compiler they are skipped.

#![allow(clippy::unwrap_used, reason = "test helpers fail like tests")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "buffers are sized by the parameters beside them")]

mod attention;
mod conversions;
mod delta;
mod device;
mod drafts;
mod e4m3;
mod faults;
mod mutants;
mod non_finite;
mod overlap;
mod product;
mod rows;
mod sampling;
mod sampling_split;
mod sources;
mod tensor_cores;
mod timing;

use std::cell::Cell;

use device::{Buffer, TestDevice};
use inflight_kernels::cuda::{HalfDtype, KvStore};
use inflight_kernels::philox4x32;
use proptest::prelude::*;

/// Pseudo-random number generator by formula, so that failures are reproducible.
pub(crate) struct SeededRng {
    key: u32,
    count: u32,
}

impl SeededRng {
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

    /// Returns a uniform value in [-1, 1).
    pub(crate) fn value(&mut self) -> f32 {
        self.word() as f32 / 2f32.powi(31) - 1.0
    }

    pub(crate) fn values(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.value() * scale).collect()
    }

    /// Returns `count` values in [-scale, scale), rounded to `half`, as bits.
    pub(crate) fn halves(&mut self, half: HalfDtype, count: usize, scale: f32) -> Vec<u16> {
        (0..count).map(|_| half.narrow(self.value() * scale)).collect()
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

pub(crate) fn half() -> impl Strategy<Value = HalfDtype> {
    prop_oneof![Just(HalfDtype::Bf16), Just(HalfDtype::F16)]
}

/// Returns the relative rounding error of a type.
pub(crate) fn unit(half: HalfDtype) -> f64 {
    match half {
        HalfDtype::Bf16 => 2f64.powi(-8),
        HalfDtype::F16 => 2f64.powi(-11),
    }
}

pub(crate) fn widen(half: HalfDtype, memory: &Buffer, count: usize) -> Vec<f32> {
    memory.read::<u16>(count).into_iter().map(|bits| half.widen(bits)).collect()
}

/// Factor of the cases of a property that is expected to fail: it ends at the first failure, and a fault that one case in a
/// hundred shows is still found.
const MUTANT_CASES: u32 = 50;

thread_local! {
    static EXPECTS_FAILURE: Cell<bool> = const { Cell::new(false) };
}

/// Runs properties that are expected to fail: with more cases, and without shrinking.
pub(crate) fn expecting_failure<T>(work: impl FnOnce() -> T) -> T {
    EXPECTS_FAILURE.set(true);
    let outcome = work();
    EXPECTS_FAILURE.set(false);
    outcome
}

/// Runs cases of a property, or reports it as skipped.
pub(crate) fn on_harness<S: Strategy>(
    cases: u32,
    strategy: S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    if !TestDevice::available() {
        inflight_fixtures::skipped("CUDA kernels", "there was no C++ compiler to build the harness with");
        return;
    }
    // Memory checkers are slow, so they run fewer cases.
    let few = std::env::var("INFLIGHT_TEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let (factor, max_shrink_iters) = if EXPECTS_FAILURE.get() { (MUTANT_CASES, 0) } else { (1, 1024) };
    let config = ProptestConfig {
        cases: few.unwrap_or(cases) * factor,
        failure_persistence: None,
        max_shrink_iters,
        ..ProptestConfig::default()
    };
    proptest::test_runner::TestRunner::new(config)
        .run(&strategy, test)
        .unwrap_or_else(|error| panic!("{error}"));
}

//! Tests of rank failures in a tensor-parallel group.

use std::cell::Cell;
use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::collective::{Collective, GroupFailed, host_group};
use inflight_runtime::{Batch, Error, Runtime, Sampled, SlotSetup};

use super::super::{CpuOptions, CpuRuntime};

/// Collectives per step of the demo model: two all-reduces per layer and one gather.
const CALLS: usize = 5 * 2 + 1;

/// Collective whose rank fails or panics in its call number `at`.
struct Faulty {
    inner: Box<dyn Collective>,
    calls: Cell<usize>,
    at: usize,
    panics: bool,
}

impl Faulty {
    fn count_call(&self) -> Result<(), GroupFailed> {
        self.calls.set(self.calls.get() + 1);
        if self.calls.get() != self.at {
            return Ok(());
        }
        assert!(!self.panics, "injected fault");
        Err(GroupFailed { rank: self.rank(), reason: "injected fault".to_owned() })
    }
}

impl Collective for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn all_reduce(&self, elements: &mut [f32]) -> Result<(), GroupFailed> {
        self.count_call()?;
        self.inner.all_reduce(elements)
    }

    fn gather(&self, part: &[f32], rows: usize, whole: Option<&mut [f32]>) -> Result<(), GroupFailed> {
        self.count_call()?;
        self.inner.gather(part, rows, whole)
    }

    fn barrier(&self) -> Result<(), GroupFailed> {
        self.inner.barrier()
    }

    fn fail(&self, reason: &str) {
        self.inner.fail(reason);
    }

    fn failure(&self) -> Option<GroupFailed> {
        self.inner.failure()
    }
}

fn load(culprit: usize, at: usize, panics: bool) -> CpuRuntime {
    let model = ModelDir::open(&ModelSource::Embedded).unwrap();
    let options = CpuOptions {
        threads: Some(2),
        kv_bytes: 1 << 20,
        host_bytes: 0,
        block_tokens: 16,
        slots: 2,
        batch_tokens: 32,
        context_tokens: None,
        isa: None,
        quantize: None,
        kv_dtype: None,
        tensor_parallel: 2,
    };
    let faulty = |inner: Box<dyn Collective>| -> Box<dyn Collective> {
        let at = if inner.rank() == culprit { at } else { usize::MAX };
        Box::new(Faulty { inner, calls: Cell::new(0), at, panics })
    };
    let collectives = host_group(2).into_iter().map(faulty).collect();
    let mut runtime = CpuRuntime::load_with_group(
        &model,
        &options,
        collectives,
        &inflight_runtime::MemoryLedger::alone(),
        &|_, _| {},
    )
    .unwrap();
    let setup = SlotSetup {
        sampling: Arc::new(SamplingParams::greedy()),
        choice: 0,
        prompt: &[],
        generated: &[],
        eos_token_ids: &[],
    };
    runtime.attach(0, &setup).unwrap();
    runtime
}

fn step(runtime: &mut dyn Runtime, position: u32) -> Result<Vec<Sampled>, Error> {
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    batch.clear();
    batch.push_sequence(&[position + 5], position, &[3]);
    batch.sample_last_row(0);
    runtime.execute(&mut batch, &mut sampled)?;
    Ok(sampled)
}

/// Runs steps until one fails; returns the number of successful ones and the error.
fn until_failure(runtime: &mut dyn Runtime) -> (usize, String) {
    for position in 0.. {
        match step(runtime, position) {
            Ok(sampled) => assert_eq!(sampled.len(), 1),
            Err(Error::Device(reason)) => return (position as usize, reason),
            Err(other) => panic!("not a failure of the device: {other}"),
        }
    }
    unreachable!("positions end at the context")
}

#[test]
fn a_rank_that_fails_fails_the_step_and_every_one_after_it() {
    for culprit in 0..2 {
        for panics in [false, true] {
            // In the first all-reduce, in a later one of another step, in a gather.
            for at in [1, 2 * CALLS + 4, 3 * CALLS] {
                let mut runtime = load(culprit, at, panics);
                let (steps, reason) = until_failure(&mut runtime);
                assert_eq!(steps, (at - 1) / CALLS, "the step it happens in fails");
                assert!(reason.contains(&format!("rank {culprit}")), "{reason}");
                assert!(reason.contains("injected fault"), "{reason}");
                assert_eq!(reason.contains("panicked"), panics, "{reason}");
                assert_eq!(until_failure(&mut runtime), (0, reason.clone()), "it stays so");
                let mut overlapped = load(culprit, at, panics).overlapped().unwrap();
                assert_eq!(until_failure(&mut overlapped), (steps, reason));
            }
        }
    }
}

#[test]
fn a_rejected_batch_does_not_fail_the_group() {
    let mut runtime = load(0, usize::MAX, false);
    let mut batch = Batch::default();
    for _ in 0..2 {
        batch.clear();
        batch.push_sequence(&[1], 0, &[7]);
        batch.push_sequence(&[2], 0, &[7]);
        let refused = runtime.execute(&mut batch, &mut Vec::new());
        assert!(matches!(refused, Err(Error::Malformed(_))), "{refused:?}");
        assert!(step(&mut runtime, 0).is_ok());
    }
}

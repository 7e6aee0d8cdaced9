use std::cell::Cell;
use std::sync::Arc;

use inflight_contract::SamplingParams;

use super::super::{CpuOptions, CpuRuntime};
use crate::models::{ModelDir, ModelSource};
use crate::runtime::collective::{Collective, GroupFailed, host_group};
use crate::runtime::{Batch, Error, Runtime, Sampled, SlotSetup};

/// Two sums a layer of the demo model, and the gathering of logits.
const CALLS: usize = 4 * 2 + 1;

/// An end whose rank goes wrong when it makes its call number `at`.
struct Faulty {
    end: Box<dyn Collective>,
    calls: Cell<usize>,
    at: usize,
    panics: bool,
}

impl Faulty {
    fn strike(&self) -> Result<(), GroupFailed> {
        self.calls.set(self.calls.get() + 1);
        if self.calls.get() != self.at {
            return Ok(());
        }
        assert!(!self.panics, "a wire came off");
        Err(GroupFailed { rank: self.rank(), reason: "a wire came off".to_owned() })
    }
}

impl Collective for Faulty {
    fn rank(&self) -> usize {
        self.end.rank()
    }

    fn world(&self) -> usize {
        self.end.world()
    }

    fn all_reduce(&self, numbers: &mut [f32]) -> Result<(), GroupFailed> {
        self.strike()?;
        self.end.all_reduce(numbers)
    }

    fn gather(&self, part: &[f32], rows: usize, whole: Option<&mut [f32]>) -> Result<(), GroupFailed> {
        self.strike()?;
        self.end.gather(part, rows, whole)
    }

    fn barrier(&self) -> Result<(), GroupFailed> {
        self.end.barrier()
    }

    fn fail(&self, reason: &str) {
        self.end.fail(reason);
    }

    fn failure(&self) -> Option<GroupFailed> {
        self.end.failure()
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
    let faulty = |end: Box<dyn Collective>| -> Box<dyn Collective> {
        let at = if end.rank() == culprit { at } else { usize::MAX };
        Box::new(Faulty { end, calls: Cell::new(0), at, panics })
    };
    let ends = host_group(2).into_iter().map(faulty).collect();
    let mut runtime = CpuRuntime::load_over(&model, &options, ends, &|_, _| {}).unwrap();
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

/// Steps until one fails; how many did not, and what it said.
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
            // In the first sum, in a later one of another step, in a gathering.
            for at in [1, 2 * CALLS + 4, 3 * CALLS] {
                let mut runtime = load(culprit, at, panics);
                let (steps, reason) = until_failure(&mut runtime);
                assert_eq!(steps, (at - 1) / CALLS, "the step it happens in fails");
                assert!(reason.contains(&format!("rank {culprit}")), "{reason}");
                assert!(reason.contains("a wire came off"), "{reason}");
                assert_eq!(reason.contains("panicked"), panics, "{reason}");
                assert_eq!(until_failure(&mut runtime), (0, reason.clone()), "it stays so");
                let mut overlapped = load(culprit, at, panics).overlapped().unwrap();
                assert_eq!(until_failure(&mut overlapped), (steps, reason));
            }
        }
    }
}

#[test]
fn a_batch_that_is_refused_fails_nobody() {
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

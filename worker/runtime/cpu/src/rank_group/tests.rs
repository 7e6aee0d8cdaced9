//! Tests of a tensor-parallel group: failures of ranks, broken weights.

use std::cell::Cell;
use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_fixtures::{Arch, Checkpoint, Dtype};
use inflight_kernels::cpu::KvDtype;
use inflight_models::{MixerWeights, ModelDir, ModelSource};
use inflight_runtime::collective::{Collective, GroupFailed, host_group};
use inflight_runtime::{Batch, Error, NonFiniteRows, Runtime, Sampled, ScoreRow, SlotSetup};

use super::super::weights::Weights;
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
        mtp: false,
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

/// Vectors of a model's weights that a fault may hit, with their names.
fn vectors(weights: &mut Weights) -> Vec<(String, &mut [f32])> {
    let mut found: Vec<(String, &mut [f32])> = vec![("norm".to_owned(), &mut weights.norm)];
    for (nth, layer) in weights.layers.iter_mut().enumerate() {
        let mut add = |name: &str, vector| found.push((format!("layer {nth} {name}"), vector));
        add("attention norm", &mut layer.mixer_norm[..]);
        add("MLP norm", &mut layer.mlp_norm[..]);
        let attention = match &mut layer.mixer {
            MixerWeights::Attention(attention) => attention,
            MixerWeights::Delta(delta) => {
                add("convolution", &mut delta.convolution[..]);
                add("decays", &mut delta.decay[..]);
                add("biases of decays", &mut delta.decay_bias[..]);
                add("norm of outputs", &mut delta.norm[..]);
                continue;
            }
        };
        if let Some((q, k)) = &mut attention.qk_norm {
            add("query norm", &mut q[..]);
            add("key norm", &mut k[..]);
        }
        for (name, linear) in [("QKV bias", &mut attention.qkv), ("output bias", &mut attention.output)] {
            linear.bias.iter_mut().for_each(|bias| add(name, &mut bias[..]));
        }
    }
    found
}

/// Runs two prompts, each in one chunk with a scored row and a sampled one; returns the rows that are not finite.
fn broken_rows(runtime: &mut CpuRuntime) -> NonFiniteRows {
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    batch.clear();
    let setup = |prompt| {
        let sampling = Arc::new(SamplingParams::greedy());
        SlotSetup { sampling, choice: 0, prompt, generated: &[], eos_token_ids: &[] }
    };
    let prompts = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]];
    for (slot, prompt) in (0..).zip(&prompts) {
        runtime.attach(slot, &setup(prompt)).unwrap();
        batch.push_sequence(prompt, 0, &[slot]);
        batch.scores.push(ScoreRow { row: slot * 6 + 3, token: 5, top: 0 });
        batch.sample_last_row(slot);
    }
    runtime.execute(&mut batch, &mut sampled).unwrap();
    let (mut scores, mut rows) = (Vec::new(), NonFiniteRows::default());
    runtime.take_scores(&mut scores);
    assert_eq!((sampled.len(), scores.len()), (2, 2));
    runtime.take_non_finite(&mut rows);
    rows
}

#[test]
fn a_broken_element_of_any_vector_is_noticed_in_every_row_of_every_format() {
    let every = NonFiniteRows { samples: vec![0, 1], scores: vec![0, 1] };
    let mut tried = 0;
    for arch in [Arch::Qwen2, Arch::Qwen3] {
        let folder = Checkpoint::new(arch, Dtype::Bf16).write_temp().unwrap();
        let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
        for (quantize, kv_dtype, ranks) in [
            (None, None, 1),
            (None, None, 2),
            (Some("int8:8"), None, 1),
            (Some("int4:8"), Some(KvDtype::Int8), 1),
        ] {
            let options = CpuOptions {
                threads: Some(ranks),
                kv_bytes: 1 << 20,
                host_bytes: 0,
                block_tokens: 16,
                slots: 2,
                batch_tokens: 32,
                context_tokens: None,
                isa: None,
                quantize: quantize.map(|name| name.parse().unwrap()),
                kv_dtype,
                tensor_parallel: ranks,
                mtp: false,
            };
            let mut runtime = CpuRuntime::load(&model, &options, &|_, _| {}).unwrap();
            assert_eq!(broken_rows(&mut runtime), NonFiniteRows::default(), "{arch} {quantize:?}");
            let count = vectors(&mut runtime.compute.group.lead.weights).len();
            for nth in 0..count {
                for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
                    let (name, vector) = vectors(&mut runtime.compute.group.lead.weights).swap_remove(nth);
                    // Finite, but the square of what it leads to is not.
                    let overflows = name.ends_with("MLP norm") || name.ends_with("attention norm");
                    if value.is_finite() && !(overflows && quantize.is_none()) {
                        continue;
                    }
                    let at = vector.len() / 2;
                    let sound = std::mem::replace(&mut vector[at], value);
                    let rows = broken_rows(&mut runtime);
                    vectors(&mut runtime.compute.group.lead.weights).swap_remove(nth).1[at] = sound;
                    assert_eq!(rows, every, "{arch} {quantize:?} {kv_dtype:?} {ranks} ranks: {name} {value}");
                    tried += 1;
                }
            }
            assert_eq!(broken_rows(&mut runtime), NonFiniteRows::default(), "{arch} {quantize:?} restored");
        }
    }
    assert!(tried > 100, "only {tried} faults were tried");
}

//! CUDA runtime, with real calls of driver, cuBLASLt and NCCL on simulated GPUs, compared with the CPU
//! runtime.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;

use inflight_contract::SamplingSpec;
use inflight_fixtures::{BenchmarkShape, TempDir, is_left_to_the_night};
use inflight_harness::SimulatedGpu;
use inflight_models::{CacheDirectory, ModelDir, ModelSource};
use inflight_runtime::{Batch, PositionLogprobs, Runtime, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};
use inflight_runtime_cuda::{CudaOptions, CudaRuntime, KvStore};

const BLOCK_TOKENS: u32 = 16;
const SLOTS: u32 = 3;
const BATCH_TOKENS: u32 = 48;
const PROMPT: usize = 70;
const STEPS: usize = 4;

/// Log probabilities at the last positions of [`SLOTS`] teacher-forced texts: prompts in chunks, side by
/// side, then token by token.
fn teacher_forced(runtime: &mut dyn Runtime) -> Vec<PositionLogprobs> {
    let spec = SamplingSpec { temperature: 0.0, logprobs: Some(12), ..SamplingSpec::default() };
    let sampling = Arc::new(spec.validate().unwrap());
    let text = |slot: u32| -> Vec<u32> {
        (0..(PROMPT + STEPS) as u32).map(|i| (i * i * 7 + i * 13 + slot * 101) % 512).collect()
    };
    let shape = runtime.capabilities().shape;
    let blocks = shape.whole_blocks((PROMPT + STEPS) as u32);
    for slot in 0..SLOTS {
        let sampling = Arc::clone(&sampling);
        let setup = SlotSetup { sampling, choice: 0, prompt: &[], generated: &[], eos_token_ids: &[] };
        runtime.attach(slot, &setup).unwrap();
    }
    let (mut batch, mut sampled, mut logprobs) = (Batch::default(), Vec::new(), Vec::new());
    let mut at = 0;
    while at < PROMPT + STEPS {
        let count = PROMPT.saturating_sub(at).clamp(1, BATCH_TOKENS as usize / SLOTS as usize);
        batch.clear();
        for slot in 0..SLOTS {
            let table: Vec<u32> = (slot * blocks..(slot + 1) * blocks).rev().collect();
            batch.push_seen(&text(slot)[at..at + count], at as u32, &shape, &table);
            if at + count >= PROMPT {
                batch.sample_last_row(slot);
            }
        }
        at += count;
        runtime.execute(&mut batch, &mut sampled).unwrap();
        logprobs.extend(sampled.drain(..).map(|sampled| *sampled.logprobs.unwrap()));
    }
    assert_eq!(logprobs.len(), SLOTS as usize * (STEPS + 1));
    logprobs
}

fn mini_model(folder: &TempDir, shape: BenchmarkShape) -> ModelDir {
    shape.write(folder.path()).unwrap();
    ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap()
}

/// Options with all fast paths but autotuning.
fn fast_options() -> CudaOptions {
    CudaOptions {
        gpus: vec![0],
        lone_communicator: false,
        utilization: 0.9,
        kv_bytes: None,
        host_bytes: 0,
        block_tokens: BLOCK_TOKENS,
        slots: SLOTS,
        draft_rows: 0,
        batch_tokens: BATCH_TOKENS,
        context_tokens: Some(256),
        kv_store: KvStore::Half,
        deterministic: false,
        experimental: false,
        graphs: true,
        copy_streams: true,
        autotune: false,
        gemm_cache: None,
        overlap: true,
    }
}

#[test]
fn a_gpu_agrees_with_the_cpu_for_all_gemms_and_tensor_parallel() {
    let test = "gpu::a_gpu_agrees_with_the_cpu_for_all_gemms_and_tensor_parallel";
    if is_left_to_the_night(test) {
        return;
    }
    // On the oldest driver, which has no function and reads no file of CUDA 13.
    if !SimulatedGpu::within("gpus=2,memory=1024,ptx=90,cuda=12.2", test).unwrap() {
        return;
    }
    for shape in [BenchmarkShape::Mini, BenchmarkShape::MiniGemma, BenchmarkShape::MiniHybrid] {
        let folder = TempDir::new("inflight-mini").unwrap();
        let options = CudaOptions { experimental: shape != BenchmarkShape::Mini, ..fast_options() };
        agrees_with_the_cpu(&mini_model(&folder, shape), options);
    }
}

fn agrees_with_the_cpu(model: &ModelDir, fast: CudaOptions) {
    let cpu = CpuOptions {
        threads: Some(1),
        kv_bytes: 8 << 20,
        host_bytes: 0,
        block_tokens: BLOCK_TOKENS,
        slots: SLOTS,
        batch_tokens: BATCH_TOKENS,
        context_tokens: Some(256),
        isa: None,
        quantize: None,
        kv_dtype: None,
        tensor_parallel: 1,
        mtp: false,
    };
    let expected = teacher_forced(&mut CpuRuntime::load(model, &cpu, &|_, _| {}).unwrap());
    // Both round activations to 16 bits.
    for (what, options, bound) in [
        ("cuBLASLt's first algorithms", fast.clone(), 0.1),
        ("autotuned algorithms", CudaOptions { autotune: true, ..fast.clone() }, 0.1),
        (
            "no graphs, no overlap",
            CudaOptions { graphs: false, overlap: false, copy_streams: false, ..fast.clone() },
            0.1,
        ),
        ("deterministic GEMMs", CudaOptions { deterministic: true, ..fast.clone() }, 0.1),
        ("keys and values in 8 bits", CudaOptions { kv_store: KvStore::Fp8, ..fast.clone() }, 0.4),
        ("a communicator of one", CudaOptions { lone_communicator: true, ..fast.clone() }, 0.1),
        ("two GPUs", CudaOptions { gpus: vec![0, 1], ..fast.clone() }, 0.1),
    ] {
        let mut gpu = CudaRuntime::load(model, &options, &|_, _| {}).unwrap();
        assert_eq!(gpu.tuned().is_empty(), !options.autotune, "{what}");
        for (position, (expected, got)) in expected.iter().zip(teacher_forced(&mut gpu)).enumerate() {
            let mut compared = 0;
            for ours in &got.top {
                let Some(theirs) = expected.top.iter().find(|theirs| theirs.token == ours.token) else {
                    continue;
                };
                let apart = (ours.logprob - theirs.logprob).abs();
                assert!(apart <= bound, "{what}, position {position}: {ours:?} and on the CPU {theirs:?}");
                compared += 1;
            }
            // The least probable entries may differ.
            assert!(compared >= 9, "{what}, position {position}: {got:?} and on the CPU {expected:?}");
            let spread = expected.top[0].logprob - expected.top[11].logprob;
            assert!(spread > 0.5, "all tokens are as probable as each other: {expected:?}");
        }
    }
}

/// With a cache directory a second start times nothing, and computes the same bits; choices that do not run are timed anew.
#[test]
fn kept_gemm_choices_are_used_by_the_next_start() {
    let test = "gpu::kept_gemm_choices_are_used_by_the_next_start";
    if is_left_to_the_night(test) {
        return;
    }
    if !SimulatedGpu::within("gpus=1,memory=1024,ptx=90,cuda=12.2", test).unwrap() {
        return;
    }
    let folder = TempDir::new("inflight-gemm").unwrap();
    let model = mini_model(&folder, BenchmarkShape::Mini);
    let cache = CacheDirectory::new(folder.path().join("cache"), "--gemm-cache");
    let options = CudaOptions { autotune: true, gemm_cache: Some(cache.clone()), ..fast_options() };
    let start = || {
        let mut gpu = CudaRuntime::load(&model, &options, &|_, _| {}).unwrap();
        (gpu.tuned().to_vec(), teacher_forced(&mut gpu))
    };
    let (timed, first) = start();
    assert!(!timed.is_empty());
    // Equal to the last bit of each measured time: they are those of the first start.
    let (kept, second) = start();
    assert_eq!(kept[..timed.len()], timed);
    if kept.len() == timed.len() {
        assert_eq!(second, first, "the same algorithms computed other bits");
    }
    // The description of an algorithm that the library does not know.
    let mut files = std::fs::read_dir(cache.path()).unwrap();
    let path = files.next().unwrap().unwrap().path();
    let mut file: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    file["choices"][0]["algorithm"] = serde_json::json!({ "cublas_lt": [u64::MAX, 0, 0, 0, 0, 0, 0, 0] });
    std::fs::write(&path, file.to_string()).unwrap();
    let (anew, third) = start();
    assert_eq!(third.len(), first.len());
    // What was timed comes last.
    let (kept, last) = (&anew[..timed.len() - 1], &anew[timed.len() - 1]);
    assert_eq!(kept, &timed[1..]);
    assert_eq!((last.m, last.n, last.k), (timed[0].m, timed[0].n, timed[0].k));
    assert_ne!(
        last.seconds, timed[0].seconds,
        "an algorithm that the library does not know was not timed anew"
    );
}

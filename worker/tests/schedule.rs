//! The schedule never changes the answer: whatever a request shares its batches with, however its prompt is chunked,
//! wherever its blocks lie, whether it is preempted and recomputed, and on however many threads, it gets the logits
//! and tokens, bit for bit, that it gets alone, one token at a time, on one thread. So it is where ranks share the model,
//! with as many of them.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use inflight_contract::SamplingSpec;
use inflight_fixtures::{Arch, Checkpoint, Dtype, TempDir, skipped};
use inflight_kernels::cpu::{Isa, KvDtype};
use inflight_kernels::philox4x32;
use inflight_worker::models::{ModelDir, ModelSource};
use inflight_worker::runtime::cpu::{CpuOptions, CpuRuntime, Quantization};
use inflight_worker::runtime::{Batch, BlockCopy, Runtime, Sampled, SlotSetup};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const SEQUENCES_MAX: usize = 32;
const CONTEXT: u32 = 1024;
const EOS: [u32; 2] = [3, 5];

#[derive(Debug, Clone)]
struct Request {
    prompt: usize,
    output: usize,
    content: u32,
    sampling: SamplingSpec,
}

#[derive(Debug, Clone)]
struct Workload {
    requests: Vec<Request>,
    /// Most tokens of a prompt in one batch; 0 draws a size each time.
    chunk: usize,
    threads: usize,
    /// Ranks that share the model, where they can.
    ranks: usize,
    block_tokens: u32,
    /// Key of every decision of the schedule.
    schedule: u32,
}

/// What a request got at one step.
#[derive(Debug, Clone, PartialEq)]
struct Step {
    logits: Vec<u32>,
    sampled: Sampled,
}

/// Decisions by formula, so that a failure replays.
struct Dice {
    key: u32,
    count: u32,
}

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.count += 1;
        philox4x32([self.count, 0, 0, 0], [self.key, 0])[0] as usize % bound.max(1)
    }
}

/// A checkpoint with room for prompts beyond the largest chunk.
fn checkpoint(arch: Arch, dtype: Dtype) -> TempDir {
    let folder = Checkpoint::new(arch, dtype).write_temp().unwrap();
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = CONTEXT.into();
    std::fs::write(&path, config.to_string()).unwrap();
    folder
}

/// How weights, keys and values are stored, where not as in the checkpoint.
#[derive(Debug, Clone, Copy, Default)]
struct Stored {
    weights: Option<Quantization>,
    kv: Option<KvDtype>,
}

fn load(
    path: PathBuf,
    isa: Isa,
    stored: Stored,
    threads: usize,
    ranks: usize,
    block_tokens: u32,
) -> CpuRuntime {
    let model = ModelDir::open(&ModelSource::Directory(path)).unwrap();
    let options = CpuOptions {
        threads: Some(threads),
        kv_bytes: 64 << 20,
        host_bytes: 0,
        block_tokens,
        slots: SEQUENCES_MAX as u32,
        batch_tokens: 2048,
        context_tokens: None,
        isa: Some(isa),
        quantize: stored.weights,
        kv_dtype: stored.kv,
        tensor_parallel: ranks,
    };
    CpuRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

fn prompt(request: &Request, vocab: u32) -> Vec<u32> {
    (0..request.prompt as u32).map(|i| philox4x32([i, 7, 0, 0], [request.content, 1])[0] % vocab).collect()
}

fn attach(runtime: &mut CpuRuntime, slot: u32, request: &Request, prompt: &[u32], generated: &[u32]) {
    let sampling = Arc::new(request.sampling.clone().validate().unwrap());
    let setup = SlotSetup { sampling, choice: request.content % 3, prompt, generated, eos_token_ids: &EOS };
    runtime.attach(slot, &setup).unwrap();
}

fn bits(runtime: &CpuRuntime, sample: usize) -> Vec<u32> {
    let vocab = runtime.capabilities().vocab_size as usize;
    runtime.logits()[sample * vocab..(sample + 1) * vocab].iter().map(|logit| logit.to_bits()).collect()
}

/// One token at a time, and nobody else there.
fn alone(runtime: &mut CpuRuntime, request: &Request) -> Vec<Step> {
    let mut tokens = prompt(request, runtime.capabilities().vocab_size);
    attach(runtime, 0, request, &tokens, &[]);
    let block_tokens = runtime.capabilities().block_tokens as usize;
    let blocks: Vec<u32> = (0..(tokens.len() + request.output).div_ceil(block_tokens) as u32).collect();
    let (mut batch, mut sampled, mut steps) = (Batch::default(), Vec::new(), Vec::new());
    for position in 0..request.prompt + request.output - 1 {
        batch.clear();
        batch.push_sequence(&tokens[position..=position], position as u32, &blocks);
        if position + 1 >= request.prompt {
            batch.sample_last_row(0);
        }
        runtime.execute(&mut batch, &mut sampled).unwrap();
        if let Some(chosen) = sampled.pop() {
            tokens.push(chosen.token);
            steps.push(Step { logits: bits(runtime, 0), sampled: chosen });
        }
    }
    runtime.detach(0);
    steps
}

/// A request under way.
struct Live {
    request: usize,
    slot: u32,
    tokens: Vec<u32>,
    /// Tokens whose keys and values are in the pool.
    fed: usize,
    blocks: Vec<u32>,
}

/// All together under a random schedule; `got` hears the request, the index of its step and what it got.
fn together(
    runtime: &mut CpuRuntime,
    workload: &Workload,
    mut got: impl FnMut(usize, usize, Step) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut dice = Dice { key: workload.schedule, count: 0 };
    let bounds = runtime.capabilities().clone();
    let mut free: Vec<u32> = (0..bounds.blocks.min(4096)).collect();
    let mut slots: Vec<u32> = (0..bounds.slots).collect();
    let mut waiting: Vec<usize> = (0..workload.requests.len()).rev().collect();
    let mut live: Vec<Live> = Vec::new();
    // Bounded, or a long prompt in small chunks might never end.
    let mut preemptions = dice.below(12);
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    while !waiting.is_empty() || !live.is_empty() {
        while !waiting.is_empty() && (live.is_empty() || dice.below(3) > 0) {
            let request = waiting.pop().unwrap();
            let slot = slots.swap_remove(dice.below(slots.len()));
            let tokens = prompt(&workload.requests[request], bounds.vocab_size);
            attach(runtime, slot, &workload.requests[request], &tokens, &[]);
            live.push(Live { request, slot, tokens, fed: 0, blocks: Vec::new() });
        }
        if preemptions > 0 && dice.below(8) == 0 {
            preemptions -= 1;
            // Preempt one: its blocks go, and it computes all its tokens again, in another slot.
            let index = dice.below(live.len());
            let victim = &mut live[index];
            runtime.detach(victim.slot);
            slots.push(victim.slot);
            victim.slot = slots.swap_remove(dice.below(slots.len()));
            free.append(&mut victim.blocks);
            victim.fed = 0;
            let request = &workload.requests[victim.request];
            let (prompt, generated) = victim.tokens.split_at(request.prompt);
            attach(runtime, victim.slot, request, prompt, generated);
        }
        batch.clear();
        let mut ran = Vec::new();
        let count = live.len();
        let first = dice.below(count);
        for i in 0..count {
            let index = (first + i) % count;
            let sequence = &mut live[index];
            if batch.rows() > 0 && dice.below(4) == 0 {
                continue;
            }
            let pending = sequence.tokens.len() - sequence.fed;
            let most = if workload.chunk == 0 { 1 + dice.below(100) } else { workload.chunk };
            let chunk = pending.min(most).min(bounds.batch_tokens as usize - batch.rows());
            if chunk == 0 {
                continue;
            }
            if !sequence.blocks.is_empty() && dice.below(8) == 0 {
                // Move a block.
                let at = dice.below(sequence.blocks.len());
                let to = free.swap_remove(dice.below(free.len()));
                batch.copies.push(BlockCopy { from: sequence.blocks[at], to });
                sequence.blocks[at] = to;
            }
            let end = sequence.fed + chunk;
            while sequence.blocks.len() * (bounds.block_tokens as usize) < end {
                sequence.blocks.push(free.swap_remove(dice.below(free.len())));
            }
            let part = &sequence.tokens[sequence.fed..end];
            batch.push_sequence(part, sequence.fed as u32, &sequence.blocks);
            sequence.fed = end;
            if end == sequence.tokens.len() {
                batch.sample_last_row(sequence.slot);
                ran.push(index);
            }
        }
        // What was moved away from is free only after the step.
        let copied: Vec<u32> = batch.copies.iter().map(|copy| copy.from).collect();
        runtime.execute(&mut batch, &mut sampled).unwrap();
        free.extend(copied);
        prop_assert_eq!(sampled.len(), ran.len());
        for (sample, (index, sampled)) in ran.iter().zip(&sampled).enumerate() {
            let sequence = &mut live[*index];
            let step = sequence.tokens.len() - workload.requests[sequence.request].prompt;
            sequence.tokens.push(sampled.token);
            got(sequence.request, step, Step { logits: bits(runtime, sample), sampled: sampled.clone() })?;
        }
        live.retain_mut(|sequence| {
            let request = &workload.requests[sequence.request];
            let done = sequence.tokens.len() == request.prompt + request.output;
            if done {
                runtime.detach(sequence.slot);
                slots.push(sequence.slot);
                free.append(&mut sequence.blocks);
            }
            !done
        });
    }
    Ok(())
}

fn sampling() -> impl Strategy<Value = SamplingSpec> {
    let penalties = (-1.0f32..1.0, -1.0f32..1.0, 0.5f32..2.0);
    let penalties = prop_oneof![2 => Just((0.0, 0.0, 1.0)), 1 => penalties];
    let temperature = prop_oneof![2 => Just(0.0f32), 3 => 0.2f32..2.0];
    let cut = (prop_oneof![Just(0), 1i32..200], prop_oneof![Just(1.0f32), 0.05f32..1.0], 0.0f32..0.3);
    let rest =
        (prop_oneof![3 => Just(None), 1 => (0u32..6).prop_map(Some)], 0u32..8, any::<u64>(), any::<bool>());
    (temperature, cut, penalties, rest).prop_map(|(temperature, (top_k, top_p, min_p), penalties, rest)| {
        let (presence_penalty, frequency_penalty, repetition_penalty) = penalties;
        let (logprobs, min_tokens, seed, bias) = rest;
        SamplingSpec {
            temperature,
            top_k,
            top_p,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            logprobs,
            min_tokens,
            seed,
            logit_bias: if bias { vec![(17, 1.5), (100, -3.0)] } else { Vec::new() },
            stop_token_ids: vec![42],
            ..SamplingSpec::default()
        }
    })
}

fn workload(ranks: &'static [usize]) -> impl Strategy<Value = Workload> {
    let prompt = prop_oneof![12 => 1usize..70, 3 => 70usize..200, 1 => 520usize..700];
    let request = (prompt, 1usize..20, any::<u32>(), sampling())
        .prop_map(|(prompt, output, content, sampling)| Request { prompt, output, content, sampling });
    (
        prop::collection::vec(request, 1..=SEQUENCES_MAX),
        prop::sample::select(vec![1, 7, 64, 512, 0, 0]),
        1usize..=4,
        prop::sample::select(ranks),
        prop::sample::select(vec![16, 16, 4, 32, 128]),
        any::<u32>(),
    )
        .prop_map(|(requests, chunk, threads, ranks, block_tokens, schedule)| Workload {
            requests,
            chunk,
            threads,
            ranks,
            block_tokens,
            schedule,
        })
}

fn check(isa: Isa, dtype: Dtype, stored: Stored, ranks: &'static [usize], archs: &[Arch], cases: u32) {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 64, ..Config::default() };
    let archs = prop::sample::select(archs.to_vec());
    let mut runner = TestRunner::new(config);
    let outcome =
        runner.run(&(archs, workload(ranks)), |(arch, workload)| one(isa, dtype, stored, arch, &workload));
    if let Err(failure) = outcome {
        panic!("{} {dtype} {stored:?}: {failure}", isa.name());
    }
}

fn one(isa: Isa, dtype: Dtype, stored: Stored, arch: Arch, workload: &Workload) -> Result<(), TestCaseError> {
    let folder = checkpoint(arch, dtype);
    let ranks = workload.ranks;
    let mut single = load(folder.path().to_path_buf(), isa, stored, 1, ranks, 16);
    let expected: Vec<Vec<Step>> =
        workload.requests.iter().map(|request| alone(&mut single, request)).collect();
    let mut runtime =
        load(folder.path().to_path_buf(), isa, stored, workload.threads, ranks, workload.block_tokens);
    together(&mut runtime, workload, |request, step, got| {
        let expected = &expected[request][step];
        prop_assert_eq!(&got.sampled, &expected.sampled, "request {} step {}", request, step);
        prop_assert!(got.logits == expected.logits, "request {request} step {step}: other bits");
        Ok(())
    })
}

/// Threads wait by spinning, so tests side by side would mostly measure each other's patience.
static ALONE: Mutex<()> = Mutex::new(());

/// Random workloads on one instruction set, every dtype and quantisation. Slower sets get fewer.
fn on(name: &str, cases: u32) {
    let _alone = ALONE.lock();
    let Some(isa) = Isa::by_name(name) else {
        skipped("schedules", &format!("this machine has no {name}"));
        return;
    };
    for dtype in Dtype::all() {
        check(isa, *dtype, Stored::default(), &[1], Arch::all(), cases);
    }
    for weights in [Quantization::INT8, Quantization::INT4] {
        check(isa, Dtype::Bf16, Stored { weights: Some(weights), kv: None }, &[1], Arch::all(), cases);
    }
    for weights in [None, Some(Quantization::INT8)] {
        let stored = Stored { weights, kv: Some(KvDtype::Int8) };
        check(isa, Dtype::Bf16, stored, &[1], Arch::all(), cases);
    }
}

#[test]
fn the_schedule_never_changes_the_answer_on_portable() {
    on("portable", 10);
}

#[test]
fn the_schedule_never_changes_the_answer_on_avx2() {
    on("avx2", 20);
}

#[test]
fn the_schedule_never_changes_the_answer_on_avx512() {
    on("avx512", 20);
}

#[test]
fn the_schedule_never_changes_the_answer_on_avx512_vnni() {
    on("avx512-vnni", 20);
}

#[test]
fn the_schedule_never_changes_the_answer_on_avx512_bf16() {
    on("avx512-bf16", 30);
}

#[test]
fn the_schedule_never_changes_the_answer_of_a_group_of_ranks() {
    let _alone = ALONE.lock();
    // Several key heads to a rank, one each, and one that two or four share.
    let archs = [Arch::Llama2, Arch::Llama31, Arch::Llama32, Arch::Mistral, Arch::Qwen2, Arch::Qwen3];
    for isa in [Isa::detect(), Isa::PORTABLE] {
        for dtype in Dtype::all() {
            check(isa, *dtype, Stored::default(), &[2, 2, 4], &archs, 2);
        }
        for (weights, kv) in [("int8:8", None), ("int4:8", None), ("int8:8", Some(KvDtype::Int8))] {
            let stored = Stored { weights: Some(weights.parse().unwrap()), kv };
            check(isa, Dtype::Bf16, stored, &[2], &archs, 2);
        }
    }
}

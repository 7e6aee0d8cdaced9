//! Batch invariance of the CPU runtime, and of the CUDA runtime in the deterministic mode: under any batching, prefill chunking, drafting, block placement,
//! preemption by recompute and number of threads, a request gets the logits and tokens, bit for bit, that it gets alone,
//! one token at a time, on one thread with the same tensor-parallel degree.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use inflight_contract::SamplingSpec;
use inflight_fixtures::{Arch, BenchmarkShape, Checkpoint, Dtype, Mtp, TempDir, cases, is_thorough, skipped};
use inflight_harness::SimulatedGpu;
use inflight_kernels::cpu::{Isa, KvDtype};
use inflight_kernels::philox4x32;
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{
    Batch, BlockCopy, DRAFT_ROWS, Predictions, PromptLogprobs, Runtime, Sampled, ScoreRow, SlotSetup,
};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime, Quantization};
use inflight_runtime_cuda::{CudaOptions, CudaRuntime, KvStore};
use inflight_worker_core::SnapshotShape;
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
    /// Maximum prefill chunk in tokens; 0: random sizes.
    chunk: usize,
    threads: usize,
    /// Tensor-parallel degree.
    ranks: usize,
    block_tokens: u32,
    /// Seed of the schedule.
    schedule: u32,
}

/// Result of a request at one step.
#[derive(Debug, Clone, PartialEq)]
struct StepBits {
    logits: Vec<u32>,
    sampled: Sampled,
}

/// Counter-based random numbers (Philox4x32-10), so that failures replay.
struct ScheduleRng {
    key: u32,
    count: u32,
}

impl ScheduleRng {
    fn below(&mut self, bound: usize) -> usize {
        self.count += 1;
        philox4x32([self.count, 0, 0, 0], [self.key, 0])[0] as usize % bound.max(1)
    }
}

/// Runtime whose logits can be read.
trait LogitsRuntime: Runtime {
    /// Returns the logits of the last step's sample rows, [samples, vocab_size].
    fn sample_logits(&mut self) -> Vec<f32>;
}

impl LogitsRuntime for CpuRuntime {
    fn sample_logits(&mut self) -> Vec<f32> {
        self.logits().to_vec()
    }
}

impl LogitsRuntime for CudaRuntime {
    fn sample_logits(&mut self) -> Vec<f32> {
        self.logits().unwrap()
    }
}

/// Writes a checkpoint with a context length beyond the largest chunk.
fn checkpoint(arch: Arch, dtype: Dtype) -> TempDir {
    let mtp = if arch == Arch::Qwen35 { Mtp::Random } else { Mtp::Absent };
    let folder = Checkpoint::new(arch, dtype).with_mtp(mtp).write_temp().unwrap();
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = CONTEXT.into();
    std::fs::write(&path, config.to_string()).unwrap();
    folder
}

/// Storage of weights and KV cache; `None`: as in the checkpoint.
#[derive(Debug, Clone, Copy, Default)]
struct StorageFormat {
    weights: Option<Quantization>,
    kv: Option<KvDtype>,
}

fn load(
    path: PathBuf,
    isa: Isa,
    format: StorageFormat,
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
        quantize: format.weights,
        kv_dtype: format.kv,
        tensor_parallel: ranks,
        mtp: true,
    };
    CpuRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

fn prompt(request: &Request, vocab: u32) -> Vec<u32> {
    (0..request.prompt as u32).map(|i| philox4x32([i, 7, 0, 0], [request.content, 1])[0] % vocab).collect()
}

fn attach(runtime: &mut dyn LogitsRuntime, slot: u32, request: &Request, prompt: &[u32], generated: &[u32]) {
    let sampling = Arc::new(request.sampling.clone().validate().unwrap());
    let setup = SlotSetup { sampling, choice: request.content % 3, prompt, generated, eos_token_ids: &EOS };
    runtime.attach(slot, &setup).unwrap();
}

/// Runs a step; returns the result of each sample row.
fn execute(runtime: &mut dyn LogitsRuntime, batch: &mut Batch) -> Vec<StepBits> {
    let mut sampled = Vec::new();
    runtime.execute(batch, &mut sampled).unwrap();
    if sampled.is_empty() {
        return Vec::new();
    }
    let logits = runtime.sample_logits();
    let rows = logits.chunks(runtime.capabilities().vocab_size as usize);
    let bits = |row: &[f32]| row.iter().map(|logit| logit.to_bits()).collect();
    rows.zip(sampled).map(|(row, sampled)| StepBits { logits: bits(row), sampled }).collect()
}

/// Runs a request alone, one token at a time.
fn alone(runtime: &mut dyn LogitsRuntime, request: &Request) -> Vec<StepBits> {
    let mut tokens = prompt(request, runtime.capabilities().vocab_size);
    attach(runtime, 0, request, &tokens, &[]);
    let shape = runtime.capabilities().shape;
    let blocks: Vec<u32> = (0..shape.whole_blocks((tokens.len() + request.output) as u32)).collect();
    let (mut batch, mut steps) = (Batch::default(), Vec::new());
    for position in 0..request.prompt + request.output - 1 {
        batch.clear();
        batch.push_whole(&tokens[position..=position], position as u32, &shape, &blocks);
        if position + 1 >= request.prompt {
            batch.sample_last_row(0);
        }
        if let Some(step) = execute(runtime, &mut batch).pop() {
            tokens.push(step.sampled.token);
            steps.push(step);
        }
    }
    runtime.detach(0);
    steps
}

/// Running request.
struct RunningSequence {
    request: usize,
    /// Tokens of the prompt.
    prompt: usize,
    slot: u32,
    tokens: Vec<u32>,
    /// Tokens that the MTP layer predicts to follow.
    predicted: Vec<u32>,
    /// Tokens with KV computed.
    fed: usize,
    /// Block table of each group of layers.
    tables: Vec<TestTable>,
    /// Blocks of the recurrent layers' state, and the position of the state.
    state: Vec<u32>,
    state_at: usize,
}

impl RunningSequence {
    /// Goes on from a snapshot of its state, with the log of another sequence behind it.
    fn resume(
        &mut self,
        shape: SnapshotShape,
        free: &mut Vec<u32>,
        rng: &mut ScheduleRng,
        batch: &mut Batch,
    ) {
        for (part, block) in self.state.iter_mut().enumerate() {
            let to = free.swap_remove(rng.below(free.len()));
            let from = std::mem::replace(block, to);
            if part < shape.blocks as usize {
                batch.copies.push(BlockCopy { from, to });
            } else {
                free.push(from);
            }
        }
        self.fed = self.state_at;
    }
}

/// Block table of a sequence in a group of layers: its first span, and the blocks from there on.
#[derive(Clone, Default)]
struct TestTable {
    first_span: u32,
    blocks: Vec<u32>,
}

/// Drafts tokens behind the newest one of a decode: up to six, those that the MTP layer predicts or others, of which some first ones are those that the
/// request, whose whole output is `expected`, will generate, and the next one is not.
fn draft(rng: &mut ScheduleRng, sequence: &RunningSequence, expected: &[StepBits], vocab: u32) -> Vec<u32> {
    if rng.below(3) == 0 {
        return Vec::new();
    }
    let step = sequence.tokens.len() - sequence.prompt;
    let future: Vec<u32> = expected[step..].iter().map(|step| step.sampled.token).collect();
    // The last token to generate has no row behind it.
    let count = rng.below(7).min(future.len() - 1);
    if !sequence.predicted.is_empty() && rng.below(2) == 0 {
        return sequence.predicted.iter().copied().take(count).collect();
    }
    let stand = rng.below(count + 1);
    let guess = |(nth, token): (usize, &u32)| if nth < stand { *token } else { (token + 1) % vocab };
    future.iter().take(count).enumerate().map(guess).collect()
}

/// Runs all requests, whose outputs are `expected`, under a random schedule with random drafts; calls `got` with
/// request, step and result.
fn together(
    runtime: &mut dyn LogitsRuntime,
    workload: &Workload,
    expected: &[Vec<StepBits>],
    mut got: impl FnMut(usize, usize, StepBits) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut rng = ScheduleRng { key: workload.schedule, count: 0 };
    let bounds = runtime.capabilities().clone();
    let mut free: Vec<u32> = (0..bounds.blocks.min(4096)).collect();
    let mut slots: Vec<u32> = (0..bounds.slots).collect();
    let mut waiting: Vec<usize> = (0..workload.requests.len()).rev().collect();
    let mut live: Vec<RunningSequence> = Vec::new();
    // Bounded, or a long prompt in small chunks might never finish.
    let mut preemptions = rng.below(12);
    let mut resumptions = rng.below(30);
    let (mut batch, mut predictions) = (Batch::default(), Predictions::default());
    while !waiting.is_empty() || !live.is_empty() {
        while !waiting.is_empty() && (live.is_empty() || rng.below(3) > 0) {
            let request = waiting.pop().unwrap();
            let slot = slots.swap_remove(rng.below(slots.len()));
            let tokens = prompt(&workload.requests[request], bounds.vocab_size);
            attach(runtime, slot, &workload.requests[request], &tokens, &[]);
            let prompt = tokens.len();
            let tables = vec![TestTable::default(); bounds.shape.groups().len()];
            let (state, predicted) = (Vec::new(), Vec::new());
            let (fed, state_at) = (0, 0);
            live.push(RunningSequence {
                request,
                prompt,
                slot,
                tokens,
                predicted,
                fed,
                tables,
                state,
                state_at,
            });
        }
        if preemptions > 0 && rng.below(8) == 0 {
            preemptions -= 1;
            // Preempt by recompute, to another slot.
            let index = rng.below(live.len());
            let victim = &mut live[index];
            runtime.detach(victim.slot);
            slots.push(victim.slot);
            victim.slot = slots.swap_remove(rng.below(slots.len()));
            for table in &mut victim.tables {
                free.append(&mut table.blocks);
                table.first_span = 0;
            }
            free.append(&mut victim.state);
            (victim.fed, victim.state_at) = (0, 0);
            let request = &workload.requests[victim.request];
            let (prompt, generated) = victim.tokens.split_at(request.prompt);
            attach(runtime, victim.slot, request, prompt, generated);
        }
        batch.clear();
        let (mut ran, mut drafted) = (Vec::new(), 0);
        let count = live.len();
        let first = rng.below(count);
        for i in 0..count {
            let index = (first + i) % count;
            let sequence = &mut live[index];
            if batch.rows() > 0 && rng.below(4) == 0 {
                continue;
            }
            let mut resumed = false;
            if let Some(shape) = bounds.snapshot.filter(|_| resumptions > 0 && sequence.state_at > 0) {
                resumed = rng.below(6) == 0;
                if resumed {
                    resumptions -= 1;
                    sequence.resume(shape, &mut free, &mut rng, &mut batch);
                }
            }
            let pending = sequence.tokens.len() - sequence.fed;
            let most = if workload.chunk == 0 { 1 + rng.below(100) } else { workload.chunk };
            let chunk = pending.min(most).min(bounds.batch_tokens as usize - batch.rows());
            if chunk == 0 {
                continue;
            }
            // Windows have passed some blocks.
            for (table, group) in sequence.tables.iter_mut().zip(bounds.shape.groups()) {
                let passed =
                    group.first_span(sequence.fed as u32, bounds.shape.block_tokens()) - table.first_span;
                let passed = rng.below(passed as usize + 1);
                free.extend(table.blocks.drain(..passed * group.blocks as usize));
                table.first_span += passed as u32;
            }
            let group = rng.below(sequence.tables.len() + usize::from(!sequence.state.is_empty()));
            let blocks = match sequence.tables.get_mut(group) {
                Some(table) => &mut table.blocks,
                None => &mut sequence.state,
            };
            if !blocks.is_empty() && !resumed && rng.below(8) == 0 {
                // Move a block.
                let at = rng.below(blocks.len());
                let to = free.swap_remove(rng.below(free.len()));
                batch.copies.push(BlockCopy { from: blocks[at], to });
                blocks[at] = to;
            }
            let end = sequence.fed + chunk;
            let samples = end == sequence.tokens.len();
            // Drafts follow a chunk of any length; a scheduler drafts only for decodes.
            let mut drafts = Vec::new();
            if samples && batch.rows() + chunk + 6 <= bounds.batch_tokens as usize {
                drafts = draft(&mut rng, sequence, &expected[sequence.request], bounds.vocab_size);
                let room = ((bounds.sample_rows - bounds.slots) as usize).saturating_sub(drafted);
                drafts.truncate(room.min(bounds.sequence_drafts as usize));
                drafted += drafts.len();
            }
            let spans = bounds.shape.spans((end + drafts.len()) as u32);
            for (table, group) in sequence.tables.iter_mut().zip(bounds.shape.groups()) {
                while table.blocks.len() < ((spans - table.first_span) * group.blocks) as usize {
                    table.blocks.push(free.swap_remove(rng.below(free.len())));
                }
            }
            while sequence.state.len() < bounds.shape.state_blocks() as usize {
                sequence.state.push(free.swap_remove(rng.below(free.len())));
            }
            let part = &sequence.tokens[sequence.fed..end];
            let tables = sequence.tables.iter().map(|table| (table.first_span, &table.blocks[..]));
            batch.push_tables(part, &drafts, sequence.fed as u32, tables, &sequence.state);
            sequence.fed = end;
            let every = bounds.snapshot.map_or(usize::MAX, |snapshot| snapshot.every as usize);
            sequence.state_at = end / every * every;
            // A sequence that the MTP layer does not always see is predicted badly, which must not matter.
            if bounds.predicted_drafts > 0 && rng.below(8) > 0 {
                let most = bounds.predicted_drafts.min(DRAFT_ROWS / bounds.slots);
                batch.predict_last(sequence.slot, rng.below(most as usize + 1) as u32);
            }
            if samples {
                batch.sample_with_drafts(sequence.slot, drafts.len() as u32);
                ran.push((index, drafts));
            }
        }
        // The sources of copies are free only after the step.
        let copied: Vec<u32> = batch.copies.iter().map(|copy| copy.from).collect();
        let results = execute(runtime, &mut batch);
        free.extend(copied);
        prop_assert_eq!(results.len(), ran.len() + drafted);
        runtime.take_predictions(&mut predictions);
        live.iter_mut().for_each(|sequence| sequence.predicted.clear());
        for (slot, predicted) in predictions.iter() {
            let sequence = live.iter_mut().find(|sequence| sequence.slot == slot);
            sequence.into_iter().for_each(|sequence| sequence.predicted.extend_from_slice(predicted));
        }
        let mut sample = 0;
        for (index, drafts) in &ran {
            let sequence = &mut live[*index];
            for nth in 0..=drafts.len() {
                let step = sequence.tokens.len() - sequence.prompt;
                let result = results[sample + nth].clone();
                let token = result.sampled.token;
                sequence.tokens.push(token);
                got(sequence.request, step, result)?;
                if drafts.get(nth) != Some(&token) {
                    break;
                }
                sequence.fed += 1;
            }
            sample += 1 + drafts.len();
        }
        live.retain_mut(|sequence| {
            let request = &workload.requests[sequence.request];
            let done = sequence.tokens.len() == request.prompt + request.output;
            if done {
                runtime.detach(sequence.slot);
                slots.push(sequence.slot);
                sequence.tables.iter_mut().for_each(|table| free.append(&mut table.blocks));
                free.append(&mut sequence.state);
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
    (temperature, cut, penalties, rest, masks()).prop_map(|(temperature, cut, penalties, rest, masks)| {
        let (top_k, top_p, min_p) = cut;
        let (allowed_token_ids, bad_word_token_ids) = masks;
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
            allowed_token_ids: allowed_token_ids.into(),
            bad_word_token_ids,
            stop_token_ids: vec![42],
            ..SamplingSpec::default()
        }
    })
}

/// Allowed tokens and bad words of few tokens, so that words of several tokens occur.
fn masks() -> impl Strategy<Value = (Vec<u32>, Vec<Vec<u32>>)> {
    let word = prop::collection::vec(39u32..45, 1..4);
    let words = prop::collection::vec(word, 1..12);
    prop_oneof![
        3 => Just((Vec::new(), Vec::new())),
        1 => prop::collection::vec(0u32..200, 1..100).prop_map(|allowed| (allowed, Vec::new())),
        1 => prop::collection::vec(prop::collection::vec(0u32..200, 1..3), 1..400).prop_map(|words| (Vec::new(), words)),
        2 => words.prop_map(|words| ((38..45).collect(), words)),
    ]
}

/// Checks that a request's output has allowed tokens only, and no bad word but for want of another token.
fn check_masks(request: &Request, vocab_size: u32, output: &[StepBits]) -> Result<(), TestCaseError> {
    let sampling = request.sampling.clone().validate().unwrap();
    let tokens: Vec<u32> = output.iter().map(|step| step.sampled.token).collect();
    let allowed = &sampling.allowed_token_ids;
    prop_assert!(allowed.is_empty() || tokens.iter().all(|token| allowed.binary_search(token).is_ok()));
    for word in &sampling.bad_word_token_ids {
        let found = tokens.windows(word.len()).any(|window| window == word.as_slice());
        let last = word.last().copied();
        prop_assert!(
            !found || (word.len() > 1 && last == sampling.fallback_token(vocab_size)),
            "{word:?} in {tokens:?}"
        );
    }
    Ok(())
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

fn check(isa: Isa, dtype: Dtype, format: StorageFormat, ranks: &'static [usize], archs: &[Arch], cases: u32) {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 64, ..Config::default() };
    let archs = prop::sample::select(archs.to_vec());
    let mut runner = TestRunner::new(config);
    let outcome =
        runner.run(&(archs, workload(ranks)), |(arch, workload)| one(isa, dtype, format, arch, &workload));
    if let Err(failure) = outcome {
        panic!("{} {dtype} {format:?}: {failure}", isa.name());
    }
}

fn one(
    isa: Isa,
    dtype: Dtype,
    format: StorageFormat,
    arch: Arch,
    workload: &Workload,
) -> Result<(), TestCaseError> {
    let folder = checkpoint(arch, dtype);
    let on_threads = |threads, block_tokens| {
        load(folder.path().to_path_buf(), isa, format, threads, workload.ranks, block_tokens)
    };
    compare(workload, &mut on_threads(1, 16), &mut on_threads(workload.threads, workload.block_tokens))
}

/// Compares the results of each request alone, on the first runtime, with those on the second one.
fn compare(
    workload: &Workload,
    single: &mut dyn LogitsRuntime,
    runtime: &mut dyn LogitsRuntime,
) -> Result<(), TestCaseError> {
    let expected: Vec<Vec<StepBits>> =
        workload.requests.iter().map(|request| alone(single, request)).collect();
    for (request, output) in workload.requests.iter().zip(&expected) {
        check_masks(request, single.capabilities().vocab_size, output)?;
    }
    together(runtime, workload, &expected, |request, step, got| {
        let expected = &expected[request][step];
        prop_assert_eq!(&got.sampled, &expected.sampled, "request {} step {}", request, step);
        prop_assert!(got.logits == expected.logits, "request {request} step {step}: other bits");
        Ok(())
    })
}

/// Serializes the tests: kernel threads wait by spinning, so concurrent tests slow each other down.
static SERIAL: Mutex<()> = Mutex::new(());

/// Checks random workloads, `all` of them in a thorough run, on one instruction set, for every dtype and quantization.
fn on(name: &str, all: u32) {
    let _serial = SERIAL.lock();
    let Some(isa) = Isa::by_name(name) else {
        skipped("schedules", &format!("this machine has no {name}"));
        return;
    };
    let cases = cases(all);
    for dtype in Dtype::all() {
        check(isa, *dtype, StorageFormat::default(), &[1], Arch::all(), cases);
    }
    for weights in [Quantization::INT8, Quantization::INT4] {
        check(isa, Dtype::Bf16, StorageFormat { weights: Some(weights), kv: None }, &[1], Arch::all(), cases);
    }
    for weights in [None, Some(Quantization::INT8)] {
        let format = StorageFormat { weights, kv: Some(KvDtype::Int8) };
        check(isa, Dtype::Bf16, format, &[1], Arch::all(), cases);
    }
}

#[test]
fn the_schedule_never_changes_the_answer_on_portable() {
    on(Isa::PORTABLE.name(), 10);
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
    let _serial = SERIAL.lock();
    // Several KV heads per rank, one per rank, and one replicated on two or four ranks.
    let archs = [Arch::Llama2, Arch::Llama31, Arch::Llama32, Arch::Mistral, Arch::Qwen2, Arch::Qwen3];
    let isas = [Isa::detect(), Isa::PORTABLE];
    for isa in isas.into_iter().take(if is_thorough() { 2 } else { 1 }) {
        for dtype in Dtype::all() {
            check(isa, *dtype, StorageFormat::default(), &[2, 2, 4], &archs, 2);
        }
        for (weights, kv) in [("int8:8", None), ("int4:8", None), ("int8:8", Some(KvDtype::Int8))] {
            let format = StorageFormat { weights: Some(weights.parse().unwrap()), kv };
            check(isa, Dtype::Bf16, format, &[2], &archs, 2);
        }
        // Two key heads of recurrent layers: one per rank.
        for dtype in [Dtype::F32, Dtype::Bf16] {
            check(isa, dtype, StorageFormat::default(), &[2], &[Arch::Qwen35], 2);
        }
    }
}

/// Loads a deterministic runtime on the first `ranks` GPUs.
fn load_on_gpus(path: PathBuf, ranks: usize, block_tokens: u32) -> CudaRuntime {
    let model = ModelDir::open(&ModelSource::Directory(path)).unwrap();
    let options = CudaOptions {
        gpus: (0..ranks).collect(),
        lone_communicator: false,
        utilization: 0.9,
        kv_bytes: Some(16 << 20),
        host_bytes: 0,
        block_tokens,
        slots: 6,
        draft_rows: 10,
        batch_tokens: 64,
        context_tokens: Some(256),
        kv_store: KvStore::Half,
        deterministic: true,
        experimental: true,
        graphs: true,
        copy_streams: true,
        autotune: false,
        gemm_cache: None,
        overlap: true,
    };
    CudaRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

#[test]
fn the_schedule_never_changes_the_answer_of_a_gpu() {
    let test = "schedule::the_schedule_never_changes_the_answer_of_a_gpu";
    if !SimulatedGpu::within("gpus=2,memory=1024,ptx=90,checks=false", test).unwrap() {
        return;
    }
    // Two GPUs take a quarter of a minute more, each case of Gemma 40 s.
    let cases: [(BenchmarkShape, &'static [usize]); 6] = [
        (BenchmarkShape::Mini, &[1]),
        (BenchmarkShape::MiniHybrid, &[1]),
        (BenchmarkShape::MiniHybrid, &[2]),
        (BenchmarkShape::Mini, &[2]),
        (BenchmarkShape::MiniGemma, &[1]),
        (BenchmarkShape::MiniGemma, &[2]),
    ];
    for (shape, ranks) in cases.into_iter().take(if is_thorough() { 6 } else { 2 }) {
        let folder = TempDir::new("inflight-mini").unwrap();
        shape.write(folder.path()).unwrap();
        // Smaller, as a token takes milliseconds. Gemma's prompts are long enough that the window (5, and a key tile) frees blocks of 16.
        let (requests, shortest, output) = match shape {
            BenchmarkShape::MiniGemma => (2, 100, 7),
            BenchmarkShape::MiniHybrid => (3, 1, 14),
            _ => (5, 1, 14),
        };
        let workload = workload(ranks).prop_map(move |mut workload| {
            workload.requests.truncate(requests);
            for request in &mut workload.requests {
                request.prompt = shortest + request.prompt % 30;
                request.output = request.output.min(output);
            }
            workload
        });
        let config = Config { cases: 1, failure_persistence: None, max_shrink_iters: 8, ..Config::default() };
        let outcome = TestRunner::new(config).run(&workload, |workload| {
            let on_gpus =
                |block_tokens| load_on_gpus(folder.path().to_path_buf(), workload.ranks, block_tokens);
            compare(&workload, &mut on_gpus(16), &mut on_gpus(workload.block_tokens))
        });
        outcome.unwrap_or_else(|failure| panic!("{shape}, {ranks:?} ranks: {failure}"));
    }
}

/// Scores every token of a sequence but the first, in chunks of `chunk` tokens, with five alternatives.
fn scores(runtime: &mut CpuRuntime, tokens: &[u32], chunk: usize) -> Vec<PromptLogprobs> {
    let shape = runtime.capabilities().shape;
    let blocks: Vec<u32> = (0..shape.whole_blocks(tokens.len() as u32)).collect();
    let (mut batch, mut sampled, mut scores) = (Batch::default(), Vec::new(), Vec::new());
    for (nth, part) in tokens.chunks(chunk).enumerate() {
        let first = nth * chunk;
        batch.clear();
        batch.push_whole(part, first as u32, &shape, &blocks);
        let row = |(row, token): (usize, &u32)| ScoreRow { row: row as u32, token: *token, top: 5 };
        batch.scores.extend(tokens[first + 1..].iter().take(part.len()).enumerate().map(row));
        runtime.execute(&mut batch, &mut sampled).unwrap();
        runtime.take_scores(&mut scores);
    }
    scores
}

#[test]
fn prompt_logprobs_equal_those_of_the_same_tokens_when_they_are_generated() {
    let _serial = SERIAL.lock();
    let sampling = SamplingSpec { temperature: 1.0, seed: 4, logprobs: Some(5), ..SamplingSpec::default() };
    for (dtype, ranks) in [(Dtype::F32, 1), (Dtype::Bf16, 1), (Dtype::F16, 2)] {
        let folder = checkpoint(Arch::Llama32, dtype);
        let mut runtime =
            load(folder.path().to_path_buf(), Isa::detect(), StorageFormat::default(), 2, ranks, 16);
        let request = Request { prompt: 9, output: 400, content: 3, sampling: sampling.clone() };
        let generated = alone(&mut runtime, &request);
        let mut tokens = prompt(&request, runtime.capabilities().vocab_size);
        tokens.extend(generated.iter().map(|step| step.sampled.token));
        // The longest chunk has more rows than the logits that are held at once.
        for chunk in [1, 7, 64, tokens.len()] {
            let scores = scores(&mut runtime, &tokens, chunk);
            assert_eq!(scores.len(), tokens.len() - 1);
            for (score, step) in scores[request.prompt - 1..].iter().zip(&generated) {
                let logprobs = step.sampled.logprobs.as_ref().unwrap();
                assert_eq!((score.token, &score.top), (logprobs.chosen, &logprobs.top), "chunks of {chunk}");
                let place = logprobs.top.iter().position(|one| one.token == score.token.token);
                assert!(place.map_or(score.rank > 5, |place| place + 1 == score.rank as usize), "{score:?}");
            }
        }
    }
}

//! Engine on real runtimes under scarcity: a block pool that holds a fraction of the work, so that sequences
//! are preempted, swapped and recomputed, also at random; drafts; shared prefixes; forked choices; stop tokens;
//! cancellation and deadlines; grammars that the output must match; tenants of different weight; every policy, with and without a
//! step target. Each choice gets the
//! tokens and log probabilities, bit for bit, that it gets alone with enough blocks and no prefix cache: for
//! every dtype, weights of 8 and 4 bits, an 8-bit KV cache and every instruction set, on simulated GPUs, and
//! with tensor parallelism.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(clippy::disallowed_methods, reason = "the seeds come from the environment")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{Constraint, FinishReason, Grammar, SamplingParams, SamplingSpec, Weight};
use inflight_fixtures::{
    Arch, BenchmarkShape, Checkpoint, Dtype, Mtp, TempDir, is_left_to_the_night, is_thorough, skipped,
};
use inflight_grammar::Vocabulary;
use inflight_grammar_service::Grammars;
use inflight_harness::SimulatedGpu;
use inflight_kernels::cpu::{Isa, KvDtype};
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{PromptLogprobs, Runtime};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime, kv_bytes_per_token, memory_needs};
use inflight_runtime_cuda::{CudaOptions, CudaRuntime, KvStore};
use inflight_worker::PolicyKind;
use inflight_worker::engine::{
    Command, Engine, EngineOptions, Finish, Request, RequestKey, ResumedChoice, SessionId,
};
use inflight_worker_core::{CostPrior, Drafts, Load, SchedulingOptions, StepTargetOption, Time};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use serde_json::Value;

/// Token, and the bits of its log probability and of the top ones.
type TokenBits = (u32, Vec<u32>);

#[derive(Debug, Clone)]
struct RequestSpec {
    text: u32,
    prompt: u32,
    max_tokens: u32,
    n: u32,
    seed: u64,
    temperature: f32,
    presence_penalty: f32,
    /// Few allowed tokens, and bad words of several of them.
    masked: bool,
    /// Index of the grammar that the output must match.
    grammar: Option<usize>,
    /// Alternatives to each prompt token, if the prompt's log probabilities are wanted.
    prompt_logprobs: Option<u32>,
    priority: i32,
    tenant: bool,
    at: usize,
    /// Steps between submission and cancellation, deadline, or preemption.
    cancel_after: Option<usize>,
    deadline_after: Option<usize>,
    preempt_after: Option<usize>,
}

fn spec() -> impl Strategy<Value = RequestSpec> {
    let sizes = (0u32..3, 1u32..70, 1u32..40, 1u32..=3);
    let choice = (any::<u64>(), prop_oneof![Just(0.0f32), Just(0.9)], prop_oneof![Just(0.0f32), Just(0.7)]);
    let grammar = prop::option::weighted(0.5, 0..GRAMMARS.len());
    let extras = (prop::bool::weighted(0.3), prop::option::weighted(0.3, 0u32..=20), grammar);
    let rarely = |steps| prop::option::weighted(0.15, 1usize..steps);
    let events = (0usize..40, rarely(60), rarely(60), prop::option::weighted(0.4, 1usize..60));
    (sizes, choice, extras, -1i32..=1, any::<bool>(), events).prop_map(
        |(
            (text, prompt, max_tokens, n),
            (seed, temperature, presence_penalty),
            (masked, prompt_logprobs, grammar),
            priority,
            tenant,
            (at, cancel_after, deadline_after, preempt_after),
        )| RequestSpec {
            text,
            prompt,
            max_tokens,
            n,
            seed,
            temperature,
            presence_penalty,
            masked,
            // The allowed tokens are digits.
            grammar: grammar.filter(|index| !masked || *index == 0),
            prompt_logprobs,
            priority,
            tenant,
            at,
            cancel_after,
            deadline_after,
            preempt_after,
        },
    )
}

/// Constructor of a grammar in one of the languages.
type Language = fn(String) -> Grammar;

/// Grammars of the requests: digits, a JSON text, one that begins after token 33, and one whose states cannot be rolled back.
const GRAMMARS: [(Language, &str, Option<u32>); 4] = [
    (Grammar::Regex, "[0-9]{3,40}", None),
    (Grammar::Regex, r#"\{"a": \[([0-9]{1,3}, ){0,9}[0-9]\], "b": "[a-z]*"\}"#, None),
    (Grammar::Regex, "(ab|[c-f]{2}|g+!)*", Some(33)),
    (Grammar::Lark, "start: (word \"!\")*\nword[stop=\"x\"]: /[a-z]*/", None),
];

fn constraint(spec: &RequestSpec) -> Option<Arc<Constraint>> {
    let (language, text, begins_after) = GRAMMARS[spec.grammar?];
    Some(Arc::new(Constraint { grammar: language(text.to_owned()), begins_after }))
}

/// Returns the grammars of a vocabulary in which each token is a printable character of ASCII.
fn grammars(vocab_size: u32) -> Arc<Grammars> {
    Arc::new(Grammars::new(vocab_size, &[], move || {
        let tokens: Vec<[u8; 1]> = (0..vocab_size).map(|token| [b' ' + (token % 95) as u8]).collect();
        Ok(Arc::new(Vocabulary::from_tokens(tokens.iter().map(|bytes| (&bytes[..], false)))))
    }))
}

fn engine(runtime: Box<dyn Runtime>, options: EngineOptions) -> Engine {
    let mut engine = Engine::new(runtime, &[], options).unwrap();
    engine.set_grammars(grammars(engine.model_limits().vocab_size));
    engine
}

/// Checks that a grammar allows an output.
fn check_grammar(constraint: &Constraint, vocab_size: u32, tokens: &[u32]) -> Result<(), TestCaseError> {
    let compiled = grammars(vocab_size).compile(&constraint.grammar).unwrap();
    let mut matcher = compiled.matcher(constraint.begins_after);
    for token in tokens {
        prop_assert!(matcher.consume(*token).is_ok(), "{constraint:?} got {tokens:?}");
    }
    Ok(())
}

fn sampling(spec: &RequestSpec) -> SamplingParams {
    let sampling = SamplingSpec {
        temperature: spec.temperature,
        presence_penalty: spec.presence_penalty,
        seed: spec.seed,
        n: spec.n,
        logprobs: Some(8),
        allowed_token_ids: if spec.masked { (20..26).collect() } else { Arc::default() },
        bad_word_token_ids: if spec.masked { bad_words() } else { Vec::new() },
        prompt_logprobs: spec.prompt_logprobs,
        constraint: constraint(spec),
        stop_token_ids: if spec.seed.is_multiple_of(3) { vec![25] } else { Vec::new() },
        min_tokens: (spec.seed % 20) as u32,
        ..SamplingSpec::default()
    };
    sampling.validate().unwrap()
}

/// No token twice in a row, and few triples.
fn bad_words() -> Vec<Vec<u32>> {
    let pairs = (20..26).map(|token| vec![token, token]);
    let triples = (20..26).map(|token| vec![token, 45 - token, token]);
    pairs.chain(triples).collect()
}

fn request(spec: &RequestSpec, id: u64, vocab: u32) -> Request {
    Request {
        key: RequestKey { session: SessionId(0), request: id },
        attempt: 1,
        prompt: (0..spec.prompt).map(|i| (i * i * 7 + i * 13 + spec.text * 101) % vocab).collect(),
        max_tokens: spec.max_tokens,
        sampling: Arc::new(sampling(spec)),
        choices: vec![ResumedChoice::default(); spec.n as usize],
        prompt_logprobs_received: 0,
        tenant: (if spec.tenant { "a" } else { "b" }).into(),
        weight: Weight::try_from(if spec.tenant { 1.0 } else { 3.0 }).unwrap(),
        virtual_start_time: None,
        priority: spec.priority,
        deadline: spec.deadline_after.map(|steps| Time::from_nanos((spec.at + steps) as u64)),
        queued: None,
        grammar: None,
        span: tracing::Span::none(),
    }
}

/// Storage of weights and KV cache on the CPU.
#[derive(Debug, Clone, Copy)]
struct StorageFormat {
    /// Dtype of the checkpoint.
    dtype: Dtype,
    /// Weight quantization, with groups that divide the matrices of two ranks; `None`: as in the checkpoint.
    weights: Option<&'static str>,
    /// Type of keys and values; `None`: as in the checkpoint.
    kv: Option<KvDtype>,
}

impl StorageFormat {
    const fn new(dtype: Dtype, weights: Option<&'static str>, kv: Option<KvDtype>) -> Self {
        Self { dtype, weights, kv }
    }

    /// Returns the type in which keys and values are stored.
    fn stored_kv(self) -> KvDtype {
        let plain = match self.dtype {
            Dtype::F32 => inflight_kernels::Dtype::F32,
            Dtype::Bf16 => inflight_kernels::Dtype::Bf16,
            Dtype::F16 => inflight_kernels::Dtype::F16,
        };
        self.kv.unwrap_or(plain.into())
    }
}

/// Formats under test: unquantized ones, then those with quantized weights, KV cache, or both.
const FORMATS: [StorageFormat; 7] = [
    StorageFormat::new(Dtype::F32, None, None),
    StorageFormat::new(Dtype::Bf16, None, None),
    StorageFormat::new(Dtype::F16, None, None),
    StorageFormat::new(Dtype::Bf16, Some("int8:8"), None),
    StorageFormat::new(Dtype::Bf16, Some("int4:8"), None),
    StorageFormat::new(Dtype::Bf16, None, Some(KvDtype::Int8)),
    StorageFormat::new(Dtype::Bf16, Some("int8:8"), Some(KvDtype::Int8)),
];

/// Instruction sets under test beside [`Isa::PORTABLE`]; those that this machine lacks are reported as skipped.
const ISAS: [&str; 4] = ["avx2", "avx512", "avx512-vnni", "avx512-bf16"];

/// Device under test.
#[derive(Debug, Clone, Copy)]
enum TestDevice {
    Cpu(StorageFormat, Isa),
    Gpu,
}

/// Runtime sizes, equal on all devices.
const BLOCK_TOKENS: u32 = 8;
const SLOTS: u32 = 6;
const BATCH_TOKENS: u32 = 40;
/// Few, so that few CUDA graphs are captured.
const DRAFT_ROWS: u32 = 10;

impl TestDevice {
    fn runtime(
        self,
        folder: &TempDir,
        (threads, ranks): (usize, usize),
        overlap: bool,
        blocks: u64,
        host_blocks: u64,
    ) -> Box<dyn Runtime> {
        match self {
            Self::Cpu(format, isa) => {
                let runtime = on_cpu(folder, format, isa, threads, ranks, blocks, host_blocks);
                if overlap { Box::new(runtime.overlapped().unwrap()) } else { Box::new(runtime) }
            }
            Self::Gpu => Box::new(on_gpu(folder, ranks, overlap, blocks, host_blocks)),
        }
    }
}

/// Loads a deterministic runtime on the first `ranks` GPUs.
fn on_gpu(folder: &TempDir, ranks: usize, overlap: bool, blocks: u64, host_blocks: u64) -> CudaRuntime {
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
    let config = model.config();
    let token_bytes = 2 * config.layers.len() * config.kv_heads * config.head_dim * 2;
    let block = u64::from(BLOCK_TOKENS) * token_bytes as u64;
    let mut options = CudaOptions {
        gpus: (0..ranks).collect(),
        lone_communicator: false,
        utilization: 0.9,
        // Per rank.
        kv_bytes: Some(blocks * block / ranks as u64),
        host_bytes: host_blocks * block,
        block_tokens: BLOCK_TOKENS,
        slots: SLOTS,
        draft_rows: DRAFT_ROWS,
        batch_tokens: BATCH_TOKENS,
        context_tokens: Some(256),
        kv_store: KvStore::Half,
        deterministic: true,
        experimental: true,
        graphs: true,
        copy_streams: true,
        autotune: false,
        gemm_cache: None,
        overlap,
    };
    if config.delta.is_some() {
        // For the states of a few sequences beside.
        let needs = inflight_runtime_cuda::memory_needs(&model, &options).unwrap();
        let states = |count: u64| count * u64::from(needs.shape.state_blocks());
        options.kv_bytes = Some((blocks + states(3)) * needs.block_bytes);
        options.host_bytes = (host_blocks + states(2)) * needs.block_bytes * ranks as u64;
    }
    CudaRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

fn on_cpu(
    folder: &TempDir,
    format: StorageFormat,
    isa: Isa,
    threads: usize,
    ranks: usize,
    blocks: u64,
    host_blocks: u64,
) -> CpuRuntime {
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
    // With fewer KV heads than ranks, KV heads are replicated.
    let copies = ranks.div_ceil(model.config().kv_heads) as u64;
    let block =
        u64::from(BLOCK_TOKENS) * kv_bytes_per_token(model.config(), format.stored_kv()) as u64 * copies;
    let mut options = CpuOptions {
        threads: Some(threads),
        kv_bytes: blocks * block,
        host_bytes: host_blocks * block,
        block_tokens: BLOCK_TOKENS,
        slots: SLOTS,
        batch_tokens: BATCH_TOKENS,
        context_tokens: None,
        isa: Some(isa),
        quantize: format.weights.map(|name| name.parse().unwrap()),
        kv_dtype: format.kv,
        tensor_parallel: ranks,
        mtp: true,
    };
    if model.config().delta.is_some() {
        // For the states of a few sequences beside.
        let needs = memory_needs(&model, &options).unwrap();
        let states = |count: u64| count * u64::from(needs.shape.state_blocks());
        options.kv_bytes = (blocks + states(3)) * needs.block_bytes;
        options.host_bytes = (host_blocks + states(2)) * needs.block_bytes;
    }
    CpuRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

/// Output of a choice.
#[derive(Debug, Default)]
struct Output {
    steps: Vec<TokenBits>,
    /// Each prompt token but the first, its rank, and the bits of its log probability and of the top ones.
    prompt: Vec<(u32, u32, Vec<u32>)>,
    /// Ended early, by cancellation or deadline.
    cut_short: bool,
}

/// Number of events, so that a test can't pass without exercising them.
#[derive(Debug, Default)]
struct Coverage {
    recomputed: u64,
    swapped: u64,
    swapped_in: u64,
    cached: u64,
    host_cached: u64,
    forced: u64,
    /// Steps completed while another was in flight.
    overlapped: u64,
    cut_short: u64,
    /// Blocks that groups of several ranks copied back.
    group_swapped_in: u64,
    /// Prompt tokens scored.
    scored: usize,
    /// Tokens generated under a grammar.
    constrained: usize,
    /// Drafted tokens, and those that stood.
    drafted: u64,
    accepted: u64,
}

impl Coverage {
    fn add(&mut self, load: &Load) {
        self.recomputed += load.recompute_preemptions;
        self.swapped += load.swap_preemptions;
        self.swapped_in += load.blocks_swapped_in;
        self.cached += load.cached_tokens;
        self.host_cached += load.host_cached_tokens;
        self.drafted += load.drafted_tokens;
        self.accepted += load.accepted_drafts;
    }
}

fn run(engine: &mut Engine, specs: &[RequestSpec], coverage: &mut Coverage) -> BTreeMap<(u64, u32), Output> {
    let vocab = engine.model_limits().vocab_size;
    let mut events = Vec::new();
    engine.command(Command::Open(SessionId(0)), Time::ZERO, &mut events);
    let mut outputs: BTreeMap<(u64, u32), Output> = BTreeMap::new();
    for step in 0.. {
        assert!(step < 100_000, "no progress");
        let now = Time::from_nanos(step as u64);
        for (id, spec) in specs.iter().enumerate() {
            let request = request(spec, id as u64, vocab);
            let key = request.key;
            let due = |after: Option<usize>| after.is_some_and(|after| spec.at + after == step);
            if spec.at == step {
                engine.command(Command::Submit(Box::new(request)), now, &mut events);
            }
            if due(spec.cancel_after) {
                engine.command(Command::Cancel { key, choice: None }, now, &mut events);
            }
            if due(spec.preempt_after) {
                engine.preempt(key, 0);
                coverage.forced += 1;
            }
        }
        let report = engine.step(now, &mut events).unwrap();
        coverage.overlapped += u64::from(report.tokens > 0 && engine.in_flight() > 0);
        for event in events.drain(..) {
            let output = outputs.entry((event.key.request, event.choice)).or_default();
            for PromptLogprobs { token, rank, top } in event.prompt_logprobs {
                assert!(output.steps.is_empty(), "log probabilities of the prompt after its output");
                let bits = std::iter::once(&token).chain(&top).map(|one| one.logprob.to_bits());
                output.prompt.push((token.token, rank, bits.collect()));
            }
            if let Some(token) = event.token {
                let logprobs = event.logprobs.expect("log probabilities were requested");
                let bits = std::iter::once(&logprobs.chosen).chain(&logprobs.top);
                output.steps.push((token, bits.map(|one| one.logprob.to_bits()).collect()));
            }
            match event.finish {
                None
                | Some(Finish::Ended(FinishReason::Stop | FinishReason::Complete | FinishReason::Length)) => {
                }
                Some(Finish::Ended(FinishReason::Cancelled | FinishReason::Deadline)) => {
                    output.cut_short = true
                }
                Some(other) => panic!("it ended by {other:?}"),
            }
        }
        if report.idle && step > 100 {
            break;
        }
    }
    let load = engine.load();
    assert_eq!((load.running, load.waiting, load.swapped), (0, 0, 0));
    assert_eq!((load.blocks_used, load.host_blocks_used), (0, 0));
    coverage.add(&load);
    outputs
}

#[derive(Debug)]
struct Workload {
    specs: Vec<RequestSpec>,
    blocks: u64,
    host_blocks: u64,
    threads: usize,
    ranks: usize,
    cheap_copies: bool,
    policy: PolicyKind,
    step_target: StepTargetOption,
    overlap: bool,
    /// Maximum tokens drafted for a sequence and iteration.
    drafts_max: u32,
}

fn workload(specs: std::ops::Range<usize>) -> impl Strategy<Value = Workload> {
    use PolicyKind::{Fair, Fcfs, Priority, Static};
    let specs = prop::collection::vec(spec(), specs);
    let policy = prop_oneof![2 => Just(Fair), 2 => Just(Priority), 1 => Just(Fcfs), 1 => Just(Static)];
    let target = prop_oneof![
        1 => Just(StepTargetOption::Off),
        1 => (1u64..3000).prop_map(|target| StepTargetOption::Fixed(Duration::from_micros(target))),
        2 => Just(StepTargetOption::Auto),
    ];
    let ranks = prop_oneof![3 => Just(1usize), 1 => Just(2)];
    let sizes = (16u64..30, 0u64..40, 1usize..3, 0u32..8);
    (specs, sizes, ranks, any::<bool>(), policy, target, any::<bool>()).prop_map(
        |(
            specs,
            (blocks, host_blocks, threads, drafts_max),
            ranks,
            cheap_copies,
            policy,
            step_target,
            overlap,
        )| Workload {
            specs,
            blocks,
            host_blocks,
            threads,
            ranks,
            cheap_copies,
            policy,
            step_target,
            overlap,
            drafts_max,
        },
    )
}

/// Compares outputs under scarcity with those of each request alone.
fn check(
    workload: &Workload,
    folder: &TempDir,
    device: TestDevice,
    coverage: &mut Coverage,
) -> Result<(), TestCaseError> {
    let mut engine_options = EngineOptions::default();
    engine_options.scheduling.no_prefix_cache = true;
    let ranks = workload.ranks;
    let roomy = device.runtime(folder, (1, ranks), false, 64, 0);
    let mut engine = engine(roomy, engine_options);
    let vocab_size = engine.model_limits().vocab_size;
    let mut alone = BTreeMap::new();
    for (id, spec) in workload.specs.iter().enumerate() {
        let undisturbed = RequestSpec {
            at: 0,
            cancel_after: None,
            deadline_after: None,
            preempt_after: None,
            ..spec.clone()
        };
        let outputs = run(&mut engine, &[undisturbed], &mut Coverage::default());
        alone.extend(outputs.into_iter().map(|((_, choice), output)| ((id as u64, choice), output)));
    }
    let copy_block = if workload.cheap_copies { 1e-9 } else { 1.0 };
    let prior = CostPrior { trust: 1e-6, ..CostPrior::default().with_copies(0.0, copy_block) };
    let (policy, step_target) = (workload.policy, workload.step_target);
    let drafts_max = workload.drafts_max;
    let engine_options = EngineOptions {
        scheduling: SchedulingOptions {
            policy: policy.into(),
            step_target,
            // Of a model without an MTP layer the same.
            drafts: if drafts_max.is_multiple_of(2) { Drafts::Auto } else { Drafts::PromptLookup },
            drafts_max,
            ..SchedulingOptions::default()
        },
        prior,
        govern_drafts: false,
        ..EngineOptions::default()
    };
    let (blocks, host_blocks) = (workload.blocks, workload.host_blocks);
    let scarce = device.runtime(folder, (workload.threads, ranks), workload.overlap, blocks, host_blocks);
    let mut engine = self::engine(scarce, engine_options);
    let before = coverage.swapped_in;
    let together = run(&mut engine, &workload.specs, coverage);
    coverage.group_swapped_in += if ranks > 1 { coverage.swapped_in - before } else { 0 };
    for (key, expected) in &alone {
        let (output, steps, spec) = (&together[key], &expected.steps, &workload.specs[key.0 as usize]);
        let scored = if spec.prompt_logprobs.is_some() && key.1 == 0 { spec.prompt as usize - 1 } else { 0 };
        prop_assert_eq!(expected.prompt.len(), scored);
        let same = expected.prompt == output.prompt
            || (output.cut_short && expected.prompt.starts_with(&output.prompt));
        prop_assert!(same, "{:?}: {:?} got {:?} and alone {:?}", device, key, output.prompt, expected.prompt);
        for (token, before) in steps.iter().skip(1).zip(steps).filter(|_| spec.masked) {
            prop_assert!((20..26).contains(&token.0) && token.0 != before.0, "{:?}", steps);
        }
        if let Some(constraint) = constraint(spec) {
            let tokens: Vec<u32> = steps.iter().map(|(token, _)| *token).collect();
            check_grammar(&constraint, vocab_size, &tokens)?;
            coverage.constrained += tokens.len();
        }
        coverage.scored += output.prompt.len();
        coverage.cut_short += u64::from(output.cut_short);
        let same = if output.cut_short { steps.starts_with(&output.steps) } else { *steps == output.steps };
        prop_assert!(same, "{:?}: {:?} got {:?} and alone {:?}", device, key, output, steps);
    }
    Ok(())
}

/// Seeds from `INFLIGHT_SEEDS=FIRST..END`, by default 0..1.
fn seeds() -> std::ops::Range<u64> {
    let parse = |text: &str| {
        let (first, end) = text.split_once("..")?;
        Some(first.parse().ok()?..end.parse().ok()?)
    };
    match std::env::var("INFLIGHT_SEEDS") {
        Ok(text) => parse(&text).unwrap_or_else(|| panic!("INFLIGHT_SEEDS={text}: write it as FIRST..END")),
        Err(_) => 0..1,
    }
}

/// Model under test: full attention, windows in all layers, or in some.
#[derive(Debug, Clone, Copy)]
enum TestModel {
    Plain(Arch),
    /// Qwen 2 with a window of this size in every other layer.
    MixedWindows(u32),
}

impl TestModel {
    fn write(self, dtype: Dtype) -> TempDir {
        match self {
            Self::Plain(arch) => Checkpoint::new(arch, dtype).write_temp().unwrap(),
            Self::MixedWindows(size) => {
                let folder = Checkpoint::new(Arch::Qwen2, dtype).write_temp().unwrap();
                let path = folder.path().join("config.json");
                let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
                let layers = config["num_hidden_layers"].as_u64().unwrap();
                let kind = |layer: u64| match layer.is_multiple_of(2) {
                    true => "sliding_attention",
                    false => "full_attention",
                };
                config["layer_types"] = (0..layers).map(kind).collect();
                config["use_sliding_window"] = true.into();
                config["sliding_window"] = size.into();
                std::fs::write(&path, config.to_string()).unwrap();
                folder
            }
        }
    }
}

/// Workloads of each format in a thorough run, over all instruction sets.
const CASES: u32 = 60;

#[test]
fn scarcity_never_changes_the_answer() {
    let models = [
        TestModel::Plain(Arch::Llama32),
        TestModel::MixedWindows(13),
        TestModel::Plain(Arch::Qwen3),
        TestModel::Plain(Arch::Mistral),
        TestModel::Plain(Arch::Gemma3),
        TestModel::MixedWindows(40),
    ];
    let mut isas = vec![Isa::PORTABLE];
    for name in ISAS {
        match Isa::by_name(name) {
            Some(isa) => isas.push(isa),
            None => skipped("scarcity", &format!("this machine has no {name}")),
        }
    }
    // Otherwise one format without and one with quantized weights.
    let (all, every) = if is_thorough() { (CASES, 1) } else { (CASES / 2, 4) };
    let formats: Vec<StorageFormat> = FORMATS.into_iter().step_by(every).collect();
    let coverages: Vec<_> = formats.iter().map(|_| RefCell::new(Coverage::default())).collect();
    for seed in seeds() {
        for (d, (format, coverage)) in formats.iter().copied().zip(&coverages).enumerate() {
            for (i, isa) in isas.iter().copied().enumerate() {
                let model = models[(d + i + seed as usize) % models.len()];
                let folder = model.write(format.dtype);
                let config = Config {
                    // As many for each format on machines with few instruction sets: enough to cover every event.
                    cases: all.div_ceil(isas.len() as u32),
                    failure_persistence: None,
                    rng_seed: RngSeed::Fixed(seed << 8 | (d << 4 | i) as u64),
                    ..Config::default()
                };
                let outcome = TestRunner::new(config).run(&workload(4..12), |workload| {
                    check(&workload, &folder, TestDevice::Cpu(format, isa), &mut coverage.borrow_mut())
                });
                if let Err(error) = outcome {
                    panic!(
                        "seed {seed} (INFLIGHT_SEEDS={seed}..{}), {model:?}, {format:?}, {}: {error}",
                        seed + 1,
                        isa.name()
                    );
                }
            }
        }
    }
    // The workloads of each format must have exercised every event; those of all, the one that depends most on the speed of copies.
    let mut host_cached = 0;
    for (format, coverage) in formats.into_iter().zip(coverages) {
        let coverage = coverage.into_inner();
        println!("seeds {:?}, {format:?}: {coverage:?}", seeds());
        assert!(coverage.recomputed > 0 && coverage.swapped > 0, "{format:?}: {coverage:?}");
        assert!(coverage.swapped_in > 0 && coverage.group_swapped_in > 0, "{format:?}: {coverage:?}");
        assert!(coverage.cached > 0, "{format:?}: {coverage:?}");
        host_cached += coverage.host_cached;
        assert!(coverage.forced > 0 && coverage.overlapped > 0, "{format:?}: {coverage:?}");
        assert!(coverage.cut_short > 0 && coverage.scored > 0, "{format:?}: {coverage:?}");
        assert!(coverage.constrained > 0, "{format:?}: {coverage:?}");
        assert!(coverage.accepted > 20 && coverage.drafted > coverage.accepted, "{format:?}: {coverage:?}");
    }
    assert!(host_cached > 0, "no block was found in the host pool");
}

/// Fewer states than slots: sequences are preempted by recompute and by swap, resume from snapshots of others and of their own, and their
/// drafts are rejected and accepted.
#[test]
fn scarcity_of_recurrent_states_never_changes_the_answer() {
    let workloads = || workload(4..12);
    let formats = [FORMATS[0], FORMATS[FORMATS.len() - 1]];
    let cases = if is_thorough() { CASES } else { CASES / 4 };
    for seed in seeds() {
        let mut coverage = RefCell::new(Coverage::default());
        for (d, format) in formats.into_iter().enumerate() {
            let checkpoint = Checkpoint::new(Arch::Qwen35, format.dtype).with_mtp(Mtp::Random);
            let folder = checkpoint.write_temp().unwrap();
            let config = Config {
                cases,
                failure_persistence: None,
                rng_seed: RngSeed::Fixed(seed << 8 | d as u64),
                ..Config::default()
            };
            let device = TestDevice::Cpu(format, Isa::detect());
            let outcome = TestRunner::new(config)
                .run(&workloads(), |workload| check(&workload, &folder, device, &mut coverage.borrow_mut()));
            if let Err(error) = outcome {
                panic!("seed {seed} (INFLIGHT_SEEDS={seed}..{}), {format:?}: {error}", seed + 1);
            }
        }
        let coverage = coverage.get_mut();
        println!("seed {seed}: {coverage:?}");
        assert!(coverage.recomputed > 0 && coverage.swapped > 0 && coverage.swapped_in > 0, "{coverage:?}");
        assert!(coverage.accepted > 20 && coverage.drafted > coverage.accepted, "{coverage:?}");
        assert!(coverage.cached > 500, "{coverage:?}");
        assert_eq!(coverage.host_cached, 0, "prefixes of such a model stay on the device");
    }
}

/// Smaller workloads with more preemptions.
fn on_gpus(ranks: usize) -> impl Strategy<Value = Workload> {
    workload(2..5).prop_map(move |mut workload| {
        for (i, spec) in workload.specs.iter_mut().enumerate() {
            spec.max_tokens = spec.max_tokens.div_ceil(3);
            spec.n = spec.n.min(2);
            spec.preempt_after = spec.preempt_after.or(Some(4 + 3 * i));
        }
        // Greedy, of few tokens, it repeats itself: drafts stand.
        let repeating = &mut workload.specs[0];
        (repeating.masked, repeating.grammar, repeating.temperature) = (true, None, 0.0);
        (repeating.presence_penalty, repeating.n, repeating.max_tokens) = (0.0, 1, 30);
        (repeating.cancel_after, repeating.deadline_after) = (None, None);
        workload.drafts_max = workload.drafts_max.max(4);
        let host_blocks = workload.host_blocks.max(8);
        Workload { ranks, host_blocks, cheap_copies: true, ..workload }
    })
}

#[test]
fn scarcity_never_changes_the_answer_of_a_gpu() {
    let test = "scarcity::scarcity_never_changes_the_answer_of_a_gpu";
    if is_left_to_the_night(test) {
        return;
    }
    if !SimulatedGpu::within("gpus=2,memory=1024,ptx=90,checks=false", test).unwrap() {
        return;
    }
    let folders =
        [BenchmarkShape::Mini, BenchmarkShape::MiniGemma, BenchmarkShape::MiniHybrid].map(|shape| {
            let folder = TempDir::new("inflight-mini").unwrap();
            shape.write(folder.path()).unwrap();
            folder
        });
    let coverage = RefCell::new(Coverage::default());
    let cases = |seed| {
        [(seed, 1, &folders[0]), (seed, 2, &folders[0]), (seed, 1, &folders[1]), (seed, 1, &folders[2])]
    };
    for (seed, ranks, folder) in seeds().flat_map(cases) {
        let config = Config {
            cases: 2,
            // A case takes seconds.
            max_shrink_iters: 8,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(seed << 8 | 0xf0 | ranks),
            ..Config::default()
        };
        let outcome = TestRunner::new(config).run(&on_gpus(ranks as usize), |workload| {
            check(&workload, folder, TestDevice::Gpu, &mut coverage.borrow_mut())
        });
        if let Err(error) = outcome {
            let path = folder.path().display();
            panic!("seed {seed} (INFLIGHT_SEEDS={seed}..{}), {ranks} ranks, {path}: {error}", seed + 1);
        }
    }
    let coverage = coverage.into_inner();
    println!("seeds {:?}: {coverage:?}", seeds());
    assert!(coverage.swapped > 0 && coverage.group_swapped_in > 0 && coverage.forced > 0, "{coverage:?}");
    assert!(coverage.cached > 0 && coverage.overlapped > 30 && coverage.scored > 0, "{coverage:?}");
    assert!(coverage.accepted > 0 && coverage.drafted > coverage.accepted, "{coverage:?}");
}

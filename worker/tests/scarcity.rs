//! The engine on the real runtime with too little of everything: a pool that holds a fraction of the work, so that
//! sequences are preempted, swapped and computed again all the time, at random moments besides; prompts that share
//! prefixes; choices that fork; cancels and deadlines in the middle; tenants of different weight; every policy, with and
//! without a target for the steps. Whatever happens, each choice gets the tokens and the log probabilities, bit for bit,
//! that it gets alone with all the room there is and no prefix cache, on every dtype and every instruction set, and on
//! GPUs that are simulated, also where ranks share the model.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(clippy::disallowed_methods, reason = "the seeds come from the environment")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{FinishReason, SamplingParams, SamplingSpec, Weight};
use inflight_fixtures::{Arch, Checkpoint, Dtype, Shape, TempDir};
use inflight_kernels::cpu::Isa;
use inflight_tests::SimulatedGpu;
use inflight_worker::PolicyKind;
use inflight_worker::engine::{Command, Engine, Finish, Request, RequestKey, Resumed, SessionId, Settings};
use inflight_worker::models::{ModelDir, ModelSource};
use inflight_worker::runtime::Runtime;
use inflight_worker::runtime::cpu::{CpuOptions, CpuRuntime, kv_bytes_per_token};
use inflight_worker::runtime::cuda::{CudaOptions, CudaRuntime, KvStore};
use inflight_worker_core::{CostPrior, Load, Time};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

/// A token and the bits of its log probability and of those of its runners-up.
type Step = (u32, Vec<u32>);

#[derive(Debug, Clone)]
struct Ask {
    text: u32,
    prompt: u32,
    max_tokens: u32,
    n: u32,
    seed: u64,
    temperature: f32,
    presence_penalty: f32,
    priority: i32,
    tenant: bool,
    at: usize,
    /// Turns after its submission at which it is withdrawn, past its deadline, or made to give way.
    cancel_after: Option<usize>,
    deadline_after: Option<usize>,
    preempt_after: Option<usize>,
}

fn ask() -> impl Strategy<Value = Ask> {
    let sizes = (0u32..3, 1u32..70, 1u32..40, 1u32..=3);
    let choice = (any::<u64>(), prop_oneof![Just(0.0f32), Just(0.9)], prop_oneof![Just(0.0f32), Just(0.7)]);
    let rarely = |turns| prop::option::weighted(0.15, 1usize..turns);
    let events = (0usize..40, rarely(60), rarely(60), prop::option::weighted(0.4, 1usize..60));
    (sizes, choice, -1i32..=1, any::<bool>(), events).prop_map(
        |(
            (text, prompt, max_tokens, n),
            (seed, temperature, presence_penalty),
            priority,
            tenant,
            (at, cancel_after, deadline_after, preempt_after),
        )| Ask {
            text,
            prompt,
            max_tokens,
            n,
            seed,
            temperature,
            presence_penalty,
            priority,
            tenant,
            at,
            cancel_after,
            deadline_after,
            preempt_after,
        },
    )
}

fn sampling(ask: &Ask) -> SamplingParams {
    let spec = SamplingSpec {
        temperature: ask.temperature,
        presence_penalty: ask.presence_penalty,
        seed: ask.seed,
        n: ask.n,
        logprobs: Some(8),
        ..SamplingSpec::default()
    };
    spec.validate().unwrap()
}

fn request(ask: &Ask, handle: u64, vocab: u32) -> Request {
    Request {
        key: RequestKey { session: SessionId(0), request: handle },
        attempt: 1,
        prompt: (0..ask.prompt).map(|i| (i * i * 7 + i * 13 + ask.text * 101) % vocab).collect(),
        max_tokens: ask.max_tokens,
        sampling: Arc::new(sampling(ask)),
        choices: vec![Resumed::default(); ask.n as usize],
        tenant: (if ask.tenant { "a" } else { "b" }).into(),
        weight: Weight::try_from(if ask.tenant { 1.0 } else { 3.0 }).unwrap(),
        order: None,
        priority: ask.priority,
        deadline: ask.deadline_after.map(|turns| Time::from_nanos((ask.at + turns) as u64)),
        span: tracing::Span::none(),
    }
}

/// What computes.
#[derive(Debug, Clone, Copy)]
enum Place {
    Cpu(Dtype, Isa),
    Gpu,
}

/// What is the same wherever it computes.
const BLOCK_TOKENS: u32 = 8;
const SLOTS: u32 = 6;
const BATCH_TOKENS: u32 = 40;

impl Place {
    fn runtime(
        self,
        folder: &TempDir,
        (threads, ranks): (usize, usize),
        overlap: bool,
        blocks: u64,
        host_blocks: u64,
    ) -> Box<dyn Runtime> {
        match self {
            Self::Cpu(dtype, isa) => {
                let runtime = on_cpu(folder, dtype, isa, threads, ranks, blocks, host_blocks);
                if overlap { Box::new(runtime.overlapped().unwrap()) } else { Box::new(runtime) }
            }
            Self::Gpu => Box::new(on_gpu(folder, ranks, overlap, blocks, host_blocks)),
        }
    }
}

/// On the first GPUs, in the deterministic mode.
fn on_gpu(folder: &TempDir, ranks: usize, overlap: bool, blocks: u64, host_blocks: u64) -> CudaRuntime {
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
    let config = model.config();
    let line = 2 * config.layers * config.kv_heads * config.head_dim * 2;
    let block = u64::from(BLOCK_TOKENS) * line as u64;
    let options = CudaOptions {
        gpus: (0..ranks).collect(),
        lone_communicator: false,
        utilization: 0.9,
        // Of each rank.
        kv_bytes: Some(blocks * block / ranks as u64),
        host_bytes: host_blocks * block,
        block_tokens: BLOCK_TOKENS,
        slots: SLOTS,
        batch_tokens: BATCH_TOKENS,
        context_tokens: Some(256),
        kv_store: KvStore::Half,
        deterministic: true,
        graphs: true,
        autotune: false,
        overlap,
    };
    CudaRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

fn on_cpu(
    folder: &TempDir,
    dtype: Dtype,
    isa: Isa,
    threads: usize,
    ranks: usize,
    blocks: u64,
    host_blocks: u64,
) -> CpuRuntime {
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
    let stored = match dtype {
        Dtype::F32 => inflight_kernels::Dtype::F32,
        Dtype::Bf16 => inflight_kernels::Dtype::Bf16,
        Dtype::F16 => inflight_kernels::Dtype::F16,
    };
    // Where there are fewer key heads than ranks, several hold the same one.
    let copies = ranks.div_ceil(model.config().kv_heads) as u64;
    let block = u64::from(BLOCK_TOKENS) * kv_bytes_per_token(model.config(), stored.into()) as u64 * copies;
    let options = CpuOptions {
        threads: Some(threads),
        kv_bytes: blocks * block,
        host_bytes: host_blocks * block,
        block_tokens: BLOCK_TOKENS,
        slots: SLOTS,
        batch_tokens: BATCH_TOKENS,
        context_tokens: None,
        isa: Some(isa),
        quantize: None,
        kv_dtype: None,
        tensor_parallel: ranks,
    };
    CpuRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

/// What a choice got, and whether it ended before its time.
#[derive(Debug, Default)]
struct Output {
    steps: Vec<Step>,
    cut: bool,
}

/// What happened, so that a test can't pass because nothing did.
#[derive(Debug, Default)]
struct Seen {
    recomputed: u64,
    swapped: u64,
    swapped_in: u64,
    cached: u64,
    host_cached: u64,
    forced: u64,
    /// Steps that ran while another was in flight.
    overlapped: u64,
    cut: u64,
    /// Blocks that groups of ranks copied back.
    group_swapped_in: u64,
}

impl Seen {
    fn add(&mut self, load: &Load) {
        self.recomputed += load.recompute_preemptions;
        self.swapped += load.swap_preemptions;
        self.swapped_in += load.blocks_swapped_in;
        self.cached += load.cached_tokens;
        self.host_cached += load.host_cached_tokens;
    }
}

fn run(engine: &mut Engine, asks: &[Ask], seen: &mut Seen) -> BTreeMap<(u64, u32), Output> {
    let vocab = engine.model_limits().vocab_size;
    let mut events = Vec::new();
    engine.command(Command::Open(SessionId(0)), Time::ZERO, &mut events);
    let mut outputs: BTreeMap<(u64, u32), Output> = BTreeMap::new();
    for turn in 0.. {
        assert!(turn < 100_000, "no progress");
        let now = Time::from_nanos(turn as u64);
        for (handle, ask) in asks.iter().enumerate() {
            let request = request(ask, handle as u64, vocab);
            let key = request.key;
            let due = |after: Option<usize>| after.is_some_and(|after| ask.at + after == turn);
            if ask.at == turn {
                engine.command(Command::Submit(Box::new(request)), now, &mut events);
            }
            if due(ask.cancel_after) {
                engine.command(Command::Cancel { key, choice: None }, now, &mut events);
            }
            if due(ask.preempt_after) {
                engine.preempt(key, 0);
                seen.forced += 1;
            }
        }
        let turned = engine.turn(now, &mut events).unwrap();
        seen.overlapped += u64::from(turned.tokens > 0 && engine.in_flight() > 0);
        for event in events.drain(..) {
            let output = outputs.entry((event.key.request, event.choice)).or_default();
            if let Some(token) = event.token {
                let logprobs = event.logprobs.expect("log probabilities were asked for");
                let bits = std::iter::once(&logprobs.chosen).chain(&logprobs.top);
                output.steps.push((token, bits.map(|one| one.logprob.to_bits()).collect()));
            }
            match event.finish {
                None | Some(Finish::Ended(FinishReason::Stop | FinishReason::Length)) => {}
                Some(Finish::Ended(FinishReason::Cancelled | FinishReason::Deadline)) => output.cut = true,
                Some(other) => panic!("it ended by {other:?}"),
            }
        }
        if turned.idle && turn > 100 {
            break;
        }
    }
    let load = engine.load();
    assert_eq!((load.running, load.waiting, load.swapped), (0, 0, 0));
    assert_eq!((load.blocks_used, load.host_blocks_used), (0, 0));
    seen.add(&load);
    outputs
}

#[derive(Debug)]
struct Workload {
    asks: Vec<Ask>,
    blocks: u64,
    host_blocks: u64,
    threads: usize,
    ranks: usize,
    cheap_copies: bool,
    policy: PolicyKind,
    step_target: Option<Duration>,
    overlap: bool,
}

fn workload(asks: std::ops::Range<usize>) -> impl Strategy<Value = Workload> {
    use PolicyKind::{Fair, Fcfs, Priority, Static};
    let asks = prop::collection::vec(ask(), asks);
    let policy = prop_oneof![2 => Just(Fair), 2 => Just(Priority), 1 => Just(Fcfs), 1 => Just(Static)];
    let target = prop::option::of(1u64..3000);
    let ranks = prop_oneof![3 => Just(1usize), 1 => Just(2)];
    (asks, 16u64..30, 0u64..40, 1usize..3, ranks, any::<bool>(), policy, target, any::<bool>()).prop_map(
        |(asks, blocks, host_blocks, threads, ranks, cheap_copies, policy, target, overlap)| Workload {
            asks,
            blocks,
            host_blocks,
            threads,
            ranks,
            cheap_copies,
            policy,
            step_target: target.map(Duration::from_micros),
            overlap,
        },
    )
}

fn check(workload: &Workload, folder: &TempDir, place: Place, seen: &mut Seen) -> Result<(), TestCaseError> {
    let settings = Settings { prefix_cache: false, ..Settings::default() };
    let ranks = workload.ranks;
    let roomy = place.runtime(folder, (1, ranks), false, 64, 0);
    let mut engine = Engine::new(roomy, &[], settings).unwrap();
    let mut alone = BTreeMap::new();
    for (handle, ask) in workload.asks.iter().enumerate() {
        let undisturbed =
            Ask { at: 0, cancel_after: None, deadline_after: None, preempt_after: None, ..ask.clone() };
        let outputs = run(&mut engine, &[undisturbed], &mut Seen::default());
        alone
            .extend(outputs.into_iter().map(|((_, choice), output)| ((handle as u64, choice), output.steps)));
    }
    let copy_block = if workload.cheap_copies { 1e-9 } else { 1.0 };
    let prior = CostPrior { trust: 1e-6, ..CostPrior::default().with_copies(0.0, copy_block) };
    let (policy, step_target) = (workload.policy, workload.step_target);
    let settings = Settings { policy, prior, step_target, ..Settings::default() };
    let (blocks, host_blocks) = (workload.blocks, workload.host_blocks);
    let scarce = place.runtime(folder, (workload.threads, ranks), workload.overlap, blocks, host_blocks);
    let mut engine = Engine::new(scarce, &[], settings).unwrap();
    let before = seen.swapped_in;
    let together = run(&mut engine, &workload.asks, seen);
    seen.group_swapped_in += if ranks > 1 { seen.swapped_in - before } else { 0 };
    for (key, steps) in &alone {
        let output = &together[key];
        seen.cut += u64::from(output.cut);
        let same = if output.cut { steps.starts_with(&output.steps) } else { *steps == output.steps };
        prop_assert!(same, "{:?}: {:?} got {:?} and alone {:?}", place, key, output, steps);
    }
    Ok(())
}

/// `INFLIGHT_SEEDS=FIRST..END` asks for other seeds than the one that every run tries.
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

#[test]
fn scarcity_never_changes_the_answer() {
    let dtypes = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    let archs = [Arch::Llama32, Arch::Qwen3, Arch::Mistral];
    let seen = RefCell::new(Seen::default());
    for seed in seeds() {
        for (d, dtype) in dtypes.into_iter().enumerate() {
            for (i, isa) in Isa::available().into_iter().enumerate() {
                let arch = archs[(d + i + seed as usize) % archs.len()];
                let folder = Checkpoint::new(arch, dtype).write_temp().unwrap();
                let config = Config {
                    cases: 6,
                    failure_persistence: None,
                    rng_seed: RngSeed::Fixed(seed << 8 | (d << 4 | i) as u64),
                    ..Config::default()
                };
                let outcome = TestRunner::new(config).run(&workload(4..12), |workload| {
                    check(&workload, &folder, Place::Cpu(dtype, isa), &mut seen.borrow_mut())
                });
                if let Err(error) = outcome {
                    panic!("seed {seed} (INFLIGHT_SEEDS={seed}..{}), {arch:?}: {error}", seed + 1);
                }
            }
        }
    }
    let seen = seen.into_inner();
    println!("seeds {:?}: {seen:?}", seeds());
    // Otherwise the test would prove nothing.
    assert!(seen.recomputed > 10 && seen.swapped > 10 && seen.swapped_in > 10, "{seen:?}");
    assert!(seen.cached > 100 && seen.host_cached > 10, "{seen:?}");
    assert!(seen.forced > 10 && seen.overlapped > 100 && seen.cut > 10, "{seen:?}");
    assert!(seen.group_swapped_in > 0, "{seen:?}");
}

/// Less work, of which more is made to give way.
fn on_gpus(ranks: usize) -> impl Strategy<Value = Workload> {
    workload(2..5).prop_map(move |mut workload| {
        for (i, ask) in workload.asks.iter_mut().enumerate() {
            ask.max_tokens = ask.max_tokens.div_ceil(3);
            ask.n = ask.n.min(2);
            ask.preempt_after = ask.preempt_after.or(Some(4 + 3 * i));
        }
        let host_blocks = workload.host_blocks.max(8);
        Workload { ranks, host_blocks, cheap_copies: true, ..workload }
    })
}

#[test]
fn scarcity_never_changes_the_answer_of_a_gpu() {
    let test = "scarcity_never_changes_the_answer_of_a_gpu";
    if !SimulatedGpu::within("gpus=2,memory=1024,ptx=90", test).unwrap() {
        return;
    }
    let folder = TempDir::new("inflight-mini").unwrap();
    Shape::Mini.write(folder.path()).unwrap();
    let seen = RefCell::new(Seen::default());
    for (seed, ranks) in seeds().flat_map(|seed| [(seed, 1), (seed, 2)]) {
        let config = Config {
            cases: 2,
            // Each case takes seconds.
            max_shrink_iters: 8,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(seed << 8 | 0xf0 | ranks),
            ..Config::default()
        };
        let outcome = TestRunner::new(config).run(&on_gpus(ranks as usize), |workload| {
            check(&workload, &folder, Place::Gpu, &mut seen.borrow_mut())
        });
        if let Err(error) = outcome {
            panic!("seed {seed} (INFLIGHT_SEEDS={seed}..{}), {ranks} ranks: {error}", seed + 1);
        }
    }
    let seen = seen.into_inner();
    println!("seeds {:?}: {seen:?}", seeds());
    assert!(seen.swapped > 0 && seen.group_swapped_in > 0 && seen.forced > 0, "{seen:?}");
    assert!(seen.cached > 0 && seen.overlapped > 30, "{seen:?}");
}

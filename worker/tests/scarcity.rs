//! The engine on the real runtime with too little of everything: a pool that holds a fraction of the work, so that
//! sequences are preempted, swapped and computed again all the time; prompts that share prefixes; choices that fork.
//! Whatever happens, each choice gets the tokens and the log probabilities, bit for bit, that it gets alone with
//! all the room there is and no prefix cache.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use inflight_contract::{SamplingParams, SamplingSpec, Weight};
use inflight_fixtures::{Arch, Checkpoint, Dtype, TempDir};
use inflight_kernels::cpu::Isa;
use inflight_worker::PolicyKind;
use inflight_worker::engine::{Command, Engine, Request, RequestKey, Resumed, SessionId, Settings};
use inflight_worker::models::{ModelDir, ModelSource};
use inflight_worker::runtime::Runtime;
use inflight_worker::runtime::cpu::{CpuOptions, CpuRuntime, kv_bytes_per_token};
use inflight_worker_core::{CostPrior, Load, Time};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

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
    at: usize,
}

fn ask() -> impl Strategy<Value = Ask> {
    let sizes = (0u32..3, 1u32..70, 1u32..40, 1u32..=3);
    let choice = (any::<u64>(), prop_oneof![Just(0.0f32), Just(0.9)], prop_oneof![Just(0.0f32), Just(0.7)]);
    (sizes, choice, -1i32..=1, 0usize..40).prop_map(
        |((text, prompt, max_tokens, n), (seed, temperature, presence_penalty), priority, at)| Ask {
            text,
            prompt,
            max_tokens,
            n,
            seed,
            temperature,
            presence_penalty,
            priority,
            at,
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
        tenant: "a".into(),
        weight: Weight::default(),
        priority: ask.priority,
        deadline: None,
        span: tracing::Span::none(),
    }
}

fn runtime(
    folder: &TempDir,
    dtype: Dtype,
    isa: Isa,
    threads: usize,
    blocks: u64,
    host_blocks: u64,
) -> CpuRuntime {
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
    let stored = match dtype {
        Dtype::F32 => inflight_kernels::Dtype::F32,
        Dtype::Bf16 => inflight_kernels::Dtype::Bf16,
        Dtype::F16 => inflight_kernels::Dtype::F16,
    };
    let block = 8 * kv_bytes_per_token(model.config(), stored) as u64;
    let options = CpuOptions {
        threads: Some(threads),
        kv_bytes: blocks * block,
        host_bytes: host_blocks * block,
        block_tokens: 8,
        slots: 6,
        batch_tokens: 40,
        context_tokens: None,
        isa: Some(isa),
        quantize: None,
    };
    CpuRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

fn run(engine: &mut Engine, asks: &[Ask]) -> (BTreeMap<(u64, u32), Vec<Step>>, Load) {
    let vocab = engine.model_limits().vocab_size;
    let mut events = Vec::new();
    engine.command(Command::Open(SessionId(0)), Time::ZERO, &mut events);
    let mut outputs: BTreeMap<(u64, u32), Vec<Step>> = BTreeMap::new();
    for turn in 0.. {
        assert!(turn < 100_000, "no progress");
        let now = Time::from_nanos(turn as u64);
        for (handle, ask) in asks.iter().enumerate().filter(|(_, ask)| ask.at == turn) {
            let request = request(ask, handle as u64, vocab);
            engine.command(Command::Submit(Box::new(request)), now, &mut events);
        }
        let idle = engine.turn(now, &mut events).unwrap().idle;
        for event in events.drain(..) {
            let output = outputs.entry((event.key.request, event.choice)).or_default();
            if let Some(token) = event.token {
                let logprobs = event.logprobs.expect("log probabilities were asked for");
                let bits = std::iter::once(&logprobs.chosen).chain(&logprobs.top);
                output.push((token, bits.map(|one| one.logprob.to_bits()).collect()));
            }
        }
        if idle && turn > 40 {
            break;
        }
    }
    let load = engine.load();
    assert_eq!((load.running, load.waiting, load.swapped), (0, 0, 0));
    assert_eq!((load.blocks_used, load.host_blocks_used), (0, 0));
    (outputs, load)
}

#[test]
fn scarcity_never_changes_the_answer() {
    let models = [(Arch::Llama32, Dtype::Bf16), (Arch::Qwen3, Dtype::F32), (Arch::Mistral, Dtype::F16)];
    let seen = RefCell::new(Load::default());
    for (arch, dtype) in models {
        let folder = Checkpoint::new(arch, dtype).write_temp().unwrap();
        for isa in Isa::available() {
            let cases = Config { cases: 6, failure_persistence: None, ..Config::default() };
            let workloads = (
                prop::collection::vec(ask(), 4..12),
                16u64..30,
                0u64..40,
                1usize..3,
                any::<bool>(),
                any::<bool>(),
                any::<bool>(),
            );
            TestRunner::new(cases)
                .run(&workloads, |(asks, blocks, host_blocks, threads, cheap_copies, fcfs, overlap)| {
                    let alone: BTreeMap<_, _> = {
                        let settings = Settings { prefix_cache: false, ..Settings::default() };
                        let roomy = runtime(&folder, dtype, isa, 1, 64, 0);
                        let mut engine = Engine::new(Box::new(roomy), &[], settings).unwrap();
                        let each = asks.iter().enumerate().flat_map(|(handle, ask)| {
                            let ask = Ask { at: 0, ..ask.clone() };
                            let (outputs, _) = run(&mut engine, &[ask]);
                            outputs
                                .into_iter()
                                .map(move |((_, choice), steps)| ((handle as u64, choice), steps))
                        });
                        each.collect()
                    };
                    let copy_block = if cheap_copies { 1e-9 } else { 1.0 };
                    let prior = CostPrior { copy: 0.0, copy_block, trust: 1e-6, ..CostPrior::default() };
                    let policy = if fcfs { PolicyKind::Fcfs } else { PolicyKind::Priority };
                    let settings = Settings { policy, prior, ..Settings::default() };
                    let scarce = runtime(&folder, dtype, isa, threads, blocks, host_blocks);
                    let scarce: Box<dyn Runtime> =
                        if overlap { Box::new(scarce.overlapped().unwrap()) } else { Box::new(scarce) };
                    let mut engine = Engine::new(scarce, &[], settings).unwrap();
                    let (together, load) = run(&mut engine, &asks);
                    let mut seen = seen.borrow_mut();
                    seen.recompute_preemptions += load.recompute_preemptions;
                    seen.swap_preemptions += load.swap_preemptions;
                    seen.cached_tokens += load.cached_tokens;
                    seen.blocks_swapped_in += load.blocks_swapped_in;
                    seen.host_cached_tokens += load.host_cached_tokens;
                    for (key, steps) in &alone {
                        prop_assert_eq!(&together[key], steps, "{:?} {:?} {:?}: {:?}", arch, dtype, isa, key);
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
    let seen = seen.into_inner();
    // Otherwise the test would prove nothing.
    assert!(seen.recompute_preemptions > 10 && seen.swap_preemptions > 10, "{seen:?}");
    assert!(seen.host_cached_tokens > 10, "{seen:?}");
    assert!(seen.cached_tokens > 100 && seen.blocks_swapped_in > 10, "{seen:?}");
}

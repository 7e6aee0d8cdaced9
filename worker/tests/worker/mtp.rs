//! Layer of multi-token prediction (MTP): what it predicts, and what its predictions save.

use std::sync::Arc;

use inflight_contract::{FinishReason, MemoryShape, SamplingSpec, Weight};
use inflight_fixtures::{Arch, Checkpoint, Dtype, Mtp, MtpReference, TempDir};
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Predictions, Runtime, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};
use inflight_worker::engine::{
    ChoiceEvent, Command, Engine, EngineOptions, Failure, Finish, Request, RequestKey, ResumedChoice,
    SessionId,
};
use inflight_worker_core::{Drafts, SchedulingOptions, StepTargetOption, Time};

/// Relative distance of the two largest logits from which on both implementations must agree.
const MARGIN: f32 = 1e-3;
const BLOCK_TOKENS: u32 = 8;

fn load(folder: &TempDir, ranks: usize) -> CpuRuntime {
    load_with(folder, ranks, 4)
}

fn load_with(folder: &TempDir, ranks: usize, slots: u32) -> CpuRuntime {
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
    let options = CpuOptions {
        threads: Some(2),
        kv_bytes: 16 << 20,
        host_bytes: 0,
        block_tokens: BLOCK_TOKENS,
        slots,
        batch_tokens: 256,
        context_tokens: None,
        isa: None,
        quantize: None,
        kv_dtype: None,
        tensor_parallel: ranks,
        mtp: true,
    };
    CpuRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

fn checkpoint(mtp: Mtp) -> TempDir {
    Checkpoint::new(Arch::Qwen35, Dtype::F32).with_mtp(mtp).write_temp().unwrap()
}

/// Sequence that is fed the tokens of the reference.
struct Follower {
    slot: u32,
    /// Tokens with KV computed.
    fed: usize,
    /// Chunks with samples so far.
    sampled: usize,
    /// Drafts of the chunk in the batch that stand, and its sample row.
    stand: usize,
    first_sample: usize,
}

/// Pushes the next chunk of a follower: of up to `chunk` tokens in the prompt and of one behind it, with drafts of which `drafts` says how
/// many stand and how many do not.
fn push(
    batch: &mut Batch,
    follower: &mut Follower,
    reference: &MtpReference,
    shape: MemoryShape,
    chunk: usize,
    drafts: &[(usize, usize)],
) {
    const VOCABULARY: u32 = 300;
    let (tokens, prompt, fed) = (&reference.tokens, reference.first + 1, follower.fed);
    let end = if fed < prompt { (fed + chunk).min(prompt) } else { fed + 1 };
    let samples = end >= prompt;
    let (stand, fail) = if samples { drafts[follower.sampled % drafts.len()] } else { (0, 0) };
    // The token behind the last draft that stands is in the reference, too.
    follower.stand = stand.min(tokens.len() - end - 1);
    let mut guessed = tokens[end..end + follower.stand].to_vec();
    let wrong = |nth: usize| (tokens[(end + guessed.len() + nth).min(tokens.len() - 1)] + 1) % VOCABULARY;
    let wrong: Vec<u32> = (0..fail).map(wrong).collect();
    guessed.extend(wrong);
    // Only the blocks of this chunk and its drafts, as from a scheduler.
    let first = follower.slot * 128;
    let table: Vec<u32> = (first..).take(shape.spans((end + guessed.len()) as u32) as usize).collect();
    let state: Vec<u32> = (first + 64..).take(shape.state_blocks() as usize).collect();
    batch.push_tables(&tokens[fed..end], &guessed, fed as u32, [(0, &table[..])], &state);
    batch.predict_last(follower.slot, if samples { 3 } else { 0 });
    follower.first_sample = batch.samples.len();
    if samples {
        batch.sample_with_drafts(follower.slot, guessed.len() as u32);
        follower.sampled += 1;
    }
    follower.fed = end;
}

/// Feeds the tokens of the reference to two sequences, one behind the other. Returns the predictions compared and those too close to compare.
fn compare(
    runtime: &mut CpuRuntime,
    reference: &MtpReference,
    chunk: usize,
    drafts: &[(usize, usize)],
) -> [u32; 2] {
    let (tokens, shape) = (&reference.tokens, runtime.capabilities().shape);
    let greedy = SamplingSpec { temperature: 0.0, ..SamplingSpec::default() };
    let sampling = Arc::new(greedy.validate().unwrap());
    let follower = |slot| Follower { slot, fed: 0, sampled: 0, stand: 0, first_sample: 0 };
    let mut followers = [follower(1), follower(0)];
    for slot in 0..2 {
        let (sampling, prompt) = (Arc::clone(&sampling), &tokens[..=reference.first]);
        runtime
            .attach(slot, &SlotSetup { sampling, choice: 0, prompt, generated: &[], eos_token_ids: &[] })
            .unwrap();
    }
    let (mut batch, mut sampled, mut predictions) = (Batch::default(), Vec::new(), Predictions::default());
    let mut compared = [0; 2];
    for step in 0.. {
        batch.clear();
        let mut ran: Vec<&mut Follower> =
            followers.iter_mut().filter(|one| one.fed + 1 < tokens.len()).collect();
        if ran.is_empty() {
            break;
        }
        // The second one begins a block later, so that both are at the same place of a block.
        ran.retain(|one| one.slot == 1 || step >= BLOCK_TOKENS);
        ran.iter_mut().for_each(|one| push(&mut batch, one, reference, shape, chunk, drafts));
        if batch.rows() == 0 {
            continue;
        }
        runtime.execute(&mut batch, &mut sampled).unwrap();
        runtime.take_predictions(&mut predictions);
        for one in ran {
            let Some((_, predicted)) = predictions.iter().find(|(slot, _)| *slot == one.slot) else {
                continue;
            };
            one.fed += one.stand;
            assert_eq!(sampled[one.first_sample + one.stand].token, tokens[one.fed], "the model itself");
            let at = one.fed - reference.first;
            for depth in 0..3 {
                if reference.margins[at][..=depth].iter().any(|margin| *margin < MARGIN) {
                    compared[1] += 1;
                    break;
                }
                let what =
                    format!("depth {depth} behind token {}, slot {}, chunks of {chunk}", one.fed, one.slot);
                assert_eq!(predicted[depth], reference.predictions[at][depth], "{what}");
                compared[0] += 1;
            }
        }
    }
    compared
}

#[test]
fn predictions_are_those_of_the_reference_under_any_chunks_and_drafts() {
    let (folder, reference) = (checkpoint(Mtp::Random), MtpReference::load().unwrap());
    for ranks in [1, 2] {
        let mut runtime = load(&folder, ranks);
        assert!(runtime.capabilities().predicted_drafts >= 3);
        for (chunk, drafts) in [
            (256, &[(0, 0)][..]),
            (1, &[(0, 0)]),
            (7, &[(0, 2), (1, 0), (2, 3)]),
            (16, &[(3, 1), (0, 1), (6, 0), (0, 0)]),
        ] {
            let [compared, close] = compare(&mut runtime, &reference, chunk, drafts);
            assert!(compared > 80 && close < compared / 8, "{compared} compared, {close} too close");
        }
    }
}

#[test]
fn the_last_of_more_sequences_than_rows_of_drafts_is_predicted() {
    const SEQUENCES: u32 = 100;
    let (folder, greedy) =
        (checkpoint(Mtp::Random), SamplingSpec { temperature: 0.0, ..SamplingSpec::default() });
    let mut runtime = load_with(&folder, 1, SEQUENCES);
    let (shape, sampling) = (runtime.capabilities().shape, Arc::new(greedy.validate().unwrap()));
    let blocks = shape.whole_blocks(2);
    let mut batch = Batch::default();
    let (mut sampled, mut predictions) = (Vec::new(), Predictions::default());
    let mut predicted = |sequences: std::ops::Range<u32>| {
        batch.clear();
        for slot in sequences.clone() {
            let (sampling, prompt) = (Arc::clone(&sampling), &[slot, slot + 1][..]);
            let setup = SlotSetup { sampling, choice: 0, prompt, generated: &[], eos_token_ids: &[] };
            runtime.attach(slot, &setup).unwrap();
            let own: Vec<u32> = (slot * blocks..(slot + 1) * blocks).collect();
            batch.push_whole(prompt, 0, &shape, &own);
            batch.sample_last_row(slot);
            batch.predict_last(slot, if slot + 1 == SEQUENCES { 3 } else { 0 });
        }
        runtime.execute(&mut batch, &mut sampled).unwrap();
        runtime.take_predictions(&mut predictions);
        let found: Vec<_> = predictions.iter().map(|(slot, tokens)| (slot, tokens.to_vec())).collect();
        found
    };
    let among = predicted(0..SEQUENCES);
    assert_eq!((among.len(), among[0].0, among[0].1.len()), (1, SEQUENCES - 1, 3));
    assert_eq!(predicted(SEQUENCES - 1..SEQUENCES), among);
}

/// What requests of one session came to.
pub(crate) struct Generated {
    /// Tokens and end of each request.
    pub(crate) outputs: Vec<(Vec<u32>, Finish)>,
    /// Iterations with decodes.
    iterations: u32,
    /// Drafts computed, and accepted, and tokens predicted.
    drafts: [u64; 3],
    /// Prompt tokens taken from the prefix cache.
    pub(crate) cached: u64,
}

/// Generates `output` tokens greedily for requests with these prompts: all at once or, if `in_turn`, one after the other.
pub(crate) fn generate(
    folder: &TempDir,
    prompts: &[Vec<u32>],
    output: u32,
    in_turn: bool,
    (drafts, govern_drafts, overlap): (Drafts, bool, bool),
) -> Generated {
    let runtime = load(folder, 1);
    let runtime: Box<dyn Runtime> =
        if overlap { Box::new(runtime.overlapped().unwrap()) } else { Box::new(runtime) };
    let scheduling = SchedulingOptions {
        step_target: StepTargetOption::Off,
        drafts,
        drafts_max: 4,
        ..SchedulingOptions::default()
    };
    let options = EngineOptions { scheduling, govern_drafts, ..EngineOptions::default() };
    let mut engine = Engine::new(runtime, &[], options).unwrap();
    let mut events: Vec<ChoiceEvent> = Vec::new();
    engine.command(Command::Open(SessionId(0)), Time::ZERO, &mut events);
    let submit = |engine: &mut Engine, id: usize, events: &mut Vec<ChoiceEvent>| {
        let sampling = SamplingSpec { ignore_eos: true, temperature: 0.0, ..SamplingSpec::default() };
        let request = Request {
            key: RequestKey { session: SessionId(0), request: id as u64 },
            attempt: 1,
            prompt: prompts[id].clone().into(),
            max_tokens: output,
            sampling: Arc::new(sampling.validate().unwrap()),
            choices: vec![ResumedChoice::default()],
            prompt_logprobs_received: 0,
            tenant: "".into(),
            weight: Weight::default(),
            virtual_start_time: None,
            priority: 0,
            deadline: None,
            queued: None,
            grammar: None,
            span: tracing::Span::none(),
        };
        engine.command(Command::Submit(Box::new(request)), Time::ZERO, events);
    };
    let mut submitted = if in_turn { 1 } else { prompts.len() };
    (0..submitted).for_each(|id| submit(&mut engine, id, &mut events));
    let mut outputs = vec![(Vec::new(), None); prompts.len()];
    let mut iterations = 0;
    for step in 0..20_000 {
        let report = engine.step(Time::from_nanos(step), &mut events).unwrap();
        iterations += u32::from(report.decodes > 0);
        for event in events.drain(..) {
            let output = &mut outputs[event.key.request as usize];
            output.0.extend(event.token);
            output.1 = event.finish.or(output.1.take());
        }
        let ended = outputs.iter().filter(|(_, finish)| finish.is_some()).count();
        if ended == prompts.len() {
            let load = engine.load();
            let outputs = outputs.into_iter().map(|(tokens, finish)| (tokens, finish.unwrap())).collect();
            let drafts = [load.drafted_tokens, load.accepted_drafts, load.predicted_tokens];
            return Generated { outputs, iterations, drafts, cached: load.cached_tokens };
        }
        if ended == submitted {
            submit(&mut engine, submitted, &mut events);
            submitted += 1;
        }
    }
    panic!("no end");
}

#[test]
fn drafts_of_a_layer_that_predicts_the_model_all_stand_and_save_their_iterations() {
    let folder = checkpoint(Mtp::Copied);
    let prompt = |id: u32| (0..9 + id * 14).map(|at| (at * 37 + id) % 300).collect::<Vec<u32>>();
    let prompts = [prompt(0), prompt(1)];
    let run = |drafts: Drafts, governed: bool, overlap: bool| {
        generate(&folder, &prompts, 80, false, (drafts, governed, overlap))
    };
    let expected = run(Drafts::Off, false, false);
    let ends = |(tokens, finish): &(Vec<u32>, Finish)| {
        tokens.len() == 80 && *finish == Finish::Ended(FinishReason::Length)
    };
    assert!(expected.outputs.iter().all(ends));
    for overlap in [false, true] {
        let got = run(Drafts::Mtp, false, overlap);
        assert_eq!(got.outputs, expected.outputs, "overlap {overlap}");
        assert_eq!(got.drafts[0], got.drafts[1], "overlap {overlap}");
        // Of five tokens, one is sampled and four are predicted before.
        let (with, without) = (got.iterations, expected.iterations);
        assert!(with <= without / 4, "{with} of {without} iterations, overlap {overlap}");
        // In turn with those that are looked up.
        let got = run(Drafts::Auto, false, overlap);
        assert_eq!(got.outputs, expected.outputs, "overlap {overlap}");
        assert!(got.iterations <= expected.iterations / 2 && got.drafts[2] > 0, "overlap {overlap}");
    }
    assert_eq!(run(Drafts::PromptLookup, false, false).outputs, expected.outputs);
    // The governor predicts where it is worth its time, which depends on the processor.
    assert_eq!(run(Drafts::Auto, true, true).outputs, expected.outputs);
}

/// A token whose embedding is so large that its norm overflows: it makes the states of its sequence NaN.
const OVERFLOWING: u32 = 7;

#[test]
fn a_state_that_overflows_ends_its_request_and_is_kept_for_no_other() {
    let folder = checkpoint(Mtp::Random);
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let row = {
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let embedding = tensors.tensor("model.embed_tokens.weight").unwrap();
        let width = embedding.shape()[1] * 4;
        let start =
            embedding.data().as_ptr() as usize - bytes.as_ptr() as usize + OVERFLOWING as usize * width;
        start..start + width
    };
    bytes[row].chunks_exact_mut(4).for_each(|element| element.copy_from_slice(&3e38f32.to_le_bytes()));
    std::fs::write(&path, bytes).unwrap();
    let text = |from: u32, count: u32| (0..count).map(move |at| 10 + (at * 29 + from) % 270);
    let shared: Vec<u32> = text(0, 40).collect();
    let with = |more: Vec<u32>| [shared.clone(), more].concat();
    let overflowing = with(std::iter::once(OVERFLOWING).chain(text(5, 60)).collect());
    let prompts = [
        with(text(9, 30).collect()),
        overflowing.clone(),
        overflowing,
        with(text(3, 40).collect()),
        with(text(9, 30).collect()),
    ];
    for drafts in [Drafts::Off, Drafts::Auto] {
        let alone =
            |at: usize| generate(&folder, &prompts[at..=at], 20, false, (drafts, false, false)).outputs;
        for in_turn in [true, false] {
            let got = generate(&folder, &prompts, 20, in_turn, (drafts, false, true));
            assert!(!in_turn || got.cached > 0, "nothing was resumed");
            for (at, output) in got.outputs.iter().enumerate() {
                let fails = [1, 2].contains(&at);
                let failed = matches!(output.1, Finish::Failed(Failure::NonFinite(_)));
                assert_eq!(failed && output.0.is_empty(), fails, "request {at}: {output:?}");
                assert!(fails || *output == alone(at)[0], "request {at}, in turn {in_turn}");
            }
        }
    }
}

//! Drafts by prompt lookup against none: equal bits, and tokens a second.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use inflight_contract::{PromptLogprobs, SamplingSpec, Weight};
use inflight_kernels::philox4x32;
use inflight_runtime::{
    Batch, Capabilities, Error, NonFiniteRows, Runtime, Sampled, Slot, SlotSetup, TokenMasks, TransferDone,
};
use inflight_runtime_cuda::CudaRuntime;
use inflight_worker::engine::{
    Command, Engine, EngineOptions, Finish, Request, RequestKey, ResumedChoice, SessionId,
};
use inflight_worker_core::{SchedulingOptions, StepTargetOption, Time, Transfer};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::JobResult;

/// Task: runs of the same streams with drafts and without, alternately.
#[derive(Debug, Clone, Deserialize)]
pub struct Drafts {
    /// Numbers of streams that run at once.
    streams: Vec<u32>,
    /// Output tokens of a stream.
    output: u32,
    /// Maximum drafts of a stream and iteration.
    drafts_max: u32,
    /// Runs of each kind.
    pairs: u32,
    /// Whether log probabilities are computed and compared, too.
    logprobs: bool,
    /// Whether drafts are used only where they are expected to save time.
    governed: bool,
}

const SESSION: SessionId = SessionId(0);
const PROMPT_TOKENS: u32 = 64;
/// Tokens of the copied text: each is followed by the next one, but the first one by the second or the tenth, as
/// drawn.
const CYCLE: u32 = 16;
const FIRST_TOKEN: u32 = 100;
const JUMP: u32 = 9;

/// Output of runs of 7 to 16 copied tokens with a choice between them, as of a file that is rewritten with edits.
fn copying() -> SamplingSpec {
    let token = |nth: u32| FIRST_TOKEN + nth % CYCLE;
    let follows = |a: u32, b: u32| b == (a + 1) % CYCLE || a == 0 && b == JUMP;
    let pairs = (0..CYCLE).flat_map(|a| (0..CYCLE).map(move |b| (a, b)));
    let words = pairs.filter(|(a, b)| !follows(*a, *b)).map(|(a, b)| vec![token(a), token(b)]);
    SamplingSpec {
        allowed_token_ids: (0..CYCLE).map(token).collect(),
        bad_word_token_ids: words.collect(),
        ..plain()
    }
}

/// Output without repetition: drawn from the whole vocabulary.
fn plain() -> SamplingSpec {
    SamplingSpec { temperature: 1.0, ignore_eos: true, ..SamplingSpec::default() }
}

/// Runtime that several engines use, one after the other.
struct SharedRuntime {
    capabilities: Capabilities,
    runtime: Arc<Mutex<CudaRuntime>>,
}

impl SharedRuntime {
    fn lock(&self) -> MutexGuard<'_, CudaRuntime> {
        self.runtime.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Runtime for SharedRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        self.lock().attach(slot, setup)
    }

    fn detach(&mut self, slot: Slot) {
        self.lock().detach(slot);
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), Error> {
        self.lock().launch(batch)
    }

    fn supply_masks(&mut self, masks: &mut TokenMasks) -> Result<(), Error> {
        self.lock().supply_masks(masks)
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        self.lock().complete(sampled)
    }

    fn take_non_finite(&mut self, rows: &mut NonFiniteRows) {
        self.lock().take_non_finite(rows);
    }

    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>) {
        self.lock().take_scores(scores);
    }

    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), Error> {
        self.lock().start_transfer(transfer)
    }

    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>) {
        self.lock().finished_transfers(finished);
    }

    fn wait_for_transfer(&mut self) -> Result<(), Error> {
        self.lock().wait_for_transfer()
    }
}

/// Streams of one run, and whether they have drafts.
struct Run {
    sampling: SamplingSpec,
    streams: u32,
    output: u32,
    /// 0: no drafts.
    drafts_max: u32,
    govern_drafts: bool,
    seed: u32,
}

/// Result of a run.
struct Outcome {
    /// Tokens by stream, and the bits of their log probabilities.
    outputs: BTreeMap<u64, Vec<(u32, u32)>>,
    tokens_per_second: f64,
    steps: u64,
    drafted: u64,
    accepted: u64,
}

pub fn drafts(runtime: CudaRuntime, task: &Drafts) -> JobResult<Value> {
    let capabilities = runtime.capabilities().clone();
    let runtime = Arc::new(Mutex::new(runtime));
    let mut rows = Vec::new();
    for (workload, spec) in [("copying", copying()), ("plain", plain())] {
        for streams in &task.streams {
            let (mut without, mut with, mut ratios, mut different) = (Vec::new(), Vec::new(), Vec::new(), 0);
            let mut last = None;
            for pair in 0..task.pairs {
                let run = |drafts_max: u32| {
                    let shared =
                        SharedRuntime { capabilities: capabilities.clone(), runtime: Arc::clone(&runtime) };
                    let logprobs = task.logprobs.then_some(0);
                    let sampling = SamplingSpec { logprobs, ..spec.clone() };
                    let (streams, output, govern_drafts) = (*streams, task.output, task.governed);
                    serve(shared, &Run { sampling, streams, output, drafts_max, govern_drafts, seed: pair })
                };
                // Alternates which one goes first.
                let (a, b) = if pair % 2 == 0 {
                    let a = run(0)?;
                    (a, run(task.drafts_max)?)
                } else {
                    let b = run(task.drafts_max)?;
                    (run(0)?, b)
                };
                let changed =
                    a.outputs.iter().filter(|(stream, output)| b.outputs.get(*stream) != Some(*output));
                different += changed.count();
                ratios.push(b.tokens_per_second / a.tokens_per_second);
                without.push(a.tokens_per_second);
                with.push(b.tokens_per_second);
                last = Some(b);
            }
            let Some(last) = last else { return Err("the task has no pairs".into()) };
            rows.push(json!({
                "workload": workload,
                "streams": streams,
                "without": median(&mut without),
                "with": median(&mut with),
                "ratio": median(&mut ratios),
                "ratio_min": ratios.first(),
                "ratio_max": ratios.last(),
                "tokens_per_step": f64::from(task.output) / last.steps as f64,
                "drafted": last.drafted,
                "accepted": last.accepted,
                "different": different,
            }));
        }
    }
    Ok(Value::Array(rows))
}

/// Sorts the values and returns the middle one.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs streams that all arrive at once to their end.
fn serve(runtime: SharedRuntime, run: &Run) -> JobResult<Outcome> {
    let vocabulary = runtime.capabilities.vocab_size;
    let Run { drafts_max, govern_drafts, .. } = *run;
    let scheduling = SchedulingOptions {
        no_prefix_cache: true,
        step_target: StepTargetOption::Off,
        drafts: inflight_worker_core::Drafts::PromptLookup,
        drafts_max,
        ..SchedulingOptions::default()
    };
    let options = EngineOptions { scheduling, govern_drafts, ..EngineOptions::default() };
    let mut engine = Engine::new(Box::new(runtime), &[], options)?;
    engine.calibrate()?;
    let mut events = Vec::new();
    engine.command(Command::Open(SESSION), Time::ZERO, &mut events);
    let begun = Instant::now();
    for stream in 0..run.streams {
        let word = |i: u32| philox4x32([stream, i, run.seed, 0], [6, 0])[0];
        let sampling = SamplingSpec { seed: word(0).into(), ..run.sampling.clone() }.validate()?;
        let request = Request {
            key: RequestKey { session: SESSION, request: stream.into() },
            attempt: 1,
            prompt: (1..=PROMPT_TOKENS).map(|i| word(i) % vocabulary).collect(),
            max_tokens: run.output,
            sampling: Arc::new(sampling),
            choices: vec![ResumedChoice::default()],
            prompt_logprobs_received: 0,
            tenant: "benchmark".into(),
            weight: Weight::default(),
            virtual_start_time: None,
            priority: 0,
            deadline: None,
            span: tracing::Span::none(),
            queued: None,
            grammar: None,
        };
        engine.command(Command::Submit(Box::new(request)), Time::ZERO.after(begun.elapsed()), &mut events);
    }
    let (mut outputs, mut ended, mut steps) = (BTreeMap::<u64, Vec<(u32, u32)>>::new(), 0, 0);
    // A step that was launched ahead of the last end is completed, too.
    while ended < run.streams || engine.in_flight() > 0 {
        let step = engine.step(Time::ZERO.after(begun.elapsed()), &mut events)?;
        steps += u64::from(step.decodes > 0);
        for event in events.drain(..) {
            if let Some(token) = event.token {
                let logprob = event.logprobs.map_or(0, |logprobs| logprobs.chosen.logprob.to_bits());
                outputs.entry(event.key.request).or_default().push((token, logprob));
            }
            match event.finish {
                Some(Finish::Failed(failure)) => return Err(failure.into()),
                Some(Finish::Ended(_)) => ended += 1,
                None => {}
            }
        }
    }
    let (seconds, load) = (begun.elapsed().as_secs_f64(), engine.load());
    let tokens: usize = outputs.values().map(Vec::len).sum();
    Ok(Outcome {
        outputs,
        tokens_per_second: tokens as f64 / seconds,
        steps,
        drafted: load.drafted_tokens,
        accepted: load.accepted_drafts,
    })
}

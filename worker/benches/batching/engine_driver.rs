//! Engine with the CPU runtime, stepped in real time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::{SamplingParams, SamplingSpec, Weight};
use inflight_grammar_service::Grammars;
use inflight_runtime::Runtime;
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};
use inflight_worker::engine::{
    ChoiceEvent, Command, Engine, EngineOptions, Finish, Request, RequestKey, ResumedChoice, SessionId,
};
use inflight_worker_core::{Iteration, Load, Time};

use crate::model::BenchModel;
use crate::options::{BenchResult, Options};

const SESSION: SessionId = SessionId(0);

/// Size of an engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineSize {
    pub threads: Option<usize>,
    pub sequences: u32,
    pub batch_tokens: u32,
    pub block_tokens: u32,
}

impl EngineSize {
    /// Reads the size from the options, with the given defaults.
    pub fn of(options: &Options, sequences: u32, batch_tokens: u32, block_tokens: u32) -> BenchResult<Self> {
        Ok(Self {
            threads: options.get("threads")?,
            sequences: options.number("sequences", sequences, 1)?,
            batch_tokens: options.number("batch-tokens", batch_tokens, 1)?,
            block_tokens: options.number("block-tokens", block_tokens, 1)?,
        })
    }
}

/// Result of one step.
#[derive(Debug, Default)]
pub struct StepTokens {
    /// Requests that got a token, in the order of the iteration's sampling chunks.
    pub tokens: Vec<u64>,
    /// Finished requests.
    pub ended: Vec<u64>,
    /// No work is left.
    pub idle: bool,
}

/// Driver with one iteration in flight, so that the last plan is the iteration of the last step.
pub struct EngineDriver {
    engine: Engine,
    sampling: Arc<SamplingParams>,
    begun: Instant,
    events: Vec<ChoiceEvent>,
}

impl EngineDriver {
    /// Creates a calibrated engine without prefix cache and with KV blocks for all slots.
    pub fn new(model: &BenchModel, size: &EngineSize, engine_options: EngineOptions) -> BenchResult<Self> {
        Self::with_runtime(Box::new(load(model, size)?), engine_options)
    }

    fn with_runtime(runtime: Box<dyn Runtime>, engine_options: EngineOptions) -> BenchResult<Self> {
        let mut engine_options = engine_options;
        engine_options.scheduling.max_waiting = 65_536;
        engine_options.scheduling.no_prefix_cache = true;
        let mut engine = Engine::new(runtime, &[], engine_options)?;
        engine.calibrate()?;
        let mut events = Vec::new();
        engine.command(Command::Open(SESSION), Time::ZERO, &mut events);
        // Greedy and to the full length: sampling is cheap, and output lengths are fixed.
        let spec = SamplingSpec { temperature: 0.0, ignore_eos: true, ..SamplingSpec::default() };
        Ok(Self { engine, sampling: Arc::new(spec.validate()?), begun: Instant::now(), events })
    }

    /// Uses these sampling parameters instead of greedy ones.
    pub fn with_sampling(mut self, spec: SamplingSpec) -> BenchResult<Self> {
        self.sampling = Arc::new(spec.validate()?);
        Ok(self)
    }

    /// Grammars of the model's vocabulary, for constrained requests.
    pub fn set_grammars(&mut self, grammars: Arc<Grammars>) {
        self.engine.set_grammars(grammars);
    }

    /// Time since the engine was created.
    pub fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    pub fn submit(&mut self, request: u64, prompt: &Arc<[u32]>, max_tokens: u32) {
        let request = Request {
            key: RequestKey { session: SESSION, request },
            attempt: 1,
            prompt: prompt.clone(),
            max_tokens,
            sampling: self.sampling.clone(),
            choices: vec![ResumedChoice::default()],
            prompt_logprobs_received: 0,
            tenant: "benchmark".into(),
            weight: Weight::default(),
            virtual_start_time: None,
            priority: 0,
            deadline: None,
            queued: None,
            grammar: None,
            span: tracing::Span::none(),
        };
        let now = time(self.now());
        self.engine.command(Command::Submit(Box::new(request)), now, &mut self.events);
    }

    /// Runs one iteration.
    pub fn step(&mut self) -> BenchResult<StepTokens> {
        let now = time(self.now());
        let report = self.engine.step(now, &mut self.events)?;
        let mut step_tokens = StepTokens { idle: report.idle, ..StepTokens::default() };
        for event in self.events.drain(..) {
            if event.token.is_some() {
                step_tokens.tokens.push(event.key.request);
            }
            match event.finish {
                Some(Finish::Failed(failure)) => return Err(failure.into()),
                Some(Finish::Ended(_)) => step_tokens.ended.push(event.key.request),
                None => {}
            }
        }
        Ok(step_tokens)
    }

    /// Iteration of the last step.
    pub fn plan(&self) -> &Iteration {
        self.engine.last_plan()
    }

    /// Predicted and measured duration of the last step.
    pub fn last_step(&self) -> Option<(Duration, Duration)> {
        self.engine.history().iter().next_back().and_then(|step| Some((step.predicted, step.took?)))
    }

    /// Counters since the engine was created.
    pub fn totals(&self) -> Load {
        self.engine.load()
    }

    /// Load when the last iteration was planned.
    pub fn load(&self) -> Load {
        self.engine.history().iter().next_back().map(|step| step.load).unwrap_or_default()
    }
}

/// Loads a model on the CPU, with KV blocks for all slots.
fn load(model: &BenchModel, size: &EngineSize) -> BenchResult<CpuRuntime> {
    let options = CpuOptions {
        threads: size.threads,
        kv_bytes: 2 << 30,
        host_bytes: 0,
        block_tokens: size.block_tokens,
        slots: size.sequences,
        batch_tokens: size.batch_tokens,
        context_tokens: None,
        isa: None,
        quantize: None,
        kv_dtype: None,
        tensor_parallel: 1,
        mtp: false,
    };
    Ok(CpuRuntime::load(&model.dir, &options, &|_, _| {})?)
}

fn time(since: Duration) -> Time {
    Time::ZERO.after(since)
}

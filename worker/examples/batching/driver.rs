//! An engine over the CPU runtime, turned on the real clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::{SamplingParams, SamplingSpec, Weight};
use inflight_worker::engine::{
    Command, Engine, Event, Finish, Request, RequestKey, Resumed, SessionId, Settings,
};
use inflight_worker::runtime::cpu::{CpuOptions, CpuRuntime};
use inflight_worker_core::{Iteration, Load, Time};

use crate::model::Model;
use crate::options::{Options, Outcome};

const SESSION: SessionId = SessionId(0);

/// How an engine is sized.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub threads: Option<usize>,
    pub sequences: u32,
    pub batch_tokens: u32,
    pub block_tokens: u32,
}

impl Size {
    /// What the options say, else these defaults.
    pub fn of(options: &Options, sequences: u32, batch_tokens: u32, block_tokens: u32) -> Outcome<Self> {
        Ok(Self {
            threads: options.get("threads")?,
            sequences: options.number("sequences", sequences, 1)?,
            batch_tokens: options.number("batch-tokens", batch_tokens, 1)?,
            block_tokens: options.number("block-tokens", block_tokens, 1)?,
        })
    }
}

/// What came of a turn.
#[derive(Debug, Default)]
pub struct Turned {
    /// Requests that got a token, in the order of the iteration's sampling chunks, which then hold this very moment.
    pub tokens: Vec<u64>,
    /// Requests that ended.
    pub ended: Vec<u64>,
    /// Nothing is left to do.
    pub idle: bool,
}

/// One iteration at a time: the plan looked at after a turn is the one that ran in it.
pub struct Driver {
    engine: Engine,
    sampling: Arc<SamplingParams>,
    begun: Instant,
    events: Vec<Event>,
}

impl Driver {
    /// A calibrated engine. Nothing is shared between prompts, and there is memory for all that may run.
    pub fn new(model: &Model, size: &Size, settings: Settings) -> Outcome<Self> {
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
        };
        let runtime = CpuRuntime::load(&model.dir, &options, &|_, _| {})?;
        let settings = Settings { waiting_max: 65_536, prefix_cache: false, ..settings };
        let mut engine = Engine::new(Box::new(runtime), &[], settings)?;
        engine.calibrate()?;
        let mut events = Vec::new();
        engine.command(Command::Open(SESSION), Time::ZERO, &mut events);
        // Greedy and to the full length: which token comes costs nothing and ends nothing.
        let spec = SamplingSpec { temperature: 0.0, ignore_eos: true, ..SamplingSpec::default() };
        Ok(Self { engine, sampling: Arc::new(spec.validate()?), begun: Instant::now(), events })
    }

    /// Time since the engine was ready.
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
            choices: vec![Resumed::default()],
            tenant: "benchmark".into(),
            weight: Weight::default(),
            order: None,
            priority: 0,
            deadline: None,
            span: tracing::Span::none(),
        };
        let now = time(self.now());
        self.engine.command(Command::Submit(Box::new(request)), now, &mut self.events);
    }

    /// Runs one iteration. Fails if a request was refused: then the measurement is void.
    pub fn turn(&mut self) -> Outcome<Turned> {
        let now = time(self.now());
        let turn = self.engine.turn(now, &mut self.events)?;
        let mut turned = Turned { idle: turn.idle, ..Turned::default() };
        for event in self.events.drain(..) {
            if event.token.is_some() {
                turned.tokens.push(event.key.request);
            }
            match event.finish {
                Some(Finish::Failed(failure)) => return Err(failure.into()),
                Some(Finish::Ended(_)) => turned.ended.push(event.key.request),
                None => {}
            }
        }
        Ok(turned)
    }

    /// The iteration that ran in the last turn.
    pub fn plan(&self) -> &Iteration {
        self.engine.last_plan()
    }

    /// What it was predicted to take, and what it took.
    pub fn last_step(&self) -> Option<(Duration, Duration)> {
        self.engine.history().iter().next_back().and_then(|step| Some((step.predicted, step.took?)))
    }

    /// The load when it was planned.
    pub fn load(&self) -> Load {
        self.engine.history().iter().next_back().map(|step| step.load).unwrap_or_default()
    }
}

fn time(since: Duration) -> Time {
    Time::ZERO.after(since)
}

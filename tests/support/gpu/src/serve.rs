//! Offline throughput: an engine with requests that all arrive at once, in one round or in several.

use std::io::{BufRead as _, Write as _};
use std::sync::Arc;
use std::time::Instant;

use inflight_contract::{SamplingParams, SamplingSpec, Weight};
use inflight_kernels::philox4x32;
use inflight_runtime::Runtime as _;
use inflight_runtime_cuda::CudaRuntime;
use inflight_worker::engine::{
    ChoiceEvent, Command, Engine, EngineOptions, Finish, Request, RequestKey, ResumedChoice, SessionId,
};
use inflight_worker_core::{SchedulingOptions, StepTargetOption, Time};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::JobResult;

/// Task: requests as (prompt tokens, output tokens).
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Serve {
    lengths: Vec<(u32, u32)>,
    /// Greedy by default.
    #[serde(default)]
    sampling: Sampling,
}

/// Task: rounds of requests by one engine, so that rounds of another engine may come between. Reads a line of JSON for each
/// round ([`Serve`]) from standard input and answers with one, after a first line when it is ready.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rounds {}

/// Sampling parameters of all requests of a round.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Sampling {
    temperature: f32,
    top_k: Option<i32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
}

impl Sampling {
    fn validate(&self) -> JobResult<Arc<SamplingParams>> {
        let default = SamplingSpec::default();
        let spec = SamplingSpec {
            temperature: self.temperature,
            top_k: self.top_k.unwrap_or(default.top_k),
            top_p: self.top_p.unwrap_or(default.top_p),
            min_p: self.min_p.unwrap_or(default.min_p),
            ignore_eos: true,
            ..default
        };
        Ok(Arc::new(spec.validate()?))
    }
}

pub fn serve(runtime: CudaRuntime, task: &Serve) -> JobResult<Value> {
    Server::new(runtime)?.run(task)
}

pub fn rounds(runtime: CudaRuntime) -> JobResult<Value> {
    let mut server = Server::new(runtime)?;
    let mut output = std::io::stdout().lock();
    let mut count = 0u32;
    writeln!(output, "{}", json!({ "ready": true }))?;
    output.flush()?;
    for line in std::io::stdin().lock().lines() {
        let round =
            serde_json::from_str(&line?).map_err(|error| format!("the round is no valid one: {error}"))?;
        writeln!(output, "{}", server.run(&round)?)?;
        output.flush()?;
        count += 1;
    }
    Ok(json!({ "rounds": count }))
}

const SESSION: SessionId = SessionId(0);

/// Engine with an open session.
struct Server {
    engine: Engine,
    vocabulary: u32,
    begun: Instant,
    /// Requests submitted so far.
    requests: u64,
    events: Vec<ChoiceEvent>,
}

impl Server {
    fn new(runtime: CudaRuntime) -> JobResult<Self> {
        let vocabulary = runtime.capabilities().vocab_size;
        let options = EngineOptions {
            scheduling: SchedulingOptions {
                no_prefix_cache: true,
                max_waiting: 65_536,
                step_target: StepTargetOption::Off,
                ..SchedulingOptions::default()
            },
            ..EngineOptions::default()
        };
        let mut engine = Engine::new(Box::new(runtime), &[], options)?;
        engine.calibrate()?;
        let mut events = Vec::new();
        engine.command(Command::Open(SESSION), Time::ZERO, &mut events);
        Ok(Self { engine, vocabulary, begun: Instant::now(), requests: 0, events })
    }

    fn now(&self) -> Time {
        Time::ZERO.after(self.begun.elapsed())
    }

    /// Serves all requests of a round.
    fn run(&mut self, round: &Serve) -> JobResult<Value> {
        let sampling = round.sampling.validate()?;
        let requests: Vec<Box<Request>> =
            round.lengths.iter().map(|lengths| Box::new(self.request(*lengths, &sampling))).collect();
        let begun = Instant::now();
        for request in requests {
            let now = self.now();
            self.engine.command(Command::Submit(request), now, &mut self.events);
        }
        let (mut tokens, mut ended, mut steps, mut busy) = (0u64, 0usize, 0u64, 0.0);
        while ended < round.lengths.len() {
            let now = self.now();
            let step = self.engine.step(now, &mut self.events)?;
            steps += 1;
            busy += step.took.as_secs_f64();
            for event in self.events.drain(..) {
                tokens += u64::from(event.token.is_some());
                match event.finish {
                    Some(Finish::Failed(failure)) => return Err(failure.into()),
                    Some(Finish::Ended(_)) => ended += 1,
                    None => {}
                }
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        let prompts: u64 = round.lengths.iter().map(|(prompt, _)| u64::from(*prompt)).sum();
        Ok(json!({
            "requests": ended, "output_tokens": tokens, "prompt_tokens": prompts, "seconds": seconds, "steps": steps,
            "device_seconds": busy, "output_tokens_per_second": tokens as f64 / seconds,
        }))
    }

    /// Makes the next request, with a prompt of its own.
    fn request(&mut self, (prompt, output): (u32, u32), sampling: &Arc<SamplingParams>) -> Request {
        let number = self.requests;
        self.requests += 1;
        let word = |j| philox4x32([number as u32, j, 0, 0], [4, 0])[0];
        Request {
            key: RequestKey { session: SESSION, request: number },
            attempt: 1,
            prompt: (0..prompt).map(|j| word(j) % self.vocabulary).collect(),
            max_tokens: output,
            sampling: Arc::clone(sampling),
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
        }
    }
}

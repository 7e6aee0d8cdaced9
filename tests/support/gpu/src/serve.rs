//! Offline throughput: an engine with a list of requests that all arrive at once.

use std::sync::Arc;
use std::time::Instant;

use inflight_contract::{SamplingSpec, Weight};
use inflight_kernels::philox4x32;
use inflight_runtime::Runtime as _;
use inflight_runtime_cuda::CudaRuntime;
use inflight_worker::engine::{
    Command, Engine, EngineOptions, Finish, Request, RequestKey, ResumedChoice, SessionId,
};
use inflight_worker_core::{StepTarget, Time};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::JobResult;

/// Task: requests as (prompt tokens, output tokens).
#[derive(Debug, Clone, Deserialize)]
pub struct Serve {
    lengths: Vec<(u32, u32)>,
}

const SESSION: SessionId = SessionId(0);

pub fn serve(runtime: CudaRuntime, task: &Serve) -> JobResult<Value> {
    let vocabulary = runtime.capabilities().vocab_size;
    let options = EngineOptions {
        waiting_max: 65_536,
        prefix_cache: false,
        step_target: StepTarget::Unbounded,
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(Box::new(runtime), &[], options)?;
    engine.calibrate()?;
    let mut events = Vec::new();
    engine.command(Command::Open(SESSION), Time::ZERO, &mut events);
    let spec = SamplingSpec { temperature: 0.0, ignore_eos: true, ..SamplingSpec::default() };
    let sampling = Arc::new(spec.validate()?);
    let begun = Instant::now();
    for (i, (prompt, output)) in task.lengths.iter().enumerate() {
        let prompt: Arc<[u32]> =
            (0..*prompt).map(|j| philox4x32([i as u32, j, 0, 0], [4, 0])[0] % vocabulary).collect();
        let request = Request {
            key: RequestKey { session: SESSION, request: i as u64 },
            attempt: 1,
            prompt,
            max_tokens: *output,
            sampling: sampling.clone(),
            choices: vec![ResumedChoice::default()],
            prompt_logprobs_received: 0,
            tenant: "benchmark".into(),
            weight: Weight::default(),
            virtual_start_time: None,
            priority: 0,
            deadline: None,
            queued: None,
            span: tracing::Span::none(),
        };
        engine.command(Command::Submit(Box::new(request)), Time::ZERO.after(begun.elapsed()), &mut events);
    }
    let (mut tokens, mut ended, mut steps, mut busy) = (0u64, 0usize, 0u64, 0.0);
    while ended < task.lengths.len() {
        let step = engine.step(Time::ZERO.after(begun.elapsed()), &mut events)?;
        steps += 1;
        busy += step.took.as_secs_f64();
        for event in events.drain(..) {
            tokens += u64::from(event.token.is_some());
            match event.finish {
                Some(Finish::Failed(failure)) => return Err(failure.into()),
                Some(Finish::Ended(_)) => ended += 1,
                None => {}
            }
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let prompts: u64 = task.lengths.iter().map(|(prompt, _)| u64::from(*prompt)).sum();
    Ok(json!({
        "requests": ended, "output_tokens": tokens, "prompt_tokens": prompts, "seconds": seconds, "steps": steps,
        "device_seconds": busy, "output_tokens_per_second": tokens as f64 / seconds,
    }))
}

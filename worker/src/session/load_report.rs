//! Load and diagnosis of the worker as protobuf messages.

use std::time::Duration;

use inflight_proto::v1;
use inflight_worker_core::{
    Conditions, History, IterationSummary, Load, Objectives, SchedulerLimits, Time, diagnose,
};

/// Prompt length of the predicted TTFT in a reported load.
pub(super) const TTFT_PROMPT_TOKENS: u32 = 256;

/// Converts the load, without predictions; `step_us` is the mean iteration time in microseconds.
pub(super) fn load(load: &Load, step_us: u64) -> v1::Load {
    v1::Load {
        running_sequences: load.running,
        waiting_sequences: load.waiting,
        kv_blocks_used: load.blocks_used,
        preemptions: load.recompute_preemptions + load.swap_preemptions,
        mean_iteration_us: step_us,
        swapped_sequences: load.swapped,
        host_kv_blocks_used: load.host_blocks_used,
        ..v1::Load::default()
    }
}

/// Diagnoses the worker's bottlenecks, `at` a time, and summarises its last iterations.
pub(super) fn diagnosis(
    history: &History,
    now: &Load,
    limits: &SchedulerLimits,
    step_us: u64,
    request: &v1::DiagnoseRequest,
    at: Time,
    conditions: Conditions,
) -> v1::DiagnoseResponse {
    let mut objectives = Objectives::default();
    if request.queue_objective_us > 0 {
        objectives.queue = Duration::from_micros(request.queue_objective_us);
    }
    let age_max = match request.age_max_us {
        0 => Duration::MAX,
        micros => Duration::from_micros(micros),
    };
    let analysed = history.iter().filter(|step| at.since(step.planned) <= age_max);
    let findings = diagnose(analysed.clone(), limits, &objectives, conditions);
    let (first, last) = (analysed.clone().next(), analysed.clone().next_back());
    let window = first.zip(last).map_or(Duration::ZERO, |(first, last)| last.planned.since(first.planned));
    let recent = history.len().saturating_sub(request.iterations as usize);
    v1::DiagnoseResponse {
        findings: findings
            .into_iter()
            .map(|finding| v1::Finding {
                bottleneck: finding.limit.label().to_owned(),
                window_share: finding.weight,
                evidence: finding.figure,
                advice: finding.action,
            })
            .collect(),
        window_iterations: analysed.count() as u32,
        window_seconds: window.as_secs_f64(),
        load: Some(load(now, step_us)),
        iterations: history.iter().skip(recent).map(|step| summary(step, step_us)).collect(),
        granted_in_use: None,
    }
}

fn summary(step: &IterationSummary, step_us: u64) -> v1::IterationSummary {
    let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    v1::IterationSummary {
        iteration: step.number,
        duration_us: step.took.map_or(0, micros),
        predicted_us: micros(step.predicted),
        decodes: step.decodes,
        prefills: step.prefills,
        prefill_tokens: step.prefill_tokens,
        max_queue_wait_us: micros(step.longest_wait),
        preempted_sequences: step.preempted,
        stalled_decodes: step.stalled,
        blocked_by: step.blocked.map_or("", |blocked| blocked.by.label()).to_owned(),
        load: Some(load(&step.load, step_us)),
        drafted_tokens: step.drafts,
    }
}

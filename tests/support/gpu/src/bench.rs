//! Step times of decode and prefill batches over a filled KV cache.

use std::time::Instant;

use cudarc::driver::{CudaContext, Profiler};
use inflight_kernels::philox4x32;
use inflight_runtime::{Batch, Feedback, Runtime as _};
use inflight_runtime_cuda::CudaRuntime;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::JobResult;
use crate::checks::{attach, checked_step};

/// Task: measure step times.
#[derive(Debug, Clone, Deserialize)]
pub struct Steps {
    cases: Vec<Case>,
    /// Maximum steps per case; the median is reported.
    repeats: usize,
    /// Time limit per case in seconds, once five steps are measured.
    #[serde(default = "seconds")]
    seconds: f64,
    /// Marks one further step of each case by `cuProfilerStart` and `cuProfilerStop`, for
    /// `ncu --profile-from-start off`.
    #[serde(default)]
    profile: bool,
}

/// Batch shape: sequences, cached tokens and new tokens per sequence.
#[derive(Debug, Clone, Deserialize)]
struct Case {
    sequences: u32,
    context: u32,
    tokens: u32,
}

fn seconds() -> f64 {
    f64::INFINITY
}

fn word(i: u32, j: u32) -> u32 {
    philox4x32([i, j, 0, 0], [8, 0])[0]
}

/// Measures all cases on a runtime whose first GPU is `ordinal`.
pub fn steps(runtime: &mut CudaRuntime, task: &Steps, ordinal: usize) -> JobResult<Value> {
    let capabilities = runtime.capabilities().clone();
    attach(runtime, capabilities.slots)?;
    let blocks =
        |case: &Case| case.sequences * (case.context + case.tokens).div_ceil(capabilities.block_tokens);
    fill(runtime, task.cases.iter().map(blocks).max().unwrap_or(0))?;
    let mut rows = Vec::new();
    for case in &task.cases {
        let each = (case.context + case.tokens).div_ceil(capabilities.block_tokens);
        if case.sequences > capabilities.slots
            || each * case.sequences > capabilities.blocks
            || case.tokens * case.sequences > capabilities.batch_tokens
        {
            rows.push(
                json!({ "case": [case.sequences, case.context, case.tokens], "skipped": "it does not fit" }),
            );
            continue;
        }
        let batch = |feed: bool, round: u32| {
            let mut batch = Batch::default();
            batch.clear();
            for s in 0..case.sequences {
                let table: Vec<u32> = (s * each..(s + 1) * each).collect();
                let tokens: Vec<u32> =
                    (0..case.tokens).map(|i| word(s + round, i) % capabilities.vocab_size).collect();
                batch.push_sequence(&tokens, case.context, &table);
                batch.sample_last_row(s);
            }
            if feed && case.tokens == 1 {
                batch.feedback = (0..case.sequences).map(|row| Feedback { row, sample: row }).collect();
            }
            batch
        };
        let mut sampled = Vec::new();
        for round in 0..3 {
            runtime.execute(&mut batch(false, round), &mut sampled)?;
        }
        // Two steps in flight, as in the engine.
        let (mut device, begun) = (Vec::new(), Instant::now());
        runtime.launch(&mut batch(false, 3))?;
        for round in 0..task.repeats as u32 {
            if round >= 5 && begun.elapsed().as_secs_f64() > task.seconds {
                break;
            }
            runtime.launch(&mut batch(true, round))?;
            device.push(runtime.complete(&mut sampled)?.as_secs_f64());
        }
        device.push(runtime.complete(&mut sampled)?.as_secs_f64());
        let wall = begun.elapsed().as_secs_f64() / device.len() as f64;
        if task.profile {
            // The runtime's own: the primary context of the first GPU.
            CudaContext::new(ordinal)?;
            let _profiled = Profiler::new()?;
            runtime.execute(&mut batch(false, 0), &mut sampled)?;
        }
        // What was timed computes something, in each of the two step slots, which have graphs of their own.
        for round in 4..6 {
            checked_step(runtime, &mut batch(false, round), &mut sampled)?;
        }
        device.sort_by(f64::total_cmp);
        rows.push(json!({
            "case": [case.sequences, case.context, case.tokens],
            "device_ms": device[device.len() / 2] * 1e3,
            "device_ms_min": device[0] * 1e3,
            "wall_ms": wall * 1e3,
        }));
    }
    Ok(Value::Array(rows))
}

/// Fills the first `blocks` blocks with keys and values of random tokens; kernels run unrealistically fast on
/// zeros.
pub fn fill(runtime: &mut CudaRuntime, blocks: u32) -> JobResult<()> {
    let capabilities = runtime.capabilities().clone();
    let tokens = capabilities.batch_tokens.min(capabilities.context_tokens) / capabilities.block_tokens
        * capabilities.block_tokens;
    let each = (tokens / capabilities.block_tokens).max(1);
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    for first in (0..blocks.min(capabilities.blocks)).step_by(each as usize) {
        let table: Vec<u32> = (first..(first + each).min(capabilities.blocks)).collect();
        let rows = table.len() as u32 * capabilities.block_tokens;
        let text: Vec<u32> = (0..rows).map(|i| word(first, i) % capabilities.vocab_size).collect();
        batch.clear();
        batch.push_sequence(&text, 0, &table);
        runtime.execute(&mut batch, &mut sampled)?;
    }
    Ok(())
}

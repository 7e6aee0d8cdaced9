//! How long steps take, over keys and values that prefills left there.

use std::time::Instant;

use inflight_kernels::philox4x32;
use inflight_worker::runtime::cuda::CudaRuntime;
use inflight_worker::runtime::{Batch, Feedback, Runtime as _};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::Outcome;
use crate::checks::attach;

/// Steps to measure.
#[derive(Debug, Clone, Deserialize)]
pub struct Steps {
    cases: Vec<Case>,
    /// Steps measured of each, at most; the median counts.
    repeats: usize,
    /// Once five were measured, none begins after so many seconds.
    #[serde(default = "seconds")]
    seconds: f64,
}

/// So many sequences with so many tokens there already, each with so many tokens in the step.
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

pub fn steps(runtime: &mut CudaRuntime, task: &Steps) -> Outcome<Value> {
    let has = runtime.capabilities().clone();
    attach(runtime, has.slots)?;
    let blocks = |case: &Case| case.sequences * (case.context + case.tokens).div_ceil(has.block_tokens);
    fill(runtime, task.cases.iter().map(blocks).max().unwrap_or(0))?;
    let mut rows = Vec::new();
    for case in &task.cases {
        let each = (case.context + case.tokens).div_ceil(has.block_tokens);
        if case.sequences > has.slots
            || each * case.sequences > has.blocks
            || case.tokens * case.sequences > has.batch_tokens
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
                    (0..case.tokens).map(|i| word(s + round, i) % has.vocab_size).collect();
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
        // Two in flight, as the engine runs it.
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

/// Fills the first blocks with keys and values of random texts, for zeros are faster than they should be.
pub fn fill(runtime: &mut CudaRuntime, blocks: u32) -> Outcome<()> {
    let has = runtime.capabilities().clone();
    let tokens = has.batch_tokens.min(has.context_tokens) / has.block_tokens * has.block_tokens;
    let each = (tokens / has.block_tokens).max(1);
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    for first in (0..blocks.min(has.blocks)).step_by(each as usize) {
        let table: Vec<u32> = (first..(first + each).min(has.blocks)).collect();
        let rows = table.len() as u32 * has.block_tokens;
        let text: Vec<u32> = (0..rows).map(|i| word(first, i) % has.vocab_size).collect();
        batch.clear();
        batch.push_sequence(&text, 0, &table);
        runtime.execute(&mut batch, &mut sampled)?;
    }
    Ok(())
}

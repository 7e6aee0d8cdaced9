//! Step times of decode and prefill batches over a filled KV cache.

use std::time::Instant;

use cudarc::driver::{CudaContext, Profiler};
use inflight_kernels::philox4x32;
use inflight_runtime::{Batch, BlockCopy, Feedback, Runtime as _};
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
    /// Blocks of the KV pool that are filled by prompts; further ones are copies of them.
    #[serde(default = "computed_blocks")]
    computed_blocks: u32,
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

/// Enough that copies at equal places are far apart in time.
pub fn computed_blocks() -> u32 {
    4096
}

fn word(i: u32, j: u32) -> u32 {
    philox4x32([i, j, 0, 0], [8, 0])[0]
}

/// Prompt tokens of a step that a timed step is compared with.
const COMPARED_CHUNK: usize = 512;

/// Measures all cases on a runtime whose first GPU is `ordinal`; prints each as a line. With a `bound`, rows of the timed batches have to
/// be within it, as a part of the largest logit, of what their sequences yield alone and in other chunks.
pub fn steps(
    runtime: &mut CudaRuntime,
    task: &Steps,
    ordinal: usize,
    bound: Option<f32>,
) -> JobResult<Value> {
    let capabilities = runtime.capabilities().clone();
    attach(runtime, capabilities.slots)?;
    let each = |case: &Case| (case.context + case.tokens).div_ceil(capabilities.shape.block_tokens());
    fill(
        runtime,
        task.cases.iter().map(|case| case.sequences * each(case)).max().unwrap_or(0),
        task.computed_blocks,
    )?;
    let mut rows = Vec::new();
    for case in &task.cases {
        let each = each(case);
        let table = |s: u32| (s * each..(s + 1) * each).collect::<Vec<u32>>();
        if case.sequences > capabilities.slots
            || each * case.sequences > capabilities.blocks
            || case.tokens * case.sequences > capabilities.batch_tokens
        {
            rows.push(
                json!({ "case": [case.sequences, case.context, case.tokens], "skipped": "it does not fit" }),
            );
            continue;
        }
        let token = |s: u32, i: u32, round: u32| word(s + round, i) % capabilities.vocab_size;
        let batch = |feed: bool, round: u32| {
            let mut batch = Batch::default();
            batch.clear();
            for s in 0..case.sequences {
                let tokens: Vec<u32> = (0..case.tokens).map(|i| token(s, i, round)).collect();
                batch.push_sequence(&tokens, case.context, &table(s));
                batch.sample_last_row(s);
            }
            if feed && case.tokens == 1 {
                batch.feedback = (0..case.sequences).map(|row| Feedback { row, sample: row }).collect();
            }
            batch
        };
        let mut sampled = Vec::new();
        // The longest steps need no more to warm up.
        for round in 0..if case.tokens > 4096 { 1 } else { 3 } {
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
        let mut logits = Vec::new();
        for round in 4..6 {
            logits = checked_step(runtime, &mut batch(false, round), &mut sampled)?;
        }
        let tokens = |s: u32| (0..case.tokens).map(|i| token(s, i, 5)).collect();
        let apart =
            bound.map(|bound| compare_alone(runtime, case, &table, &tokens, &logits, bound)).transpose()?;
        device.sort_by(f64::total_cmp);
        let row = json!({
            "case": [case.sequences, case.context, case.tokens],
            "device_ms": device[device.len() / 2] * 1e3,
            "device_ms_min": device[0] * 1e3,
            "wall_ms": wall * 1e3,
            "apart": apart,
        });
        // What a run that is cut off leaves.
        println!("{}", json!({ "partial": row }));
        rows.push(row);
    }
    Ok(Value::Array(rows))
}

/// Compares the first, the middle and the last row of a step with those of the same sequences alone, in chunks; returns the largest
/// difference as a part of the largest logit.
fn compare_alone(
    runtime: &mut CudaRuntime,
    case: &Case,
    table: &dyn Fn(u32) -> Vec<u32>,
    tokens: &dyn Fn(u32) -> Vec<u32>,
    logits: &[f32],
    bound: f32,
) -> JobResult<f32> {
    let vocabulary = runtime.capabilities().vocab_size as usize;
    let scale = logits.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
    let mut sequences = vec![0, case.sequences / 2, case.sequences - 1];
    sequences.dedup();
    let (mut batch, mut sampled, mut apart) = (Batch::default(), Vec::new(), 0.0f32);
    for s in sequences {
        let tokens = tokens(s);
        let mut at = case.context;
        for part in tokens.chunks(COMPARED_CHUNK) {
            batch.clear();
            batch.push_sequence(part, at, &table(s));
            at += part.len() as u32;
            if at < case.context + case.tokens {
                runtime.execute(&mut batch, &mut sampled)?;
            }
        }
        batch.sample_last_row(s);
        let alone = checked_step(runtime, &mut batch, &mut sampled)?;
        let row = &logits[s as usize * vocabulary..][..vocabulary];
        apart = row.iter().zip(&alone).fold(apart, |most, (a, b)| most.max((a - b).abs() / scale));
    }
    if apart > bound || scale == 0.0 {
        let Case { sequences, context, tokens } = case;
        return Err(format!(
            "logits of {sequences} sequences of {tokens} tokens after {context} are {apart:.1e} of the largest one from those of a sequence \
             alone (bound {bound:.0e})"
        )
        .into());
    }
    Ok(apart)
}

/// Fills the first `blocks` blocks: `computed` with keys and values of random tokens, the rest with copies of these. Kernels run
/// unrealistically fast on zeros.
pub fn fill(runtime: &mut CudaRuntime, blocks: u32, computed: u32) -> JobResult<()> {
    let capabilities = runtime.capabilities().clone();
    let blocks = blocks.min(capabilities.blocks);
    let computed = blocks.min(computed.max(1));
    let tokens = capabilities.batch_tokens.min(capabilities.context_tokens)
        / capabilities.shape.block_tokens()
        * capabilities.shape.block_tokens();
    let each = (tokens / capabilities.shape.block_tokens()).max(1);
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    for first in (0..computed).step_by(each as usize) {
        let table: Vec<u32> = (first..(first + each).min(computed)).collect();
        let rows = table.len() as u32 * capabilities.shape.block_tokens();
        let text: Vec<u32> = (0..rows).map(|i| word(first, i) % capabilities.vocab_size).collect();
        batch.clear();
        batch.push_sequence(&text, 0, &table);
        runtime.execute(&mut batch, &mut sampled)?;
    }
    for first in (computed..blocks).step_by(capabilities.slots as usize) {
        batch.clear();
        // A step has rows; this one computes what is there.
        batch.push_sequence(&[word(0, 0) % capabilities.vocab_size], 0, &[0]);
        let copies =
            (first..(first + capabilities.slots).min(blocks)).map(|to| BlockCopy { from: to % computed, to });
        batch.copies.extend(copies);
        runtime.execute(&mut batch, &mut sampled)?;
    }
    Ok(())
}

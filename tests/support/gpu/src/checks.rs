//! Logits for comparison with a reference, and batch invariance.

use std::path::PathBuf;
use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_kernels::philox4x32;
use inflight_runtime::{Batch, Runtime as _, SlotSetup};
use inflight_runtime_cuda::CudaRuntime;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::JobResult;

/// Attaches greedy sequences to the first `slots` slots.
pub fn attach(runtime: &mut CudaRuntime, slots: u32) -> JobResult<()> {
    for slot in 0..slots {
        let setup = SlotSetup {
            sampling: Arc::new(SamplingParams::greedy()),
            choice: 0,
            prompt: &[],
            generated: &[],
            eos_token_ids: &[],
        };
        runtime.attach(slot, &setup)?;
    }
    Ok(())
}

/// Task: write teacher-forced logits to a file.
#[derive(Debug, Clone, Deserialize)]
pub struct Logits {
    /// Token ids of the text.
    tokens: Vec<u32>,
    /// Tokens computed in prefill chunks; the rest is computed one by one. Logits are written for the last
    /// prefill token and every later one.
    prefill: usize,
    chunk: usize,
    /// Output file: little-endian f32, row by row.
    out: PathBuf,
}

pub fn logits(runtime: &mut CudaRuntime, task: &Logits) -> JobResult<Value> {
    attach(runtime, 1)?;
    // Descending block ids, so that kernels must use the block table.
    let blocks: Vec<u32> = (0..task.tokens.len().div_ceil(16) as u32).rev().collect();
    let (mut batch, mut sampled, mut bytes) = (Batch::default(), Vec::new(), Vec::new());
    let mut at = 0;
    let mut greedy = Vec::new();
    while at < task.tokens.len() {
        let left = task.prefill.saturating_sub(at);
        let count = if left > 0 { left.min(task.chunk) } else { 1 };
        batch.clear();
        batch.push_sequence(&task.tokens[at..at + count], at as u32, &blocks);
        at += count;
        if at >= task.prefill {
            batch.sample_last_row(0);
        }
        runtime.execute(&mut batch, &mut sampled)?;
        if at >= task.prefill {
            greedy.push(sampled[0].token);
            bytes.extend(runtime.logits()?.iter().flat_map(|x| x.to_le_bytes()));
        }
    }
    std::fs::write(&task.out, &bytes)?;
    Ok(json!({ "rows": greedy.len(), "greedy": greedy }))
}

/// Task: compare the logits of one text over chunk and batch sizes.
#[derive(Debug, Clone, Deserialize)]
pub struct Determinism {
    /// Tokens of the text.
    length: usize,
    /// Batch sizes for decoding the last token.
    companions: Vec<u32>,
    /// Prefill chunk sizes.
    chunks: Vec<usize>,
}

/// Runs the task; reports the variants whose logits differ from those of the first one.
pub fn determinism(runtime: &mut CudaRuntime, task: &Determinism) -> JobResult<Value> {
    let vocabulary = runtime.capabilities().vocab_size;
    let tokens: Vec<u32> =
        (0..task.length as u32).map(|i| philox4x32([i, 0, 0, 0], [5, 0])[0] % vocabulary).collect();
    let slots = runtime.capabilities().slots;
    attach(runtime, slots)?;
    let each = task.length.div_ceil(16) as u32;
    let table = |s: u32| (s * each..(s + 1) * each).collect::<Vec<u32>>();
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    let mut variants = 0u32;
    let mut different = Vec::new();
    let mut reference: Option<Vec<u32>> = None;
    let mut compare = |what: String, logits: Vec<f32>| {
        let bits: Vec<u32> = logits[..vocabulary as usize].iter().map(|x| x.to_bits()).collect();
        variants += 1;
        match &reference {
            None => reference = Some(bits),
            Some(reference) if *reference == bits => {}
            Some(reference) => {
                let count = reference.iter().zip(&bits).filter(|(a, b)| a != b).count();
                different.push(format!("{what}: {count} of {vocabulary} logits"));
            }
        }
    };
    for chunk in &task.chunks {
        for (i, part) in tokens.chunks(*chunk).enumerate() {
            batch.clear();
            batch.push_sequence(part, (i * chunk) as u32, &table(0));
            if (i * chunk + part.len()) == tokens.len() {
                batch.sample_last_row(0);
            }
            runtime.execute(&mut batch, &mut sampled)?;
        }
        compare(format!("in chunks of {chunk}"), runtime.logits()?);
    }
    // Companion sequences, each with its own KV blocks.
    let companions = task.companions.iter().copied().max().unwrap_or(1).min(slots);
    for s in 1..companions {
        let text: Vec<u32> = tokens.iter().map(|token| (token + s) % vocabulary).collect();
        for (i, part) in text.chunks(2048).enumerate() {
            batch.clear();
            batch.push_sequence(part, i as u32 * 2048, &table(s));
            runtime.execute(&mut batch, &mut sampled)?;
        }
    }
    let last = task.length - 1;
    for rows in &task.companions {
        batch.clear();
        for s in 0..(*rows).min(slots) {
            batch.push_sequence(&[(tokens[last] + s) % vocabulary], last as u32, &table(s));
            batch.sample_last_row(s);
        }
        runtime.execute(&mut batch, &mut sampled)?;
        compare(format!("decoded in a batch of {rows}"), runtime.logits()?);
    }
    Ok(json!({ "ways": variants, "different": different }))
}

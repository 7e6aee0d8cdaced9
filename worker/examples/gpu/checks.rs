//! Is it right, and is it always the same.

use std::path::PathBuf;
use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_kernels::philox4x32;
use inflight_worker::runtime::cuda::CudaRuntime;
use inflight_worker::runtime::{Batch, Runtime as _, SlotSetup};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::Outcome;

/// Attaches slots with nothing set but greedy choice.
pub fn attach(runtime: &mut CudaRuntime, slots: u32) -> Outcome<()> {
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

/// Logits of the last positions of a text, all tokens given.
#[derive(Debug, Clone, Deserialize)]
pub struct Logits {
    /// The text, as token ids.
    tokens: Vec<u32>,
    /// So many tokens come in prefill chunks, the rest one by one; logits are those of the last one of the chunks and
    /// of each that follows.
    prefill: usize,
    chunk: usize,
    /// Gets the logits as little-endian f32, row by row.
    out: PathBuf,
}

pub fn logits(runtime: &mut CudaRuntime, task: &Logits) -> Outcome<Value> {
    attach(runtime, 1)?;
    // Blocks in falling order, so that a table is needed to find them.
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

/// The logits of one text, in many ways.
#[derive(Debug, Clone, Deserialize)]
pub struct Determinism {
    /// Tokens of the text.
    length: usize,
    /// Rows of the batches that its last token is computed in.
    companions: Vec<u32>,
    /// Sizes of the chunks it is computed in.
    chunks: Vec<usize>,
}

pub fn determinism(runtime: &mut CudaRuntime, task: &Determinism) -> Outcome<Value> {
    let vocabulary = runtime.capabilities().vocab_size;
    let tokens: Vec<u32> =
        (0..task.length as u32).map(|i| philox4x32([i, 0, 0, 0], [5, 0])[0] % vocabulary).collect();
    let slots = runtime.capabilities().slots;
    attach(runtime, slots)?;
    let each = task.length.div_ceil(16) as u32;
    let table = |s: u32| (s * each..(s + 1) * each).collect::<Vec<u32>>();
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    let mut ways = 0u32;
    let mut different = Vec::new();
    let mut reference: Option<Vec<u32>> = None;
    let mut compare = |what: String, logits: Vec<f32>| {
        let bits: Vec<u32> = logits[..vocabulary as usize].iter().map(|x| x.to_bits()).collect();
        ways += 1;
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
    // Others that decode beside it, each over keys of its own.
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
    Ok(json!({ "ways": ways, "different": different }))
}

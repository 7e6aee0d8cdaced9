//! Steps whose results are checked: logits for comparison with a reference, and batch invariance.

use std::path::PathBuf;
use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_kernels::philox4x32;
use inflight_runtime::{Batch, Runtime as _, Sampled, SlotSetup};
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

/// Runs a step of greedy sequences on buffers that hold nothing but NaN; returns the logits of its sampled rows, [samples, vocabulary].
///
/// # Errors
/// The step left a logit out or computed NaN or infinity, or a sampled token is not the most likely one of its row.
pub fn checked_step(
    runtime: &mut CudaRuntime,
    batch: &mut Batch,
    sampled: &mut Vec<Sampled>,
) -> JobResult<Vec<f32>> {
    let (rows, vocabulary) = (batch.samples.len(), runtime.capabilities().vocab_size as usize);
    runtime.poison()?;
    runtime.execute(batch, sampled)?;
    let logits = if rows > 0 { runtime.logits()? } else { Vec::new() };
    if logits.len() != rows * vocabulary || sampled.len() != rows {
        let (found, samples) = (logits.len(), sampled.len());
        return Err(format!(
            "a step of {rows} sampled rows gave {found} logits of a vocabulary of {vocabulary}, and {samples} samples"
        )
        .into());
    }
    for (row, (logits, sampled)) in logits.chunks(vocabulary).zip(&*sampled).enumerate() {
        if let Some(at) = logits.iter().position(|logit| !logit.is_finite()) {
            return Err(format!(
                "logit {at} of row {row} of {rows} is {}: the step computed it wrong, or not at all",
                logits[at]
            )
            .into());
        }
        let most = logits.iter().copied().fold(f32::MIN, f32::max);
        if vocabulary > 1 && logits.iter().all(|logit| *logit == most) {
            return Err(format!("all logits of row {row} of {rows} are {most}").into());
        }
        if logits.get(sampled.token as usize).is_none_or(|logit| *logit < most) {
            let token = sampled.token;
            return Err(format!(
                "the token {token} was sampled from row {row} of {rows}, and is not its most likely one"
            )
            .into());
        }
    }
    Ok(logits)
}

/// Sequences with given tokens, computed together as an engine does: each step decodes one token of each sequence whose prompt is done, and
/// spends what is left of the batch on prompts. Block tables are at the end of the pool, in descending order, so that kernels must use
/// them, and offsets into the pool exceed 32 bits where it has more than 4 GiB.
pub struct TeacherForced<'a> {
    sequences: &'a [Vec<u32>],
    prompts: &'a [usize],
    tables: Vec<Vec<u32>>,
    done: Vec<usize>,
    /// Logits of each sequence's last prompt token and all later ones.
    logits: Vec<Vec<f32>>,
}

impl<'a> TeacherForced<'a> {
    /// Prepares sequences; `prompts`: the tokens of each that are computed in chunks.
    pub fn new(
        runtime: &CudaRuntime,
        sequences: &'a [Vec<u32>],
        prompts: &'a [usize],
    ) -> JobResult<TeacherForced<'a>> {
        let capabilities = runtime.capabilities();
        let mut left = capabilities.blocks;
        let mut table = |tokens: &Vec<u32>| -> JobResult<Vec<u32>> {
            let shape = capabilities.shape;
            let blocks = shape.whole_blocks(tokens.len() as u32);
            let rest = left.checked_sub(blocks).ok_or("the KV pool is too small for the sequences")?;
            let table = (rest..left).rev().collect();
            left = rest;
            Ok(table)
        };
        let tables = sequences.iter().map(&mut table).collect::<JobResult<_>>()?;
        if sequences.len() > capabilities.slots as usize
            || sequences.len() > capabilities.batch_tokens as usize
            || sequences.iter().zip(prompts).any(|(tokens, prompt)| *prompt == 0 || *prompt > tokens.len())
        {
            return Err(
                "more sequences than slots or rows of a batch, or a prompt longer than its sequence".into()
            );
        }
        let (done, logits) = (vec![0; sequences.len()], vec![Vec::new(); sequences.len()]);
        Ok(Self { sequences, prompts, tables, done, logits })
    }

    /// Runs all steps with at most `chunk` prompt tokens in each; returns the logits by sequence and position.
    pub fn run(mut self, runtime: &mut CudaRuntime, chunk: usize) -> JobResult<Vec<Vec<f32>>> {
        let vocabulary = runtime.capabilities().vocab_size as usize;
        let room = chunk.min(runtime.capabilities().batch_tokens as usize);
        let shape = runtime.capabilities().shape;
        let (mut batch, mut sampled) = (Batch::default(), Vec::new());
        loop {
            batch.clear();
            let decodes = |at: usize| (self.prompts[at]..self.sequences[at].len()).contains(&self.done[at]);
            let decoding: Vec<usize> = (0..self.sequences.len()).filter(|at| decodes(*at)).collect();
            let mut left = room.saturating_sub(decoding.len()).max(usize::from(decoding.is_empty()));
            let mut parts: Vec<(usize, usize)> = decoding.into_iter().map(|at| (at, 1)).collect();
            for at in 0..self.sequences.len() {
                let count = self.prompts[at].saturating_sub(self.done[at]).min(left);
                left -= count;
                parts.extend((count > 0).then_some((at, count)));
            }
            if parts.is_empty() {
                return Ok(self.logits);
            }
            let mut rows = Vec::new();
            for (at, count) in parts {
                let from = self.done[at];
                self.done[at] += count;
                let tokens = &self.sequences[at][from..self.done[at]];
                batch.push_seen(tokens, from as u32, &shape, &self.tables[at]);
                if self.done[at] >= self.prompts[at] {
                    batch.sample_last_row(at as u32);
                    rows.push(at);
                }
            }
            let logits = checked_step(runtime, &mut batch, &mut sampled)?;
            for (at, row) in rows.into_iter().zip(logits.chunks(vocabulary)) {
                self.logits[at].extend_from_slice(row);
            }
        }
    }
}

/// Task: write teacher-forced logits of sequences that are computed together to a file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Logits {
    /// Token ids of each sequence.
    sequences: Vec<Vec<u32>>,
    /// Tokens of each that are computed in chunks; the rest is computed one by one. Logits are written for the last of them and
    /// every later one.
    prompts: Vec<usize>,
    /// Prompt tokens of a step at most.
    chunk: usize,
    /// Output file: little-endian f32, row by row, sequence by sequence.
    out: PathBuf,
}

pub fn logits(runtime: &mut CudaRuntime, task: &Logits) -> JobResult<Value> {
    let vocabulary = runtime.capabilities().vocab_size as usize;
    attach(runtime, task.sequences.len() as u32)?;
    let logits = TeacherForced::new(runtime, &task.sequences, &task.prompts)?.run(runtime, task.chunk)?;
    let rows: Vec<usize> = logits.iter().map(|logits| logits.len() / vocabulary).collect();
    let bytes: Vec<u8> = logits.into_iter().flatten().flat_map(f32::to_le_bytes).collect();
    std::fs::write(&task.out, &bytes)?;
    Ok(json!({ "rows": rows }))
}

/// Check before a task: logits of a few ragged sequences, computed together, written to a file or compared with those in one. So
/// figures of a runtime that computes nothing, or something else, are refused.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Canonical {
    /// File of the reference.
    file: PathBuf,
    /// Largest difference, as a part of the largest logit; without it the file is written.
    pub bound: Option<f32>,
}

const CANONICAL_SEQUENCES: u32 = 8;
const CANONICAL_DECODED: usize = 4;

pub fn canonical(runtime: &mut CudaRuntime, check: &Canonical) -> JobResult<Value> {
    let capabilities = runtime.capabilities().clone();
    let vocabulary = capabilities.vocab_size as usize;
    let count = CANONICAL_SEQUENCES.min(capabilities.slots).min(capabilities.batch_tokens);
    let most = capabilities.context_tokens as usize - CANONICAL_DECODED;
    let prompts: Vec<usize> = (0..count as usize).map(|at| (17 + 37 * at).min(most)).collect();
    let tokens = |at: usize, count: usize| {
        let token = |i: usize| philox4x32([i as u32, at as u32, 0, 0], [12, 0])[0] % capabilities.vocab_size;
        (0..count).map(token).collect::<Vec<u32>>()
    };
    let sequences: Vec<Vec<u32>> =
        prompts.iter().enumerate().map(|(at, prompt)| tokens(at, prompt + CANONICAL_DECODED)).collect();
    attach(runtime, count)?;
    let logits = TeacherForced::new(runtime, &sequences, &prompts)?.run(runtime, 128)?.concat();
    let rows = logits.len() / vocabulary;
    let Some(bound) = check.bound else {
        let bytes: Vec<u8> = logits.into_iter().flat_map(f32::to_le_bytes).collect();
        std::fs::write(&check.file, &bytes)?;
        return Ok(json!({ "rows": rows, "written": true }));
    };
    let bytes = std::fs::read(&check.file)?;
    let reference: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    if reference.len() != logits.len() {
        return Err(
            format!("the reference has {} logits, the check {}", reference.len(), logits.len()).into()
        );
    }
    if !reference.iter().all(|logit| logit.is_finite()) {
        return Err("the reference has logits that are not finite".into());
    }
    let scale = reference.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
    let differences = reference.iter().zip(&logits).map(|(a, b)| (a - b).abs());
    let apart = differences.fold(0.0, f32::max) / scale;
    let (mut sure, mut different) = (0, 0);
    for (reference, logits) in reference.chunks(vocabulary).zip(logits.chunks(vocabulary)) {
        let best = most_likely(reference);
        let lead = reference.iter().enumerate().filter(|(token, _)| *token != best).map(|(_, logit)| logit);
        if lead.fold(f32::MIN, |most, logit| most.max(*logit)) + bound * scale < reference[best] {
            sure += 1;
            different += usize::from(most_likely(logits) != best);
        }
    }
    let close = apart <= bound;
    if !close || different > 0 || sure == 0 {
        return Err(format!(
            "logits are {apart:.1e} of the largest one from those of the deterministic eager run (bound {bound:.0e}), and {different} of \
             {sure} sure tokens differ: what is measured is not this model"
        )
        .into());
    }
    Ok(json!({ "rows": rows, "apart": apart, "sure": sure }))
}

fn most_likely(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a))).unwrap_or(0)
}

/// Task: compare the logits of texts over chunk and batch sizes.
#[derive(Debug, Clone, Deserialize)]
pub struct Determinism {
    /// Tokens of each text.
    length: usize,
    /// Batch sizes for decoding the last token.
    companions: Vec<u32>,
    /// Prefill chunk sizes.
    chunks: Vec<usize>,
}

/// Runs the task; reports the variants in which the logits of a row differ from those of its text alone.
pub fn determinism(runtime: &mut CudaRuntime, task: &Determinism) -> JobResult<Value> {
    let vocabulary = runtime.capabilities().vocab_size;
    let slots = runtime.capabilities().slots;
    attach(runtime, slots)?;
    let companions = task.companions.iter().copied().max().unwrap_or(1).clamp(1, slots);
    let word = |i: u32, text: u32| philox4x32([i, text, 0, 0], [5, 0])[0] % vocabulary;
    let texts: Vec<Vec<u32>> =
        (0..companions).map(|text| (0..task.length as u32).map(|i| word(i, text)).collect()).collect();
    let shape = runtime.capabilities().shape;
    let each = shape.whole_blocks(task.length as u32);
    let table = |s: u32| (s * each..(s + 1) * each).collect::<Vec<u32>>();
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    let mut reference: Vec<Option<Vec<u32>>> = vec![None; companions as usize];
    let (mut variants, mut rows, mut different) = (0u32, 0u32, Vec::new());
    // Rows of consecutive texts.
    let mut compare = |what: String, first: usize, logits: Vec<f32>| {
        variants += 1;
        for (text, logits) in (first..).zip(logits.chunks(vocabulary as usize)) {
            let bits: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
            rows += 1;
            match &reference[text] {
                None => reference[text] = Some(bits),
                Some(reference) if *reference == bits => {}
                Some(reference) => {
                    let count = reference.iter().zip(&bits).filter(|(a, b)| a != b).count();
                    different.push(format!("{what}, row {text}: {count} of {vocabulary} logits"));
                }
            }
        }
    };
    // Tokens that no text has at their places, so that keys and values of an earlier way do not stand in for those of this one.
    let others: Vec<u32> =
        (0..task.length as u32).map(|i| (texts[0][i as usize] + 1 + i % 7) % vocabulary).collect();
    let prefill = runtime.capabilities().batch_tokens as usize;
    for chunk in &task.chunks {
        for (i, part) in others.chunks(prefill).enumerate() {
            batch.clear();
            batch.push_seen(part, (i * prefill) as u32, &shape, &table(0));
            runtime.execute(&mut batch, &mut sampled)?;
        }
        for (i, part) in texts[0].chunks(*chunk).enumerate() {
            batch.clear();
            batch.push_seen(part, (i * chunk) as u32, &shape, &table(0));
            if (i * chunk + part.len()) == task.length {
                batch.sample_last_row(0);
                let logits = checked_step(runtime, &mut batch, &mut sampled)?;
                compare(format!("in chunks of {chunk}"), 0, logits);
            } else {
                runtime.poison()?;
                runtime.execute(&mut batch, &mut sampled)?;
            }
        }
    }
    // Companion sequences, each with its own KV blocks.
    for (s, text) in texts.iter().enumerate().skip(1) {
        for (i, part) in text.chunks(prefill).enumerate() {
            batch.clear();
            batch.push_seen(part, (i * prefill) as u32, &shape, &table(s as u32));
            let ends = i * prefill + part.len() == task.length;
            if !ends {
                runtime.execute(&mut batch, &mut sampled)?;
                continue;
            }
            batch.sample_last_row(s as u32);
            let logits = checked_step(runtime, &mut batch, &mut sampled)?;
            compare(format!("text {s} alone"), s, logits);
        }
    }
    let last = task.length - 1;
    for rows in &task.companions {
        for wrong in [true, false] {
            batch.clear();
            for s in 0..(*rows).min(companions) {
                let right = texts[s as usize][last];
                let token = if wrong { (right + 1) % vocabulary } else { right };
                batch.push_seen(&[token], last as u32, &shape, &table(s));
                batch.sample_last_row(s);
            }
            let logits = checked_step(runtime, &mut batch, &mut sampled)?;
            if !wrong {
                compare(format!("decoded in a batch of {rows}"), 0, logits);
            }
        }
    }
    Ok(json!({ "ways": variants, "rows": rows, "different": different }))
}

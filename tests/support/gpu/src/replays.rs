//! Many decode steps in a row, and what they computed in one number.

use inflight_kernels::philox4x32;
use inflight_runtime::{Batch, Feedback, NonFiniteRows, Runtime as _, Sampled};
use inflight_runtime_cuda::CudaRuntime;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::JobResult;
use crate::checks::{attach, checked_step};

/// Task: decode steps of greedy sequences, two in flight, each of which takes its tokens from the one before.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replays {
    sequences: u32,
    /// Prompt tokens of each.
    context: u32,
    steps: u32,
}

/// Steps at the end whose logits are examined.
const CHECKED: u32 = 2;

/// FNV-1a over 32-bit words.
struct Digest(u64);

impl Digest {
    fn add(&mut self, word: u32) {
        for byte in word.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// Completes a step; its logits have to be finite.
fn completed(runtime: &mut CudaRuntime, sampled: &mut Vec<Sampled>) -> JobResult<()> {
    let mut rows = NonFiniteRows::default();
    runtime.complete(sampled)?;
    runtime.take_non_finite(&mut rows);
    if rows.is_empty() { Ok(()) } else { Err(format!("logits are not finite: {rows:?}").into()) }
}

/// Runs the task; returns a digest of all tokens and of the logits of two last steps.
pub fn replays(runtime: &mut CudaRuntime, task: &Replays) -> JobResult<Value> {
    let capabilities = runtime.capabilities().clone();
    let Replays { sequences, context, steps } = *task;
    let each = (context + steps + CHECKED).div_ceil(capabilities.shape.block_tokens());
    if sequences * each > capabilities.blocks || context + steps + CHECKED > capabilities.context_tokens {
        return Err("the sequences do not fit into the KV pool or the context".into());
    }
    attach(runtime, sequences)?;
    let table = |s: u32| (s * each..(s + 1) * each).collect::<Vec<u32>>();
    let word = |i: u32, s: u32| philox4x32([i, s, 0, 0], [21, 0])[0] % capabilities.vocab_size;
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    for s in 0..sequences {
        let text: Vec<u32> = (0..context).map(|i| word(i, s)).collect();
        let rows = capabilities.batch_tokens as usize;
        for (part, first) in text.chunks(rows).zip((0..).step_by(rows)) {
            batch.clear();
            batch.push_sequence(part, first, &table(s));
            runtime.execute(&mut batch, &mut sampled)?;
        }
    }
    let decode = |nth: u32| {
        let mut batch = Batch::default();
        batch.clear();
        for s in 0..sequences {
            batch.push_sequence(&[word(context, s)], context + nth, &table(s));
            batch.sample_last_row(s);
        }
        if nth > 0 {
            batch.feedback = (0..sequences).map(|row| Feedback { row, sample: row }).collect();
        }
        batch
    };
    let mut digest = Digest(0xcbf2_9ce4_8422_2325);
    let mut add = |sampled: &[Sampled]| sampled.iter().for_each(|one| digest.add(one.token));
    runtime.launch(&mut decode(0))?;
    for nth in 1..steps {
        runtime.launch(&mut decode(nth))?;
        completed(runtime, &mut sampled)?;
        add(&sampled);
    }
    completed(runtime, &mut sampled)?;
    add(&sampled);
    // Two, since a GPU that skips every second step would pass one.
    for nth in 0..CHECKED {
        batch.clear();
        for s in 0..sequences {
            batch.push_sequence(&[word(context + 1 + nth, s)], context + steps + nth, &table(s));
            batch.sample_last_row(s);
        }
        let logits = checked_step(runtime, &mut batch, &mut sampled)?;
        logits.iter().for_each(|logit| digest.add(logit.to_bits()));
    }
    Ok(json!({ "steps": steps, "digest": format!("{:016x}", digest.0) }))
}

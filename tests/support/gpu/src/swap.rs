//! Transfers of KV blocks to the host and back, alone and beside decoding.

use std::time::{Duration, Instant};

use inflight_kernels::philox4x32;
use inflight_runtime::{Batch, Runtime as _, TransferDone};
use inflight_runtime_cuda::CudaRuntime;
use inflight_worker_core::{Direction, Transfer, TransferId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::JobResult;
use crate::bench::{computed_blocks, fill};
use crate::checks::{attach, checked_step};

/// Task: measure transfers and decode steps.
#[derive(Debug, Clone, Deserialize)]
pub struct Swap {
    /// Blocks per transfer.
    blocks: u32,
    /// Transfers per measurement and direction.
    transfers: u32,
    /// Decoding sequences.
    sequences: u32,
    /// Cached tokens per decoding sequence.
    context: u32,
    /// Decode steps per measurement.
    steps: u32,
}

struct TransferSource {
    next: u64,
    blocks: u32,
    first: u32,
}

impl TransferSource {
    /// Returns a transfer of blocks that no step accesses.
    fn transfer(&mut self, direction: Direction) -> Transfer {
        let id = TransferId(self.next);
        // Each direction has its own half of the blocks, on both sides.
        let half = if direction == Direction::Out { 0 } else { self.blocks };
        self.next += 1;
        // Consecutive device blocks map to descending host blocks, as after a long run, so each block is a
        // separate copy.
        let blocks = (0..self.blocks).map(|i| (self.first + half + i, half + self.blocks - 1 - i)).collect();
        Transfer { id, direction, blocks }
    }
}

fn drain(runtime: &mut CudaRuntime, mut left: usize) -> JobResult<Vec<TransferDone>> {
    let mut all = Vec::new();
    while left > 0 {
        runtime.wait_for_transfer()?;
        let before = all.len();
        runtime.finished_transfers(&mut all);
        left -= all.len() - before;
    }
    match all.iter().all(|done| done.succeeded) {
        true => Ok(all),
        false => Err("a transfer failed".into()),
    }
}

/// Copies the blocks of a sequence to the host and, once others have overwritten them, back to other places. Returns their number.
///
/// # Errors
/// The next token of the sequence has other logits then.
fn check_content(runtime: &mut CudaRuntime, source: &mut TransferSource) -> JobResult<u32> {
    let capabilities = runtime.capabilities().clone();
    let (block_tokens, vocabulary) = (capabilities.shape.block_tokens(), capabilities.vocab_size);
    let blocks = source.blocks.min(capabilities.context_tokens / block_tokens);
    let last = blocks * block_tokens - 1;
    let places = [source.first, source.first + source.blocks];
    let table = |place: u32| (place..place + blocks).collect::<Vec<u32>>();
    let word = |i: u32, text: u32| philox4x32([i, text, 0, 0], [14, 0])[0] % vocabulary;
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    let mut prefill = |runtime: &mut CudaRuntime, text: u32| -> JobResult<()> {
        let tokens: Vec<u32> = (0..last).map(|i| word(i, text)).collect();
        let rows = capabilities.batch_tokens as usize;
        for (part, first) in tokens.chunks(rows).zip((0..).step_by(rows)) {
            batch.clear();
            batch.push_sequence(part, first, &table(places[0]));
            runtime.execute(&mut batch, &mut sampled)?;
        }
        Ok(())
    };
    let next = |runtime: &mut CudaRuntime, place: u32| {
        let (mut batch, mut sampled) = (Batch::default(), Vec::new());
        batch.clear();
        batch.push_sequence(&[word(last, 0)], last, &table(place));
        batch.sample_last_row(0);
        checked_step(runtime, &mut batch, &mut sampled)
    };
    let mut transfer = |runtime: &mut CudaRuntime, direction, place: u32| -> JobResult<()> {
        let id = TransferId(source.next);
        source.next += 1;
        let blocks = (0..blocks).map(|i| (place + i, blocks - 1 - i)).collect();
        runtime.start_transfer(&Transfer { id, direction, blocks })?;
        drain(runtime, 1).map(drop)
    };
    prefill(runtime, 0)?;
    let before = next(runtime, places[0])?;
    transfer(runtime, Direction::Out, places[0])?;
    prefill(runtime, 1)?;
    let other = next(runtime, places[0])?;
    transfer(runtime, Direction::In, places[1])?;
    let after = next(runtime, places[1])?;
    let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<u32>>();
    match (bits(&before) == bits(&after), bits(&before) == bits(&other)) {
        (true, false) => Ok(blocks),
        (_, true) => Err("other keys and values change no logit".into()),
        (false, _) => Err("blocks came back from the host with another content".into()),
    }
}

pub fn swap(runtime: &mut CudaRuntime, task: &Swap) -> JobResult<Value> {
    let capabilities = runtime.capabilities().clone();
    let each = task.context.div_ceil(capabilities.shape.block_tokens()) + 1;
    let used = each * task.sequences;
    if used + 2 * task.blocks > capabilities.blocks || 2 * task.blocks > capabilities.host_blocks {
        return Err("the pools are too small for this measurement".into());
    }
    attach(runtime, capabilities.slots)?;
    fill(runtime, used + 2 * task.blocks, computed_blocks())?;
    let mut source = TransferSource { next: 1, blocks: task.blocks, first: used };
    let mut measure = |runtime: &mut CudaRuntime, directions: &[Direction]| -> JobResult<f64> {
        let begun = Instant::now();
        let mut count = 0;
        for _ in 0..task.transfers {
            for direction in directions {
                runtime.start_transfer(&source.transfer(*direction))?;
                count += 1;
            }
        }
        drain(runtime, count)?;
        Ok(begun.elapsed().as_secs_f64())
    };
    let out = measure(runtime, &[Direction::Out])?;
    let back = measure(runtime, &[Direction::In])?;
    let both = measure(runtime, &[Direction::Out, Direction::In])?;
    let mut expected: Option<Vec<u32>> = None;
    let mut decode = |runtime: &mut CudaRuntime, seconds: &mut Vec<f64>| -> JobResult<()> {
        let mut batch = Batch::default();
        let mut sampled = Vec::new();
        batch.clear();
        for s in 0..task.sequences {
            let table: Vec<u32> = (s * each..(s + 1) * each).collect();
            batch.push_sequence(&[s + 7], task.context, &table);
            batch.sample_last_row(s);
        }
        let took: Duration = runtime.execute(&mut batch, &mut sampled)?;
        seconds.push(took.as_secs_f64());
        let tokens: Vec<u32> = sampled.iter().map(|sampled| sampled.token).collect();
        match expected.get_or_insert_with(|| tokens.clone()) == &tokens {
            true => Ok(()),
            false => Err("a step beside transfers gave other tokens".into()),
        }
    };
    let (mut calm, mut loaded) = (Vec::new(), Vec::new());
    for _ in 0..task.steps {
        decode(runtime, &mut calm)?;
    }
    let (mut in_flight, mut moved, begun) = (0, 0, Instant::now());
    let mut done = Vec::new();
    for _ in 0..task.steps {
        // Keep a few transfers of each direction in flight.
        while in_flight < 4 {
            let direction = if source.next.is_multiple_of(2) { Direction::Out } else { Direction::In };
            runtime.start_transfer(&source.transfer(direction))?;
            in_flight += 1;
        }
        decode(runtime, &mut loaded)?;
        done.clear();
        runtime.finished_transfers(&mut done);
        if done.iter().any(|done| !done.succeeded) {
            return Err("a transfer failed".into());
        }
        (in_flight, moved) = (in_flight - done.len(), moved + done.len());
    }
    let beside = begun.elapsed().as_secs_f64();
    drain(runtime, in_flight)?;
    let compared = check_content(runtime, &mut source)?;
    let median = |seconds: &mut Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let blocks = f64::from(task.blocks) * f64::from(task.transfers);
    let blocks_beside = moved as f64 * f64::from(task.blocks);
    Ok(json!({
        "blocks_moved": blocks, "blocks_beside": blocks_beside, "beside_seconds": beside, "out_seconds": out, "in_seconds": back, "both_seconds": both,
        "blocks_compared": compared, "decode_ms_calm": median(&mut calm) * 1e3, "decode_ms_beside_swaps": median(&mut loaded) * 1e3,
    }))
}

//! Transfers of KV blocks to the host and back, alone and beside decoding.

use std::time::{Duration, Instant};

use inflight_runtime::{Batch, Runtime as _, TransferDone};
use inflight_runtime_cuda::CudaRuntime;
use inflight_worker_core::{Direction, Transfer, TransferId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::JobResult;
use crate::bench::fill;
use crate::checks::attach;

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

pub fn swap(runtime: &mut CudaRuntime, task: &Swap) -> JobResult<Value> {
    let capabilities = runtime.capabilities().clone();
    let each = task.context.div_ceil(capabilities.block_tokens) + 1;
    let used = each * task.sequences;
    if used + 2 * task.blocks > capabilities.blocks || 2 * task.blocks > capabilities.host_blocks {
        return Err("the pools are too small for this measurement".into());
    }
    attach(runtime, capabilities.slots)?;
    fill(runtime, used + 2 * task.blocks)?;
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
    let decode = |runtime: &mut CudaRuntime, seconds: &mut Vec<f64>| -> JobResult<()> {
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
        Ok(())
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
    let median = |seconds: &mut Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let blocks = f64::from(task.blocks) * f64::from(task.transfers);
    let blocks_beside = moved as f64 * f64::from(task.blocks);
    Ok(json!({
        "blocks_moved": blocks, "blocks_beside": blocks_beside, "beside_seconds": beside, "out_seconds": out, "in_seconds": back, "both_seconds": both,
        "decode_ms_calm": median(&mut calm) * 1e3, "decode_ms_beside_swaps": median(&mut loaded) * 1e3,
    }))
}

//! Copies of blocks to the host and back, alone and beside decoding.

use std::time::{Duration, Instant};

use inflight_worker::runtime::cuda::CudaRuntime;
use inflight_worker::runtime::{Batch, Runtime as _, TransferDone};
use inflight_worker_core::{Direction, Transfer, TransferId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::Outcome;
use crate::bench::fill;
use crate::checks::attach;

/// What to copy beside what.
#[derive(Debug, Clone, Deserialize)]
pub struct Swap {
    /// Blocks of a transfer.
    blocks: u32,
    /// Transfers of each measurement.
    transfers: u32,
    /// Sequences that decode, and tokens each has.
    sequences: u32,
    context: u32,
    steps: u32,
}

struct Mover {
    next: u64,
    blocks: u32,
    first: u32,
}

impl Mover {
    /// Transfers of blocks that no step touches.
    fn transfer(&mut self, direction: Direction) -> Transfer {
        let id = TransferId(self.next);
        // Each way has a half of its own, on both sides.
        let half = if direction == Direction::Out { 0 } else { self.blocks };
        self.next += 1;
        // Neighbours on the device are not neighbours on the host, as in a worker that has run for a while: each block is a
        // copy of its own.
        let blocks = (0..self.blocks).map(|i| (self.first + half + i, half + self.blocks - 1 - i)).collect();
        Transfer { id, direction, blocks }
    }
}

fn drain(runtime: &mut CudaRuntime, mut left: usize) -> Outcome<Vec<TransferDone>> {
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

pub fn swap(runtime: &mut CudaRuntime, task: &Swap) -> Outcome<Value> {
    let has = runtime.capabilities().clone();
    let each = task.context.div_ceil(has.block_tokens) + 1;
    let used = each * task.sequences;
    if used + 2 * task.blocks > has.blocks || 2 * task.blocks > has.host_blocks {
        return Err("the pools are too small for this measurement".into());
    }
    attach(runtime, has.slots)?;
    fill(runtime, used + 2 * task.blocks)?;
    let mut mover = Mover { next: 1, blocks: task.blocks, first: used };
    let mut measure = |runtime: &mut CudaRuntime, directions: &[Direction]| -> Outcome<f64> {
        let begun = Instant::now();
        let mut count = 0;
        for _ in 0..task.transfers {
            for direction in directions {
                runtime.start_transfer(&mover.transfer(*direction))?;
                count += 1;
            }
        }
        drain(runtime, count)?;
        Ok(begun.elapsed().as_secs_f64())
    };
    let out = measure(runtime, &[Direction::Out])?;
    let back = measure(runtime, &[Direction::In])?;
    let both = measure(runtime, &[Direction::Out, Direction::In])?;
    let decode = |runtime: &mut CudaRuntime, seconds: &mut Vec<f64>| -> Outcome<()> {
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
    let (mut under_way, mut moved, begun) = (0, 0, Instant::now());
    let mut done = Vec::new();
    for _ in 0..task.steps {
        // Always a few of each way under way.
        while under_way < 4 {
            let direction = if mover.next.is_multiple_of(2) { Direction::Out } else { Direction::In };
            runtime.start_transfer(&mover.transfer(direction))?;
            under_way += 1;
        }
        decode(runtime, &mut loaded)?;
        done.clear();
        runtime.finished_transfers(&mut done);
        if done.iter().any(|done| !done.succeeded) {
            return Err("a transfer failed".into());
        }
        (under_way, moved) = (under_way - done.len(), moved + done.len());
    }
    let beside = begun.elapsed().as_secs_f64();
    drain(runtime, under_way)?;
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

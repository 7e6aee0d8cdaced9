//! Calibration: steps and copies of a few sizes at start-up, from which the cost model starts.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::SamplingParams;
use inflight_runtime::{Error, SlotSetup};
use inflight_worker_core::{Direction, StepWork, Transfer, TransferId};

use super::Engine;

/// Total step time after which no further step runs, so that start-up stays short with any model.
const TOTAL_TIME_MAX: Duration = Duration::from_millis(300);

/// Measured batches: sequences, new tokens per sequence, cached tokens per sequence.
const SHAPES: [(u32, u32, u32); 8] =
    [(1, 1, 0), (1, 16, 0), (1, 64, 0), (4, 1, 48), (8, 1, 16), (2, 32, 16), (1, 128, 0), (1, 1, 127)];

impl Engine {
    /// Fits the cost model to a few measured steps and copies. Must run before the first submission; the
    /// model is refined by the steps that follow.
    ///
    /// # Errors
    /// The runtime failed.
    pub fn calibrate(&mut self) -> Result<(), Error> {
        debug_assert!(self.scheduler.is_idle(), "calibration overwrites arbitrary blocks");
        let capabilities = self.runtime.capabilities().clone();
        let setup = SlotSetup {
            sampling: Arc::new(SamplingParams::greedy()),
            choice: 0,
            prompt: &[0],
            generated: &[],
            eos_token_ids: &[],
        };
        let (mut spent, mut sampled) = (Duration::ZERO, Vec::new());
        // The first round faults memory in and is not representative.
        for round in 0..3 {
            for (sequences, len, context) in SHAPES {
                let shape = capabilities.shape;
                let blocks_each = shape.whole_blocks(context + len);
                let fits = sequences <= capabilities.slots
                    && sequences * len <= capabilities.batch_tokens
                    && context + len < capabilities.context_tokens
                    && sequences * blocks_each <= capabilities.blocks
                    && (shape.state_blocks() == 0 || sequences * context <= capabilities.batch_tokens);
                if !fits || spent > TOTAL_TIME_MAX {
                    continue;
                }
                let blocks_of = |sequence: u32| -> Vec<u32> {
                    let first = sequence * blocks_each;
                    (first..first + blocks_each).collect()
                };
                // Attention may read stale blocks while it is timed; recurrent layers need the state of the context, computed first.
                if shape.state_blocks() > 0 && context > 0 {
                    self.batch.clear();
                    for sequence in 0..sequences {
                        self.batch.push_whole(&vec![0; context as usize], 0, &shape, &blocks_of(sequence));
                    }
                    spent += self.runtime.execute(&mut self.batch, &mut sampled)?;
                }
                self.batch.clear();
                let mut work = StepWork::default();
                for sequence in 0..sequences {
                    self.runtime.attach(sequence, &setup)?;
                    self.batch.push_whole(&vec![0; len as usize], context, &shape, &blocks_of(sequence));
                    self.batch.sample_last_row(sequence);
                    work.add(context, len);
                }
                let took = self.runtime.execute(&mut self.batch, &mut sampled)?;
                (0..sequences).for_each(|sequence| self.runtime.detach(sequence));
                spent += took;
                if round > 0 {
                    self.scheduler.observe_step(&work, took);
                }
            }
            self.calibrate_copies(round, capabilities.blocks.min(capabilities.host_blocks))?;
        }
        Ok(())
    }

    fn calibrate_copies(&mut self, round: u64, blocks: u32) -> Result<(), Error> {
        for (nth, count) in [1, 8].into_iter().enumerate().filter(|(_, count)| *count <= blocks) {
            for direction in [Direction::Out, Direction::In] {
                // Ids that the scheduler, which counts from 1, does not use.
                let id = TransferId(u64::MAX - round * 4 - nth as u64);
                let pairs = (0..count).map(|block| (block, block)).collect();
                self.runtime.start_transfer(&Transfer { id, direction, blocks: pairs })?;
                self.transfers_done.clear();
                while self.transfers_done.is_empty() {
                    self.runtime.wait_for_transfer()?;
                    self.runtime.finished_transfers(&mut self.transfers_done);
                }
                for done in self.transfers_done.drain(..).filter(|done| done.succeeded && round > 0) {
                    self.scheduler.observe_copy(count, done.took);
                }
            }
        }
        Ok(())
    }
}

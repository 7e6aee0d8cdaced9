//! Device model: durations of steps and copies.

use std::time::Duration;

use inflight_worker_core::{CostModel, StepWork};

/// Work of a step, split into prefill and decode.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BatchWork {
    /// Work of the prefill chunks.
    pub prefill: StepWork,
    /// Work of the decodes.
    pub decode: StepWork,
}

impl BatchWork {
    /// Returns the sum of prefill and decode work.
    pub fn total(&self) -> StepWork {
        StepWork {
            tokens: self.prefill.tokens + self.decode.tokens,
            keys: self.prefill.keys + self.decode.keys,
            prefill_keys: self.prefill.prefill_keys + self.decode.prefill_keys,
            sequences: self.prefill.sequences + self.decode.sequences,
        }
    }
}

/// Model of a device's durations; computes nothing.
pub trait Device {
    /// Returns the duration of a step.
    fn step(&self, work: &BatchWork) -> Duration;

    /// Returns the duration of a one-way copy of `blocks` blocks between device and host.
    fn copy(&self, blocks: u32) -> Duration;
}

/// The scheduler's cost model as the device, so that its predictions are exact.
impl Device for CostModel {
    fn step(&self, work: &BatchWork) -> Duration {
        CostModel::step(self, &work.total())
    }

    fn copy(&self, blocks: u32) -> Duration {
        CostModel::copy(self, blocks)
    }
}

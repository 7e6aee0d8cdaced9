use std::time::Duration;

use inflight_worker_core::{CostModel, StepWork};

/// What a step computes, its prompt chunks apart from its decodes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BatchWork {
    /// Chunks of prompts.
    pub prefill: StepWork,
    /// One token for each decoding sequence.
    pub decode: StepWork,
}

impl BatchWork {
    /// Both together.
    pub fn total(&self) -> StepWork {
        StepWork {
            tokens: self.prefill.tokens + self.decode.tokens,
            keys: self.prefill.keys + self.decode.keys,
            prefill_keys: self.prefill.prefill_keys + self.decode.prefill_keys,
            sequences: self.prefill.sequences + self.decode.sequences,
        }
    }
}

/// Says how long a device takes. It computes nothing.
pub trait Device {
    /// Duration of a step.
    fn step(&self, work: &BatchWork) -> Duration;

    /// Duration of copying this many blocks between device and host, one way.
    fn copy(&self, blocks: u32) -> Duration;
}

/// The scheduler's own model as the device: what it predicts comes true.
impl Device for CostModel {
    fn step(&self, work: &BatchWork) -> Duration {
        CostModel::step(self, &work.total())
    }

    fn copy(&self, blocks: u32) -> Duration {
        CostModel::copy(self, blocks)
    }
}

//! Events of a simulation and their observers.

use std::time::Duration;

use inflight_contract::FinishReason;
use inflight_worker_core::{BlockedBy, Preemption, SubmitError, Time};

use crate::{BatchWork, Request};

/// Event in the life of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestEvent {
    /// Submitted and waiting.
    Arrived,
    /// Rejected by the scheduler.
    Refused(SubmitError),
    /// Received a slot, for the first time or after a preemption.
    Started,
    /// Preempted; it lost its slot and waits again.
    Preempted(Preemption),
    /// A step with tokens of this request has run. Recomputed tokens are not counted again.
    Served {
        /// Prompt tokens computed for the first time.
        prompt_tokens: u32,
        /// Tokens generated: more than 1 with drafts.
        output_tokens: u32,
    },
    /// Ended.
    Ended(FinishReason),
}

/// State at the beginning of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSample {
    /// Begin of the step.
    pub began: Time,
    /// Duration of the step.
    pub took: Duration,
    /// Duration predicted by the scheduler's cost model.
    pub predicted: Duration,
    /// Work of the step.
    pub work: BatchWork,
    /// Sequences with a slot.
    pub running: u32,
    /// Number of slots.
    pub slots: u32,
    /// Sequences waiting.
    pub waiting: u32,
    /// Token capacity of the blocks owned by sequences, as of a model without windows; blocks in transfers are not counted
    /// in this and the next fields.
    pub allocated_tokens: u64,
    /// Subset of `allocated_tokens` filled at the end of the step.
    pub stored_tokens: u64,
    /// Subset of `allocated_tokens` reserved for known but uncomputed tokens.
    pub pending_tokens: u64,
    /// Reason why the first waiting sequence was not admitted.
    pub blocked: Option<BlockedBy>,
}

/// Receiver of all events of a simulation, in order of time.
pub trait Observer {
    /// Receives an event of a request; `index` is its position in the slice passed to the simulation.
    fn request(&mut self, at: Time, index: usize, request: &Request, event: &RequestEvent) {
        let _ = (at, index, request, event);
    }

    /// Receives the begin of a step.
    fn step(&mut self, step: &StepSample) {
        let _ = step;
    }
}

/// Forwards all events to both observers.
impl<A: Observer, B: Observer> Observer for (A, B) {
    fn request(&mut self, at: Time, index: usize, request: &Request, event: &RequestEvent) {
        self.0.request(at, index, request, event);
        self.1.request(at, index, request, event);
    }

    fn step(&mut self, step: &StepSample) {
        self.0.step(step);
        self.1.step(step);
    }
}

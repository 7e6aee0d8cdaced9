use std::time::Duration;

use inflight_contract::FinishReason;
use inflight_worker_core::{BlockedBy, Preemption, SubmitError, Time};

use crate::{BatchWork, Request};

/// What happens to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It was submitted and waits.
    Arrived,
    /// The scheduler did not take it.
    Refused(SubmitError),
    /// It was given a slot: for the first time, or again after a preemption.
    Started,
    /// It lost its slot and waits again.
    Preempted(Preemption),
    /// A step that it took part in has run. Tokens computed again count once.
    Served {
        /// Tokens of its prompt computed for the first time.
        prompt_tokens: u32,
        /// Tokens generated: 0 or 1.
        output_tokens: u32,
    },
    /// It is over.
    Ended(FinishReason),
}

/// A step, as it begins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSample {
    /// When it begins.
    pub began: Time,
    /// How long it runs.
    pub took: Duration,
    /// What the scheduler's cost model expected.
    pub predicted: Duration,
    /// What it computes.
    pub work: BatchWork,
    /// Sequences with a slot.
    pub running: u32,
    /// Slots.
    pub slots: u32,
    /// Sequences waiting.
    pub waiting: u32,
    /// Token slots of the blocks that sequences own; blocks in a transfer are left out here and in what follows.
    pub allocated_tokens: u64,
    /// Of these, the ones that hold a token's keys and values when the step has run.
    pub stored_tokens: u64,
    /// Of the others, the ones promised to known tokens of prompts that are not computed yet.
    pub pending_tokens: u64,
    /// What the first of the waiting lacks.
    pub blocked: Option<BlockedBy>,
}

/// Is told all that happens, in order of time.
pub trait Observer {
    /// Something happens to a request; `index` is its place among the requests given.
    fn request(&mut self, at: Time, index: usize, request: &Request, event: &Event) {
        let _ = (at, index, request, event);
    }

    /// A step begins.
    fn step(&mut self, step: &StepSample) {
        let _ = step;
    }
}

/// Both are told.
impl<A: Observer, B: Observer> Observer for (A, B) {
    fn request(&mut self, at: Time, index: usize, request: &Request, event: &Event) {
        self.0.request(at, index, request, event);
        self.1.request(at, index, request, event);
    }

    fn step(&mut self, step: &StepSample) {
        self.0.step(step);
        self.1.step(step);
    }
}

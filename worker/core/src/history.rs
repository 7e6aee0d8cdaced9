//! Ring buffer of recent iterations, read by the diagnosis and by operators.

use std::collections::VecDeque;
use std::time::Duration;

use crate::{Blocked, Load, Time};

/// Summary of one iteration: its work, its duration and what limited it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IterationSummary {
    /// Iteration number.
    pub number: u64,
    /// Time of the plan.
    pub planned: Time,
    /// Measured duration, predictions included; `None` while in flight.
    pub took: Option<Duration>,
    /// Duration predicted by the cost model, with that of predictions.
    pub predicted: Duration,
    /// Duration up to which prefill chunks were planned, with that of predictions; `None`: unbounded.
    pub bound: Option<Duration>,
    /// Number of decodes.
    pub decodes: u32,
    /// Drafted tokens of the decodes.
    pub drafts: u32,
    /// Tokens predicted for the drafts of the next iteration.
    pub predictions: u32,
    /// Number of prefill chunks.
    pub prefills: u32,
    /// Tokens in the prefill chunks.
    pub prefill_tokens: u32,
    /// Longest queueing time among the waiting sequences.
    pub longest_wait: Duration,
    /// Number of preempted sequences.
    pub preempted: u32,
    /// Number of decodes stalled on a fence.
    pub stalled: u32,
    /// Reason why the first waiting sequence was not admitted.
    pub blocked: Option<Blocked>,
    /// Scheduler load and counters after planning.
    pub load: Load,
}

/// Fixed-size ring of the most recent iterations.
#[derive(Debug)]
pub struct History {
    steps: VecDeque<IterationSummary>,
    capacity: usize,
}

impl History {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { steps: VecDeque::with_capacity(capacity), capacity }
    }

    pub(crate) fn push(&mut self, step: IterationSummary) {
        if self.steps.len() == self.capacity {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
    }

    pub(crate) fn finish(&mut self, number: u64, took: Duration) {
        // At most two iterations are in flight, and they are at the end.
        if let Some(step) = self.steps.iter_mut().rev().find(|step| step.number == number) {
            step.took = Some(took);
        }
    }

    /// Returns the iterations, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &IterationSummary> + Clone {
        self.steps.iter()
    }

    /// Returns the number of iterations in the ring.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Returns true if no iteration was recorded yet.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

use std::collections::VecDeque;
use std::time::Duration;

use crate::{Blocked, Load, Time};

/// What one iteration did, and why not more: what `diagnose` and an operator read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Its number.
    pub number: u64,
    /// When it was planned.
    pub planned: Time,
    /// How long it ran; `None` while it is in flight.
    pub took: Option<Duration>,
    /// What the cost model had predicted.
    pub predicted: Duration,
    /// Sequences that got a token.
    pub decodes: u32,
    /// Sequences whose prompt was worked on.
    pub prefills: u32,
    /// Tokens of these.
    pub prefill_tokens: u32,
    /// The longest that one of the waiting has waited.
    pub longest_wait: Duration,
    /// Sequences preempted.
    pub preempted: u32,
    /// Decodes that stood still for a fence.
    pub stalled: u32,
    /// Why the first of the waiting did not start.
    pub blocked: Option<Blocked>,
    /// How busy the scheduler was after it was planned, with its counters.
    pub load: Load,
}

/// The last iterations, oldest first: a ring of fixed size.
#[derive(Debug)]
pub struct History {
    steps: VecDeque<Step>,
    most: usize,
}

impl History {
    pub(crate) fn new(most: usize) -> Self {
        Self { steps: VecDeque::with_capacity(most), most }
    }

    pub(crate) fn push(&mut self, step: Step) {
        if self.steps.len() == self.most {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
    }

    pub(crate) fn finish(&mut self, number: u64, took: Duration) {
        // The newest ones are at the end, and at most two are in flight.
        if let Some(step) = self.steps.iter_mut().rev().find(|step| step.number == number) {
            step.took = Some(took);
        }
    }

    /// The steps, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Step> + Clone {
        self.steps.iter()
    }

    /// Steps held.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether nothing ran yet.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

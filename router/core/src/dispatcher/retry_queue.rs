//! Resubmissions that wait for the retry budget.

use std::collections::VecDeque;
use std::time::Duration;

use crate::{RequestId, RetryBudget};

/// Resubmissions in the order in which they came, and the budget that they wait for.
#[derive(Debug)]
pub(super) struct RetryQueue {
    /// Includes requests that have ended meanwhile.
    waiting: VecDeque<RequestId>,
    budget: RetryBudget,
}

impl RetryQueue {
    pub(super) fn new(budget: RetryBudget) -> Self {
        Self { waiting: VecDeque::new(), budget }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Takes the budget of a resubmission, unless others wait for it. Returns whether it did.
    pub(super) fn admit(&mut self, now: Duration) -> bool {
        self.waiting.is_empty() && self.budget.take(now)
    }

    pub(super) fn push(&mut self, request: RequestId) {
        self.waiting.push_back(request);
    }

    /// Removes the next request for which the budget suffices. Requests for which `waits` is false are dropped and cost nothing.
    pub(super) fn pop(&mut self, now: Duration, waits: impl Fn(RequestId) -> bool) -> Option<RequestId> {
        while let Some(next) = self.waiting.front().copied() {
            let waits = waits(next);
            if waits && !self.budget.take(now) {
                return None;
            }
            self.waiting.pop_front();
            if waits {
                return Some(next);
            }
        }
        None
    }
}

//! Grants of the sessions: what routers may have in flight, and what requests use of it.

use std::time::Duration;

use inflight_contract::AdmissionCost;
use inflight_worker_core::{Capacity, DispatchAhead, Grant, Grants, SchedulerLimits, priority_sequences_max};

use super::SessionId;

/// Grants of the open sessions, and how many sequences beyond the running ones are granted.
pub(super) struct Granting {
    grants: Grants<SessionId>,
    cost: AdmissionCost,
    queue_ahead: DispatchAhead,
    running_max: u32,
    /// Maximum priority sequences in flight beyond the grants.
    priority_sequences_max: u32,
    /// Sequences that ended since the last completed iteration.
    ended: u32,
}

impl Granting {
    /// Creates grants over the slots and blocks of `limits`, and over up to `queue_ahead` sequences that wait in the worker's queue. With
    /// `by_priority`, priority sequences may be in flight beyond the grants.
    pub fn new(limits: &SchedulerLimits, queue_ahead: u32, by_priority: bool) -> Self {
        let capacity =
            Capacity { sequences: limits.running_max + 1, blocks: limits.blocks - limits.watermark_blocks };
        let priority_sequences_max =
            if by_priority { priority_sequences_max(limits.running_max, queue_ahead) } else { 0 };
        Self {
            grants: Grants::new(capacity),
            cost: AdmissionCost::new(limits.shape),
            queue_ahead: DispatchAhead::new(queue_ahead),
            running_max: limits.running_max,
            priority_sequences_max,
            ended: 0,
        }
    }

    /// Opens a session.
    pub fn open(&mut self, session: SessionId) {
        self.grants.open(session);
    }

    /// Closes a session.
    pub fn close(&mut self, session: SessionId) {
        self.grants.close(session);
    }

    /// Returns true if a session is open.
    pub fn is_open(&self, session: SessionId) -> bool {
        self.grants.is_open(session)
    }

    /// Sets whether the router of a session has requests that wait for a grant.
    pub fn set_backlog(&mut self, session: SessionId, has_waiting: bool) {
        self.grants.set_backlog(session, has_waiting);
    }

    /// Returns what a choice with this number of resumed tokens uses of a grant, beside what it shares of the prompt.
    pub fn cost_of_choice(&self, prompt_tokens: usize, resumed_tokens: usize) -> Grant {
        Grant { sequences: 1, blocks: self.cost.choice(prompt_tokens, resumed_tokens) }
    }

    fn cost_of_prompt(&self, prompt_tokens: usize) -> Grant {
        Grant { sequences: 0, blocks: self.cost.prompt(prompt_tokens) }
    }

    /// Charges a session for a request's prompt, and for its choices.
    pub fn charge(&mut self, session: SessionId, prompt_tokens: usize, choices: impl Iterator<Item = Grant>) {
        choices.for_each(|cost| self.grants.charge(session, cost));
        self.grants.charge(session, self.cost_of_prompt(prompt_tokens));
    }

    /// Releases what an ended choice used; `prompt_tokens` if it was the last one of its request.
    pub fn release(&mut self, session: SessionId, choice: Grant, prompt_tokens: Option<usize>) {
        self.ended += 1;
        self.grants.release(session, choice);
        if let Some(tokens) = prompt_tokens {
            self.grants.release(session, self.cost_of_prompt(tokens));
        }
    }

    /// Returns the number of sequences that ended since the last completed iteration.
    pub fn ended(&self) -> u32 {
        self.ended
    }

    /// Learns from a completed iteration how many sequences beyond the running ones hide the round trip to the routers.
    pub fn complete(&mut self, took: Duration) {
        self.queue_ahead.learn(took, std::mem::take(&mut self.ended));
        self.grants.set_sequences(self.running_max + self.queue_ahead.depth());
    }

    /// Returns the sum of the grants in use over all sessions.
    pub fn in_use(&self) -> Grant {
        self.grants.in_flight()
    }

    /// Returns the grant of each open session while this number of blocks is used.
    pub fn divide(&self, blocks_used: u32) -> impl Iterator<Item = (SessionId, Grant)> + '_ {
        self.grants.divide(blocks_used)
    }

    /// Returns the priority sequences that each session may have in flight beyond its grant.
    pub fn priority_sequences(&self) -> impl Iterator<Item = (SessionId, u32)> + '_ {
        self.grants.priority_sequences(self.priority_sequences_max)
    }
}

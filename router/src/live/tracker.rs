//! What the dispatcher's shell reports of one request. Nothing here waits: a few atomic additions for each delivery, and the
//! request's own lock for each change of its state. Lock order: the dispatcher's lock, the registry's, the request's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::FinishReason;
use inflight_router_core::{RequestPlaced, ResubmissionReason, RetryWait};

use super::hub::Hub;
use super::request::{LiveRequest, NewRequest, Place};
use super::view::State;
use crate::dispatcher::transition::Transition;
use crate::outcome::Outcome;

/// Reports a request to the live view.
#[derive(Debug, Clone)]
pub(crate) struct Tracker {
    hub: Arc<Hub>,
    request: Arc<LiveRequest>,
}

impl Tracker {
    /// Adds a request to the live view.
    pub(crate) fn new(hub: &Arc<Hub>, new: &NewRequest<'_>, now: Instant) -> Self {
        Self { hub: hub.clone(), request: hub.arrive(new, now) }
    }

    /// Reports a transition of the request.
    pub(crate) fn observe(&self, transition: &Transition<'_>, now: Instant) {
        match transition {
            Transition::Rejected => self.hub.forget(self.request.number),
            Transition::Placed { placed, .. } => self.dispatched(placed, now),
            Transition::Submitted { worker, submission, attempt } => {
                let forgotten = self.request.submitted(*submission, *attempt);
                self.hub.submitted(*worker, *submission, &self.request, forgotten);
            }
            Transition::Delivered(output) => {
                self.delivered(output.tokens.len(), output.computed_prompt, now);
                if let Some(reason) = output.finish {
                    self.choice_ended(output.choice, reason, now);
                }
            }
            Transition::Paused => self.request.paused(now),
            Transition::Resumed => self.request.continued(now),
            Transition::Resubmitted { reason, wait, .. } => self.lost(*reason, *wait, now),
            Transition::Requeued => self.request.queued(now, "ahead of new requests"),
            Transition::Failed(outcome) => self.ended(outcome.label(), now),
            // Only the first end has an effect.
            Transition::Released => self.ended(Outcome::Cancelled.label(), now),
            Transition::Stalled
            | Transition::Discarded { .. }
            | Transition::ChoiceFinished(_)
            | Transition::Ended(_) => {}
        }
    }

    /// Records a dispatch.
    fn dispatched(&self, placed: &RequestPlaced, now: Instant) {
        let RequestPlaced { worker, tokens, cached_tokens, .. } = *placed;
        let name = self.hub.worker(worker).map(|worker| worker.name()).unwrap_or_default();
        let policy = self.hub.policy();
        let detail = format!(
            "policy {policy}; {cached_tokens} of {tokens} tokens expected in the worker's prefix cache"
        );
        if self.request.dispatched(now, Place { worker, name }, detail) {
            self.hub.count_queued(now.saturating_duration_since(self.request.arrived));
        }
        self.hub.count_dispatched(tokens);
    }

    /// Counts delivered tokens. `computed` are the prompt tokens that were computed, with the first ones.
    fn delivered(&self, tokens: usize, computed: Option<u32>, now: Instant) {
        if tokens == 0 {
            return;
        }
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        self.hub.count_output(tokens);
        self.request.tenant.count_generated(tokens.into());
        let (first, awaited) = self.request.count(tokens);
        if let Some(computed) = computed {
            self.request.tenant.count_computed(computed.min(self.request.prompt_tokens).into());
        }
        if first {
            self.hub.count_first_token(now.saturating_duration_since(self.request.arrived));
        }
        if awaited {
            self.request.generating(now, if first { "first_token" } else { "resumed" }, computed);
        }
    }

    /// Records a gap between tokens of a choice.
    pub(crate) fn gap(&self, gap: Duration) {
        self.hub.count_gap(gap);
    }

    /// Records the end of a choice; with the last one the request ends.
    fn choice_ended(&self, choice: u32, reason: FinishReason, now: Instant) {
        // To a client they are one.
        let reason = if reason == FinishReason::Complete { FinishReason::Stop } else { reason };
        if self.request.choice_ended(now, choice, reason.label()) {
            self.ended(reason.label(), now);
        }
    }

    /// Records that the worker was lost or returned the request.
    fn lost(&self, reason: ResubmissionReason, wait: RetryWait, now: Instant) {
        self.request.lost(now, reason.label());
        match wait {
            RetryWait::Queue => self.request.queued(now, "ahead of new requests"),
            RetryWait::Budget => {
                self.request.held(now, State::Retry, "retry", "it waits for the retry budget");
            }
            RetryWait::Quarantine => {
                let detail =
                    "two workers in a row were lost before its first token; it waits for a worker of its own";
                self.request.held(now, State::Quarantined, "quarantined", detail);
            }
        }
    }

    /// Records the end of the request; only the first call has an effect.
    fn ended(&self, outcome: &str, now: Instant) {
        if self.request.end(now, outcome) {
            self.hub.ended(&self.request);
        }
    }
}

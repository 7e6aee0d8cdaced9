//! What the dispatcher's shell reports of one request. Nothing here waits: a few atomic additions for each delivery, and the
//! request's own lock for each change of its state. Lock order: the dispatcher's lock, the registry's, the request's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::FinishReason;
use inflight_router_core::{SubmissionId, WorkerId};

use super::hub::Hub;
use super::request::{LiveRequest, NewRequest, Place};
use super::view::State;

/// Reports a request to the live view.
#[derive(Debug, Clone)]
pub(crate) struct Tracker {
    hub: Arc<Hub>,
    request: Arc<LiveRequest>,
}

/// Placement of a request, as the dispatcher knows it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Placement {
    /// Tokens of prompt and earlier output.
    pub(crate) tokens: u32,
    /// Tokens expected in the worker's prefix cache.
    pub(crate) cached_tokens: u32,
}

impl Tracker {
    /// Adds a request to the live view.
    pub(crate) fn new(hub: &Arc<Hub>, new: &NewRequest<'_>, now: Instant) -> Self {
        Self { hub: hub.clone(), request: hub.arrive(new, now) }
    }

    /// Forgets a request that was not admitted.
    pub(crate) fn rejected(&self) {
        self.hub.forget(self.request.number);
    }

    /// Records a dispatch.
    pub(crate) fn dispatched(&self, worker: WorkerId, placement: Placement, now: Instant) {
        let Placement { tokens, cached_tokens } = placement;
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

    /// Records the id of a submission.
    pub(crate) fn submitted(&self, worker: WorkerId, submission: SubmissionId, attempt: u32) {
        let forgotten = self.request.submitted(submission, attempt);
        self.hub.submitted(worker, submission, &self.request, forgotten);
    }

    /// Counts delivered tokens. `computed` are the prompt tokens that were computed, with the first ones.
    pub(crate) fn delivered(&self, tokens: usize, computed: Option<u32>, now: Instant) {
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
    pub(crate) fn choice_ended(&self, choice: u32, reason: FinishReason, now: Instant) {
        // To a client they are one.
        let reason = if reason == FinishReason::Complete { FinishReason::Stop } else { reason };
        if self.request.choice_ended(now, choice, reason.label()) {
            self.ended(reason.label(), now);
        }
    }

    /// Records that the request is paused until its client reads.
    pub(crate) fn paused(&self, now: Instant) {
        self.request.paused(now);
    }

    /// Records that the client reads again.
    pub(crate) fn continued(&self, now: Instant) {
        self.request.continued(now);
    }

    /// Records that the worker was lost or returned the request. `waits`: the next attempt waits outside the queue.
    pub(crate) fn lost(&self, reason: &str, quarantined: bool, waits: bool, now: Instant) {
        self.request.lost(now, reason);
        if quarantined {
            let detail =
                "two workers in a row were lost before its first token; it waits for a worker of its own";
            self.request.held(now, State::Quarantined, "quarantined", detail);
        } else if waits {
            self.request.held(now, State::Retry, "retry", "it waits for the retry budget");
        } else {
            self.request.queued(now, "ahead of new requests");
        }
    }

    /// Whether the request was last recorded as waiting outside the queue.
    pub(crate) fn is_held(&self) -> bool {
        self.request.is_held()
    }

    /// Records that the next attempt no longer waits outside the queue.
    pub(crate) fn requeued(&self, now: Instant) {
        self.request.queued(now, "ahead of new requests");
    }

    /// Records the end of the request; only the first call has an effect.
    pub(crate) fn ended(&self, outcome: &str, now: Instant) {
        if self.request.end(now, outcome) {
            self.hub.ended(&self.request);
        }
    }
}

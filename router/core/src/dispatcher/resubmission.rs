//! Resubmission: the next attempt of a request that its worker does not finish, within the retry budget; and
//! pausing requests whose clients do not read.

use super::Dispatcher;
use super::request::{Phase, Request};
use crate::{ClientCommand, Failure, LossAction, Notice, RequestId, ResubmissionReason, RetryWait, WorkerId};

impl Dispatcher {
    /// Starts the next attempt of a request that its worker does not finish. `suspected` if the request may
    /// be the cause of the loss.
    pub(super) fn resubmit(
        &mut self,
        id: RequestId,
        worker: WorkerId,
        reason: ResubmissionReason,
        suspected: bool,
    ) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let Phase::Running { .. } = request.phase() else { return };
        self.lanes.touch(request.spec.lane);
        let attempts = request.journal.attempt();
        let alone = request.alone;
        if request.next_attempt(&mut self.commands) {
            return;
        }
        let after = if suspected { request.losses.record_loss(alone) } else { LossAction::Retry };
        request.avoid = Some(worker);
        if after == LossAction::Reject {
            request.fail(Failure::AttemptsExhausted { attempts }, &mut self.commands);
            return;
        }
        request.set_awaiting_retry();
        let wait = if request.losses.is_quarantined() {
            request.set_quarantined();
            RetryWait::Quarantine
        } else if !reason.is_loss() || self.retries.admit(self.now) {
            RetryWait::Queue
        } else {
            RetryWait::Budget
        };
        self.commands.push(Notice::Resubmitted { request: id, reason, attempt: attempts + 1, wait }.into());
        match wait {
            RetryWait::Queue => self.requeue_first(id),
            RetryWait::Budget => self.retries.push(id),
            RetryWait::Quarantine => self.quarantined.push_back(id),
        }
    }

    /// Requeues the retry queue as far as the retry budget allows.
    pub(super) fn release_retries(&mut self) {
        let requests = &self.requests;
        let waits =
            |id| requests.get(id).is_some_and(|request: &Request| request.phase() == Phase::AwaitingRetry);
        let mut released = Vec::new();
        while let Some(next) = self.retries.pop(self.now, waits) {
            released.push(next);
        }
        for request in released {
            self.requeue_first(request);
            self.commands.push(Notice::Requeued { request }.into());
        }
    }

    /// Takes a request off its worker until its client reads again.
    pub(super) fn pause(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let Phase::Running { worker, session, submission } = request.phase() else { return };
        if let Some(session) = self.sessions.session_mut(worker, session) {
            session.cancel(submission, &mut self.commands);
        }
        if !request.next_attempt(&mut self.commands) {
            request.set_paused();
            request.send(ClientCommand::Pause, &mut self.commands);
        }
    }

    /// Requeues a paused request whose client reads again.
    pub(super) fn resume(&mut self, id: RequestId) {
        if self.requests.get(id).is_some_and(|request| request.phase() == Phase::Paused) {
            self.requeue_first(id);
        }
    }
}

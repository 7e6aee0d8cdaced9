//! Moving streams off workers that drain or are reserved for a quarantined request.

use super::Dispatcher;
use super::assignment::PlacementDecision;
use super::request::Phase;
use crate::{RequestId, ResubmissionReason, SubmissionId, WorkerId};

impl Dispatcher {
    /// Retires a worker that was removed from discovery: it gets nothing new, and its streams end or move.
    pub(super) fn retire(&mut self, worker: WorkerId) {
        let Some(lane) = self.sessions.get(worker).map(|session| session.lane) else { return };
        self.sessions.drain(worker, self.now);
        self.refresh_lane(lane);
        self.lanes.touch(lane);
        self.commands.push(crate::Command::TopologyChanged);
    }

    /// Moves streams off draining workers after the grace period, and off workers reserved for a quarantined
    /// request, as far as others have room. A stream that has begun moves only to a worker with its
    /// fingerprint.
    pub(super) fn move_streams(&mut self) {
        for worker in self.sessions.reserved_or_draining() {
            let Some(session) = self.sessions.get(worker) else { continue };
            let grace = self.options.drain_grace;
            let reason = match session.draining() {
                Some(since) if self.now.saturating_sub(since) >= grace => ResubmissionReason::Drained,
                _ if session.reserved().is_some() => ResubmissionReason::Quarantine,
                _ => continue,
            };
            let submissions: Vec<_> = session
                .submissions
                .iter()
                .map(|(submission, in_flight)| (*submission, in_flight.request))
                .collect();
            for (submission, request) in submissions {
                self.move_stream(worker, submission, request, reason);
            }
        }
    }

    fn move_stream(
        &mut self,
        worker: WorkerId,
        submission: SubmissionId,
        id: RequestId,
        reason: ResubmissionReason,
    ) {
        let (Some(session), Some(request)) = (self.sessions.get(worker), self.requests.get(id)) else {
            return;
        };
        let here = Phase::Running { worker, session: session.id, submission };
        let quarantined = session.reserved().is_some_and(|reserved| reserved.request == id);
        if request.phase() != here || quarantined {
            return;
        }
        // A reservation excludes others for a bounded time: after it, streams that cannot move are requeued.
        let overdue = session.reserved().is_some_and(|reserved| {
            let waiting = self.requests.get(reserved.request);
            self.now.saturating_sub(reserved.since) > Self::RESERVED_MAX
                && waiting.is_some_and(|request| request.phase() == Phase::Quarantined)
        });
        let begun = request.journal.tokens() > 0;
        let fingerprint = &session.fingerprint;
        let mut others = self.sessions_of(request.spec.lane);
        if begun && !overdue && !others.any(|s| s.accepts_requests() && s.fingerprint == *fingerprint) {
            return;
        }
        drop(others);
        // If this one fits on no worker, a later one may.
        if !overdue && !matches!(self.choose_worker(id), PlacementDecision::Dispatch(_)) {
            return;
        }
        if let Some(session) = self.sessions.get_mut(worker) {
            session.cancel(submission, &mut self.commands);
        }
        self.resubmit(id, worker, reason, false);
        self.dispatch_waiting();
    }
}

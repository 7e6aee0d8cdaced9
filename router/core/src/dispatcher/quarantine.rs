//! Quarantine: a request that lost two workers in a row before its first token runs alone on a worker.

use std::time::Duration;

use super::Dispatcher;
use super::request::Phase;
use super::sessions::{Reservation, WorkerSession};
use crate::{Credits, Failure, Notice, RequestId, WorkerId};

impl Dispatcher {
    /// Maximum time a reserved worker may finish streams that cannot move.
    pub(super) const RESERVED_MAX: Duration = Duration::from_secs(5);

    /// Reserves a worker for each quarantined request: at most half of a model's workers, and at least one.
    pub(super) fn place_quarantined(&mut self) {
        for worker in self.sessions.reserved() {
            self.end_reservation_if_over(worker);
        }
        for _ in 0..self.quarantined.len() {
            let Some(id) = self.quarantined.pop_front() else { break };
            let Some(request) = self.requests.get_mut(id) else { continue };
            if request.phase() != Phase::Quarantined {
                continue;
            }
            if request.expired(self.now) {
                request.fail(Failure::DeadlineExceeded, &mut self.commands);
            } else if !self.place_one_quarantined(id) {
                self.quarantined.push_back(id);
            }
        }
    }

    /// Ends a worker's reservation once its request has ended, has run long enough, or waits in vain.
    fn end_reservation_if_over(&mut self, worker: WorkerId) {
        let Some(session) = self.sessions.get(worker) else { return };
        let Some(Reservation { request, since }) = session.reserved() else { return };
        let waited = self.now.saturating_sub(since) > 2 * Self::RESERVED_MAX;
        let (mut over, mut failed_at) = (session.draining().is_some(), None);
        over |= match self.requests.get(request).map(|request| (request.phase(), &request.losses)) {
            Some((Phase::Quarantined, _)) => {
                failed_at = waited.then_some(self.now);
                waited
            }
            // The worker has survived it long enough: the quarantine ends.
            Some((Phase::Running { session: at, .. }, losses)) => {
                at != session.id || !losses.is_quarantined() || waited
            }
            Some((Phase::Queued(_) | Phase::AwaitingRetry | Phase::Paused | Phase::Ended, _)) | None => true,
        };
        if over {
            let lane = session.lane;
            self.sessions.end_reservation(worker, failed_at);
            self.lanes.resend_backlog(lane);
        }
    }

    /// Tries to dispatch a quarantined request to its reserved worker. Returns whether it was dispatched.
    fn place_one_quarantined(&mut self, id: RequestId) -> bool {
        let Some(request) = self.requests.get(id) else { return true };
        let lane = request.spec.lane;
        let reserved_for = |s: &&WorkerSession| s.reserved().is_some_and(|reserved| reserved.request == id);
        let own = self.sessions_of(lane).find(reserved_for).map(|session| {
            // Requires an update since the reservation: a worker that has died silently would be counted as a
            // loss.
            let alive = session.reserved().is_some_and(|reserved| session.last_update > reserved.since);
            let granted = session.ledger.grant() != Credits::default();
            (session.worker, alive && granted && session.submissions.is_empty())
        });
        if let Some((worker, free)) = own {
            if free {
                if let Some(request) = self.requests.get_mut(id) {
                    request.alone = true;
                }
                self.dispatch_to(id, worker);
                self.lanes.resend_backlog(lane);
            }
            return free;
        }
        let reserved = self.serving(lane).filter(|session| session.reserved().is_some()).count();
        if reserved >= (self.serving(lane).count() / 2).max(1) {
            return false;
        }
        if let Some(worker) = self.worker_to_reserve(id) {
            self.commands.push(Notice::Quarantined { request: id, worker }.into());
            self.sessions.reserve(worker, Reservation { request: id, since: self.now });
            self.lanes.resend_backlog(lane);
        }
        false
    }

    /// Chooses a worker to reserve for a quarantined request: the one with the fewest requests in flight.
    fn worker_to_reserve(&self, id: RequestId) -> Option<WorkerId> {
        let request = self.requests.get(id)?;
        let lane = request.spec.lane;
        let begun = request.journal.tokens() > 0;
        let changes_fingerprint =
            |s: &WorkerSession| begun && request.fingerprint.as_ref().is_some_and(|f| *f != s.fingerprint);
        let ejected = |s: &WorkerSession| !self.outliers.admits(s.worker, s.submissions.len(), self.now);
        let able = || self.serving(lane).filter(|session| session.holds(&request.spec));
        // A stream that has begun waits for a worker with its fingerprint while there is one.
        let waits_for_fingerprint = able().any(|session| !changes_fingerprint(session));
        let failed_lately = |s: &WorkerSession| {
            s.reservation_failed_at().is_some_and(|at| self.now.saturating_sub(at) <= Self::RESERVED_MAX)
        };
        able()
            .filter(|s| s.accepts_requests() && !(waits_for_fingerprint && changes_fingerprint(s)))
            .filter(|s| !failed_lately(s))
            .min_by_key(|s| {
                let last = request.avoid == Some(s.worker);
                (ejected(s), s.is_overdue(self.now), s.submissions.len(), last, s.worker)
            })
            .map(|session| session.worker)
    }
}

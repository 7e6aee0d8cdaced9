//! Admission of requests and their dispatch to workers, in queue order.

use std::time::Duration;

use super::Dispatcher;
use super::assignment::PlacementDecision;
use super::lanes::Lane;
use super::request::{Phase, Request};
use super::sessions::WorkerSession;
use crate::{
    Admitted, ClientCommand, Command, Credits, Failure, LaneId, Notice, QueuePosition, RequestId, RequestSpec,
};

impl Dispatcher {
    /// Queues a new request, or rejects it.
    pub(super) fn arrive(&mut self, id: RequestId, spec: RequestSpec) {
        match self.admit(id, &spec) {
            Ok(Admitted { position, displaced }) => {
                self.lanes.touch(spec.lane);
                self.requests.insert(id, Request::new(id, spec, position));
                for other in displaced {
                    if let Some(other) = self.requests.get_mut(other) {
                        other.fail(Failure::Displaced, &mut self.commands);
                    }
                }
            }
            Err(failure) => {
                let command = ClientCommand::Reject(failure);
                self.commands.push(Command::Client { request: id, command });
            }
        }
    }

    fn admit(&mut self, id: RequestId, spec: &RequestSpec) -> Result<Admitted<LaneId, RequestId>, Failure> {
        let (tokens, most) = (spec.tokens(), self.options.request_tokens_max);
        if tokens > most {
            return Err(Failure::TooManyTokens { tokens, most });
        }
        if self.lanes.get(spec.lane).is_none() {
            return Err(Failure::Unserved);
        }
        // Without any worker it waits like other requests: the worker that it needs may return.
        if let Some(required) = &spec.require_fingerprint
            && self.fingerprints(spec.lane).next().is_some()
            && !self.fingerprints(spec.lane).any(|served| RequestSpec::matches(required, served))
        {
            return Err(self.unknown_fingerprint(spec.lane, required));
        }
        if let Some(deadline) = spec.deadline {
            let left = deadline.saturating_sub(self.now);
            // The estimate costs a lookup per block, so it is made only for a deadline.
            let first_token = self.first_token(spec).unwrap_or_default();
            let predicted = self.queue.predicted_wait(spec) + first_token;
            if predicted > left {
                return Err(Failure::Infeasible { predicted, left });
            }
        }
        self.queue.push(id, spec, self.now).map_err(Failure::QueueFull)
    }

    /// Returns the earliest predicted first token of a new request over all workers; `None` if unknown for
    /// one, which may be the earliest.
    fn first_token(&self, spec: &RequestSpec) -> Option<Duration> {
        let able = self.sessions_of(spec.lane).filter(|s| s.accepts_requests() && s.fits(spec));
        able.map(|session| self.placement.first_token(session.worker, spec)).min().flatten()
    }

    /// Ends a choice on the router's side: cancels it at its worker and delivers nothing more of it.
    pub(super) fn withdraw(&mut self, request: RequestId, choice: u32) {
        let Some(request) = self.requests.get_mut(request) else { return };
        if !request.journal.withdraw(choice) {
            return;
        }
        let ended = request.journal.ended();
        match request.phase() {
            Phase::Running { worker, session, submission } => {
                let session = self.sessions.session_mut(worker, session);
                if let Some(session) = session {
                    session.cancel_choice(submission, choice, &mut self.commands);
                }
            }
            Phase::Queued(position) if ended => self.queue.remove(&position),
            Phase::Queued(_) | Phase::AwaitingRetry | Phase::Quarantined | Phase::Paused | Phase::Ended => {}
        }
        if ended {
            request.end();
        }
        self.lanes.touch(request.spec.lane);
    }

    /// Dispatches the waiting requests of the lanes that an event has touched.
    pub(super) fn dispatch_waiting(&mut self) {
        self.release_retries();
        self.place_quarantined();
        while let Some(lane) = self.lanes.next_touched() {
            self.dispatch_lane(lane);
            self.send_backlog(lane);
        }
    }

    /// Dispatches the waiting requests of a lane, in queue order. A head that fits on no worker is bypassed
    /// by later requests a bounded number of times.
    fn dispatch_lane(&mut self, lane: LaneId) {
        let now = self.now;
        while let Some((position, request)) = self.queue.head(lane, now) {
            if self.try_dispatch(&position, request) {
                continue;
            }
            let one = Credits { sequences: 1, blocks: 1 };
            let room = |s: &WorkerSession| s.accepts_requests() && s.ledger.grant().fit(s.ledger.used(), one);
            if !self.sessions_of(lane).any(room) {
                break;
            }
            let mut bypassing = self.queue.bypass_candidates(&position, now).into_iter();
            if !bypassing.any(|(other, request)| self.try_dispatch(&other, request)) {
                break;
            }
            self.queue.count_bypass(&position);
            self.commands.push(Notice::Bypassed.into());
        }
    }

    /// Tells the workers of a lane whether requests wait that they could run.
    fn send_backlog(&mut self, id: LaneId) {
        let waits = self.queue.waits_in(id);
        if !self.lanes.set_backlog(id, waits) {
            return;
        }
        let workers = self.lanes.get(id).map(Lane::workers);
        for worker in workers.into_iter().flatten() {
            let Some(session) = self.sessions.get_mut(worker) else { continue };
            // A quarantined request waits outside the queue and needs a grant of its worker as well.
            let awaited = session.reserved().and_then(|reserved| self.requests.get(reserved.request));
            let awaits_quarantined = awaited.is_some_and(|request| request.phase() == Phase::Quarantined);
            session.send_backlog(waits || awaits_quarantined, &mut self.commands);
        }
    }

    /// Dispatches a waiting request, or fails it if it cannot run. Returns whether it has left the queue.
    fn try_dispatch(&mut self, position: &QueuePosition<LaneId>, id: RequestId) -> bool {
        match self.choose_worker(id) {
            PlacementDecision::Wait => false,
            PlacementDecision::Fail(failure) => {
                self.queue.remove(position);
                if let Some(request) = self.requests.get_mut(id) {
                    request.fail(failure, &mut self.commands);
                }
                true
            }
            PlacementDecision::Dispatch(worker) => {
                let Some(request) = self.requests.get_mut(id) else { return false };
                self.queue.take(position, request.spec.lane, self.now);
                request.position = Some(*position);
                self.dispatch_to(id, worker);
                true
            }
        }
    }
}

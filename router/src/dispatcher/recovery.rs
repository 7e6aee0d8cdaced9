//! Failover: resubmission within the retry budget, quarantine, moving streams off draining workers, and
//! ending calls of clients that do not read.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_router_core::{Credits, LossAction};

use super::{Dispatcher, DispatcherState, PlacementDecision};
use crate::clock;
use crate::dispatcher::request::{ActiveRequest, Phase};
use crate::dispatcher::session::WorkerSession;
use crate::metrics as names;
use crate::outcome::Outcome;

/// ResubmissionReason for a resubmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResubmissionReason {
    /// The session was lost or timed out.
    SessionLost,
    /// The session was closed for a protocol violation by the worker.
    ProtocolViolation {
        /// Submission that the violation was about, if any.
        about: Option<u64>,
    },
    /// The worker returned the request unasked.
    Returned,
    /// The worker drains.
    Drained,
    /// The worker is reserved for a quarantined request.
    Quarantine,
}

impl ResubmissionReason {
    fn label(self) -> &'static str {
        match self {
            Self::SessionLost => "session_lost",
            Self::ProtocolViolation { .. } => "protocol_violation",
            Self::Returned => "returned",
            Self::Drained => "drained",
            Self::Quarantine => "quarantine",
        }
    }

    /// Whether it counts against the retry budget, which protects workers from a flood of resubmissions.
    fn is_loss(self) -> bool {
        matches!(self, Self::SessionLost | Self::ProtocolViolation { .. } | Self::Returned)
    }
}

impl Dispatcher {
    /// Interval of [`Dispatcher::tick`].
    pub(crate) const TICK: Duration = Duration::from_millis(100);
    /// Ticks between two checks of all open calls.
    const TICKS_PER_STALL_CHECK: u32 = 10;

    /// Runs the time-driven work: moves streams off draining workers, releases the retry queue, probes
    /// ejected workers, ends calls of clients that do not read.
    pub(crate) fn tick(&self) {
        let now = clock::now();
        let mut state = self.lock();
        state.ticks = state.ticks.wrapping_add(1);
        if state.ticks.is_multiple_of(Self::TICKS_PER_STALL_CHECK) {
            state.end_stalled_calls(now, self.options.stall_timeout);
            state.forget_lanes(now, self.options.model_retention.max(self.options.no_worker_timeout));
            let since = state.since(now);
            state.queue.expire_indirect_counters(since);
        }
        state.move_streams(now, self.options.drain_grace);
        state.dispatch_waiting(now);
    }

    /// Requeues a paused request whose client reads again.
    pub(super) fn resume(&self, active: &Arc<ActiveRequest>) {
        let now = clock::now();
        let mut state = self.lock();
        let resumes = active.lock().phase == Phase::Paused;
        if resumes {
            state.requeue_first(active, now);
            state.dispatch_waiting(now);
            // Wakes its stream, which then times the wait for a worker again.
            active.notify();
        }
    }
}

impl DispatcherState {
    /// Maximum time a reserved worker may finish streams that cannot move.
    const RESERVED_MAX: Duration = Duration::from_secs(5);

    /// Starts the next attempt of a request that its worker does not finish. `suspected` if the request may
    /// be the cause of the loss.
    pub(super) fn requeue(
        &mut self,
        active: &Arc<ActiveRequest>,
        worker: usize,
        reason: ResubmissionReason,
        suspected: bool,
        now: Instant,
    ) {
        let call = &active.call;
        let mut request = active.lock();
        let Phase::Running { .. } = request.phase else { return };
        let attempts = request.journal.attempt();
        request.journal.next_attempt();
        let alone = std::mem::take(&mut request.alone);
        if request.journal.ended() {
            request.phase = Phase::Ended;
            drop(request);
            active.notify();
            return;
        }
        let after = if suspected { request.losses.record_loss(alone) } else { LossAction::Retry };
        request.avoid = Some(worker);
        if after == LossAction::Reject {
            request.fail(Outcome::AttemptsExhausted { attempts });
            drop(request);
            active.notify();
            return;
        }
        request.phase = Phase::AwaitingRetry;
        let quarantined = request.losses.is_quarantined();
        drop(request);
        metrics::counter!(names::RESUBMISSIONS, "reason" => reason.label()).increment(1);
        tracing::info!(
            request_id = call.request_id,
            reason = reason.label(),
            attempt = attempts + 1,
            isolated = quarantined,
            "resubmitting request"
        );
        if quarantined {
            metrics::counter!(names::QUARANTINED_REQUESTS).increment(1);
            self.quarantined.push_back(active.clone());
        } else if !reason.is_loss() || (self.retries.is_empty() && self.budget.take(self.since(now))) {
            self.requeue_first(active, now);
        } else {
            self.retries.push_back(active.clone());
        }
        active.notify();
    }

    /// Requeues the retry queue as far as the retry budget allows.
    pub(super) fn release_retries(&mut self, now: Instant) {
        while let Some(next) = self.retries.front() {
            if next.lock().phase != Phase::AwaitingRetry {
                self.retries.pop_front();
                continue;
            }
            if !self.budget.take(self.since(now)) {
                break;
            }
            if let Some(active) = self.retries.pop_front() {
                self.requeue_first(&active, now);
            }
        }
        self.gauges.retry_queue.set(self.retries.len() as f64);
        self.gauges.quarantine.set(self.quarantined.len() as f64);
    }

    /// Reserves a worker for each quarantined request: at most half of a model's workers, and at least one.
    pub(super) fn place_quarantined(&mut self, now: Instant) {
        for session in self.sessions.values_mut() {
            let over = session.reserved.as_ref().is_some_and(|(active, since)| {
                let request = active.lock();
                let waited = now.saturating_duration_since(*since) > 2 * Self::RESERVED_MAX;
                match request.phase {
                    Phase::AwaitingRetry if waited => {
                        session.reservation_failed_at = Some(now);
                        true
                    }
                    Phase::AwaitingRetry => false,
                    // The worker has survived it long enough: the quarantine ends.
                    Phase::Running { session: at, .. } => {
                        at != session.id || !request.losses.is_quarantined() || waited
                    }
                    Phase::Queued(_) | Phase::Paused | Phase::Ended => true,
                }
            });
            if over || session.draining.is_some() {
                session.reserved = None;
            }
        }
        let mut waiting = std::mem::take(&mut self.quarantined);
        waiting.retain(|active| {
            if active.lock().phase != Phase::AwaitingRetry {
                return false;
            }
            if active.expired(now) {
                active.lock().fail(Outcome::DeadlineExceeded);
                active.notify();
                return false;
            }
            !self.place_one_quarantined(active, now)
        });
        self.quarantined = waiting;
    }

    /// Tries to dispatch a quarantined request to its reserved worker. Returns whether it was dispatched.
    fn place_one_quarantined(&mut self, active: &Arc<ActiveRequest>, now: Instant) -> bool {
        let lane = active.call.lane;
        let of_lane = || self.sessions.values().filter(|session| session.lane == lane);
        let own_session =
            of_lane().find(|s| s.reserved.as_ref().is_some_and(|(other, _)| Arc::ptr_eq(other, active)));
        if let Some(session) = own_session {
            // Requires an update since the reservation: a worker that has died silently would be counted as a
            // loss.
            let alive = session.reserved.as_ref().is_some_and(|(_, since)| session.last_update > *since);
            let granted = session.ledger.grant() != Credits::default();
            if !alive || !granted || !session.submissions.is_empty() {
                return false;
            }
            let worker = session.worker;
            active.lock().alone = true;
            self.dispatch_to(active, worker, now);
            return true;
        }
        let serving = || of_lane().filter(|session| session.draining.is_none());
        let reserved = serving().filter(|session| session.reserved.is_some()).count();
        if reserved >= (serving().count() / 2).max(1) {
            return false;
        }
        let request = active.lock();
        let last = request.avoid;
        let begun = request.journal.tokens() > 0;
        let changes_fingerprint =
            |s: &WorkerSession| begun && request.fingerprint.as_ref().is_some_and(|f| *f != s.fingerprint);
        let fits =
            |s: &&WorkerSession| u64::from(s.limits.sequence_tokens()) >= active.call.sequence_tokens();
        let since = self.since(now);
        let ejected = |s: &WorkerSession| !self.outliers.admits(s.worker, s.submissions.len(), since);
        // A stream that has begun waits for a worker with its fingerprint while there is one.
        let waits_for_fingerprint = serving().filter(fits).any(|s| !changes_fingerprint(s));
        let chosen = serving()
            .filter(fits)
            .filter(|s| s.accepts_requests() && !(waits_for_fingerprint && changes_fingerprint(s)))
            .filter(|s| {
                s.reservation_failed_at
                    .is_none_or(|at| now.saturating_duration_since(at) > Self::RESERVED_MAX)
            })
            .min_by_key(|s| {
                (ejected(s), s.is_overdue(now), s.submissions.len(), last == Some(s.worker), s.worker)
            })
            .map(|session| session.worker);
        drop(request);
        if let Some(session) = chosen.and_then(|worker| self.sessions.get_mut(&worker)) {
            tracing::warn!(
                request_id = active.call.request_id,
                worker = session.address,
                "quarantining request: two workers in a row were lost before its first token; it will run on a worker of its own"
            );
            session.reserved = Some((active.clone(), now));
        }
        false
    }

    /// Moves streams off draining workers after the grace period, and off workers reserved for a quarantined
    /// request, as far as others have room. A stream that has begun moves only to a worker with its
    /// fingerprint.
    fn move_streams(&mut self, now: Instant, grace: Duration) {
        let over = |since: Instant| now.saturating_duration_since(since) >= grace;
        let due = self.sessions.values().filter_map(|session| {
            let reserved = session.reserved.as_ref().map(|(_, since)| *since);
            let reason = if session.draining.is_some_and(over) {
                ResubmissionReason::Drained
            } else if reserved.is_some() {
                ResubmissionReason::Quarantine
            } else {
                return None;
            };
            Some((session.worker, reason))
        });
        let due: Vec<_> = due.collect();
        for (worker, reason) in due {
            let Some(session) = self.sessions.get(&worker) else { continue };
            let (id, fingerprint) = (session.id, session.fingerprint.clone());
            let quarantined = session.reserved.as_ref().map(|(active, _)| active.clone());
            // A reservation excludes others for a bounded time: after it, streams that cannot move are
            // requeued.
            let overdue = session.reserved.as_ref().is_some_and(|(active, since)| {
                now.saturating_duration_since(*since) > Self::RESERVED_MAX
                    && active.lock().phase == Phase::AwaitingRetry
            });
            let submissions: Vec<_> = session
                .submissions
                .iter()
                .map(|(handle, submitted)| (*handle, submitted.active.clone()))
                .collect();
            for (submission, active) in submissions {
                let (here, begun) = {
                    let request = active.lock();
                    let phase = Phase::Running { worker, session: id, submission };
                    (request.phase == phase, request.journal.tokens() > 0)
                };
                if !here || quarantined.as_ref().is_some_and(|quarantined| Arc::ptr_eq(quarantined, &active))
                {
                    continue;
                }
                let lane = active.call.lane;
                let accepts_same_fingerprint =
                    |other: &WorkerSession| other.accepts_requests() && other.fingerprint == fingerprint;
                if begun && !overdue && !self.sessions_of(lane).any(accepts_same_fingerprint) {
                    continue;
                }
                // If this one fits on no worker, a later one may.
                if !overdue && !matches!(self.choose_worker(&active, now), PlacementDecision::Dispatch(_)) {
                    continue;
                }
                if let Some(session) = self.session(worker, id) {
                    session.cancel(submission);
                }
                self.requeue(&active, worker, reason, false, now);
                self.dispatch_waiting(now);
            }
        }
    }

    /// Ends calls past their deadlines and calls whose clients have read nothing for `patience`. Their
    /// streams are not polled and would hold their resources until the connections end.
    fn end_stalled_calls(&mut self, now: Instant, patience: Duration) {
        let mut over: Vec<(Arc<ActiveRequest>, Outcome)> = Vec::new();
        for active in self.open.values() {
            if active.expired(now) {
                over.push((active.clone(), Outcome::DeadlineExceeded));
            } else if active.lock().unread_for(now) >= patience {
                over.push((active.clone(), Outcome::ClientStalled { waited: patience }));
            }
        }
        for (active, outcome) in over {
            self.cancel_everywhere(&active);
            active.lock().fail(outcome);
            active.notify();
            active.guard.end();
        }
    }

    /// Removes a request from the queue or its worker.
    pub(super) fn cancel_everywhere(&mut self, active: &ActiveRequest) {
        let mut request = active.lock();
        match std::mem::replace(&mut request.phase, Phase::Ended) {
            Phase::Queued(position) => {
                self.queue.remove(&position);
            }
            Phase::Running { worker, session, submission } => {
                if let Some(session) = self.session(worker, session) {
                    session.cancel(submission);
                }
            }
            // The retry queue and the quarantine skip ended requests.
            Phase::AwaitingRetry | Phase::Paused | Phase::Ended => {}
        }
        if let Some(position) = request.position.take() {
            self.queue.depart(&position);
        }
        request.queue_span = None;
    }
}

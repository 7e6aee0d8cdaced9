//! How requests survive their workers: resubmission within the retry budget, quarantined that run alone, streams that
//! move away from a draining worker, and clients that do not read.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_router_core::{AfterLoss, Credits};

use super::{Dispatch, DispatcherState, PlacementDecision};
use crate::clock;
use crate::dispatcher::request::{ActiveRequest, Phase};
use crate::dispatcher::session::WorkerSession;
use crate::metrics as names;
use crate::outcome::Outcome;

/// Why a request has to go on elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The session broke, or fell silent.
    SessionLost,
    /// The worker violated the protocol, so its session was closed.
    ProtocolViolation {
        /// The request that it talked about, if it was one.
        about: Option<u64>,
    },
    /// The worker gave the request back without being asked.
    Returned,
    /// The worker drains.
    Drained,
    /// The worker was needed by a suspect.
    Quarantine,
}

impl Reason {
    fn label(self) -> &'static str {
        match self {
            Self::SessionLost => "session_lost",
            Self::ProtocolViolation { .. } => "protocol_violation",
            Self::Returned => "returned",
            Self::Drained => "drained",
            Self::Quarantine => "quarantine",
        }
    }

    /// Whether workers should be reservation_failed_at a flood of such.
    fn is_loss(self) -> bool {
        matches!(self, Self::SessionLost | Self::ProtocolViolation { .. } | Self::Returned)
    }
}

impl Dispatch {
    /// How often [`Dispatch::tick`] wants to be called.
    pub(crate) const TICK: Duration = Duration::from_millis(100);
    /// Ticks from one look at all open calls to the next.
    const TICKS_PER_STALL_CHECK: u32 = 10;

    /// Does what only time brings about: moves streams off draining workers, lets delayed resubmissions and probes
    /// of ejected workers through, ends calls whose clients do not read.
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

    /// Goes on with a paused request: its client reads again.
    pub(super) fn resume(&self, active: &Arc<ActiveRequest>) {
        let now = clock::now();
        let mut state = self.lock();
        let resumes = active.lock().phase == Phase::Paused;
        if resumes {
            state.requeue_first(active, now);
            state.dispatch_waiting(now);
            // Its stream learns that it waits again, and for how long nobody serves it.
            active.notify();
        }
    }
}

impl DispatcherState {
    /// How long a worker that is kept for a suspect finishes what it has, if that can't move.
    const RESERVED_MAX: Duration = Duration::from_secs(5);

    /// Begins the next attempt of a request that its worker does not finish. `suspected`: it may be the cause itself.
    pub(super) fn requeue(
        &mut self,
        active: &Arc<ActiveRequest>,
        worker: usize,
        reason: Reason,
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
        let after = if suspected { request.suspicion.lost(alone) } else { AfterLoss::Retry };
        request.avoid = Some(worker);
        if after == AfterLoss::Refuse {
            request.fail(Outcome::AttemptsExhausted { attempts });
            drop(request);
            active.notify();
            return;
        }
        request.phase = Phase::AwaitingRetry;
        let isolated = request.suspicion.isolated();
        drop(request);
        metrics::counter!(names::RESUBMISSIONS, "reason" => reason.label()).increment(1);
        tracing::info!(
            request_id = call.request_id,
            reason = reason.label(),
            attempt = attempts + 1,
            isolated,
            "resubmitting request"
        );
        if isolated {
            metrics::counter!(names::SUSPECTS).increment(1);
            self.quarantined.push_back(active.clone());
        } else if !reason.is_loss() || (self.retries.is_empty() && self.budget.take(self.since(now))) {
            self.requeue_first(active, now);
        } else {
            self.retries.push_back(active.clone());
        }
        active.notify();
    }

    /// Lets delayed resubmissions through, as far as the budget goes.
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

    /// Gives each suspect a worker for itself: of each model's workers half at most, and at least one.
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
                    // What its worker has survived for so long it need not survive alone.
                    Phase::Running { session: at, .. } => {
                        at != session.id || !request.suspicion.isolated() || waited
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

    /// Whether the suspect was handed over.
    fn place_one_quarantined(&mut self, active: &Arc<ActiveRequest>, now: Instant) -> bool {
        let lane = active.call.lane;
        let of_lane = || self.sessions.values().filter(|session| session.lane == lane);
        let mine =
            of_lane().find(|s| s.reserved.as_ref().is_some_and(|(other, _)| Arc::ptr_eq(other, active)));
        if let Some(session) = mine {
            // Heard of since it was reserved: a worker that has died in silence is no fair trial.
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
        let other =
            |s: &WorkerSession| begun && request.fingerprint.as_ref().is_some_and(|f| *f != s.fingerprint);
        let fits =
            |s: &&WorkerSession| u64::from(s.limits.sequence_tokens()) >= active.call.sequence_tokens();
        let since = self.since(now);
        let ejected = |s: &WorkerSession| !self.outliers.admits(s.worker, s.submissions.len(), since);
        // A stream that has begun waits for a worker of its fingerprint as long as there is one.
        let waits = serving().filter(fits).any(|s| !other(s));
        let chosen = serving()
            .filter(fits)
            .filter(|s| s.accepts_requests() && !(waits && other(s)))
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

    /// Moves streams off workers that drain, once they had time to end by themselves, and off those that a suspect waits
    /// for, as far as others have room. One that has begun moves only where its tokens stay the same.
    fn move_streams(&mut self, now: Instant, grace: Duration) {
        let over = |since: Instant| now.saturating_duration_since(since) >= grace;
        let due = self.sessions.values().filter_map(|session| {
            let reserved = session.reserved.as_ref().map(|(_, since)| *since);
            let reason = if session.draining.is_some_and(over) {
                Reason::Drained
            } else if reserved.is_some() {
                Reason::Quarantine
            } else {
                return None;
            };
            Some((session.worker, reason))
        });
        let due: Vec<_> = due.collect();
        for (worker, reason) in due {
            let Some(session) = self.sessions.get(&worker) else { continue };
            let (id, fingerprint) = (session.id, session.fingerprint.clone());
            let suspect = session.reserved.as_ref().map(|(active, _)| active.clone());
            // A suspect keeps others out for a bounded time: what can't move goes back to the queue.
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
                if !here || suspect.as_ref().is_some_and(|suspect| Arc::ptr_eq(suspect, &active)) {
                    continue;
                }
                let lane = active.call.lane;
                let same =
                    |other: &WorkerSession| other.accepts_requests() && other.fingerprint == fingerprint;
                if begun && !overdue && !self.sessions_of(lane).any(same) {
                    continue;
                }
                // One that fits nowhere now says nothing of those after it.
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

    /// Ends calls past their deadlines and calls whose clients have taken nothing for `patience`: nobody polls their
    /// streams, so they would hold what they have until their connections end.
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

    /// Takes a request out of wherever it is.
    pub(super) fn cancel_everywhere(&mut self, active: &ActiveRequest) {
        let mut request = active.lock();
        match std::mem::replace(&mut request.phase, Phase::Ended) {
            Phase::Queued(place) => {
                self.queue.remove(&place);
            }
            Phase::Running { worker, session, submission } => {
                if let Some(session) = self.session(worker, session) {
                    session.cancel(submission);
                }
            }
            // The lists of those that wait drop it when they come to it.
            Phase::AwaitingRetry | Phase::Paused | Phase::Ended => {}
        }
        if let Some(place) = request.place.take() {
            self.queue.depart(&place);
        }
        request.queue_span = None;
    }
}

//! How requests survive their workers: resubmission within the retry budget, suspects that run alone, streams that
//! move away from a draining worker, and clients that do not read.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_router_core::{AfterLoss, Credits};

use super::{Dispatch, State, Verdict};
use crate::clock;
use crate::directory::Session;
use crate::metrics as names;
use crate::outcome::Outcome;
use crate::relay::{Phase, Relay};

/// Why a request has to go on elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The session broke, or fell silent.
    SessionLost,
    /// The worker violated the protocol, so its session was closed.
    Nonsense {
        /// The request that it talked about, if it was one.
        about: Option<u64>,
    },
    /// The worker gave the request back without being asked.
    GivenBack,
    /// The worker drains.
    Drained,
    /// The worker was needed by a suspect.
    MadeRoom,
}

impl Reason {
    fn label(self) -> &'static str {
        match self {
            Self::SessionLost => "session_lost",
            Self::Nonsense { .. } => "protocol_violation",
            Self::GivenBack => "returned",
            Self::Drained => "drained",
            Self::MadeRoom => "quarantine",
        }
    }

    /// Whether workers should be spared a flood of such.
    fn is_loss(self) -> bool {
        matches!(self, Self::SessionLost | Self::Nonsense { .. } | Self::GivenBack)
    }
}

impl Dispatch {
    /// How often [`Dispatch::tick`] wants to be called.
    pub(crate) const TICK: Duration = Duration::from_millis(100);
    /// Ticks from one look at all open calls to the next.
    const REAP_EVERY: u32 = 10;

    /// Does what only time brings about: moves streams off draining workers, lets delayed resubmissions and probes
    /// of ejected workers through, ends calls whose clients do not read.
    pub(crate) fn tick(&self) {
        let now = clock::now();
        let mut state = self.lock();
        state.ticks = state.ticks.wrapping_add(1);
        if state.ticks.is_multiple_of(Self::REAP_EVERY) {
            state.reap(now, self.options.stall_timeout);
            state.forget_lanes(now, self.options.model_retention.max(self.options.no_worker_timeout));
            let since = state.since(now);
            state.queue.expire_hearsay(since);
        }
        state.move_streams(now, self.options.drain_grace);
        state.pump(now);
    }

    /// Goes on with a paused request: its client reads again.
    pub(super) fn resume(&self, relay: &Arc<Relay>) {
        let now = clock::now();
        let mut state = self.lock();
        let resumes = relay.lock().phase == Phase::Paused;
        if resumes {
            state.put_back(relay, now);
            state.pump(now);
            // Its stream learns that it waits again, and for how long nobody serves it.
            relay.notify();
        }
    }
}

impl State {
    /// How long a worker that is kept for a suspect finishes what it has, if that can't move.
    const RESERVED_MAX: Duration = Duration::from_secs(5);

    /// Begins the next attempt of a request that its worker does not finish. `suspected`: it may be the cause itself.
    pub(super) fn requeue(
        &mut self,
        relay: &Arc<Relay>,
        worker: usize,
        reason: Reason,
        suspected: bool,
        now: Instant,
    ) {
        let call = &relay.call;
        let mut request = relay.lock();
        let Phase::Running { .. } = request.phase else { return };
        let attempts = request.journal.attempt();
        request.journal.next_attempt();
        let alone = std::mem::take(&mut request.alone);
        if request.journal.ended() {
            request.phase = Phase::Ended;
            drop(request);
            relay.notify();
            return;
        }
        let after = if suspected { request.suspicion.lost(alone) } else { AfterLoss::Retry };
        request.avoid = Some(worker);
        if after == AfterLoss::Refuse {
            request.fail(Outcome::AttemptsExhausted { attempts });
            drop(request);
            relay.notify();
            return;
        }
        request.phase = Phase::Parked;
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
            self.suspects.push_back(relay.clone());
        } else if !reason.is_loss() || (self.parked.is_empty() && self.budget.take(self.since(now))) {
            self.put_back(relay, now);
        } else {
            self.parked.push_back(relay.clone());
        }
        relay.notify();
    }

    /// Lets delayed resubmissions through, as far as the budget goes.
    pub(super) fn release_parked(&mut self, now: Instant) {
        while let Some(next) = self.parked.front() {
            if next.lock().phase != Phase::Parked {
                self.parked.pop_front();
                continue;
            }
            if !self.budget.take(self.since(now)) {
                break;
            }
            if let Some(relay) = self.parked.pop_front() {
                self.put_back(&relay, now);
            }
        }
        self.gauges.retry_queue.set(self.parked.len() as f64);
        self.gauges.quarantine.set(self.suspects.len() as f64);
    }

    /// Gives each suspect a worker for itself: of each model's workers half at most, and at least one.
    pub(super) fn place_suspects(&mut self, now: Instant) {
        for session in self.sessions.values_mut() {
            let over = session.reserved.as_ref().is_some_and(|(relay, since)| {
                let request = relay.lock();
                let waited = now.saturating_duration_since(*since) > 2 * Self::RESERVED_MAX;
                match request.phase {
                    Phase::Parked if waited => {
                        session.spared = Some(now);
                        true
                    }
                    Phase::Parked => false,
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
        let mut waiting = std::mem::take(&mut self.suspects);
        waiting.retain(|relay| {
            if relay.lock().phase != Phase::Parked {
                return false;
            }
            if relay.expired(now) {
                relay.lock().fail(Outcome::DeadlineExceeded);
                relay.notify();
                return false;
            }
            !self.place_suspect(relay, now)
        });
        self.suspects = waiting;
    }

    /// Whether the suspect was handed over.
    fn place_suspect(&mut self, relay: &Arc<Relay>, now: Instant) -> bool {
        let lane = relay.call.lane;
        let of_lane = || self.sessions.values().filter(|session| session.lane == lane);
        let mine =
            of_lane().find(|s| s.reserved.as_ref().is_some_and(|(other, _)| Arc::ptr_eq(other, relay)));
        if let Some(session) = mine {
            // Heard of since it was reserved: a worker that has died in silence is no fair trial.
            let alive = session.reserved.as_ref().is_some_and(|(_, since)| session.heard > *since);
            let granted = session.ledger.grant() != Credits::default();
            if !alive || !granted || !session.flights.is_empty() {
                return false;
            }
            let worker = session.worker;
            relay.lock().alone = true;
            self.hand_over(relay, worker, now);
            return true;
        }
        let serving = || of_lane().filter(|session| session.draining.is_none());
        let reserved = serving().filter(|session| session.reserved.is_some()).count();
        if reserved >= (serving().count() / 2).max(1) {
            return false;
        }
        let request = relay.lock();
        let last = request.avoid;
        let begun = request.journal.tokens() > 0;
        let other = |s: &Session| begun && request.fingerprint.as_ref().is_some_and(|f| *f != s.fingerprint);
        let fits = |s: &&Session| u64::from(s.limits.sequence_tokens()) >= relay.call.sequence_tokens();
        let since = self.since(now);
        let ejected = |s: &Session| !self.outliers.admits(s.worker, s.flights.len(), since);
        // A stream that has begun waits for a worker of its fingerprint as long as there is one.
        let waits = serving().filter(fits).any(|s| !other(s));
        let chosen = serving()
            .filter(fits)
            .filter(|s| s.takes() && !(waits && other(s)))
            .filter(|s| s.spared.is_none_or(|at| now.saturating_duration_since(at) > Self::RESERVED_MAX))
            .min_by_key(|s| (ejected(s), s.quiet(now), s.flights.len(), last == Some(s.worker), s.worker))
            .map(|session| session.worker);
        drop(request);
        if let Some(session) = chosen.and_then(|worker| self.sessions.get_mut(&worker)) {
            tracing::warn!(
                request_id = relay.call.request_id,
                worker = session.address,
                "quarantining request: two workers in a row were lost before its first token; it will run on a worker of its own"
            );
            session.reserved = Some((relay.clone(), now));
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
                Reason::MadeRoom
            } else {
                return None;
            };
            Some((session.worker, reason))
        });
        let due: Vec<_> = due.collect();
        for (worker, reason) in due {
            let Some(session) = self.sessions.get(&worker) else { continue };
            let (id, fingerprint) = (session.id, session.fingerprint.clone());
            let suspect = session.reserved.as_ref().map(|(relay, _)| relay.clone());
            // A suspect keeps others out for a bounded time: what can't move goes back to the queue.
            let overdue = session.reserved.as_ref().is_some_and(|(relay, since)| {
                now.saturating_duration_since(*since) > Self::RESERVED_MAX
                    && relay.lock().phase == Phase::Parked
            });
            let flights: Vec<_> =
                session.flights.iter().map(|(handle, flight)| (*handle, flight.relay.clone())).collect();
            for (submission, relay) in flights {
                let (here, begun) = {
                    let request = relay.lock();
                    let phase = Phase::Running { worker, session: id, submission };
                    (request.phase == phase, request.journal.tokens() > 0)
                };
                if !here || suspect.as_ref().is_some_and(|suspect| Arc::ptr_eq(suspect, &relay)) {
                    continue;
                }
                let lane = relay.call.lane;
                let same = |other: &Session| other.takes() && other.fingerprint == fingerprint;
                if begun && !overdue && !self.sessions_of(lane).any(same) {
                    continue;
                }
                // One that fits nowhere now says nothing of those after it.
                if !overdue && !matches!(self.place(&relay, now), Verdict::Hand(_)) {
                    continue;
                }
                if let Some(session) = self.session(worker, id) {
                    session.cancel(submission);
                }
                self.requeue(&relay, worker, reason, false, now);
                self.pump(now);
            }
        }
    }

    /// Ends calls past their deadlines and calls whose clients have taken nothing for `patience`: nobody polls their
    /// streams, so they would hold what they have until their connections end.
    fn reap(&mut self, now: Instant, patience: Duration) {
        let mut over: Vec<(Arc<Relay>, Outcome)> = Vec::new();
        for relay in self.open.values() {
            if relay.expired(now) {
                over.push((relay.clone(), Outcome::DeadlineExceeded));
            } else if relay.lock().unread_for(now) >= patience {
                over.push((relay.clone(), Outcome::ClientStalled { waited: patience }));
            }
        }
        for (relay, outcome) in over {
            self.withdraw_all(&relay);
            relay.lock().fail(outcome);
            relay.notify();
            relay.lease.end();
        }
    }

    /// Takes a request out of wherever it is.
    pub(super) fn withdraw_all(&mut self, relay: &Relay) {
        let mut request = relay.lock();
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
            Phase::Parked | Phase::Paused | Phase::Ended => {}
        }
        if let Some(place) = request.place.take() {
            self.queue.depart(&place);
        }
        request.queue_span = None;
    }
}

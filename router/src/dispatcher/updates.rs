//! What workers say, and their coming and going.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use inflight_router_core::WorkerUpdate;
use inflight_transport::batch_wakeups;

use super::session::WorkerInfo;
use super::{Dispatch, DispatcherState, Reason};
use crate::clock;
use crate::dispatcher::request::{Phase, UpdateEffect};
use crate::dispatcher::session::WorkerSession;
use crate::dispatcher::violation::Violation;
use crate::metrics as names;

impl Dispatch {
    /// A worker is known from now on, whether or not it can be reached.
    pub(crate) fn join(&self, worker: usize) {
        let mut state = self.lock();
        state.members.insert(worker);
        state.outliers.join(worker);
        self.publish(&state);
    }

    /// A worker is out of the list: it gets nothing new, and its streams end there or move.
    pub(crate) fn retire(&self, worker: usize) {
        let now = clock::now();
        let mut state = self.lock();
        let Some(session) = state.sessions.get_mut(&worker) else { return };
        session.draining.get_or_insert(now);
        let lane = session.lane;
        state.refresh(lane, now);
        self.publish(&state);
    }

    /// Whether nothing is in submitted in a session.
    pub(crate) fn is_idle(&self, worker: usize, session: u64) -> bool {
        self.lock().session(worker, session).is_none_or(|session| session.submissions.is_empty())
    }

    /// A worker is not known any more.
    pub(crate) fn leave(&self, worker: usize) {
        let mut state = self.lock();
        state.members.remove(&worker);
        state.outliers.leave(worker);
        self.publish(&state);
    }

    /// Takes a worker's session in; the number names it in the calls that follow.
    pub(crate) fn open(&self, info: WorkerInfo) -> u64 {
        let now = clock::now();
        let mut state = self.lock();
        state.connected_ever = true;
        let id = state.next_session;
        state.next_session += 1;
        let lane = state.lane_for(&info);
        state.warn_of_mixed_fingerprints(lane, &info);
        let worker = info.worker;
        let services = state.queue.open(worker, lane, info.incarnation.clone());
        let blocks = info.has.blocks as usize + info.host_blocks as usize;
        state.placement.open(worker, info.block_tokens, blocks);
        let session = WorkerSession::new(id, lane, info, now);
        services.into_iter().for_each(|table| session.send_service_table(table));
        state.sessions.insert(worker, session);
        state.refresh(lane, now);
        state.forget_lanes(now, self.options.model_retention.max(self.options.no_worker_timeout));
        state.dispatch_waiting(now);
        self.publish(&state);
        id
    }

    /// Takes a worker's update in.
    ///
    /// # Errors
    /// [`Violation`] if the update is nonsense: the session must then be closed. What was sound in it is taken.
    pub(crate) fn apply(&self, worker: usize, session: u64, update: WorkerUpdate) -> Result<(), Violation> {
        let now = clock::now();
        let mut guard = self.lock();
        let state = &mut *guard;
        let since = state.since(now);
        let Some(entry) = state.sessions.get_mut(&worker).filter(|entry| entry.id == session) else {
            return Ok(());
        };
        entry.check(&update, now)?;
        state.queue.apply_service_counters(worker, &update, since)?;
        entry.last_update = now;
        if state.placement.apply_update(worker, &entry.address, &update) {
            entry.resync();
        }
        let mut given_back = Vec::new();
        let mut violation = None;
        let mut readers = Vec::new();
        let (mut stale, mut failures, mut progress) = (0, 0, false);
        for sequence in update.sequences {
            let (submission, choice) = (sequence.submission, sequence.choice);
            let known =
                entry.submissions.get_mut(&submission).filter(|_| entry.ledger.runs(submission, choice));
            let Some(submitted) = known else {
                violation = Some(Violation::UnknownRequest { request: submission, choice });
                break;
            };
            if submitted.attempt != sequence.attempt {
                stale += 1;
                continue;
            }
            let ended = sequence.end.is_some();
            let (vocab_size, unread_max) = (entry.limits.vocab_size, self.options.client_buffer_tokens);
            let active = submitted.active.clone();
            let received = active.receive(submission, sequence, vocab_size, unread_max, now, &mut readers);
            if let UpdateEffect::ProtocolViolation(nonsense) = received {
                violation = Some(nonsense);
                break;
            }
            let reports = ended || received == UpdateEffect::Progress;
            if reports && !std::mem::replace(&mut submitted.reported, true) {
                state.queue.settle(submission);
            }
            if ended {
                entry.settle(submission, choice);
                if !entry.submissions.contains_key(&submission) {
                    state.placement.settle(worker, submission);
                }
            }
            match received {
                UpdateEffect::Progress => progress = true,
                UpdateEffect::Taken | UpdateEffect::ProtocolViolation(_) => {}
                UpdateEffect::Stale => stale += 1,
                UpdateEffect::Failed { fault } => {
                    failures += u32::from(fault);
                    entry.cancel(submission);
                }
                UpdateEffect::Returned => {
                    // However many of its choices come back, it is one request.
                    if !given_back.iter().any(|other| Arc::ptr_eq(other, &active)) {
                        failures += u32::from(entry.draining.is_none() && !update.draining);
                        entry.cancel(submission);
                        given_back.push(active);
                    }
                }
                UpdateEffect::Overfull => {
                    progress = true;
                    entry.cancel(submission);
                    tracing::debug!(
                        request_id = active.call.request_id,
                        "pausing request: the client is too far behind its stream"
                    );
                }
            }
        }
        if stale > 0 {
            metrics::counter!(names::STALE_UPDATES).increment(stale);
        }
        if let Some(grant) = update.grant {
            entry.ledger.set_grant(grant.credits);
            entry.ledger.set_urgent(grant.priority_sequences);
        }
        entry.show();
        let drains = update.draining && entry.draining.is_none();
        if drains {
            entry.draining = Some(now);
        }
        let reason = if entry.draining.is_some() { Reason::Drained } else { Reason::Returned };
        let (lane, address) = (entry.lane, entry.address.clone());
        if progress {
            state.outliers.success(worker, since);
        }
        (0..failures).for_each(|_| state.record_failure(worker, now));
        if drains {
            tracing::info!(worker = address, "worker is draining");
            state.refresh(lane, now);
        }
        for active in given_back {
            state.requeue(&active, worker, reason, reason == Reason::Returned, now);
        }
        state.dispatch_waiting(now);
        if drains {
            self.publish(&guard);
        }
        drop(guard);
        batch_wakeups(|| readers.into_iter().for_each(Waker::wake));
        violation.map_or(Ok(()), Err)
    }

    /// Lets a lost session go: what it had in submitted is queued again, ahead of all new requests.
    pub(crate) fn close(&self, worker: usize, session: u64, reason: Reason) {
        let now = clock::now();
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.session(worker, session).is_none() {
            return;
        }
        let Some(mut lost) = state.sessions.remove(&worker) else { return };
        state.placement.close(worker);
        if let Some(services) = state.queue.close(worker) {
            state.sessions_of(lost.lane).for_each(|session| session.send_service_table(services.clone()));
        }
        lost.clear_gauges();
        state.refresh(lost.lane, now);
        let reason = match reason {
            // What nothing in submitted has to do with may have been brought about by any of it.
            Reason::ProtocolViolation { about } => Reason::ProtocolViolation {
                about: about.filter(|request| lost.submissions.contains_key(request)),
            },
            _ if lost.draining.is_some() => Reason::Drained,
            reason => reason,
        };
        if reason != Reason::Drained {
            state.record_failure(worker, now);
        }
        for (submission, submitted) in std::mem::take(&mut lost.submissions) {
            state.queue.settle(submission);
            let in_force = matches!(submitted.active.lock().phase,
                Phase::Running { session: current, .. } if current == session);
            let suspected = match reason {
                Reason::SessionLost | Reason::Returned => true,
                Reason::ProtocolViolation { about } => about.is_none_or(|request| request == submission),
                Reason::Drained | Reason::Quarantine => false,
            };
            if in_force {
                state.requeue(&submitted.active, worker, reason, suspected, now);
            }
        }
        state.dispatch_waiting(now);
        self.publish(&guard);
    }

    pub(super) fn publish(&self, state: &DispatcherState) {
        metrics::gauge!(names::WORKERS_CONFIGURED).set(state.members.len() as f64);
        metrics::gauge!(names::WORKERS_CONNECTED).set(state.sessions.len() as f64);
        let mixed = state.lanes.keys().filter(|lane| state.distinct_fingerprints(**lane).len() > 1).count();
        metrics::gauge!(names::MIXED_FINGERPRINTS).set(mixed as f64);
        let ready = state.sessions.values().any(|session| session.draining.is_none());
        self.ready.send_if_modified(|now| std::mem::replace(now, ready) != ready);
        let serving = state.sessions.values().filter(|session| session.draining.is_none());
        let names = serving.filter_map(|session| state.lanes.get(&session.lane));
        let names: BTreeSet<String> = names.map(|lane| lane.name.clone()).collect();
        self.served.send_if_modified(|now| {
            let changed = *now != names;
            *now = names;
            changed
        });
    }
}

impl DispatcherState {
    /// Holds a failure against a worker.
    pub(super) fn record_failure(&mut self, worker: usize, now: Instant) {
        let since = self.since(now);
        if let Some(time) = self.outliers.failure(worker, since) {
            let address = self.sessions.get(&worker).map_or("", |session| session.address.as_str());
            let seconds = time.as_secs_f64();
            tracing::warn!(worker, address, seconds, "ejecting worker after consecutive failures");
            metrics::counter!(names::EJECTIONS).increment(1);
        }
    }
}

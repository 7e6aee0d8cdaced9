//! Session events: workers join, open, update and close their sessions.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use inflight_net::batch_wakeups;
use inflight_router_core::WorkerUpdate;

use super::session::WorkerInfo;
use super::{Dispatcher, DispatcherState, ResubmissionReason};
use crate::clock;
use crate::dispatcher::request::{Phase, UpdateEffect};
use crate::dispatcher::session::WorkerSession;
use crate::dispatcher::violation::Violation;
use crate::metrics as names;

impl Dispatcher {
    /// Adds a known worker, reachable or not.
    pub(crate) fn join(&self, worker: usize) {
        let mut state = self.lock();
        state.members.insert(worker);
        state.outliers.join(worker);
        self.publish(&state);
    }

    /// Retires a worker that was removed from discovery: it gets nothing new, and its streams end or move.
    pub(crate) fn retire(&self, worker: usize) {
        let now = clock::now();
        let mut state = self.lock();
        let Some(session) = state.sessions.get_mut(&worker) else { return };
        session.draining.get_or_insert(now);
        let lane = session.lane;
        state.refresh(lane, now);
        self.publish(&state);
    }

    /// Whether a session has nothing in flight.
    pub(crate) fn is_idle(&self, worker: usize, session: u64) -> bool {
        self.lock().session(worker, session).is_none_or(|session| session.submissions.is_empty())
    }

    /// Removes a worker.
    pub(crate) fn leave(&self, worker: usize) {
        let mut state = self.lock();
        state.members.remove(&worker);
        state.outliers.leave(worker);
        self.publish(&state);
    }

    /// Opens a session with a worker. Returns its id.
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
        let blocks = info.capacity.blocks as usize + info.host_blocks as usize;
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

    /// Applies a worker's update.
    ///
    /// # Errors
    /// [`Violation`] for a protocol violation: the session must then be closed. What was valid before it is
    /// applied.
    pub(crate) fn apply(&self, worker: usize, session: u64, update: WorkerUpdate) -> Result<(), Violation> {
        let now = clock::now();
        let mut guard = self.lock();
        let state = &mut *guard;
        let since = state.since(now);
        let Some(opened) = state.sessions.get_mut(&worker).filter(|opened| opened.id == session) else {
            return Ok(());
        };
        opened.check(&update, now)?;
        state.queue.apply_service_counters(worker, &update, since)?;
        opened.last_update = now;
        if state.placement.apply_update(worker, &opened.address, &update) {
            opened.request_resync();
        }
        let mut returned = Vec::new();
        let mut violation = None;
        let mut readers = Vec::new();
        let (mut stale_updates, mut failures, mut progress) = (0, 0, false);
        for sequence in update.sequences {
            let (submission, choice) = (sequence.submission, sequence.choice);
            let found =
                opened.submissions.get_mut(&submission).filter(|_| opened.ledger.runs(submission, choice));
            let Some(submitted) = found else {
                violation = Some(Violation::UnknownRequest { request: submission, choice });
                break;
            };
            if submitted.attempt != sequence.attempt {
                stale_updates += 1;
                continue;
            }
            let ended = sequence.end.is_some();
            let (vocab_size, unread_max) = (opened.limits.vocab_size, self.options.client_buffer_tokens);
            let active = submitted.active.clone();
            let received = active.receive(submission, sequence, vocab_size, unread_max, now, &mut readers);
            if let UpdateEffect::ProtocolViolation(error) = received {
                violation = Some(error);
                break;
            }
            let first_report = ended || received == UpdateEffect::Progress;
            if first_report && !std::mem::replace(&mut submitted.reported, true) {
                state.queue.settle(submission);
            }
            if ended {
                opened.settle(submission, choice);
                if !opened.submissions.contains_key(&submission) {
                    state.placement.settle(worker, submission);
                }
            }
            match received {
                UpdateEffect::Progress => progress = true,
                UpdateEffect::None | UpdateEffect::ProtocolViolation(_) => {}
                UpdateEffect::Stale => stale_updates += 1,
                UpdateEffect::Failed { fault } => {
                    failures += u32::from(fault);
                    opened.cancel(submission);
                }
                UpdateEffect::Returned => {
                    // One request, however many of its choices are returned.
                    if !returned.iter().any(|other| Arc::ptr_eq(other, &active)) {
                        failures += u32::from(opened.draining.is_none() && !update.draining);
                        opened.cancel(submission);
                        returned.push(active);
                    }
                }
                UpdateEffect::Overfull => {
                    progress = true;
                    opened.cancel(submission);
                    tracing::debug!(
                        request_id = active.call.request_id,
                        "pausing request: the client is too far behind its stream"
                    );
                }
            }
        }
        if stale_updates > 0 {
            metrics::counter!(names::STALE_UPDATES).increment(stale_updates);
        }
        if let Some(grant) = update.grant {
            opened.ledger.set_grant(grant.credits);
            opened.ledger.set_priority_sequences(grant.priority_sequences);
        }
        opened.update_gauges();
        let drains = update.draining && opened.draining.is_none();
        if drains {
            opened.draining = Some(now);
        }
        let reason = if opened.draining.is_some() {
            ResubmissionReason::Drained
        } else {
            ResubmissionReason::Returned
        };
        let (lane, address) = (opened.lane, opened.address.clone());
        if progress {
            state.outliers.success(worker, since);
        }
        (0..failures).for_each(|_| state.record_failure(worker, now));
        if drains {
            tracing::info!(worker = address, "worker is draining");
            state.refresh(lane, now);
        }
        for active in returned {
            state.requeue(&active, worker, reason, reason == ResubmissionReason::Returned, now);
        }
        state.dispatch_waiting(now);
        if drains {
            self.publish(&guard);
        }
        drop(guard);
        batch_wakeups(|| readers.into_iter().for_each(Waker::wake));
        violation.map_or(Ok(()), Err)
    }

    /// Closes a lost session: requeues its requests in flight, ahead of all new ones.
    pub(crate) fn close(&self, worker: usize, session: u64, reason: ResubmissionReason) {
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
            // A violation about no request in flight may be caused by any of them.
            ResubmissionReason::ProtocolViolation { about } => ResubmissionReason::ProtocolViolation {
                about: about.filter(|request| lost.submissions.contains_key(request)),
            },
            _ if lost.draining.is_some() => ResubmissionReason::Drained,
            reason => reason,
        };
        if reason != ResubmissionReason::Drained {
            state.record_failure(worker, now);
        }
        for (submission, submitted) in std::mem::take(&mut lost.submissions) {
            state.queue.settle(submission);
            let in_force = matches!(submitted.active.lock().phase,
                Phase::Running { session: current, .. } if current == session);
            let suspected = match reason {
                ResubmissionReason::SessionLost | ResubmissionReason::Returned => true,
                ResubmissionReason::ProtocolViolation { about } => {
                    about.is_none_or(|request| request == submission)
                }
                ResubmissionReason::Drained | ResubmissionReason::Quarantine => false,
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
    /// Records a failure of a worker for outlier ejection.
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

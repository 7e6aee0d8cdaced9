//! Session events: workers open, update and close their sessions.

use super::Dispatcher;
use super::lanes::Lane;
use super::request::{Phase, UpdateEffect};
use super::sessions::WorkerSession;
use crate::{
    Command, Notice, RequestId, ResubmissionReason, SequenceUpdate, SessionId, Violation, WorkerCommand,
    WorkerId, WorkerInfo, WorkerUpdate,
};

/// Why a worker does not finish a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReturnCause {
    Unasked,
    NonFinite,
}

/// What the sequences of one update come to.
#[derive(Debug, Default)]
struct UpdateSummary {
    /// Requests that the worker returned, and those whose logits were not finite on it.
    returned: Vec<(RequestId, ReturnCause)>,
    /// Failures that count for outlier ejection.
    failures: u32,
    /// At least one sequence progressed.
    progress: bool,
    /// Dropped sequence updates of older attempts.
    stale_updates: u32,
    violation: Option<Violation>,
}

impl Dispatcher {
    /// Opens a session with a worker.
    pub(super) fn open_session(&mut self, session: SessionId, info: WorkerInfo) {
        self.connected_ever = true;
        let lane = self.lanes.lane_of(&info);
        self.notice_mixed_fingerprints(lane, &info);
        let worker = info.worker;
        let tables = self.queue.open(worker, lane, info.incarnation.clone());
        let blocks = info.capacity.blocks as usize + info.host_blocks as usize;
        self.placement.open(worker, info.shape, blocks);
        let session = WorkerSession::new(session, lane, info, self.now);
        for table in tables {
            session.send_service_table(table, &mut self.commands);
        }
        self.sessions.insert(session);
        self.lanes.add_worker(lane, worker);
        self.refresh_lane(lane);
        self.forget_lanes();
        self.lanes.resend_backlog(lane);
        self.commands.push(Command::TopologyChanged);
    }

    /// Applies a worker's update. After a protocol violation, the session is to be closed; the entries before
    /// the violation are applied.
    pub(super) fn apply_update(&mut self, worker: WorkerId, session: SessionId, mut update: WorkerUpdate) {
        let Some(opened) = self.sessions.session_mut(worker, session) else {
            return;
        };
        let routers = self.queue.routers();
        let checked = opened.check(&update, self.now);
        let checked = checked.and_then(|()| self.queue.apply_service_counters(worker, &update, self.now));
        if let Err(violation) = checked {
            self.commands.push(Command::CloseSession { worker, violation });
            return;
        }
        opened.last_update = self.now;
        let now = self.queue.routers();
        if now != routers {
            self.commands.push(Command::Notice(Notice::Routers { before: routers, now }));
        }
        if self.placement.apply_update(worker, &update, &mut self.commands) {
            opened.send(WorkerCommand::ResyncPrefixCache, &mut self.commands);
        }
        let lane = opened.lane;
        self.lanes.touch(lane);
        let drains = update.draining && opened.draining().is_none();
        let summary = self.apply_sequences(worker, std::mem::take(&mut update.sequences), update.draining);
        let Some(opened) = self.sessions.get_mut(worker) else { return };
        if let Some(grant) = update.grant {
            opened.ledger.set_grant(grant.credits);
            opened.ledger.set_priority_sequences(grant.priority_sequences);
        }
        let drained = drains || opened.draining().is_some();
        if drains {
            self.sessions.drain(worker, self.now);
            self.commands.push(Notice::Draining { worker }.into());
            self.refresh_lane(lane);
            self.commands.push(Command::TopologyChanged);
        }
        if summary.stale_updates > 0 {
            self.commands.push(Notice::StaleUpdates { updates: summary.stale_updates }.into());
        }
        if summary.progress {
            self.outliers.success(worker, self.now);
        }
        (0..summary.failures).for_each(|_| self.record_failure(worker));
        for (request, cause) in summary.returned {
            let reason = match cause {
                ReturnCause::NonFinite => ResubmissionReason::NonFinite,
                ReturnCause::Unasked if drained => ResubmissionReason::Drained,
                ReturnCause::Unasked => ResubmissionReason::Returned,
            };
            self.resubmit(request, worker, reason, reason == ResubmissionReason::Returned);
        }
        if let Some(violation) = summary.violation {
            self.commands.push(Command::CloseSession { worker, violation });
        }
    }

    /// Applies the sequence updates of a worker in order, up to the first protocol violation.
    fn apply_sequences(
        &mut self,
        worker: WorkerId,
        sequences: Vec<SequenceUpdate>,
        draining: bool,
    ) -> UpdateSummary {
        let mut summary = UpdateSummary::default();
        let Some(opened) = self.sessions.get_mut(worker) else { return summary };
        for sequence in sequences {
            let (submission, choice) = (sequence.submission, sequence.choice);
            let found =
                opened.submissions.get_mut(&submission).filter(|_| opened.ledger.runs(submission, choice));
            let Some(in_flight) = found else {
                summary.violation = Some(Violation::UnknownRequest { request: submission, choice });
                break;
            };
            // Each submission is one attempt. To drop the update would leave the request waiting for its end.
            if in_flight.attempt != sequence.attempt {
                let (attempt, submitted) = (sequence.attempt, in_flight.attempt);
                summary.violation = Some(Violation::WrongAttempt { request: submission, attempt, submitted });
                break;
            }
            let (id, ended) = (in_flight.request, sequence.end.is_some());
            let effect = match self.requests.get_mut(id) {
                Some(request) => {
                    request.receive(submission, sequence, opened.limits.vocab_size, &mut self.commands)
                }
                // Its client's call has ended.
                None => Ok(UpdateEffect::Stale),
            };
            let effect = match effect {
                Ok(effect) => effect,
                Err(violation) => {
                    summary.violation = Some(violation);
                    break;
                }
            };
            let first_report = ended || effect == UpdateEffect::Progress;
            if first_report && !std::mem::replace(&mut in_flight.reported, true) {
                self.queue.settle(submission);
                opened.ledger.start(submission);
            }
            if ended && opened.settle(submission, choice) {
                self.placement.settle(worker, submission);
            }
            match effect {
                UpdateEffect::Progress => summary.progress = true,
                UpdateEffect::None => {}
                UpdateEffect::Stale => summary.stale_updates += 1,
                UpdateEffect::Failed { fault } => {
                    summary.failures += u32::from(fault);
                    opened.cancel(submission, &mut self.commands);
                }
                UpdateEffect::Returned | UpdateEffect::NonFinite => {
                    // One request, however many of its choices are returned.
                    if summary.returned.iter().all(|(returned, _)| *returned != id) {
                        let unasked = effect == UpdateEffect::Returned;
                        summary.failures += u32::from(unasked && opened.draining().is_none() && !draining);
                        opened.cancel(submission, &mut self.commands);
                        let cause = if unasked { ReturnCause::Unasked } else { ReturnCause::NonFinite };
                        summary.returned.push((id, cause));
                    }
                }
            }
        }
        summary
    }

    /// Closes a lost session: resubmits its requests in flight, ahead of all new ones.
    pub(super) fn close_session(&mut self, worker: WorkerId, session: SessionId, reason: ResubmissionReason) {
        if self.sessions.session_mut(worker, session).is_none() {
            return;
        }
        let Some(lost) = self.sessions.remove(worker) else { return };
        self.placement.close(worker);
        self.lanes.remove_worker(lost.lane, worker);
        let before = self.queue.routers();
        let table = self.queue.close(worker);
        let now = self.queue.routers();
        if now != before {
            self.commands.push(Command::Notice(Notice::Routers { before, now }));
        }
        if let Some(table) = table {
            let workers = self.lanes.get(lost.lane).map(Lane::workers);
            let others = workers.into_iter().flatten().filter_map(|worker| self.sessions.get(worker));
            others.for_each(|session| session.send_service_table(table.clone(), &mut self.commands));
        }
        self.refresh_lane(lost.lane);
        self.lanes.touch(lost.lane);
        let reason = match reason {
            // A violation about no request in flight may be caused by any of them.
            ResubmissionReason::ProtocolViolation { about } => ResubmissionReason::ProtocolViolation {
                about: about.filter(|request| lost.submissions.contains_key(request)),
            },
            _ if lost.draining().is_some() => ResubmissionReason::Drained,
            reason => reason,
        };
        if reason != ResubmissionReason::Drained {
            self.record_failure(worker);
        }
        for (submission, in_flight) in lost.submissions {
            self.queue.settle(submission);
            let suspected = match reason {
                ResubmissionReason::SessionLost | ResubmissionReason::Returned => true,
                ResubmissionReason::ProtocolViolation { about } => {
                    about.is_none_or(|request| request == submission)
                }
                ResubmissionReason::Drained
                | ResubmissionReason::Quarantine
                | ResubmissionReason::NonFinite => false,
            };
            let request = self.requests.get(in_flight.request);
            let in_force = request.is_some_and(
                |request| matches!(request.phase(), Phase::Running { session: current, .. } if current == session),
            );
            if in_force {
                self.resubmit(in_flight.request, worker, reason, suspected);
            }
        }
        self.commands.push(Command::TopologyChanged);
    }

    /// Records a failure of a worker for outlier ejection.
    fn record_failure(&mut self, worker: WorkerId) {
        if let Some(duration) = self.outliers.failure(worker, self.now) {
            self.commands.push(Notice::Ejected { worker, duration }.into());
        }
    }
}

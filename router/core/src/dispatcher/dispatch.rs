//! Admission of requests and their dispatch to workers, in queue order.

use std::time::Duration;

use inflight_contract::AdmissionCost;

use super::Dispatcher;
use super::request::{Phase, Request};
use super::session::WorkerSession;
use crate::{
    Admitted, Candidate, ClientCommand, Command, Credits, Estimate, Failure, LaneId, Notice, QueuePosition,
    RequestId, RequestPlaced, RequestSpec, ResumedChoice, Standing, Submission, SubmissionId, WorkerId,
};

/// Prompts that its tenant must have less than another one for a request to outrank the other's: those of tenants that share evenly differ by
/// about one, and need not pass each other.
const OUTRANKING_PROMPTS: u32 = 2;

/// What to do with a waiting request.
#[derive(Debug)]
pub(super) enum PlacementDecision {
    Wait,
    Fail(Failure),
    Dispatch(WorkerId),
}

impl Dispatcher {
    /// Queues a new request, or rejects it.
    pub(super) fn arrive(&mut self, id: RequestId, spec: RequestSpec) {
        match self.admit(id, &spec) {
            Ok(Admitted { position, displaced }) => {
                self.touched.insert(spec.lane);
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
        if !self.lanes.contains_key(&spec.lane) {
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
        match request.phase {
            Phase::Running { worker, session, submission } => {
                let session = self.sessions.get_mut(&worker).filter(|open| open.id == session);
                if let Some(session) = session {
                    session.cancel_choice(submission, choice, &mut self.commands);
                }
            }
            Phase::Queued(position) if ended => self.queue.remove(&position),
            Phase::Queued(_) | Phase::AwaitingRetry | Phase::Quarantined | Phase::Paused | Phase::Ended => {}
        }
        if ended {
            request.phase = Phase::Ended;
        }
        self.touched.insert(request.spec.lane);
    }

    /// Dispatches the waiting requests of the lanes that an event has touched.
    pub(super) fn dispatch_waiting(&mut self) {
        self.release_retries();
        self.place_quarantined();
        while let Some(lane) = self.touched.pop_first() {
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
            self.notice(Notice::Bypassed);
        }
    }

    /// Tells the workers of a lane whether requests wait that they could run.
    fn send_backlog(&mut self, id: LaneId) {
        let waits = self.queue.waits_in(id);
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        if lane.backlog.replace(waits) == Some(waits) {
            return;
        }
        for worker in &lane.workers {
            let Some(session) = self.sessions.get_mut(worker) else { continue };
            // A quarantined request waits outside the queue and needs a grant of its worker as well.
            let awaited = session.reserved.and_then(|reserved| self.requests.get(reserved.request));
            let awaits_quarantined = awaited.is_some_and(|request| request.phase == Phase::Quarantined);
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

    /// Chooses a worker for a waiting request.
    pub(super) fn choose_worker(&mut self, id: RequestId) -> PlacementDecision {
        let mut candidates = std::mem::take(&mut self.candidates);
        let decision = match self.requests.get(id) {
            Some(request) if request.expired(self.now) => PlacementDecision::Fail(Failure::DeadlineExceeded),
            Some(request) => {
                candidates.clear();
                candidates.extend(self.candidates_for(request));
                self.choose_among(id, &candidates)
            }
            None => PlacementDecision::Wait,
        };
        self.candidates = candidates;
        decision
    }

    /// Returns the workers of a request's lane as candidates of its placement.
    fn candidates_for<'a>(&'a self, request: &'a Request) -> impl Iterator<Item = Candidate> + 'a {
        let spec = &request.spec;
        // Includes workers reserved for a quarantined request: they accept others again soon.
        let eligible = || self.serving(spec.lane).filter(|session| session.fits(spec));
        let generated = request.journal.tokens();
        let same_fingerprint =
            |session: &WorkerSession| request.fingerprint.as_ref() == Some(&session.fingerprint);
        // A stream that has begun stays on workers with its fingerprint while there are any, so that its
        // tokens do not change.
        let keep_fingerprint = generated > 0 && eligible().any(same_fingerprint);
        let suits = move |session: &WorkerSession| {
            session.fits(spec) && (!keep_fingerprint || same_fingerprint(session))
        };
        let not_ejected = |session: &WorkerSession| {
            self.outliers.admits(session.worker, session.submissions.len(), self.now)
        };
        // If only ejected workers are left, they are used.
        let any_not_ejected =
            eligible().any(|session| session.reserved.is_none() && suits(session) && not_ejected(session));
        let standing = move |session: &WorkerSession| {
            if session.draining.is_some() {
                Standing::Draining
            } else if !suits(session) {
                Standing::Unfit
            } else if session.reserved.is_some() || (any_not_ejected && !not_ejected(session)) {
                Standing::Ejected
            } else {
                Standing::Serving
            }
        };
        self.sessions_of(spec.lane).map(move |session| {
            let need = Credits {
                sequences: request.journal.running().count_ones(),
                blocks: request.journal.blocks(spec.prompt_tokens as usize, session.block_tokens),
            };
            let (grant, used) = (session.ledger.grant(), session.ledger.used());
            let beyond = || {
                let own = self.queue.virtual_time_with(spec, OUTRANKING_PROMPTS * spec.prompt_tokens);
                let has_more = |tenant: &str| self.queue.virtual_time(spec.lane, tenant) > own;
                session.ledger.priority_sequences(spec.priority.get(), &spec.tenant, has_more)
            };
            let candidate = Candidate {
                worker: session.worker,
                standing: standing(session),
                grant,
                used,
                priority_sequences: if grant.fit(used, need) { 0 } else { beyond() },
                need,
                avoid: request.avoid == Some(session.worker) || session.is_overdue(self.now),
                estimate: Estimate::default(),
            };
            // Only for workers with room: an estimate costs a lookup per block.
            let estimate = match candidate.standing == Standing::Serving && candidate.has_room() {
                true => self.placement.estimate(session.worker, spec, generated),
                false => Estimate::default(),
            };
            Candidate { estimate, ..candidate }
        })
    }

    fn choose_among(&mut self, id: RequestId, candidates: &[Candidate]) -> PlacementDecision {
        let Some(request) = self.requests.get(id) else { return PlacementDecision::Wait };
        let lane = request.spec.lane;
        let fits = self.serving(lane).any(|session| session.fits(&request.spec));
        let served = self.serving(lane).next().is_some();
        let now = self.now;
        let Some(request) = self.requests.get_mut(id) else { return PlacementDecision::Wait };
        if fits {
            request.unfit_since = None;
        } else if served {
            // A worker that can hold the request may return.
            let since = *request.unfit_since.get_or_insert(now);
            if now.saturating_sub(since) >= self.options.no_worker_timeout {
                return PlacementDecision::Fail(self.unfit(id));
            }
        }
        let Some(request) = self.requests.get(id) else { return PlacementDecision::Wait };
        match self.placement.choose(&request.spec, request.journal.tokens(), candidates) {
            Some(worker) => PlacementDecision::Dispatch(worker),
            None => PlacementDecision::Wait,
        }
    }

    /// Returns the failure of a request that no serving worker can run.
    fn unfit(&self, id: RequestId) -> Failure {
        let Some(request) = self.requests.get(id) else { return Failure::Unserved };
        // The workers with its fingerprint have left while it waited.
        if let Some(required) = &request.spec.require_fingerprint
            && self.fingerprints(request.spec.lane).all(|served| !RequestSpec::matches(required, served))
        {
            return self.unknown_fingerprint(request.spec.lane, required);
        }
        Failure::TooLongForWorkers { tokens: request.spec.sequence_tokens() }
    }

    /// Submits a request to a worker.
    pub(super) fn dispatch_to(&mut self, id: RequestId, worker: WorkerId) {
        let (Some(request), Some(session)) = (self.requests.get_mut(id), self.sessions.get_mut(&worker))
        else {
            return;
        };
        let commands = &mut self.commands;
        let submission = self.next_submission;
        self.next_submission = SubmissionId(submission.0 + 1);
        let changed_after = request.set_fingerprint(&session.fingerprint);
        let fingerprint = session.fingerprint.clone();
        let generated = request.journal.tokens();
        request.phase = Phase::Running { worker, session: session.id, submission };
        let (tokens, cached_tokens) = self.placement.route(worker, submission, &request.spec, generated);
        let (mut virtual_start_time, mut min_waiting_virtual_time) = (None, None);
        if let Some(position) = &request.position {
            // The prompt of a resumed stream was charged at its first dispatch; of another one, the worker charges what is not cached.
            let prompt =
                if generated > 0 { 0 } else { request.spec.prompt_tokens.saturating_sub(cached_tokens) };
            // Before what it outranks: the tags of a burst, given at its dispatch, lag behind the service since.
            let (spec, queue) = (&request.spec, &self.queue);
            let own = queue.virtual_time_with(spec, OUTRANKING_PROMPTS * spec.prompt_tokens);
            let has_more = |tenant: &str| queue.virtual_time(spec.lane, tenant) > own;
            let outranked = session.ledger.outranked_start(spec.priority.get(), &spec.tenant, has_more);
            let start = self.queue.charge_provisionally(position, submission, prompt);
            virtual_start_time = Some(outranked.map_or(start, |outranked| outranked.min(start)));
            min_waiting_virtual_time = self.queue.min_waiting_virtual_time(session.lane);
        }
        let resumed = request.journal.resumed().map(|resumed| ResumedChoice {
            choice: resumed.choice,
            tokens: resumed.tokens.to_vec(),
            finished: resumed.finished,
        });
        let submission = Submission {
            id: submission,
            request: id,
            attempt: request.journal.attempt(),
            resumed: resumed.collect(),
            prompt_logprobs_received: request.journal.scored(),
            deadline: request.spec.deadline.map(|deadline| deadline.saturating_sub(self.now)),
            virtual_start_time,
            min_waiting_virtual_time,
        };
        let prompt_blocks =
            AdmissionCost::new(session.block_tokens).prompt(request.spec.prompt_tokens as usize);
        let choices = request.journal.choice_blocks(session.block_tokens);
        let placed = RequestPlaced { worker, fingerprint, changed_after, tokens, cached_tokens };
        request.send(ClientCommand::Placed(placed), commands);
        let RequestSpec { priority, tenant, .. } = &request.spec;
        session.submit(*priority, tenant, prompt_blocks, choices, submission, commands);
    }

    /// Requeues a request that was dispatched before, ahead of all new requests.
    pub(super) fn requeue_first(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let Some(position) = request.position.take() else { return };
        let position = self.queue.requeue_first(&position, id, &request.spec, self.now);
        request.phase = Phase::Queued(position);
        self.touched.insert(request.spec.lane);
    }
}

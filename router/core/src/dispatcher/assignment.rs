//! Assignment of a waiting request to a worker: the choice of the worker, and the submission there.

use inflight_contract::AdmissionCost;

use super::Dispatcher;
use super::request::Request;
use super::sessions::WorkerSession;
use crate::{
    Candidate, ClientCommand, Credits, Estimate, Failure, RequestId, RequestPlaced, RequestSpec,
    ResumedChoice, Standing, Submission, SubmissionId, WorkerId,
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
            eligible().any(|session| session.reserved().is_none() && suits(session) && not_ejected(session));
        let standing = move |session: &WorkerSession| {
            if session.draining().is_some() {
                Standing::Draining
            } else if !suits(session) {
                Standing::Unfit
            } else if session.reserved().is_some() || (any_not_ejected && !not_ejected(session)) {
                Standing::Ejected
            } else {
                Standing::Serving
            }
        };
        self.sessions_of(spec.lane).map(move |session| {
            let need = Credits {
                sequences: request.journal.running().count_ones(),
                blocks: request.journal.blocks(spec.prompt_tokens as usize, session.shape),
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
        let (Some(request), Some(session)) = (self.requests.get_mut(id), self.sessions.get_mut(worker))
        else {
            return;
        };
        let commands = &mut self.commands;
        let submission = self.next_submission;
        self.next_submission = SubmissionId(submission.0 + 1);
        let changed_after = request.set_fingerprint(&session.fingerprint);
        let fingerprint = session.fingerprint.clone();
        let generated = request.journal.tokens();
        request.set_running(worker, session.id, submission);
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
        let prompt_tokens = request.spec.prompt_tokens as usize;
        let prompt_blocks = AdmissionCost::new(session.shape).prompt(prompt_tokens);
        let choices = request.journal.choice_blocks(prompt_tokens, session.shape);
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
        request.set_queued(position);
        self.lanes.touch(request.spec.lane);
    }
}

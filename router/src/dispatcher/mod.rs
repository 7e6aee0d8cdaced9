//! The dispatcher: queues requests, places them on workers and follows them to their end.

mod catalogue;
mod placement;
mod queue;
mod recovery;
pub(crate) mod request;
mod session;
mod updates;
pub(crate) mod violation;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use inflight_contract::{AdmissionCost, ModelLimits};
use inflight_router_core::{Candidate, Credits, Estimate, OutlierLimits, Outliers, RetryBudget, Standing};
use metrics::Gauge;
use tokio::sync::watch;

use crate::call_guard::CallGuard;
use crate::clock;
use crate::cluster::bundle::Model;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::stats::RouterStats;
use placement::PlacementState;
use queue::ClusterQueue;
pub(crate) use recovery::Reason;
use request::{ActiveRequest, AdmittedCall, LaneId, Phase, Place};
pub(crate) use session::WorkerInfo;
use session::WorkerSession;

/// A model as requests see it.
#[derive(Debug, Clone)]
pub(crate) struct Served {
    pub(crate) lane: LaneId,
    pub(crate) name: String,
    pub(crate) architecture: String,
    pub(crate) limits: ModelLimits,
    pub(crate) model: Arc<Model>,
    /// Since when no worker serves it; `None` while one does.
    pub(crate) unserved: watch::Receiver<Option<Instant>>,
}

#[derive(Debug)]
struct Lane {
    name: String,
    bundle_digest: String,
    architecture: String,
    limits: ModelLimits,
    model: Arc<Model>,
    unserved: watch::Sender<Option<Instant>>,
}

struct DispatcherState {
    queue: ClusterQueue,
    lanes: BTreeMap<LaneId, Lane>,
    next_lane: LaneId,
    /// By worker; those that are connected.
    sessions: BTreeMap<usize, WorkerSession>,
    /// Workers that the router knows of, connected or not.
    members: BTreeSet<usize>,
    next_session: u64,
    next_submission: u64,
    placement: PlacementState,
    connected_ever: bool,
    /// Calls whose streams are open, by ticket.
    open: BTreeMap<u64, Arc<ActiveRequest>>,
    next_ticket: u64,
    /// Resubmissions that wait for the budget.
    retries: VecDeque<Arc<ActiveRequest>>,
    /// Requests that wait for a worker of their own.
    quarantined: VecDeque<Arc<ActiveRequest>>,
    budget: RetryBudget,
    outliers: Outliers,
    /// How long a request waits while only workers that are too small for it are connected.
    unfit_wait: Duration,
    ticks: u32,
    /// What the dispatcher's clock counts from.
    epoch: Instant,
    gauges: Gauges,
}

/// Handles, as looking one up by its name costs more than setting it.
struct Gauges {
    requests: Gauge,
    tokens: Gauge,
    retry_queue: Gauge,
    quarantine: Gauge,
    ejected: Gauge,
}

/// The router's one decision point: holds the queue, the sessions and their ledgers, and hands a request over
/// the moment a worker's grant has room. Every change (an arrival, a grant, an end, a lost session) drives it;
/// nothing polls.
pub(crate) struct Dispatch {
    options: Options,
    state: Mutex<DispatcherState>,
    ready: watch::Sender<bool>,
    /// Models that a worker serves now.
    served: watch::Sender<BTreeSet<String>>,
    /// Routers that share the workers, as the queue knows.
    routers: Arc<AtomicU32>,
}

/// An admitted request, held by its client's stream; dropping it withdraws the request wherever it is.
pub(crate) struct Ticket {
    dispatch: Arc<Dispatch>,
    pub(crate) active: Arc<ActiveRequest>,
    number: u64,
}

impl Ticket {
    /// Ends a choice on the router's side: its worker stops and nothing more of it is delivered.
    pub(crate) fn withdraw(&self, choice: u32) {
        self.dispatch.withdraw(&self.active, choice);
    }

    /// The client reads again after its request was paused.
    pub(crate) fn resume(&self) {
        self.dispatch.resume(&self.active);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.dispatch.release(self.number, &self.active);
    }
}

impl Dispatch {
    /// Sizes of blocks for which a prompt is hashed: clusters have one, and while it is changed two.
    const BLOCK_SIZES_MAX: usize = 2;

    pub(crate) fn new(options: &Options) -> Self {
        let epoch = clock::now();
        let gauges = Gauges {
            requests: metrics::gauge!(names::QUEUE_REQUESTS),
            tokens: metrics::gauge!(names::QUEUE_TOKENS),
            retry_queue: metrics::gauge!(names::RETRY_QUEUE),
            quarantine: metrics::gauge!(names::QUARANTINE),
            ejected: metrics::gauge!(names::WORKERS_EJECTED),
        };
        let queue = ClusterQueue::new(options);
        let routers = queue.routers();
        let state = DispatcherState {
            queue,
            lanes: BTreeMap::new(),
            next_lane: 0,
            sessions: BTreeMap::new(),
            members: BTreeSet::new(),
            next_session: 0,
            next_submission: 0,
            placement: PlacementState::new(options),
            connected_ever: false,
            open: BTreeMap::new(),
            next_ticket: 0,
            retries: VecDeque::new(),
            quarantined: VecDeque::new(),
            budget: RetryBudget::new(options.retry_rate, options.retry_burst),
            outliers: Outliers::new(OutlierLimits::default()),
            unfit_wait: options.no_worker_timeout,
            ticks: 0,
            epoch,
            gauges,
        };
        Self {
            options: options.clone(),
            state: Mutex::new(state),
            ready: watch::Sender::new(false),
            served: watch::Sender::default(),
            routers,
        }
    }

    fn lock(&self) -> MutexGuard<'_, DispatcherState> {
        // Every method leaves the state whole at each call that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether at least one worker takes requests.
    pub(crate) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// The models that a worker serves now.
    pub(crate) fn served(&self) -> watch::Receiver<BTreeSet<String>> {
        self.served.subscribe()
    }

    /// Queues a request, and hands it over at once if a worker has room.
    pub(crate) fn submit(
        self: &Arc<Self>,
        call: AdmittedCall,
        queue_span: tracing::Span,
        guard: CallGuard,
    ) -> Result<Ticket, Outcome> {
        let now = clock::now();
        let most = self.options.request_tokens_max;
        if call.tokens() > most {
            return Err(Outcome::Invalid(format!(
                "prompt and n * max_tokens come to {} tokens, more than the {most} that the router keeps for a request; lower n or max_tokens",
                call.tokens()
            )));
        }
        let active = Arc::new(ActiveRequest::new(call, queue_span, guard));
        let call = &active.call;
        // Hashing takes a while, so not under the lock. Where several sizes of blocks meet, each has its names.
        let sizes = self.block_sizes(call.lane);
        active.chains.get_or_init(|| PlacementState::chains(call, &sizes));
        let mut state = self.lock();
        if !state.lanes.contains_key(&call.lane) {
            let waited = self.options.no_worker_timeout;
            return Err(Outcome::Unserved { model: call.model.clone(), waited });
        }
        if let Some(required) = &call.require_fingerprint
            && state.fingerprints(call.lane).all(|served| served != required)
        {
            return Err(state.unknown_fingerprint(call.lane, required));
        }
        let since = state.since(now);
        let left = call.deadline.map(|deadline| deadline.saturating_duration_since(now));
        // Finding out takes a look-up for each block.
        let first_token = left.and_then(|_| state.first_token(&active));
        let (place, displaced) = state.queue.push(&active, first_token, left, since)?;
        active.lock().phase = Phase::Queued(place);
        for other in displaced {
            other.lock().fail(state.queue.displaced());
            other.notify();
        }
        let number = state.next_ticket;
        state.next_ticket += 1;
        state.open.insert(number, active.clone());
        state.dispatch_waiting(now);
        drop(state);
        Ok(Ticket { dispatch: self.clone(), active, number })
    }

    /// Sizes of blocks at a lane's workers; none where the placement does not look at blocks.
    fn block_sizes(&self, lane: LaneId) -> Vec<u32> {
        let state = self.lock();
        if !state.placement.reads_prefixes() {
            return Vec::new();
        }
        let sizes: BTreeSet<u32> = state.sessions_of(lane).map(|session| session.block_tokens).collect();
        sizes.into_iter().take(Self::BLOCK_SIZES_MAX).collect()
    }

    /// Routers that share the workers.
    pub(crate) fn routers(&self) -> u32 {
        self.routers.load(Ordering::Relaxed)
    }

    /// How much the router holds.
    pub(crate) fn stats(&self) -> RouterStats {
        let state = self.lock();
        let used = state.sessions.values().map(|session| session.ledger.used());
        RouterStats {
            open: state.open.len(),
            waiting: state.queue.len() + state.retries.len() + state.quarantined.len(),
            in_flight: state.sessions.values().map(|session| session.submissions.len()).sum(),
            sequences: used.clone().map(|used| used.sequences).sum(),
            blocks: used.map(|used| used.blocks).sum(),
        }
    }

    fn withdraw(&self, active: &ActiveRequest, choice: u32) {
        let mut state = self.lock();
        let mut request = active.lock();
        if !request.journal.withdraw(choice) {
            return;
        }
        let ended = request.journal.ended();
        match request.phase {
            Phase::Running { worker, session, submission } => {
                if let Some(session) = state.session(worker, session) {
                    session.cancel_choice(submission, choice);
                }
            }
            Phase::Queued(place) if ended => {
                state.queue.remove(&place);
            }
            Phase::Queued(_) | Phase::AwaitingRetry | Phase::Paused | Phase::Ended => {}
        }
        if ended {
            request.phase = Phase::Ended;
        }
        drop(request);
        state.dispatch_waiting(clock::now());
    }

    fn release(&self, ticket: u64, active: &ActiveRequest) {
        let mut state = self.lock();
        state.open.remove(&ticket);
        state.cancel_everywhere(active);
        active.guard.end();
        state.dispatch_waiting(clock::now());
    }
}

impl DispatcherState {
    fn session(&mut self, worker: usize, id: u64) -> Option<&mut WorkerSession> {
        self.sessions.get_mut(&worker).filter(|session| session.id == id)
    }

    /// The time as the pure parts take it.
    fn since(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.epoch)
    }

    /// Queues a request that was handed over before, ahead of all that never were.
    fn requeue_first(&mut self, active: &Arc<ActiveRequest>, now: Instant) {
        let since = self.since(now);
        let mut request = active.lock();
        let Some(place) = request.place.take() else { return };
        request.phase = Phase::Queued(self.queue.requeue_first(&place, active, since));
    }

    /// The soonest first token that a worker promises a new request.
    fn first_token(&self, active: &ActiveRequest) -> Option<Duration> {
        let fits = |session: &&WorkerSession| session.fits(&active.call);
        let of_lane =
            self.sessions_of(active.call.lane).filter(|session| session.accepts_requests()).filter(fits);
        let promised =
            of_lane.map(|session| self.placement.first_token(session.worker, &active.call, active.chains()));
        // A worker that says nothing may be the soonest.
        promised.min().flatten()
    }

    /// Hands over what can be handed over: lane by lane, in order. A head that finds no room may be overtaken, a bounded
    /// number of times, by those behind it that do.
    fn dispatch_waiting(&mut self, now: Instant) {
        self.release_retries(now);
        self.place_quarantined(now);
        let since = self.since(now);
        let lanes: Vec<LaneId> = self.queue.lanes().collect();
        for lane in lanes {
            while let Some((place, active)) = self.queue.head(lane, since) {
                if self.try_dispatch(&place, &active, now) {
                    continue;
                }
                let one = Credits { sequences: 1, blocks: 1 };
                let room =
                    |s: &WorkerSession| s.accepts_requests() && s.ledger.grant().fit(s.ledger.used(), one);
                if !self.sessions_of(lane).any(room) {
                    break;
                }
                let mut behind = self.queue.bypass_candidates(&place, since).into_iter();
                if !behind.any(|(other, active)| self.try_dispatch(&other, &active, now)) {
                    break;
                }
                self.queue.count_bypass(&place);
            }
        }
        for session in self.sessions.values_mut() {
            // A suspect waits outside of the queue, and needs a grant of its worker as much.
            session.send_backlog(self.queue.waits_in(session.lane) || session.awaits_quarantined());
        }
        self.gauges.requests.set(self.queue.len() as f64);
        self.gauges.tokens.set(self.queue.tokens() as f64);
        self.gauges.ejected.set(self.outliers.ejected(self.since(now)) as f64);
    }

    /// Hands a waiting request over, or ends it if it cannot run; whether it has left the queue.
    fn try_dispatch(&mut self, place: &Place, active: &Arc<ActiveRequest>, now: Instant) -> bool {
        match self.choose_worker(active, now) {
            PlacementDecision::Wait => false,
            PlacementDecision::Fail(outcome) => {
                self.queue.remove(place);
                active.lock().fail(outcome);
                active.notify();
                true
            }
            PlacementDecision::Dispatch(worker) => {
                let since = self.since(now);
                self.queue.take(place, active.call.lane, since);
                active.lock().place = Some(*place);
                self.dispatch_to(active, worker, now);
                true
            }
        }
    }

    fn choose_worker(&mut self, active: &ActiveRequest, now: Instant) -> PlacementDecision {
        if active.expired(now) {
            return PlacementDecision::Fail(Outcome::DeadlineExceeded);
        }
        let mut request = active.lock();
        let lane = active.call.lane;
        let fits = |session: &&WorkerSession| session.fits(&active.call);
        // Those that are kept for a suspect take others again soon.
        let in_time =
            || self.sessions.values().filter(|s| s.lane == lane && s.draining.is_none()).filter(fits);
        let generated = request.journal.tokens();
        let begun = generated > 0;
        let same = |session: &&WorkerSession| request.fingerprint.as_ref() == Some(&session.fingerprint);
        let sessions = || in_time().filter(|session| session.accepts_requests());
        // A stream that has begun goes on with the very same tokens where that is possible at all.
        let keep_fingerprint = begun && in_time().any(|session| same(&session));
        let since = self.since(now);
        let admitted =
            |session: &&WorkerSession| self.outliers.admits(session.worker, session.submissions.len(), since);
        // Where nobody but ejected workers is left, one of them is better than none.
        let admits = sessions().any(|session| (!keep_fingerprint || same(&session)) && admitted(&session));
        let standing = |session: &WorkerSession| {
            if session.draining.is_some() {
                Standing::Draining
            } else if !fits(&session) || (keep_fingerprint && !same(&session)) {
                Standing::Unfit
            } else if session.reserved.is_some() || (admits && !admitted(&session)) {
                Standing::Ejected
            } else {
                Standing::Serving
            }
        };
        let candidates: Vec<Candidate> = self
            .sessions_of(lane)
            .map(|session| Candidate {
                worker: session.worker,
                standing: standing(session),
                grant: session.ledger.grant(),
                used: session.ledger.used(),
                urgent: session.ledger.urgent(active.call.priority),
                need: Credits {
                    sequences: request.journal.running().count_ones(),
                    blocks: request.journal.blocks(active.call.prompt.len(), session.block_tokens),
                },
                avoid: request.avoid == Some(session.worker) || session.is_overdue(now),
                ..Candidate::default()
            })
            .map(|candidate| {
                // Only where it matters: finding out takes a look-up for each block.
                let estimate = match candidate.standing == Standing::Serving && candidate.has_room() {
                    true => {
                        self.placement.estimate(candidate.worker, &active.call, generated, active.chains())
                    }
                    false => Estimate::default(),
                };
                Candidate { estimate, ..candidate }
            })
            .collect();
        if in_time().next().is_some() {
            request.unfit_since = None;
        } else if self.sessions_of(lane).any(|session| session.draining.is_none())
            // The worker that could hold it may come back.
            && now.saturating_duration_since(*request.unfit_since.get_or_insert(now)) >= self.unfit_wait
        {
            // The workers that could run it went while it waited.
            if let Some(required) = &active.call.require_fingerprint
                && self.fingerprints(lane).all(|served| served != required)
            {
                return PlacementDecision::Fail(self.unknown_fingerprint(lane, required));
            }
            return PlacementDecision::Fail(Outcome::Invalid(format!(
                "prompt and max_tokens come to {} tokens, more than the workers now connected can hold",
                active.call.sequence_tokens()
            )));
        }
        match self.placement.choose(&active.call, generated, &candidates) {
            Some(worker) => PlacementDecision::Dispatch(worker),
            None => PlacementDecision::Wait,
        }
    }

    fn dispatch_to(&mut self, active: &Arc<ActiveRequest>, worker: usize, now: Instant) {
        let submission = self.next_submission;
        self.next_submission += 1;
        let Some(session) = self.sessions.get_mut(&worker) else { return };
        let mut request = active.lock();
        if request.run_on(&session.fingerprint) {
            metrics::counter!(names::FINGERPRINT_CHANGES).increment(1);
            tracing::warn!(
                request_id = active.call.request_id,
                worker = session.address,
                fingerprint = &*session.fingerprint,
                "stream continues on a worker with another fingerprint; its tokens may differ"
            );
        }
        request.phase = Phase::Running { worker, session: session.id, submission };
        request.queue_span = None;
        if request.times.placed.is_none() {
            request.times.placed = Some(now);
            let waited = now.saturating_duration_since(active.call.arrived);
            let model = active.call.model.clone();
            metrics::histogram!(names::QUEUE_SECONDS, "model" => model.clone()).record(waited);
            metrics::counter!(names::PROMPT_TOKENS, "model" => model)
                .increment(active.call.prompt.len() as u64);
        }
        let prompt_blocks = AdmissionCost::new(session.block_tokens).prompt(active.call.prompt.len());
        let choices = request.journal.choice_blocks(session.block_tokens).collect();
        let mut submit = active.submission(&request.journal, submission, now);
        if let Some(place) = &request.place {
            // A stream that has begun was charged for its prompt before.
            let prompt = if request.journal.tokens() > 0 { 0 } else { active.call.prompt.len() };
            submit.virtual_start_time = Some(self.queue.charge_provisionally(place, submission, prompt));
            submit.min_waiting_virtual_time = self.queue.min_waiting_virtual_time(session.lane);
        }
        let attempt = request.journal.attempt();
        self.placement.route(worker, submission, &active.call, request.journal.tokens(), active.chains());
        drop(request);
        session.submit(active, attempt, prompt_blocks, choices, submit);
        active.notify();
    }
}

enum PlacementDecision {
    Wait,
    Fail(Outcome),
    Dispatch(usize),
}

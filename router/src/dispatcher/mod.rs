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
use inflight_router_core::{
    Candidate, Credits, Estimate, OutlierDetector, OutlierLimits, RetryBudget, Standing,
};
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
pub(crate) use recovery::ResubmissionReason;
use request::{ActiveRequest, AdmittedCall, LaneId, Phase, QueuePosition};
pub(crate) use session::WorkerInfo;
use session::WorkerSession;

/// Model as requests resolve it.
#[derive(Debug, Clone)]
pub(crate) struct ServedModel {
    pub(crate) lane: LaneId,
    pub(crate) name: String,
    pub(crate) architecture: String,
    pub(crate) limits: ModelLimits,
    pub(crate) model: Arc<Model>,
    /// Time since which no worker serves it; `None` while one does.
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
    /// Open sessions, by worker.
    sessions: BTreeMap<usize, WorkerSession>,
    /// Known workers, connected or not.
    members: BTreeSet<usize>,
    next_session: u64,
    next_submission: u64,
    placement: PlacementState,
    connected_ever: bool,
    /// Admitted requests whose streams are open, by ticket number.
    open: BTreeMap<u64, Arc<ActiveRequest>>,
    next_ticket: u64,
    /// Retry queue: resubmissions that wait for the retry budget.
    retries: VecDeque<Arc<ActiveRequest>>,
    /// Quarantined requests that wait for a worker of their own.
    quarantined: VecDeque<Arc<ActiveRequest>>,
    budget: RetryBudget,
    outliers: OutlierDetector,
    /// Maximum time a request waits while all connected workers are too small for it.
    unfit_wait: Duration,
    ticks: u32,
    /// Epoch of the times passed to the pure core.
    epoch: Instant,
    gauges: Gauges,
}

/// Metric handles; a lookup by name costs more than an update.
struct Gauges {
    requests: Gauge,
    tokens: Gauge,
    retry_queue: Gauge,
    quarantine: Gauge,
    ejected: Gauge,
}

/// Single decision point of the router: owns the queue, the sessions and their ledgers, and dispatches a
/// request as soon as a worker's grant has room. Driven by events (arrival, grant, end, lost session);
/// nothing polls.
pub(crate) struct Dispatcher {
    options: Options,
    state: Mutex<DispatcherState>,
    ready: watch::Sender<bool>,
    /// Models with at least one serving worker.
    served: watch::Sender<BTreeSet<String>>,
    /// Number of routers that share the workers, as reported by workers.
    routers: Arc<AtomicU32>,
}

/// Handle of an admitted request, owned by its client's stream; dropping it cancels the request.
pub(crate) struct Ticket {
    dispatch: Arc<Dispatcher>,
    pub(crate) active: Arc<ActiveRequest>,
    number: u64,
}

impl Ticket {
    /// Ends a choice on the router's side: cancels it at its worker and delivers nothing more of it.
    pub(crate) fn withdraw(&self, choice: u32) {
        self.dispatch.withdraw(&self.active, choice);
    }

    /// Resumes a paused request whose client reads again.
    pub(crate) fn resume(&self) {
        self.dispatch.resume(&self.active);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.dispatch.release(self.number, &self.active);
    }
}

impl Dispatcher {
    /// Maximum number of block sizes for which a prompt is hashed: one per cluster, two during a migration.
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
            outliers: OutlierDetector::new(OutlierLimits::default()),
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
        // The state is consistent at every call that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a receiver of whether at least one worker accepts requests.
    pub(crate) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Returns a receiver of the models with at least one serving worker.
    pub(crate) fn served(&self) -> watch::Receiver<BTreeSet<String>> {
        self.served.subscribe()
    }

    /// Queues a request, and dispatches it at once if a worker has room.
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
        // Hashing is slow, so it happens before taking the lock. Each block size has its own chain.
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
        // The estimate costs a lookup per block, so it is made only for a deadline.
        let first_token = left.and_then(|_| state.first_token(&active));
        let (position, displaced) = state.queue.push(&active, first_token, left, since)?;
        active.lock().phase = Phase::Queued(position);
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

    /// Returns the block sizes of a lane's workers; empty if the placement policy ignores prefixes.
    fn block_sizes(&self, lane: LaneId) -> Vec<u32> {
        let state = self.lock();
        if !state.placement.reads_prefixes() {
            return Vec::new();
        }
        let sizes: BTreeSet<u32> = state.sessions_of(lane).map(|session| session.block_tokens).collect();
        sizes.into_iter().take(Self::BLOCK_SIZES_MAX).collect()
    }

    /// Returns the number of routers that share the workers.
    pub(crate) fn routers(&self) -> u32 {
        self.routers.load(Ordering::Relaxed)
    }

    /// Returns the current load of the router.
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
            Phase::Queued(position) if ended => {
                state.queue.remove(&position);
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

    /// Converts a time to the duration since the epoch.
    fn since(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.epoch)
    }

    /// Requeues a request that was dispatched before, ahead of all new requests.
    fn requeue_first(&mut self, active: &Arc<ActiveRequest>, now: Instant) {
        let since = self.since(now);
        let mut request = active.lock();
        let Some(position) = request.position.take() else { return };
        request.phase = Phase::Queued(self.queue.requeue_first(&position, active, since));
    }

    /// Returns the earliest predicted first token of a new request over all workers; `None` if unknown for
    /// one.
    fn first_token(&self, active: &ActiveRequest) -> Option<Duration> {
        let fits = |session: &&WorkerSession| session.fits(&active.call);
        let of_lane =
            self.sessions_of(active.call.lane).filter(|session| session.accepts_requests()).filter(fits);
        let promised =
            of_lane.map(|session| self.placement.first_token(session.worker, &active.call, active.chains()));
        // A worker without a cost model may be the earliest.
        promised.min().flatten()
    }

    /// Dispatches waiting requests, lane by lane and in queue order. A head that fits on no worker is
    /// bypassed by later requests a bounded number of times.
    fn dispatch_waiting(&mut self, now: Instant) {
        self.release_retries(now);
        self.place_quarantined(now);
        let since = self.since(now);
        let lanes: Vec<LaneId> = self.queue.lanes().collect();
        for lane in lanes {
            while let Some((position, active)) = self.queue.head(lane, since) {
                if self.try_dispatch(&position, &active, now) {
                    continue;
                }
                let one = Credits { sequences: 1, blocks: 1 };
                let room =
                    |s: &WorkerSession| s.accepts_requests() && s.ledger.grant().fit(s.ledger.used(), one);
                if !self.sessions_of(lane).any(room) {
                    break;
                }
                let mut bypassing = self.queue.bypass_candidates(&position, since).into_iter();
                if !bypassing.any(|(other, active)| self.try_dispatch(&other, &active, now)) {
                    break;
                }
                self.queue.count_bypass(&position);
            }
        }
        for session in self.sessions.values_mut() {
            // A quarantined request waits outside the queue and needs a grant of its worker as well.
            session.send_backlog(self.queue.waits_in(session.lane) || session.awaits_quarantined());
        }
        self.gauges.requests.set(self.queue.len() as f64);
        self.gauges.tokens.set(self.queue.tokens() as f64);
        self.gauges.ejected.set(self.outliers.ejected(self.since(now)) as f64);
    }

    /// Dispatches a waiting request, or fails it if it cannot run. Returns whether it has left the queue.
    fn try_dispatch(&mut self, position: &QueuePosition, active: &Arc<ActiveRequest>, now: Instant) -> bool {
        match self.choose_worker(active, now) {
            PlacementDecision::Wait => false,
            PlacementDecision::Fail(outcome) => {
                self.queue.remove(position);
                active.lock().fail(outcome);
                active.notify();
                true
            }
            PlacementDecision::Dispatch(worker) => {
                let since = self.since(now);
                self.queue.take(position, active.call.lane, since);
                active.lock().position = Some(*position);
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
        // Includes workers reserved for a quarantined request: they accept others again soon.
        let eligible =
            || self.sessions.values().filter(|s| s.lane == lane && s.draining.is_none()).filter(fits);
        let generated = request.journal.tokens();
        let begun = generated > 0;
        let same_fingerprint =
            |session: &&WorkerSession| request.fingerprint.as_ref() == Some(&session.fingerprint);
        let sessions = || eligible().filter(|session| session.accepts_requests());
        // A stream that has begun stays on workers with its fingerprint while there are any, so that its
        // tokens do not change.
        let keep_fingerprint = begun && eligible().any(|session| same_fingerprint(&session));
        let since = self.since(now);
        let not_ejected =
            |session: &&WorkerSession| self.outliers.admits(session.worker, session.submissions.len(), since);
        // If only ejected workers are left, they are used.
        let any_not_ejected = sessions()
            .any(|session| (!keep_fingerprint || same_fingerprint(&session)) && not_ejected(&session));
        let standing = |session: &WorkerSession| {
            if session.draining.is_some() {
                Standing::Draining
            } else if !fits(&session) || (keep_fingerprint && !same_fingerprint(&session)) {
                Standing::Unfit
            } else if session.reserved.is_some() || (any_not_ejected && !not_ejected(&session)) {
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
                priority_sequences: session.ledger.priority_sequences(active.call.priority),
                need: Credits {
                    sequences: request.journal.running().count_ones(),
                    blocks: request.journal.blocks(active.call.prompt.len(), session.block_tokens),
                },
                avoid: request.avoid == Some(session.worker) || session.is_overdue(now),
                ..Candidate::default()
            })
            .map(|candidate| {
                // Only for workers with room: an estimate costs a lookup per block.
                let estimate = match candidate.standing == Standing::Serving && candidate.has_room() {
                    true => {
                        self.placement.estimate(candidate.worker, &active.call, generated, active.chains())
                    }
                    false => Estimate::default(),
                };
                Candidate { estimate, ..candidate }
            })
            .collect();
        if eligible().next().is_some() {
            request.unfit_since = None;
        } else if self.sessions_of(lane).any(|session| session.draining.is_none())
            // A worker that can hold the request may return.
            && now.saturating_duration_since(*request.unfit_since.get_or_insert(now)) >= self.unfit_wait
        {
            // The workers with its fingerprint have left while it waited.
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
        if request.set_fingerprint(&session.fingerprint) {
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
        if let Some(position) = &request.position {
            // The prompt of a resumed stream was charged at its first dispatch.
            let prompt = if request.journal.tokens() > 0 { 0 } else { active.call.prompt.len() };
            submit.virtual_start_time = Some(self.queue.charge_provisionally(position, submission, prompt));
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

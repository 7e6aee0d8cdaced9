use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use inflight_contract::ModelLimits;
use inflight_proto::v1;
use inflight_router_core::{Candidate, Credits, LeastLoaded, Place, Placement, QueueLimits, RequestQueue};
use tokio::sync::{mpsc, watch};
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::bundle::Model;
use crate::directory::Session;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::relay::{Call, Phase, Received, Relay};

/// A lane of the queue: the requests for one model with one bundle.
pub(crate) type LaneId = u32;

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

/// What a worker said of itself, and its loaded bundle.
#[derive(Debug)]
pub(crate) struct Introduction {
    pub(crate) worker: usize,
    pub(crate) address: String,
    pub(crate) model_name: String,
    pub(crate) architecture: String,
    pub(crate) bundle_digest: String,
    pub(crate) fingerprint: String,
    pub(crate) limits: ModelLimits,
    pub(crate) block_tokens: u32,
    pub(crate) model: Arc<Model>,
    /// Where submissions and cancels go.
    pub(crate) commands: mpsc::UnboundedSender<v1::SessionRequest>,
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

struct State {
    queue: RequestQueue<LaneId, Arc<Relay>>,
    lanes: BTreeMap<LaneId, Lane>,
    next_lane: LaneId,
    /// By worker index; `None` while a worker is not connected.
    sessions: Vec<Option<Session>>,
    next_session: u64,
    next_submission: u64,
    placement: Box<dyn Placement>,
    connected_ever: bool,
}

/// The router's one decision point: holds the queue, the sessions and their ledgers, and hands a request over
/// the moment a worker's grant has room. Every change (an arrival, a grant, an end, a lost session) drives it;
/// nothing polls.
pub(crate) struct Dispatch {
    options: Options,
    state: Mutex<State>,
    ready: watch::Sender<bool>,
}

/// An admitted request, held by its client's stream; dropping it withdraws the request wherever it is.
pub(crate) struct Ticket {
    dispatch: Arc<Dispatch>,
    pub(crate) relay: Arc<Relay>,
    /// Keeps a draining router up until the stream is done.
    _open: TaskTrackerToken,
}

impl Ticket {
    /// Ends a choice on the router's side: its worker stops and nothing more of it is delivered.
    pub(crate) fn withdraw(&self, choice: u32) {
        self.dispatch.withdraw(&self.relay, choice);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.dispatch.release(&self.relay);
    }
}

impl Dispatch {
    pub(crate) fn new(options: &Options) -> Self {
        let limits = QueueLimits { requests: options.queue_requests_max, tokens: options.queue_tokens_max };
        let state = State {
            queue: RequestQueue::new(limits),
            lanes: BTreeMap::new(),
            next_lane: 0,
            sessions: options.workers.iter().map(|_| None).collect(),
            next_session: 0,
            next_submission: 0,
            placement: Box::new(LeastLoaded::default()),
            connected_ever: false,
        };
        Self { options: options.clone(), state: Mutex::new(state), ready: watch::Sender::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every method leaves the state whole at each call that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether at least one worker takes requests.
    pub(crate) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// The model that a request names.
    pub(crate) fn resolve(&self, asked: &str, now: Instant) -> Result<Served, Outcome> {
        let state = self.lock();
        let wait = self.options.unserved_wait_max;
        let in_reach = |lane: &Lane| match *lane.unserved.borrow() {
            None => true,
            Some(since) => now.saturating_duration_since(since) < wait,
        };
        let names: BTreeSet<&str> =
            state.lanes.values().filter(|lane| in_reach(lane)).map(|lane| lane.name.as_str()).collect();
        let unserved = |model: &str| Outcome::Unserved { model: model.to_owned(), waited: wait };
        let name = match (asked, names.first()) {
            (_, None) if !state.connected_ever => {
                return Err(Outcome::NeverConnected { workers: state.sessions.len() });
            }
            ("", None) => return Err(unserved("")),
            ("", Some(only)) if names.len() == 1 => *only,
            ("", Some(_)) => {
                let names: Vec<_> = names.into_iter().collect();
                return Err(Outcome::Invalid(format!(
                    "model is empty, but several are served; name one of: {}",
                    names.join(", ")
                )));
            }
            (asked, _) => asked,
        };
        // Workers with the same model but another bundle are a lane apart: the one with most workers is taken.
        let workers = |id: LaneId| state.sessions_of(id).filter(|session| !session.draining).count();
        let best = state
            .lanes
            .iter()
            .filter(|(_, lane)| lane.name == name && in_reach(lane))
            .max_by_key(|(id, _)| (workers(**id), **id));
        match best {
            Some((id, lane)) => Ok(Served {
                lane: *id,
                name: lane.name.clone(),
                architecture: lane.architecture.clone(),
                limits: lane.limits,
                model: lane.model.clone(),
                unserved: lane.unserved.subscribe(),
            }),
            None if state.lanes.values().any(|lane| lane.name == name) => Err(unserved(name)),
            None => Err(Outcome::UnknownModel {
                asked: name.to_owned(),
                served: names.into_iter().map(str::to_owned).collect(),
            }),
        }
    }

    /// The models that a worker serves now, by name, with the number of workers of each.
    pub(crate) fn models(&self) -> Vec<(Served, u32)> {
        let state = self.lock();
        let mut models: BTreeMap<String, (Served, u32)> = BTreeMap::new();
        for (id, lane) in &state.lanes {
            let workers = state.sessions_of(*id).filter(|session| !session.draining).count() as u32;
            if workers == 0 {
                continue;
            }
            let served = Served {
                lane: *id,
                name: lane.name.clone(),
                architecture: lane.architecture.clone(),
                limits: lane.limits,
                model: lane.model.clone(),
                unserved: lane.unserved.subscribe(),
            };
            models
                .entry(lane.name.clone())
                .and_modify(|entry| entry.1 += workers)
                .or_insert((served, workers));
        }
        models.into_values().collect()
    }

    /// Queues a request, and hands it over at once if a worker has room.
    pub(crate) fn submit(
        self: &Arc<Self>,
        call: Call,
        queue_span: tracing::Span,
        open: TaskTrackerToken,
    ) -> Result<Ticket, Outcome> {
        let now = Instant::now();
        let relay = Arc::new(Relay::new(call, queue_span));
        let call = &relay.call;
        let mut state = self.lock();
        if !state.lanes.contains_key(&call.lane) {
            let waited = self.options.unserved_wait_max;
            return Err(Outcome::Unserved { model: call.model.clone(), waited });
        }
        let place = state
            .queue
            .push(call.lane, call.priority, call.tokens(), relay.clone())
            .map_err(|full| Outcome::Full { what: full.to_string(), retry: self.options.retry_delay })?;
        relay.lock().phase = Phase::Queued(place);
        state.pump(now);
        drop(state);
        Ok(Ticket { dispatch: self.clone(), relay, _open: open })
    }

    fn withdraw(&self, relay: &Relay, choice: u32) {
        let mut state = self.lock();
        let mut request = relay.lock();
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
            Phase::Queued(_) | Phase::Ended => {}
        }
        if ended {
            request.phase = Phase::Ended;
        }
        drop(request);
        state.pump(Instant::now());
    }

    fn release(&self, relay: &Relay) {
        let mut state = self.lock();
        let mut request = relay.lock();
        match std::mem::replace(&mut request.phase, Phase::Ended) {
            Phase::Queued(place) => {
                state.queue.remove(&place);
            }
            Phase::Running { worker, session, submission } => {
                if let Some(session) = state.session(worker, session) {
                    session.cancel(submission);
                }
            }
            Phase::Ended => {}
        }
        request.queue_span = None;
        drop(request);
        state.pump(Instant::now());
    }

    /// Takes a worker's session in; the number names it in the calls that follow.
    pub(crate) fn open(&self, introduction: Introduction) -> u64 {
        let now = Instant::now();
        let mut state = self.lock();
        state.connected_ever = true;
        let id = state.next_session;
        state.next_session += 1;
        let lane = state.lane_for(&introduction);
        let worker = introduction.worker;
        state.sessions[worker] = Some(Session::new(id, lane, introduction));
        state.refresh(lane, now);
        state.forget_lanes(now, self.options.unserved_wait_max);
        state.pump(now);
        self.publish(&state);
        id
    }

    /// Takes a worker's update in.
    pub(crate) fn apply(&self, worker: usize, session: u64, update: v1::Update) {
        let now = Instant::now();
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(entry) = state.session(worker, session) else { return };
        let mut given_back = Vec::new();
        let mut stale = 0;
        for sequence in update.sequences {
            let (submission, choice) = (sequence.request, sequence.choice);
            let flight = entry.flights.get(&submission).filter(|flight| flight.attempt == sequence.attempt);
            let Some(relay) = flight.map(|flight| flight.relay.clone()) else {
                stale += 1;
                continue;
            };
            let ended = sequence.finish != v1::FinishReason::Unspecified as i32;
            let received = relay.receive(submission, sequence, now);
            if ended {
                entry.settle(submission, choice);
            }
            match received {
                Received::Taken => {}
                Received::Stale => stale += 1,
                Received::Failed => entry.cancel(submission),
                Received::GivenBack => {
                    entry.cancel(submission);
                    given_back.push(relay);
                }
            }
        }
        if stale > 0 {
            metrics::counter!(names::STALE_UPDATES).increment(stale);
        }
        if let Some(grant) = update.grant {
            entry.ledger.set_grant(Credits { sequences: grant.sequences, blocks: grant.blocks });
        }
        entry.show();
        let drains = update.draining && !entry.draining;
        entry.draining |= update.draining;
        let (lane, address) = (entry.lane, entry.address.clone());
        if drains {
            tracing::info!(worker = address, "worker is draining");
            state.refresh(lane, now);
        }
        for relay in given_back {
            state.requeue(&relay, worker, "given_back", self.options.attempts_max);
        }
        state.pump(now);
        if drains {
            self.publish(&guard);
        }
    }

    /// Lets a lost session go: what it had in flight is queued again, ahead of all new requests.
    pub(crate) fn close(&self, worker: usize, session: u64) {
        let now = Instant::now();
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.session(worker, session).is_none() {
            return;
        }
        let Some(mut lost) = state.sessions[worker].take() else { return };
        lost.clear_gauges();
        state.refresh(lost.lane, now);
        for flight in std::mem::take(&mut lost.flights).into_values() {
            let in_force = matches!(flight.relay.lock().phase,
                Phase::Running { session: current, .. } if current == session);
            if in_force {
                state.requeue(&flight.relay, worker, "session_lost", self.options.attempts_max);
            }
        }
        state.pump(now);
        self.publish(&guard);
    }

    fn publish(&self, state: &State) {
        let connected = state.sessions.iter().flatten().count();
        metrics::gauge!(names::WORKERS_CONNECTED).set(connected as f64);
        let ready = state.sessions.iter().flatten().any(|session| !session.draining);
        self.ready.send_if_modified(|now| std::mem::replace(now, ready) != ready);
    }
}

impl State {
    fn session(&mut self, worker: usize, id: u64) -> Option<&mut Session> {
        self.sessions.get_mut(worker)?.as_mut().filter(|session| session.id == id)
    }

    fn sessions_of(&self, lane: LaneId) -> impl Iterator<Item = &Session> {
        self.sessions.iter().flatten().filter(move |session| session.lane == lane)
    }

    fn lane_for(&mut self, introduction: &Introduction) -> LaneId {
        let same = |lane: &Lane| {
            lane.name == introduction.model_name && lane.bundle_digest == introduction.bundle_digest
        };
        if let Some((id, _)) = self.lanes.iter().find(|(_, lane)| same(lane)) {
            return *id;
        }
        let id = self.next_lane;
        self.next_lane += 1;
        let lane = Lane {
            name: introduction.model_name.clone(),
            bundle_digest: introduction.bundle_digest.clone(),
            architecture: introduction.architecture.clone(),
            limits: introduction.limits,
            model: introduction.model.clone(),
            unserved: watch::Sender::new(None),
        };
        self.lanes.insert(id, lane);
        id
    }

    /// Brings a lane up to date with the sessions that serve it. Its limits are what each of them can take.
    fn refresh(&mut self, id: LaneId, now: Instant) {
        let serving = self.sessions_of(id).filter(|session| !session.draining);
        let limits = serving.map(|session| session.limits).reduce(|a, b| ModelLimits {
            vocab_size: a.vocab_size.min(b.vocab_size),
            context_tokens: a.context_tokens.min(b.context_tokens),
            kv_tokens: a.kv_tokens.min(b.kv_tokens),
        });
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        match limits {
            Some(limits) => {
                lane.limits = limits;
                lane.unserved.send_if_modified(|since| since.take().is_some());
            }
            None => {
                lane.unserved.send_if_modified(|since| since.is_none() && since.replace(now).is_none());
            }
        }
    }

    /// Forgets the lanes that nobody serves or waits for any more.
    fn forget_lanes(&mut self, now: Instant, wait: std::time::Duration) {
        let in_use: BTreeSet<LaneId> =
            self.sessions.iter().flatten().map(|session| session.lane).chain(self.queue.lanes()).collect();
        self.lanes.retain(|id, lane| {
            let lost_long_ago = lane.unserved.borrow().is_some_and(|since| now.duration_since(since) > wait);
            in_use.contains(id) || !lost_long_ago
        });
    }

    /// Begins the next attempt of a request, or ends it if it had as many as are allowed.
    fn requeue(&mut self, relay: &Arc<Relay>, worker: usize, reason: &'static str, attempts_max: u32) {
        let call = &relay.call;
        let mut request = relay.lock();
        let Phase::Running { .. } = request.phase else { return };
        let attempts = request.journal.attempt();
        request.journal.next_attempt();
        if request.journal.ended() {
            request.phase = Phase::Ended;
        } else if attempts >= attempts_max {
            request.fail(Outcome::AttemptsExhausted { attempts });
        } else {
            metrics::counter!(names::RESUBMISSIONS, "reason" => reason).increment(1);
            tracing::warn!(
                request_id = call.request_id,
                reason,
                attempt = attempts + 1,
                "resubmitting request"
            );
            let place = self.queue.push_front(
                call.lane,
                call.priority,
                request.arrival,
                call.tokens(),
                relay.clone(),
            );
            request.phase = Phase::Queued(place);
            request.avoid = Some(worker);
        }
        drop(request);
        relay.changed.notify_one();
    }

    /// Hands over what can be handed over: lane by lane, in order, until a head finds no room.
    fn pump(&mut self, now: Instant) {
        let lanes: Vec<LaneId> = self.queue.lanes().collect();
        for lane in lanes {
            while let Some(relay) = self.queue.head(lane).cloned() {
                match self.place(&relay, now) {
                    Verdict::Wait => break,
                    Verdict::Fail(outcome) => {
                        self.queue.pop(lane);
                        relay.lock().fail(outcome);
                        relay.changed.notify_one();
                    }
                    Verdict::Hand(worker) => {
                        if let Some((place, relay)) = self.queue.pop(lane) {
                            self.hand_over(&relay, &place, worker, now);
                        }
                    }
                }
            }
        }
        metrics::gauge!(names::QUEUE_REQUESTS).set(self.queue.len() as f64);
        metrics::gauge!(names::QUEUE_TOKENS).set(self.queue.tokens() as f64);
    }

    fn place(&mut self, relay: &Relay, now: Instant) -> Verdict {
        if relay.expired(now) {
            return Verdict::Fail(Outcome::DeadlineExceeded);
        }
        let request = relay.lock();
        let lane = relay.call.lane;
        let eligible = |session: &&Session| {
            session.lane == lane
                && !session.draining
                && u64::from(session.limits.sequence_tokens()) >= relay.call.sequence_tokens()
        };
        let begun = request.journal.tokens() > 0;
        let same = |session: &&Session| request.fingerprint.as_ref() == Some(&session.fingerprint);
        let sessions = || self.sessions.iter().flatten().filter(eligible);
        // A stream that has begun goes on with the very same tokens where that is possible at all.
        let keep_fingerprint = begun && sessions().any(|session| same(&session));
        let candidates: Vec<Candidate> = sessions()
            .filter(|session| !keep_fingerprint || same(session))
            .map(|session| Candidate {
                worker: session.worker,
                grant: session.ledger.grant(),
                used: session.ledger.used(),
                need: Credits {
                    sequences: request.journal.running().count_ones(),
                    blocks: request.journal.blocks(relay.call.prompt.len(), session.block_tokens),
                },
                avoid: request.avoid == Some(session.worker),
            })
            .collect();
        if candidates.is_empty() && self.sessions_of(lane).any(|session| !session.draining) {
            // Limits shrank while it waited: the workers that could hold it are gone.
            return Verdict::Fail(Outcome::Invalid(format!(
                "prompt and max_tokens come to {} tokens, more than the workers now connected can hold",
                relay.call.sequence_tokens()
            )));
        }
        match self.placement.choose(&candidates) {
            Some(worker) => Verdict::Hand(worker),
            None => Verdict::Wait,
        }
    }

    fn hand_over(&mut self, relay: &Arc<Relay>, place: &Place<LaneId>, worker: usize, now: Instant) {
        let submission = self.next_submission;
        self.next_submission += 1;
        let Some(session) = self.sessions.get_mut(worker).and_then(Option::as_mut) else { return };
        let mut request = relay.lock();
        if request.journal.tokens() > 0
            && request.fingerprint.as_ref().is_some_and(|before| *before != session.fingerprint)
        {
            metrics::counter!(names::FINGERPRINT_CHANGES).increment(1);
            tracing::warn!(
                request_id = relay.call.request_id,
                worker = session.address,
                "stream goes on at a worker of another fingerprint; its tokens may differ"
            );
        }
        request.arrival = place.arrival();
        request.phase = Phase::Running { worker, session: session.id, submission };
        request.fingerprint = Some(session.fingerprint.clone());
        request.queue_span = None;
        if request.times.placed.is_none() {
            request.times.placed = Some(now);
            let waited = now.saturating_duration_since(relay.call.arrived);
            let model = relay.call.model.clone();
            metrics::histogram!(names::QUEUE_SECONDS, "model" => model.clone()).record(waited);
            metrics::counter!(names::PROMPT_TOKENS, "model" => model)
                .increment(relay.call.prompt.len() as u64);
        }
        let blocks = request.journal.blocks(relay.call.prompt.len(), session.block_tokens);
        let running = request.journal.running();
        let submit = relay.submission(&request.journal, submission, now);
        let attempt = request.journal.attempt();
        drop(request);
        session.submit(relay, attempt, running, blocks, submit);
        relay.changed.notify_one();
    }
}

enum Verdict {
    Wait,
    Fail(Outcome),
    Hand(usize),
}

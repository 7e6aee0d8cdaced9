//! The dispatcher's shell: feeds events to the pure [`Dispatcher`] under one lock and carries out its commands.

mod execute;
mod handoff;
mod model_aliases;
pub(crate) mod model_counters;
mod notices;
pub(crate) mod observer;
mod phase_spans;
mod recorder;
pub(crate) mod request;
mod state;
pub(crate) mod transition;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use inflight_net::{batch_wakeups, create_private_file};
use inflight_router_core::{
    Dispatcher, Event, Recording, ResolveError, ResubmissionReason, SessionId, Violation, WorkerId,
    WorkerInfo, WorkerUpdate, prompt_chains,
};
use tokio::sync::watch;

use crate::call_guard::CallGuard;
use crate::clock;
use crate::live::hub::Hub;
use crate::live::request::NewRequest;
use crate::live::tracker::Tracker;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::request::admitted_call::AdmittedCall;
use crate::stats::RouterStats;
use model_counters::CountersByModel;
use observer::{Billing, RequestObserver};
use recorder::Recorder;
use request::ActiveRequest;
use state::DispatcherState;
pub(crate) use state::{ReportedPool, ServedModel, WorkerConnection, WorkerMessage};
use transition::Transition;

/// The router's dispatcher, shared by the tasks of clients and workers. Driven by events (arrival, update,
/// lost session, tick); nothing polls.
pub(crate) struct SharedDispatcher {
    options: Options,
    state: Mutex<DispatcherState>,
    ready: watch::Sender<bool>,
    /// Models with at least one serving worker.
    served: watch::Sender<BTreeSet<String>>,
    /// Number of routers that share the workers, as reported by workers.
    routers: AtomicU32,
    /// Epoch of the times passed to the dispatcher.
    epoch: Instant,
    /// Live view; `None` without `--admin`.
    live: Option<Arc<Hub>>,
    /// Counters of ended requests.
    counters: Arc<CountersByModel>,
}

/// What to do after an event, outside the lock.
#[derive(Default)]
struct Aftermath {
    /// Streams with something to read, woken together so that those of one connection write all their tokens
    /// at once.
    readers: Vec<Waker>,
    violation: Option<Violation>,
}

/// Handle of an admitted request, owned by its client's stream; dropping it cancels the request.
pub(crate) struct Ticket {
    dispatch: Arc<SharedDispatcher>,
    pub(crate) active: Arc<ActiveRequest>,
}

impl Ticket {
    /// Ends a choice on the router's side: cancels it at its worker and delivers nothing more of it.
    pub(crate) fn withdraw(&self, choice: u32) {
        self.dispatch.handle(Event::ChoiceWithdrawn { request: self.active.id(), choice });
    }

    /// Resumes a paused request whose client reads again.
    pub(crate) fn resume(&self) {
        self.active.observe(&Transition::Resumed, clock::now());
        self.dispatch.handle(Event::ClientResumed { request: self.active.id() });
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.dispatch.release(&self.active);
    }
}

impl SharedDispatcher {
    /// Interval of [`SharedDispatcher::tick`].
    pub(crate) const TICK: Duration = Dispatcher::TICK;

    /// Creates a dispatcher without workers.
    ///
    /// # Errors
    /// I/O error: the recording cannot be created.
    pub(crate) fn new(options: &Options) -> io::Result<Self> {
        let mut seed = DefaultHasher::new();
        (&options.router_id(), &options.incarnation).hash(&mut seed);
        let (core_options, seed) = (options.dispatcher, seed.finish());
        let core = Dispatcher::new(core_options, options.placement.build(seed));
        let recorder = options.record.as_ref().map(|path| {
            let log = Recording::new(core_options, options.placement, seed);
            create_private_file(path).map(|file| Recorder::new(file, log))
        });
        let epoch = clock::now();
        let live = Hub::new(options, epoch);
        Ok(Self {
            options: options.clone(),
            live: live.clone(),
            state: Mutex::new(DispatcherState::new(core, recorder.transpose()?, live)),
            ready: watch::Sender::new(false),
            served: watch::Sender::default(),
            routers: AtomicU32::new(1),
            epoch,
            counters: Arc::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, DispatcherState> {
        // The state is consistent at every call that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Converts a time to the time since the epoch.
    fn since_epoch(&self, time: Instant) -> Duration {
        time.saturating_duration_since(self.epoch)
    }

    /// Applies an event, carries out its commands and wakes the streams that have something to read.
    fn handle(&self, event: Event) -> Option<Violation> {
        let mut state = self.lock();
        let aftermath = self.apply(&mut state, event);
        drop(state);
        aftermath.finish()
    }

    /// Returns a receiver of whether at least one worker accepts requests.
    pub(crate) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Returns a receiver of the models with at least one serving worker.
    pub(crate) fn served(&self) -> watch::Receiver<BTreeSet<String>> {
        self.served.subscribe()
    }

    /// Returns the number of routers that share the workers.
    pub(crate) fn routers(&self) -> u32 {
        self.routers.load(Ordering::Relaxed)
    }

    /// Returns the hub of the live view, if there is one.
    pub(crate) fn live(&self) -> Option<&Arc<Hub>> {
        self.live.as_ref()
    }

    /// Returns the counters of ended requests.
    pub(crate) fn counters(&self) -> &CountersByModel {
        &self.counters
    }

    /// Adds a request to the live view, if there is one.
    fn track(&self, call: &AdmittedCall) -> Option<Tracker> {
        let hub = self.live.as_ref()?;
        let new = NewRequest {
            request_id: &call.request_id,
            tenant: &call.tenant,
            weight: call.weight.get(),
            model: &call.model,
            priority: call.priority.get(),
            prompt_tokens: u32::try_from(call.prompt.len()).unwrap_or(u32::MAX),
            max_tokens: call.max_tokens,
            choices: call.sampling.n,
            arrived: call.arrived,
            trace_id: call.trace.exported_trace(),
        };
        Some(Tracker::new(hub, &new, clock::now()))
    }

    /// Returns the current load of the router.
    pub(crate) fn stats(&self) -> RouterStats {
        let load = self.lock().core.load();
        RouterStats {
            open: load.open,
            waiting: load.queued + load.retries + load.quarantined,
            in_flight: load.in_flight,
            sequences: load.used.sequences,
            blocks: load.used.blocks,
        }
    }

    /// Resolves a name of a model; of several lanes, the one with workers of the required fingerprint.
    pub(crate) fn resolve(
        &self,
        asked: &str,
        fingerprint: Option<&str>,
        now: Instant,
    ) -> Result<ServedModel, Outcome> {
        let waited = self.options.dispatcher.no_worker_timeout;
        let state = self.lock();
        let name = state.model_of(asked);
        let resolved = state.core.resolve(name, fingerprint, self.since_epoch(now));
        let served = resolved.map(|lane| state.served_model(lane));
        match served {
            Ok(Some(served)) => Ok(served),
            Ok(None) => Err(Outcome::Unserved { model: asked.to_owned(), waited }),
            Err(ResolveError::NeverConnected { workers }) => Err(Outcome::NeverConnected { workers }),
            Err(ResolveError::Unserved { model }) => Err(Outcome::Unserved { model, waited }),
            Err(ResolveError::Unknown { asked, served }) => Err(Outcome::UnknownModel { asked, served }),
            Err(ResolveError::Ambiguous { served }) => {
                let served = served.join(", ");
                let reason = format!("model is empty, but several are served; name one of: {served}");
                Err(Outcome::field("model", reason))
            }
        }
    }

    /// Returns the models with serving workers, by name, with the fingerprint of each worker.
    pub(crate) fn models(&self) -> Vec<(ServedModel, Vec<String>)> {
        let state = self.lock();
        let mut models: BTreeMap<String, (ServedModel, Vec<String>)> = BTreeMap::new();
        for (id, lane) in state.core.served_lanes() {
            let fingerprints = || state.core.fingerprints(id).map(str::to_owned);
            if let Some(served) = state.served_model(id) {
                let entry = models.entry(lane.name().to_owned()).or_insert_with(|| (served, Vec::new()));
                entry.1.extend(fingerprints());
            }
        }
        models.into_values().collect()
    }

    /// Returns the further names of a model, sorted.
    pub(crate) fn aliases(&self, model: &str) -> Vec<String> {
        self.lock().aliases.aliases_of(model).map(str::to_owned).collect()
    }

    /// Queues a request, and dispatches it at once if a worker has room. `span` is recorded until the end of its stream; spans of its
    /// phases are children of it.
    pub(crate) fn submit(
        self: &Arc<Self>,
        call: AdmittedCall,
        span: tracing::Span,
        guard: CallGuard,
        billing: Billing,
    ) -> Result<Ticket, Outcome> {
        // Hashing is slow, so it happens outside the lock. Each block size has its own chain.
        let sizes = self.lock().core.block_sizes(call.lane);
        // A prompt whose log probabilities are requested is computed without the prefix cache.
        let cacheable = if call.sampling.prompt_logprobs.is_some() { &[] } else { &call.prompt[..] };
        let chains = prompt_chains(&call.tenant, cacheable, &sizes);
        let spec = Box::new(call.spec(chains, |deadline| self.since_epoch(deadline)));
        let observer = RequestObserver::new(&call, span, billing, self.track(&call), self.counters.clone());
        let mut state = self.lock();
        let request =
            state.requests.insert_with_key(|id| Arc::new(ActiveRequest::new(id, call, guard, observer)));
        let active = state.requests[request].clone();
        let aftermath = self.apply(&mut state, Event::Arrived { request, call: spec });
        let rejected = active.rejection();
        if rejected.is_some() {
            state.requests.remove(request);
            active.observe(&Transition::Rejected, clock::now());
        }
        drop(state);
        aftermath.finish();
        match rejected {
            Some(outcome) => Err(outcome),
            None => Ok(Ticket { dispatch: self.clone(), active }),
        }
    }

    /// Ends a request whose client's call has ended.
    fn release(&self, active: &ActiveRequest) {
        let request = active.id();
        let mut state = self.lock();
        let aftermath = self.apply(&mut state, Event::Released { request });
        state.requests.remove(request);
        drop(state);
        active.observe(&Transition::Released, clock::now());
        active.guard.end();
        aftermath.finish();
    }

    /// Adds a known worker, reachable or not.
    pub(crate) fn join(&self, worker: WorkerId) {
        self.handle(Event::WorkerJoined { worker });
    }

    /// Retires a worker that was removed from discovery: it gets nothing new, and its streams end or move.
    pub(crate) fn retire(&self, worker: WorkerId) {
        self.handle(Event::WorkerRetired { worker });
    }

    /// Removes a worker.
    pub(crate) fn leave(&self, worker: WorkerId) {
        self.handle(Event::WorkerLeft { worker });
    }

    /// Whether a session has nothing in flight.
    pub(crate) fn is_idle(&self, worker: WorkerId, session: SessionId) -> bool {
        self.lock().core.is_idle(worker, session)
    }

    /// Opens a session with a worker. Returns its id.
    pub(crate) fn open(&self, info: WorkerInfo, connection: WorkerConnection) -> SessionId {
        let mut state = self.lock();
        let worker = info.worker;
        let (session, model) = (state.next_session(), connection.model.clone());
        state.name(&info, &connection);
        state.connect(worker, session, connection);
        let aftermath = self.apply(&mut state, Event::SessionOpened { session, worker: Box::new(info) });
        state.set_model(worker, model);
        drop(state);
        aftermath.finish();
        session
    }

    /// Applies a worker's update.
    ///
    /// # Errors
    /// [`Violation`] for a protocol violation: the session must then be closed. What was valid before it is
    /// applied.
    pub(crate) fn update(
        &self,
        worker: WorkerId,
        session: SessionId,
        update: WorkerUpdate,
    ) -> Result<(), Violation> {
        let violation = self.handle(Event::Updated { worker, session, update: Box::new(update) });
        violation.map_or(Ok(()), Err)
    }

    /// Closes a lost session: resubmits its requests in flight, ahead of all new ones.
    pub(crate) fn close(&self, worker: WorkerId, session: SessionId, reason: ResubmissionReason) {
        let mut state = self.lock();
        let aftermath = self.apply(&mut state, Event::SessionClosed { worker, session, reason });
        state.disconnect(worker, session);
        drop(state);
        aftermath.finish();
    }

    /// Runs the time-driven work, and ends calls whose clients have read nothing for the stall timeout or until the
    /// deadline. Their streams are not polled and would hold their resources until the connections end.
    pub(crate) fn tick(&self) {
        let waited = self.options.stall_timeout;
        let mut state = self.lock();
        let mut aftermath = self.apply(&mut state, Event::Tick);
        let now = clock::now();
        for request in state.stalled_requests(now, waited) {
            aftermath.merge(self.apply(&mut state, Event::ClientStalled { request, waited }));
        }
        let unread = state.take_unread_failures(now);
        state.set_slow_gauges();
        state.flush_recording();
        if let Some(hub) = &self.live {
            hub.tick(now, self.routers());
        }
        drop(state);
        aftermath.finish();
        // A stream that is polled takes its own lock before the dispatcher's.
        unread.iter().for_each(|active| active.end_stream());
    }
}

impl Aftermath {
    /// Wakes the streams; outside the dispatcher's lock. Returns the protocol violation, if there was one.
    fn finish(self) -> Option<Violation> {
        if !self.readers.is_empty() {
            batch_wakeups(|| self.readers.into_iter().for_each(Waker::wake));
        }
        self.violation
    }

    fn merge(&mut self, other: Self) {
        self.readers.extend(other.readers);
        self.violation = self.violation.take().or(other.violation);
    }
}

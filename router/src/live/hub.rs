//! The hub of the live view: open and ended requests, workers, tenants, windows of figures, and the viewers.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use inflight_router_core::{SubmissionId, WorkerId};
use tokio::sync::watch;

use super::findings::{self, RouterFinding};
use super::request::{LiveRequest, NewRequest};
use super::sampler::{Sampler, Snapshot};
use super::tenant::LiveTenant;
use super::view::{ClusterView, LifeView, RequestView};
use super::viewer_places::{PlaceLost, ViewerPlaces};
use super::window::{PartClock, Rate, RollingPercentiles};
use super::worker::LiveWorker;
use crate::metrics as names;
use crate::options::{Admin, Options, TraceUrl};

/// Ended requests that are kept.
const ENDED_MAX: usize = 1000;
/// Table size above which idle tenants are removed.
const TENANTS_MAX: usize = 1000;

/// State of the live view, shared by dispatcher, sessions and viewers.
pub(crate) struct Hub {
    router: Arc<str>,
    policy: &'static str,
    admin: Admin,
    stall_timeout: Duration,
    bytes_per_second: u64,
    trace_url: Option<TraceUrl>,
    /// Socket of the supervisor under `inflight up`.
    supervisor: Option<PathBuf>,
    /// Worker addresses; the index plus one is the number of a worker under `inflight up`.
    up_workers: Vec<String>,
    next_number: AtomicU64,
    /// Whether the recording has ended with an error.
    recording_failed: AtomicBool,
    /// Models whose workers have different fingerprints.
    mixed_models: Mutex<Vec<String>>,
    registry: Mutex<Registry>,
    workers: Mutex<BTreeMap<WorkerId, Arc<LiveWorker>>>,
    models: Mutex<Vec<String>>,
    routers: AtomicU32,
    output_tokens: AtomicU64,
    prompt_tokens: AtomicU64,
    ended_requests: AtomicU64,
    first_token: RollingPercentiles,
    gap: RollingPercentiles,
    queue: RollingPercentiles,
    rates: Mutex<Rates>,
    viewers: Mutex<ViewerPlaces>,
    /// Whether workers are to be observed: a viewer with iterations is there.
    observing: watch::Sender<bool>,
    sampler: Mutex<Sampler>,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hub")
    }
}

#[derive(Debug, Default)]
pub(super) struct Registry {
    pub(super) open: BTreeMap<u64, Arc<LiveRequest>>,
    /// Most recently ended requests, oldest first.
    pub(super) ended: VecDeque<Arc<LiveRequest>>,
    /// Number of all ended requests so far.
    pub(super) ended_total: u64,
    /// Worker and request of each submission of these.
    submissions: BTreeMap<SubmissionId, (WorkerId, Arc<LiveRequest>)>,
    pub(super) tenants: BTreeMap<Arc<str>, Arc<LiveTenant>>,
    /// Number of tenants at which idle tenants are removed from the table.
    tenants_full: usize,
}

impl Registry {
    /// Returns a tenant.
    fn tenant(&mut self, name: &str) -> Arc<LiveTenant> {
        if let Some(tenant) = self.tenants.get(name) {
            return tenant.clone();
        }
        if self.tenants.len() >= self.tenants_full.max(TENANTS_MAX) {
            self.tenants.retain(|_, tenant| Arc::strong_count(tenant) > 1);
            // Later, so that the search costs little for each new tenant.
            self.tenants_full = 2 * self.tenants.len();
        }
        let tenant = Arc::new(LiveTenant::new(name));
        self.tenants.insert(tenant.name.clone(), tenant.clone());
        tenant
    }
}

struct Rates {
    parts: PartClock,
    output_tokens: Rate,
    prompt_tokens: Rate,
    ended: Rate,
}

/// Place of a viewer, until it is dropped or lost.
#[derive(Debug)]
pub(super) struct ViewerPlace {
    hub: Arc<Hub>,
    id: u64,
}

impl ViewerPlace {
    /// Keeps the place until the stall timeout after `due`, the time of the next update.
    ///
    /// # Errors
    /// [`PlaceLost`].
    pub(super) fn keep(&self, due: Instant) -> Result<(), PlaceLost> {
        lock(&self.hub.viewers).keep(self.id, due)
    }
}

impl Drop for ViewerPlace {
    fn drop(&mut self) {
        let mut viewers = lock(&self.hub.viewers);
        viewers.leave(self.id);
        self.hub.publish_viewers(&viewers);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The state is consistent at every call that could panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    /// Creates the hub of a router; `None` without `--admin`.
    pub(crate) fn new(options: &Options, now: Instant) -> Option<Arc<Self>> {
        if options.admin == Admin::Off {
            return None;
        }
        let parts = PartClock::new(now);
        let (output_tokens, prompt_tokens, ended) = Default::default();
        Some(Arc::new(Self {
            router: Arc::from(options.router_id()),
            policy: options.placement.name(),
            admin: options.admin,
            stall_timeout: options.stall_timeout,
            bytes_per_second: options.viewer_bytes_per_second,
            trace_url: options.trace_url.clone(),
            supervisor: options.supervisor.clone(),
            up_workers: options.supervisor.as_ref().map_or_else(Vec::new, |_| options.workers.clone()),
            next_number: AtomicU64::new(1),
            recording_failed: AtomicBool::new(false),
            mixed_models: Mutex::default(),
            registry: Mutex::default(),
            workers: Mutex::default(),
            models: Mutex::default(),
            routers: AtomicU32::new(1),
            output_tokens: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            ended_requests: AtomicU64::new(0),
            first_token: RollingPercentiles::new(),
            gap: RollingPercentiles::new(),
            queue: RollingPercentiles::new(),
            rates: Mutex::new(Rates { parts, output_tokens, prompt_tokens, ended }),
            viewers: Mutex::new(ViewerPlaces::new(options.viewers_max)),
            observing: watch::Sender::new(false),
            sampler: Mutex::default(),
        }))
    }

    pub(super) fn registry(&self) -> MutexGuard<'_, Registry> {
        lock(&self.registry)
    }

    pub(super) fn policy(&self) -> &'static str {
        self.policy
    }

    /// Returns the socket of the supervisor, if workers can be killed.
    pub(crate) fn killer(&self) -> Option<&PathBuf> {
        self.supervisor.as_ref().filter(|_| self.admin == Admin::On)
    }

    /// Returns the number of processes that a kill can name.
    pub(crate) fn up_workers(&self) -> usize {
        self.up_workers.len()
    }

    /// Adds a request.
    pub(super) fn arrive(&self, new: &NewRequest<'_>, now: Instant) -> Arc<LiveRequest> {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let mut registry = self.registry();
        let tenant = registry.tenant(new.tenant);
        tenant.set_weight(new.weight);
        let request = Arc::new(LiveRequest::new(number, new, tenant));
        request.queued(now, "");
        registry.open.insert(number, request.clone());
        drop(registry);
        request
    }

    /// Forgets a request that was not admitted.
    pub(super) fn forget(&self, number: u64) {
        self.registry().open.remove(&number);
    }

    /// Keeps the request of a submission, which its worker's iterations name, and forgets an older one.
    pub(super) fn submitted(
        &self,
        worker: WorkerId,
        submission: SubmissionId,
        request: &Arc<LiveRequest>,
        forgotten: Option<SubmissionId>,
    ) {
        let mut registry = self.registry();
        if let Some(forgotten) = forgotten {
            registry.submissions.remove(&forgotten);
        }
        registry.submissions.insert(submission, (worker, request.clone()));
    }

    /// Returns the request of a submission to this worker, open or ended: iterations are reported up to a tenth of a second
    /// after a short request has ended.
    pub(crate) fn request_of(&self, submission: SubmissionId, worker: WorkerId) -> Option<Arc<LiveRequest>> {
        let registry = self.registry();
        let (submitted_to, request) = registry.submissions.get(&submission)?;
        (*submitted_to == worker).then(|| request.clone())
    }

    /// Moves a request to those that have ended.
    pub(super) fn ended(&self, request: &Arc<LiveRequest>) {
        self.ended_requests.fetch_add(1, Ordering::Relaxed);
        let mut registry = self.registry();
        registry.ended_total += 1;
        registry.open.remove(&request.number);
        let oldest = if registry.ended.len() == ENDED_MAX { registry.ended.pop_front() } else { None };
        for submission in oldest.iter().flat_map(|oldest| oldest.take_submissions()) {
            registry.submissions.remove(&submission);
        }
        registry.ended.push_back(request.clone());
        drop(registry);
        // Its memory is freed outside of the lock.
        drop(oldest);
    }

    pub(super) fn count_output(&self, tokens: u32) {
        self.output_tokens.fetch_add(tokens.into(), Ordering::Relaxed);
    }

    pub(super) fn count_dispatched(&self, tokens: u32) {
        self.prompt_tokens.fetch_add(tokens.into(), Ordering::Relaxed);
    }

    pub(super) fn count_queued(&self, waited: Duration) {
        self.queue.record(waited);
    }

    pub(super) fn count_first_token(&self, after: Duration) {
        self.first_token.record(after);
    }

    pub(super) fn count_gap(&self, gap: Duration) {
        self.gap.record(gap);
    }

    /// Follows the time; called at every tick of the dispatcher.
    pub(crate) fn tick(&self, now: Instant, routers: u32) {
        self.routers.store(routers, Ordering::Relaxed);
        let mut rates = lock(&self.rates);
        rates.parts.advance(now, &[&self.first_token, &self.gap, &self.queue]);
        rates.output_tokens.sample(now, self.output_tokens.load(Ordering::Relaxed));
        rates.prompt_tokens.sample(now, self.prompt_tokens.load(Ordering::Relaxed));
        rates.ended.sample(now, self.ended_requests.load(Ordering::Relaxed));
        drop(rates);
        self.remove_stalled_viewers(now);
    }

    /// Sets the names of the served models.
    pub(crate) fn set_models(&self, models: impl Iterator<Item = String>) {
        *lock(&self.models) = models.collect();
    }

    /// Adds a worker that discovery has found, or returns the known one.
    pub(crate) fn join(&self, worker: WorkerId, address: &str) -> Arc<LiveWorker> {
        let of_up = self.up_workers.iter().position(|known| known == address);
        let number = of_up.map_or(0, |at| u32::try_from(at + 1).unwrap_or(0));
        let mut workers = lock(&self.workers);
        workers.entry(worker).or_insert_with(|| Arc::new(LiveWorker::new(worker, address, number))).clone()
    }

    /// Removes a worker.
    pub(crate) fn leave(&self, worker: WorkerId) {
        lock(&self.workers).remove(&worker);
    }

    /// Returns a worker.
    pub(crate) fn worker(&self, worker: WorkerId) -> Option<Arc<LiveWorker>> {
        lock(&self.workers).get(&worker).cloned()
    }

    /// Returns all workers.
    pub(super) fn all_workers(&self) -> Vec<Arc<LiveWorker>> {
        lock(&self.workers).values().cloned().collect()
    }

    /// Takes a place for a viewer of a tenant or address; `None` if there are as many viewers as allowed.
    pub(super) fn enter(
        self: &Arc<Self>,
        whose: Arc<str>,
        iterations: bool,
        now: Instant,
    ) -> Option<ViewerPlace> {
        let mut viewers = lock(&self.viewers);
        let Some(id) = viewers.enter(whose, iterations, now) else {
            metrics::counter!(names::VIEWERS_REFUSED).increment(1);
            return None;
        };
        self.publish_viewers(&viewers);
        Some(ViewerPlace { hub: self.clone(), id })
    }

    /// Takes the places of viewers that have not asked for an update for the stall timeout after it was due: they do not
    /// read, and HTTP/2's flow control keeps their connections alive. Their streams end when they read again.
    fn remove_stalled_viewers(&self, now: Instant) {
        let mut viewers = lock(&self.viewers);
        if viewers.remove_stalled(now, self.stall_timeout) {
            self.publish_viewers(&viewers);
        }
    }

    fn publish_viewers(&self, viewers: &ViewerPlaces) {
        metrics::gauge!(names::VIEWERS).set(viewers.taken() as f64);
        let observes = viewers.observe_iterations();
        self.observing.send_if_modified(|now| std::mem::replace(now, observes) != observes);
    }

    /// Returns a receiver of whether workers are to be observed.
    pub(crate) fn observing(&self) -> watch::Receiver<bool> {
        self.observing.subscribe()
    }

    /// Returns the maximum number of viewers.
    pub(crate) fn viewers_max(&self) -> usize {
        lock(&self.viewers).most()
    }

    /// Returns the time after which a viewer that reads nothing loses its place.
    pub(crate) fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    /// Returns the bytes a second that a viewer may be sent.
    pub(super) fn bytes_per_second(&self) -> u64 {
        self.bytes_per_second
    }

    /// Returns the state of the cluster, which is at most a tenth of a second old.
    pub(super) fn snapshot(&self, now: Instant) -> Arc<Snapshot> {
        let mut sampler = lock(&self.sampler);
        sampler.snapshot(self, now)
    }

    /// Returns the figures of the whole cluster; those of requests are the sampler's.
    pub(super) fn cluster(&self, now: Instant) -> ClusterView {
        let rates = lock(&self.rates);
        ClusterView {
            router: self.router.clone(),
            version: env!("CARGO_PKG_VERSION"),
            routers: self.routers.load(Ordering::Relaxed),
            output_tokens_per_second: rates
                .output_tokens
                .per_second(now, self.output_tokens.load(Ordering::Relaxed)),
            prompt_tokens_per_second: rates
                .prompt_tokens
                .per_second(now, self.prompt_tokens.load(Ordering::Relaxed)),
            ended_per_second: rates.ended.per_second(now, self.ended_requests.load(Ordering::Relaxed)),
            first_token_ms: self.first_token.percentiles(),
            gap_ms: self.gap.percentiles(),
            queue_ms: self.queue.percentiles(),
            viewers: u32::try_from(lock(&self.viewers).taken()).unwrap_or(u32::MAX),
            models: lock(&self.models).clone(),
            can_kill_workers: self.killer().is_some(),
            ..ClusterView::default()
        }
    }

    /// Returns what is wrong at the router. Requests queued for longer than `queue_objective` count as late.
    pub(crate) fn findings(&self, now: Instant, queue_objective: Duration) -> Vec<RouterFinding> {
        let snapshot = self.snapshot(now);
        let workers: Vec<_> = snapshot.workers.iter().map(|sample| &sample.view).collect();
        let mut findings = findings::of(&snapshot.cluster, &workers, queue_objective);
        if self.recording_failed.load(Ordering::Relaxed) {
            findings.push(RouterFinding::recording_failed());
        }
        findings.extend(RouterFinding::mixed_fingerprints(&lock(&self.mixed_models)));
        findings
    }

    /// Sets the models whose workers have different fingerprints.
    pub(crate) fn set_mixed_models(&self, models: Vec<String>) {
        *lock(&self.mixed_models) = models;
    }

    /// Reports that the recording has ended with an error.
    pub(crate) fn set_recording_failed(&self) {
        self.recording_failed.store(true, Ordering::Relaxed);
    }

    /// Lists requests, oldest first, with the number of those beyond `limit`. `tenant`: only its requests, unless empty.
    pub(crate) fn list(
        &self,
        tenant: &str,
        with_ended: bool,
        limit: usize,
        now: Instant,
    ) -> (Vec<RequestView>, u32) {
        let snapshot = self.snapshot(now);
        let ended = snapshot.ended.iter().filter(|_| with_ended).map(|request| (request, None));
        let open = snapshot.open.iter().map(|sample| (&sample.request, Some(&sample.now)));
        let of_tenant = |request: &LiveRequest| tenant.is_empty() || *request.tenant.name == *tenant;
        let mut chosen: Vec<_> = ended.chain(open).filter(|(request, _)| of_tenant(request)).collect();
        chosen.sort_by_key(|(request, _)| request.number);
        let omitted = chosen.len().saturating_sub(limit);
        let views = chosen.into_iter().take(limit).map(|(request, state)| match state {
            Some(state) => request.view(state, now),
            None => request.view(&request.now(), now),
        });
        (views.collect(), u32::try_from(omitted).unwrap_or(u32::MAX))
    }

    /// Returns the life of a request: by its number, or else by its request id (of several, the newest).
    pub(crate) fn life(&self, number: u64, request_id: &str, now: Instant) -> Option<LifeView> {
        let found = {
            let registry = self.registry();
            let all = registry.open.values().chain(&registry.ended);
            let wanted = all.filter(|request| match number {
                0 => request.has_id(request_id),
                number => request.number == number,
            });
            wanted.max_by_key(|request| request.number).cloned()
        };
        let request = found?;
        let snapshot = self.snapshot(now);
        let sampled = snapshot.open.binary_search_by_key(&request.number, |sample| sample.request.number);
        let state = request.now();
        // What is observed of it, if it is still what was sampled.
        let state = match sampled.ok().map(|at| &snapshot.open[at].now) {
            Some(sampled) if state.ended_us.is_none() && sampled.place == state.place => sampled.clone(),
            _ => state,
        };
        Some(request.life(&state, self.trace_url.as_ref(), now))
    }
}

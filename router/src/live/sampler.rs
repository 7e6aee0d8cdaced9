//! Snapshots of the cluster, taken when a viewer needs one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_router_core::WorkerId;

use super::hub::Hub;
use super::observation::Together;
use super::request::{LiveRequest, RequestNow};
use super::tenant::LiveTenant;
use super::view::{ClusterView, State, TenantView, WorkerView};
use super::window::Rate;
use super::worker::LiveWorker;

/// Minimum age of a snapshot before another one is taken.
const AGE_MIN: Duration = Duration::from_millis(90);
/// Age of the last snapshot after which rates of tenants start anew.
const GAP_MAX: Duration = Duration::from_secs(2);
/// Tenants listed by themselves.
const TENANTS_MAX: usize = 100;
/// Name of the sum of the other tenants.
const OTHERS: &str = "(other)";

/// State of the cluster at one time.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    /// Number of the snapshot, from 1.
    pub(super) number: u64,
    pub(super) cluster: ClusterView,
    /// Workers sorted by name, without their iterations.
    pub(super) workers: Vec<WorkerSample>,
    pub(super) tenants: Vec<TenantView>,
    /// Open requests by number.
    pub(super) open: Vec<RequestSample>,
    /// Most recently ended requests, in the order of their ends.
    pub(super) ended: Vec<Arc<LiveRequest>>,
    /// All that have ended.
    pub(super) ended_total: u64,
}

#[derive(Debug, Clone)]
pub(super) struct RequestSample {
    pub(super) request: Arc<LiveRequest>,
    pub(super) now: RequestNow,
    /// Number of the last snapshot in which the request changed.
    pub(super) changed: u64,
}

#[derive(Debug, Clone)]
pub(super) struct WorkerSample {
    pub(super) worker: Arc<LiveWorker>,
    pub(super) view: WorkerView,
}

#[derive(Debug, Default)]
pub(super) struct Sampler {
    taken: Option<Instant>,
    last: Arc<Snapshot>,
    rates: BTreeMap<Arc<str>, Rate>,
    reasons: Reasons,
}

/// Counts of requests of a tenant, by where they are.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    queued: u32,
    in_flight: u32,
    held: u32,
}

impl Counts {
    fn add(&mut self, now: &RequestNow) {
        match now.state {
            State::Queued => self.queued += 1,
            State::Retry | State::Quarantined => self.held += 1,
            State::Waiting | State::Prefill | State::Decode | State::Preempted | State::Swapped => {
                self.in_flight += 1;
            }
            State::Paused | State::Ended | State::Unspecified => {}
        }
    }
}

impl Sampler {
    /// Returns the last snapshot, or a new one if that is too old.
    pub(super) fn snapshot(&mut self, hub: &Hub, now: Instant) -> Arc<Snapshot> {
        let age = self.taken.map(|taken| now.saturating_duration_since(taken));
        if age.is_some_and(|age| age < AGE_MIN) {
            return self.last.clone();
        }
        if age.is_none_or(|age| age > GAP_MAX) {
            self.rates.clear();
        }
        self.taken = Some(now);
        self.last = Arc::new(self.take(hub, now));
        self.last.clone()
    }

    fn take(&mut self, hub: &Hub, now: Instant) -> Snapshot {
        let number = self.last.number + 1;
        let (open, ended, ended_total, tenants) = {
            let registry = hub.registry();
            let open: Vec<_> = registry.open.values().cloned().collect();
            let ended: Vec<_> = registry.ended.iter().cloned().collect();
            (open, ended, registry.ended_total, registry.tenants.values().cloned().collect::<Vec<_>>())
        };
        let workers = hub.all_workers();
        let served: BTreeSet<Arc<str>> = workers.iter().filter_map(|worker| worker.served_model()).collect();
        let observed: BTreeMap<WorkerId, BTreeMap<u64, Together>> =
            workers.iter().map(|worker| (worker.id, worker.observed().requests())).collect();
        let mut before = self.last.open.iter().peekable();
        let open = open.into_iter().map(|request| {
            let mut state = request.now();
            let place = state.place.as_ref().and_then(|place| observed.get(&place.worker));
            if let Some(together) = place.and_then(|of_worker| of_worker.get(&request.number)) {
                join(&mut state, together);
            }
            state.waiting_reason = self.reasons.of(&state, served.contains(&request.model));
            while before.next_if(|sample| sample.request.number < request.number).is_some() {}
            let same = before.peek().filter(|sample| sample.request.number == request.number);
            let changed = same.filter(|sample| sample.now == state).map_or(number, |sample| sample.changed);
            RequestSample { request, now: state, changed }
        });
        let open: Vec<RequestSample> = open.collect();
        let mut counts: BTreeMap<&str, Counts> = BTreeMap::new();
        let mut all = Counts::default();
        let mut by_worker: BTreeMap<WorkerId, u32> = BTreeMap::new();
        for sample in &open {
            all.add(&sample.now);
            counts.entry(&sample.request.tenant.name).or_default().add(&sample.now);
            if let Some(place) = &sample.now.place {
                *by_worker.entry(place.worker).or_default() += 1;
            }
        }
        let cluster = ClusterView {
            open_requests: u32::try_from(open.len()).unwrap_or(u32::MAX),
            queued_requests: all.queued,
            in_flight_requests: all.in_flight,
            retrying_requests: all.held,
            ..hub.cluster(now)
        };
        let mut blocks: BTreeMap<Arc<str>, u32> = BTreeMap::new();
        for (tenant, of_worker) in workers.iter().flat_map(|worker| worker.observed().blocks_by_tenant()) {
            let sum = blocks.entry(tenant).or_default();
            *sum = sum.saturating_add(of_worker);
        }
        let tenants = self.tenants(&tenants, &counts, &blocks, now);
        let workers = workers.into_iter().map(|worker| {
            let requests = by_worker.get(&worker.id).copied().unwrap_or_default();
            let view = WorkerView { requests, ..worker.view(now) };
            WorkerSample { worker, view }
        });
        let mut workers: Vec<_> = workers.collect();
        workers.sort_by(|a, b| (&a.view.name, &a.view.address).cmp(&(&b.view.name, &b.view.address)));
        Snapshot { number, cluster, workers, tenants, open, ended, ended_total }
    }

    /// Returns the tenants that have requests or had service, those with most service first.
    fn tenants(
        &mut self,
        tenants: &[Arc<LiveTenant>],
        counts: &BTreeMap<&str, Counts>,
        blocks: &BTreeMap<Arc<str>, u32>,
        now: Instant,
    ) -> Vec<TenantView> {
        let mut before = std::mem::take(&mut self.rates);
        let mut views = Vec::new();
        for tenant in tenants {
            let mut rate = before.remove(&tenant.name).unwrap_or_default();
            let service = tenant.service();
            rate.sample(now, service);
            let service_per_second = rate.per_second(now, service);
            self.rates.insert(tenant.name.clone(), rate);
            let counts = counts.get(&*tenant.name);
            if counts.is_none() && service_per_second <= 0.0 {
                continue;
            }
            let Counts { queued, in_flight, .. } = counts.copied().unwrap_or_default();
            views.push(TenantView {
                tenant: tenant.name.clone(),
                weight: tenant.weight(),
                service_per_second,
                queued_requests: queued,
                in_flight_requests: in_flight,
                kv_blocks: blocks.get(&tenant.name).copied().unwrap_or_default(),
                ..TenantView::default()
            });
        }
        let service: f64 = views.iter().map(|view| view.service_per_second).sum();
        let weights: f64 = views.iter().map(|view| view.weight).sum();
        for view in &mut views {
            view.share = if service > 0.0 { view.service_per_second / service } else { 0.0 };
            view.fair_share = if weights > 0.0 { view.weight / weights } else { 0.0 };
        }
        views.sort_by(|a, b| {
            b.service_per_second.total_cmp(&a.service_per_second).then_with(|| a.tenant.cmp(&b.tenant))
        });
        let others = views.split_off(views.len().min(TENANTS_MAX));
        if !others.is_empty() {
            views.push(sum(&others));
        }
        views
    }
}

/// Adds what is observed of a request's sequences.
fn join(now: &mut RequestNow, together: &Together) {
    // Its own state is older: the observation is of a tenth of a second ago at most.
    if matches!(now.state, State::Waiting | State::Decode) {
        now.state = together.state;
    }
    now.kv_blocks = together.kv_blocks;
    now.computed_tokens = together.computed_tokens;
    now.waiting_reason = together.waiting_reason.clone();
}

/// Sums tenants up.
fn sum(others: &[TenantView]) -> TenantView {
    let start = TenantView { tenant: Arc::from(OTHERS), ..TenantView::default() };
    others.iter().fold(start, |mut sum, other| {
        sum.weight += other.weight;
        sum.service_per_second += other.service_per_second;
        sum.share += other.share;
        sum.fair_share += other.fair_share;
        sum.queued_requests += other.queued_requests;
        sum.in_flight_requests += other.in_flight_requests;
        sum.kv_blocks += other.kv_blocks;
        sum
    })
}

/// Reasons to wait at the router, allocated once.
#[derive(Debug)]
struct Reasons {
    room: Arc<str>,
    unserved: Arc<str>,
    retry: Arc<str>,
    quarantine: Arc<str>,
    paused: Arc<str>,
    unreported: Arc<str>,
}

impl Default for Reasons {
    fn default() -> Self {
        Self {
            room: Arc::from("no worker has room"),
            unserved: Arc::from("no worker serves its model"),
            retry: Arc::from("retry budget"),
            quarantine: Arc::from("needs a worker of its own"),
            paused: Arc::from("its client does not read"),
            unreported: Arc::from("not reported by its worker yet"),
        }
    }
}

impl Reasons {
    /// Returns why a request waits, as far as the router knows.
    fn of(&self, now: &RequestNow, served: bool) -> Arc<str> {
        let reason = match now.state {
            State::Queued if served => &self.room,
            State::Queued => &self.unserved,
            State::Retry => &self.retry,
            State::Quarantined => &self.quarantine,
            State::Paused => &self.paused,
            State::Waiting | State::Preempted | State::Swapped if now.waiting_reason.is_empty() => {
                &self.unreported
            }
            _ => &now.waiting_reason,
        };
        reason.clone()
    }
}

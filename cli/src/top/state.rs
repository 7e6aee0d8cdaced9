//! What the cluster does, merged from the updates of a watch. Names from clients are made harmless here, once.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use inflight_proto::v1::{
    ClusterDiagnosis, ClusterFinding, ClusterView, Load, RequestState, RequestView, TenantView,
    WatchResponse, WorkerFacts, WorkerLimits, WorkerView,
};

use super::text::harmless;

/// Open requests that are kept: more than a router sends.
const OPEN_MAX: usize = 20_000;
/// Ended requests that are kept.
const ENDED_MAX: usize = 1_000;
/// Iterations of a worker over which its step time is averaged.
const STEPS_MAX: usize = 64;
/// Age of the oldest of them.
const STEP_AGE_MAX_MS: u64 = 5_000;

/// Findings that are kept: more than a router sends.
const FINDINGS_MAX: usize = 100;

/// A request.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Last reported view of the request.
    pub view: RequestView,
    /// Time of its arrival, in milliseconds since the Unix epoch.
    arrived_ms: u64,
}

impl Request {
    /// Whether the request has ended.
    pub fn ended(&self) -> bool {
        self.view.state() == RequestState::Ended
    }
}

/// A worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    /// Last reported view of the worker, without slots and iterations.
    pub view: WorkerView,
    /// Time of arrival and duration in microseconds of the last iterations.
    steps: VecDeque<(u64, u32)>,
}

impl Worker {
    /// Load.
    pub fn load(&self) -> Load {
        self.view.load.unwrap_or_default()
    }

    /// Limits.
    pub fn limits(&self) -> WorkerLimits {
        self.view.limits.unwrap_or_default()
    }

    /// Program, device and memory.
    pub fn facts(&self) -> WorkerFacts {
        self.view.facts.clone().unwrap_or_default()
    }

    /// Mean duration of the last iterations, in microseconds; `None` if there were none lately.
    pub fn step_us(&self) -> Option<f64> {
        let sum: f64 = self.steps.iter().map(|(_, step)| f64::from(*step)).sum();
        (!self.steps.is_empty()).then(|| sum / self.steps.len() as f64)
    }
}

/// State of the cluster after an update.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClusterState {
    /// The whole cluster.
    pub cluster: ClusterView,
    /// Time of the last update at the router, in milliseconds since the Unix epoch; 0: there was none.
    pub unix_ms: u64,
    /// Workers by name.
    pub workers: Vec<Worker>,
    /// Tenants by service.
    pub tenants: Vec<TenantView>,
    /// Requests by number.
    pub requests: BTreeMap<u64, Request>,
    /// Updates that the router left out.
    pub skipped_updates: u64,
    /// Latest findings; `None` before the first ones, and of an older router.
    pub diagnosis: Option<ClusterDiagnosis>,
    /// Numbers of the ended requests, in the order of their ends.
    ended: VecDeque<u64>,
}

impl ClusterState {
    /// Applies an update. The `first` update of a watch replaces all requests of the previous watch.
    pub fn apply(&mut self, update: WatchResponse, first: bool) {
        if first {
            self.diagnosis = None;
            self.requests.clear();
            self.ended.clear();
        }
        self.unix_ms = update.unix_ms;
        self.skipped_updates += u64::from(update.skipped_updates);
        if let Some(cluster) = update.cluster {
            self.cluster = ClusterView {
                router: harmless(&cluster.router),
                version: harmless(&cluster.version),
                models: cluster.models.iter().map(|model| harmless(model)).collect(),
                ..cluster
            };
        }
        let mut steps: BTreeMap<String, VecDeque<(u64, u32)>> =
            self.workers.drain(..).map(|worker| (worker.view.name, worker.steps)).collect();
        for mut view in update.workers {
            view.name = harmless(&view.name);
            view.address = harmless(&view.address);
            view.model = harmless(&view.model);
            view.state = harmless(&view.state);
            view.facts = view.facts.map(harmless_facts);
            let mut steps = steps.remove(&view.name).unwrap_or_default();
            let latest = view.iterations.len().saturating_sub(STEPS_MAX);
            steps.extend(view.iterations[latest..].iter().map(|step| (update.unix_ms, step.duration_us)));
            steps.drain(..steps.len().saturating_sub(STEPS_MAX));
            steps.retain(|(at, _)| update.unix_ms.saturating_sub(*at) <= STEP_AGE_MAX_MS);
            (view.slots, view.iterations) = (Vec::new(), Vec::new());
            self.workers.push(Worker { view, steps });
        }
        if let Some(diagnosis) = update.diagnosis {
            self.diagnosis = Some(harmless_diagnosis(diagnosis));
        }
        let named = |tenant: TenantView| TenantView { tenant: harmless(&tenant.tenant), ..tenant };
        self.tenants = update.tenants.into_iter().map(named).collect();
        for view in update.requests {
            self.apply_request(view);
        }
    }

    fn apply_request(&mut self, view: RequestView) {
        let number = view.number;
        let known = self.requests.get(&number);
        let was_ended = known.is_some_and(Request::ended);
        let open = self.requests.len() - self.ended.len();
        let mut view = harmless_request(view);
        // Of a request that ended long ago, the router may know the end only.
        if let Some(known) = known
            && view.state() == RequestState::Ended
            && view.request_id.is_empty()
        {
            let outcome = if view.outcome.is_empty() { known.view.outcome.clone() } else { view.outcome };
            let age_ms = if view.age_ms == 0 { known.view.age_ms } else { view.age_ms };
            view = RequestView { state: RequestState::Ended.into(), outcome, age_ms, ..known.view.clone() };
        }
        let arrived_ms = self.unix_ms.saturating_sub(view.age_ms);
        let request = Request { view, arrived_ms };
        if request.ended() && !was_ended {
            self.ended.push_back(number);
        } else if known.is_none() && open >= OPEN_MAX {
            return;
        }
        self.requests.insert(number, request);
        while self.ended.len() > ENDED_MAX {
            let oldest = self.ended.pop_front();
            oldest.into_iter().for_each(|number| drop(self.requests.remove(&number)));
        }
    }

    /// Open requests of which this is the list.
    pub fn open(&self) -> usize {
        self.requests.len() - self.ended.len()
    }

    /// Age of a request at the last update; of an ended one, from arrival to end.
    pub fn age(&self, request: &Request) -> Duration {
        let open = self.unix_ms.saturating_sub(request.arrived_ms);
        Duration::from_millis(if request.ended() { request.view.age_ms } else { open })
    }
}

/// Returns the facts of a worker with harmless texts.
fn harmless_facts(facts: WorkerFacts) -> WorkerFacts {
    WorkerFacts {
        version: harmless(&facts.version),
        device: harmless(&facts.device),
        weight_encoding: harmless(&facts.weight_encoding),
        kv_encoding: harmless(&facts.kv_encoding),
        ..facts
    }
}

/// Returns the diagnosis with harmless texts and a bounded number of findings.
fn harmless_diagnosis(diagnosis: ClusterDiagnosis) -> ClusterDiagnosis {
    let finding = |finding: ClusterFinding| ClusterFinding {
        worker: harmless(&finding.worker),
        bottleneck: harmless(&finding.bottleneck),
        evidence: harmless(&finding.evidence),
        advice: harmless(&finding.advice),
        ..finding
    };
    let findings = diagnosis.findings.into_iter().take(FINDINGS_MAX).map(finding).collect();
    ClusterDiagnosis { findings, ..diagnosis }
}

/// Returns the view with harmless names.
pub fn harmless_request(view: RequestView) -> RequestView {
    RequestView {
        request_id: harmless(&view.request_id),
        tenant: harmless(&view.tenant),
        model: harmless(&view.model),
        worker: harmless(&view.worker),
        waiting_reason: harmless(&view.waiting_reason),
        outcome: harmless(&view.outcome),
        ..view
    }
}

/// Returns the name of a request's state.
pub fn state_name(state: RequestState) -> &'static str {
    match state {
        RequestState::Unspecified => "unknown",
        RequestState::Queued => "queued",
        RequestState::Waiting => "waiting",
        RequestState::Prefill => "prefill",
        RequestState::Decode => "decode",
        RequestState::Preempted => "preempted",
        RequestState::Swapped => "swapped",
        RequestState::Retry => "retry",
        RequestState::Quarantined => "quarantined",
        RequestState::Paused => "paused",
        RequestState::Ended => "ended",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_proto::v1::IterationView;

    fn request(number: u64, state: RequestState, age_ms: u64) -> RequestView {
        RequestView {
            number,
            state: state.into(),
            age_ms,
            request_id: format!("r{number}\n"),
            ..RequestView::default()
        }
    }

    fn update(unix_ms: u64, requests: Vec<RequestView>) -> WatchResponse {
        WatchResponse { unix_ms, requests, ..WatchResponse::default() }
    }

    #[test]
    fn requests_are_merged_age_between_updates_and_end() {
        let mut state = ClusterState::default();
        let both = vec![request(1, RequestState::Queued, 500), request(2, RequestState::Decode, 100)];
        state.apply(update(10_000, both), true);
        state.apply(update(11_000, vec![request(2, RequestState::Ended, 700)]), false);
        let ages = state.requests.values().map(|request| state.age(request).as_millis());
        assert_eq!(ages.collect::<Vec<_>>(), [1_500, 700], "an ended request does not age");
        assert_eq!((state.open(), state.requests[&1].view.request_id.as_str()), (1, "r1\u{fffd}"));
        // Of the ended requests, the last ones are kept.
        let ended = (3..1_100).map(|number| request(number, RequestState::Ended, 1)).collect();
        state.apply(update(12_000, ended), false);
        assert_eq!((state.open(), state.requests.len()), (1, 1 + ENDED_MAX));
        assert!(!state.requests.contains_key(&2) && state.requests.contains_key(&1_099));
        // Of an end that is known by its number only, the rest stays known.
        let end = RequestView { number: 1, state: RequestState::Ended.into(), ..RequestView::default() };
        state.apply(update(12_500, vec![end]), false);
        assert_eq!((state.open(), state.requests[&1].view.request_id.as_str()), (0, "r1\u{fffd}"));
        // Another watch begins.
        state.apply(update(13_000, vec![request(7, RequestState::Retry, 0)]), true);
        assert_eq!((state.open(), state.requests.len()), (1, 1));
    }

    #[test]
    fn a_router_that_sends_too_many_requests_costs_bounded_memory() {
        let mut state = ClusterState::default();
        let many =
            (1..=OPEN_MAX as u64 + 50).map(|number| request(number, RequestState::Queued, 1)).collect();
        state.apply(update(1_000, many), true);
        assert_eq!(state.open(), OPEN_MAX);
        state.apply(update(2_000, vec![request(1, RequestState::Decode, 1)]), false);
        assert_eq!(state.requests[&1].view.state(), RequestState::Decode, "known requests still change");
    }

    #[test]
    fn step_times_are_the_mean_of_recent_iterations() {
        let mut state = ClusterState::default();
        let mut worker = |at, steps: &[u32]| {
            let step = |duration_us: &u32| IterationView { duration_us: *duration_us, ..Default::default() };
            let iterations = steps.iter().map(step).collect();
            let view = WorkerView { name: "w".to_owned(), iterations, ..WorkerView::default() };
            state.apply(WatchResponse { workers: vec![view], ..update(at, Vec::new()) }, false);
            state.workers[0].step_us()
        };
        assert_eq!(worker(1_000, &[100, 200]), Some(150.0));
        assert_eq!(worker(2_000, &[]), Some(150.0));
        assert_eq!(worker(3_000, &[300]), Some(200.0));
        assert_eq!(worker(7_000, &[]), Some(300.0));
        assert_eq!(worker(9_000, &[]), None);
        assert_eq!(worker(9_500, &[7; 1_000]), Some(7.0));
    }
}

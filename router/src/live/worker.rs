//! A worker in the live view: its session, its load, and what is observed of its iterations.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use inflight_router_core::WorkerId;

use super::observation::Observed;
use super::view::{FactsView, LimitsView, LoadView, WorkerState, WorkerView};

/// Known worker, connected or not.
#[derive(Debug)]
pub(crate) struct LiveWorker {
    pub(super) id: WorkerId,
    address: Arc<str>,
    /// Number of its process under `inflight up`; 0: not under `up`.
    pub(super) up_number: u32,
    state: Mutex<WorkerNow>,
    observed: Mutex<Observed>,
}

#[derive(Debug, Default)]
struct WorkerNow {
    /// Empty before its first session.
    name: Arc<str>,
    model: Arc<str>,
    connected: bool,
    draining: bool,
    ejected_until: Option<Instant>,
    limits: LimitsView,
    load: LoadView,
    facts: FactsView,
}

impl LiveWorker {
    pub(super) fn new(id: WorkerId, address: &str, up_number: u32) -> Self {
        let state = Mutex::new(WorkerNow::default());
        Self { id, address: Arc::from(address), up_number, state, observed: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, WorkerNow> {
        // The state is consistent at every call that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what is observed of it.
    pub(crate) fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that its session has opened.
    pub(crate) fn connected(&self, name: &str, model: &str, limits: LimitsView, facts: FactsView) {
        let mut state = self.lock();
        state.facts = facts;
        (state.name, state.model) = (Arc::from(name), Arc::from(model));
        (state.connected, state.draining, state.limits) = (true, false, limits);
    }

    /// Records that its session has closed.
    pub(crate) fn disconnected(&self) {
        let mut state = self.lock();
        (state.connected, state.load) = (false, LoadView::default());
        drop(state);
        self.observed().clear();
    }

    /// Records its load.
    pub(crate) fn set_load(&self, load: LoadView) {
        self.lock().load = load;
    }

    /// Records that it drains.
    pub(crate) fn draining(&self) {
        self.lock().draining = true;
    }

    /// Records that it is ejected from placement.
    pub(crate) fn ejected(&self, until: Instant) {
        self.lock().ejected_until = Some(until);
    }

    /// Returns its name; before its first session its address.
    pub(super) fn name(&self) -> Arc<str> {
        let name = self.lock().name.clone();
        if name.is_empty() { self.address.clone() } else { name }
    }

    /// Returns its model if it is connected.
    pub(super) fn served_model(&self) -> Option<Arc<str>> {
        let state = self.lock();
        state.connected.then(|| state.model.clone())
    }

    /// Returns its view, without what is observed.
    pub(super) fn view(&self, now: Instant) -> WorkerView {
        let observed = self.observed();
        let (kv_blocks_cached, step_target_us) = (observed.kv_blocks_cached, observed.step_target_us);
        drop(observed);
        let state = self.lock();
        let connection = match &*state {
            WorkerNow { connected: false, .. } => WorkerState::Disconnected,
            WorkerNow { draining: true, .. } => WorkerState::Draining,
            WorkerNow { ejected_until: Some(until), .. } if now < *until => WorkerState::Ejected,
            _ => WorkerState::Connected,
        };
        WorkerView {
            name: if state.name.is_empty() { self.address.clone() } else { state.name.clone() },
            address: self.address.clone(),
            model: state.model.clone(),
            state: Some(connection),
            limits: state.limits.clone(),
            load: state.load.clone(),
            facts: state.facts.clone(),
            up_number: self.up_number,
            kv_blocks_cached,
            step_target_us,
            ..WorkerView::default()
        }
    }
}

//! Diagnosis of the cluster while viewers watch: at most one every few seconds, whatever their number.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::cluster::worker_calls::WorkerCalls;
use crate::live::diagnosis::merge;
use crate::live::hub::Hub;
use crate::live::view::DiagnosisView;

/// Queueing time beyond which a request counts as late, where a diagnosis asks for none.
pub(crate) const QUEUE_OBJECTIVE: Duration = Duration::from_secs(1);
/// Time between two diagnoses.
const INTERVAL: Duration = Duration::from_secs(5);
/// Age of the iterations that are analysed.
const WINDOW: Duration = Duration::from_secs(60);
/// Age from which a diagnosis is not shown any more: no viewer watched meanwhile.
const AGE_MAX: Duration = Duration::from_secs(60);

/// Diagnosis of the cluster, shared by all viewers.
pub(crate) struct ViewerDiagnosis {
    hub: Arc<Hub>,
    calls: Arc<WorkerCalls>,
    drain: CancellationToken,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Time from which another diagnosis is due; `None` before the first one.
    due: Option<Instant>,
    /// The diagnosis that is being made.
    task: Option<JoinHandle<()>>,
    latest: Option<NumberedDiagnosis>,
}

/// Diagnosis with its number, which increases.
#[derive(Clone)]
pub(crate) struct NumberedDiagnosis {
    pub(crate) number: u64,
    pub(crate) view: Arc<DiagnosisView>,
    made: Instant,
}

impl ViewerDiagnosis {
    pub(crate) fn new(hub: Arc<Hub>, calls: Arc<WorkerCalls>, drain: CancellationToken) -> Arc<Self> {
        Arc::new(Self { hub, calls, drain, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent at every call that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the latest diagnosis, and starts another one if one is due. Called while someone watches, within Tokio.
    pub(crate) fn latest(self: &Arc<Self>) -> Option<NumberedDiagnosis> {
        let now = clock::now();
        let mut state = self.lock();
        let idle = state.task.as_ref().is_none_or(JoinHandle::is_finished);
        if idle && state.due.is_none_or(|due| due <= now) {
            state.due = Some(now + INTERVAL);
            let diagnosis = self.clone();
            state.task = Some(tokio::spawn(async move {
                tokio::select! {
                    biased;
                    () = diagnosis.drain.cancelled() => {}
                    () = diagnosis.make() => {}
                }
            }));
        }
        state.latest.clone().filter(|latest| now.saturating_duration_since(latest.made) < AGE_MAX)
    }

    async fn make(&self) {
        let workers = self.calls.findings(WINDOW).await;
        let now = clock::now();
        let view = merge(self.hub.findings(now, QUEUE_OBJECTIVE), workers);
        let mut state = self.lock();
        let number = state.latest.as_ref().map_or(1, |latest| latest.number + 1);
        state.latest = Some(NumberedDiagnosis { number, view: Arc::new(view), made: now });
    }
}

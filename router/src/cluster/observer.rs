//! Reports of a worker's sessions to the live view, and the observation of its iterations while a viewer wants them.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use inflight_proto::v1;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_router_core::WorkerId;
use tonic::Code;
use tonic::transport::Channel;

use crate::clock;
use crate::cluster::wire;
use crate::cluster::worker_calls::WorkerCalls;
use crate::live::hub::Hub;
use crate::live::worker::LiveWorker;

/// Pause after an observation that has failed.
const RETRY: Duration = Duration::from_secs(1);

/// Reports one worker to the live view.
#[derive(Debug, Clone)]
pub(super) struct Observer {
    hub: Arc<Hub>,
    id: WorkerId,
    worker: Arc<LiveWorker>,
    calls: Arc<WorkerCalls>,
}

impl Observer {
    /// Adds a worker to the live view.
    pub(super) fn join(hub: &Arc<Hub>, calls: &Arc<WorkerCalls>, id: WorkerId, address: &str) -> Self {
        Self { hub: hub.clone(), id, worker: hub.join(id, address), calls: calls.clone() }
    }

    /// Reports that its session opens.
    pub(super) fn opened(&self, hello: &v1::Hello, client: &WorkerClient<Channel>) {
        let limits = wire::limits_view(&hello.limits.unwrap_or_default());
        let facts = hello.facts.as_ref().map(wire::facts_view).unwrap_or_default();
        self.worker.connected(&hello.worker_id, &hello.model, limits, facts);
        self.calls.open(self.id, hello.worker_id.clone(), client.clone());
    }

    /// Reports its load.
    pub(super) fn load(&self, update: &v1::Update) {
        if let Some(load) = &update.load {
            self.worker.set_load(wire::load_view(load));
        }
    }

    /// Reports that its session has closed.
    pub(super) fn closed(&self) {
        self.worker.disconnected();
        self.calls.close(self.id);
    }

    /// Reports that discovery has removed it.
    pub(super) fn left(&self) {
        self.hub.leave(self.id);
    }

    /// Observes its iterations whenever a viewer wants them, over the connection of its session.
    pub(super) async fn observe(&self, client: WorkerClient<Channel>) -> Infallible {
        let mut observing = self.hub.observing();
        loop {
            // The hub outlives the session.
            let _ = observing.wait_for(|wanted| *wanted).await;
            let mut still = self.hub.observing();
            let failure = tokio::select! {
                biased;
                _ = still.wait_for(|wanted| !*wanted) => None,
                failure = self.follow(client.clone()) => Some(failure),
            };
            self.worker.observed().clear();
            match failure {
                // A worker of an older version.
                Some(Code::Unimplemented) => std::future::pending().await,
                Some(_) => tokio::time::sleep(RETRY).await,
                None => {}
            }
        }
    }

    /// Follows one observation to its end. Returns why it ended.
    async fn follow(&self, client: WorkerClient<Channel>) -> Code {
        let mut responses = match self.calls.observe(client).await {
            Ok(responses) => responses,
            Err(code) => return code,
        };
        loop {
            match responses.message().await {
                Ok(Some(response)) => {
                    let observation = wire::observation(response, |sequence| self.calls.is_own(sequence));
                    let request_of = |submission| self.hub.request_of(submission, self.id);
                    self.worker.observed().apply(observation, request_of, clock::now());
                }
                Ok(None) => return Code::Ok,
                Err(status) => {
                    tracing::debug!(%status, "observation of a worker ended");
                    return status.code();
                }
            }
        }
    }
}

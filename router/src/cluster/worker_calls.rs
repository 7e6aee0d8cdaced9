//! Calls to workers beside their sessions, for operators.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use inflight_net::SecretFile;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::{prove, v1};
use inflight_router_core::WorkerId;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use crate::cluster::wire::{self, FINDING_BYTES_MAX};
use crate::live::diagnosis::{FINDINGS_MAX, WorkerFindings};
use crate::live::display_text::display_text;
use crate::options::Options;

/// Path of the method that reports bottlenecks.
const DIAGNOSE_PATH: &str = "/inflight.v1.Worker/Diagnose";
/// Path of the method that streams iterations.
const OBSERVE_PATH: &str = "/inflight.v1.Worker/Observe";
/// Calls at once.
const CALLS_MAX: usize = 16;

/// Clients of the workers with open sessions.
#[derive(Debug)]
pub(crate) struct WorkerCalls {
    secret: Option<SecretFile>,
    limit: Duration,
    router_id: String,
    incarnation: String,
    clients: Mutex<BTreeMap<WorkerId, (String, WorkerClient<Channel>)>>,
}

impl WorkerCalls {
    pub(crate) fn new(options: &Options) -> Self {
        Self {
            secret: options.worker_secret.clone(),
            limit: options.connect_timeout,
            router_id: options.router_id(),
            incarnation: options.incarnation.clone(),
            clients: Mutex::default(),
        }
    }

    /// Adds the client of a session that has opened.
    pub(super) fn open(&self, worker: WorkerId, name: String, client: WorkerClient<Channel>) {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner).insert(worker, (name, client));
    }

    /// Removes the client of a session that has closed.
    pub(super) fn close(&self, worker: WorkerId) {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner).remove(&worker);
    }

    /// Diagnoses every connected worker; sorted by name.
    pub(crate) async fn diagnose(&self, request: v1::DiagnoseRequest) -> Vec<v1::WorkerDiagnosis> {
        let clients: Vec<_> =
            self.clients.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        let calls = clients.into_iter().map(|(worker, client)| async move {
            let answer = timeout(self.limit, self.diagnose_one(client, request)).await;
            let late = || format!("no answer within {} s", self.limit.as_secs_f64());
            match answer.unwrap_or_else(|_| Err(late())) {
                Ok(diagnosis) => {
                    v1::WorkerDiagnosis { worker, diagnosis: Some(diagnosis), error: String::new() }
                }
                Err(error) => v1::WorkerDiagnosis { worker, diagnosis: None, error },
            }
        });
        let mut diagnoses: Vec<_> = stream::iter(calls).buffer_unordered(CALLS_MAX).collect().await;
        diagnoses.sort_by(|a, b| a.worker.cmp(&b.worker));
        diagnoses
    }

    /// Diagnoses the last `age_max` of every connected worker, for viewers.
    pub(crate) async fn findings(&self, age_max: Duration) -> Vec<WorkerFindings> {
        let age_max_us = u64::try_from(age_max.as_micros()).unwrap_or(u64::MAX);
        let request = v1::DiagnoseRequest { age_max_us, ..v1::DiagnoseRequest::default() };
        let diagnoses = self.diagnose(request).await.into_iter();
        diagnoses
            .map(|of| {
                let worker = display_text(&of.worker, FINDING_BYTES_MAX);
                let found = of.diagnosis.map(|diagnosis| diagnosis.findings);
                let views = found.map(|found| {
                    found.iter().take(FINDINGS_MAX).map(|one| wire::finding_view(&worker, one)).collect()
                });
                WorkerFindings(views)
            })
            .collect()
    }

    /// Whether a sequence was submitted by this router.
    pub(super) fn is_own(&self, sequence: &v1::ObservedSequence) -> bool {
        if self.incarnation.is_empty() {
            sequence.incarnation.is_empty() && sequence.router_id == self.router_id
        } else {
            sequence.incarnation == self.incarnation
        }
    }

    /// Starts an observation of a worker.
    ///
    /// # Errors
    /// The code of the failure.
    pub(super) async fn observe(
        &self,
        mut client: WorkerClient<Channel>,
    ) -> Result<Streaming<v1::ObserveResponse>, Code> {
        let start = async {
            let secrets = self.secret.as_ref().map(SecretFile::secrets);
            let request = v1::ObserveRequest::default();
            let proved = prove(&mut client, secrets.as_deref().unwrap_or_default(), OBSERVE_PATH, request);
            let (request, _) = proved.await.map_err(|_| Code::Unauthenticated)?;
            client.observe(request).await.map_err(|status| {
                tracing::debug!(%status, "a worker refuses to be observed");
                status.code()
            })
        };
        let started = timeout(self.limit, start).await.map_err(|_| Code::DeadlineExceeded)?;
        started.map(tonic::Response::into_inner)
    }

    async fn diagnose_one(
        &self,
        mut client: WorkerClient<Channel>,
        request: v1::DiagnoseRequest,
    ) -> Result<v1::DiagnoseResponse, String> {
        let secrets = self.secret.as_ref().map(SecretFile::secrets);
        let proved = prove(&mut client, secrets.as_deref().unwrap_or_default(), DIAGNOSE_PATH, request);
        let (request, _) = proved.await.map_err(|error| error.to_string())?;
        let answer = client.diagnose(request).await;
        answer
            .map(tonic::Response::into_inner)
            .map_err(|status| format!("{:?}: {}", status.code(), status.message()))
    }
}

//! The server of a scripted worker.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Mutex;
use std::time::Instant;

use futures::{Stream, StreamExt as _};
use inflight_proto::v1::session_response::Message;
use inflight_proto::v1::worker_server::{Worker, WorkerServer};
use inflight_proto::{AnswerProof, Challenges, PROTOCOL_VERSION, SESSION_PATH, v1};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use crate::profile::{Access, Script};
use crate::session::{Command, ScriptedObservation, ScriptedSession};

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Path of the call that fetches a bundle.
const BUNDLE_PATH: &str = "/inflight.v1.Worker/FetchBundle";

/// Sessions and observations that routers have opened.
pub struct Sessions {
    sessions: mpsc::UnboundedReceiver<ScriptedSession>,
    observations: mpsc::UnboundedReceiver<ScriptedObservation>,
    diagnoses: mpsc::UnboundedReceiver<v1::DiagnoseRequest>,
}

impl Sessions {
    /// Waits for the next session; `None` if the server has ended.
    pub async fn next(&mut self) -> Option<ScriptedSession> {
        self.sessions.recv().await
    }
}

/// Worker whose sessions a test drives.
pub struct ScriptedWorker {
    /// Address on which it listens.
    pub address: SocketAddr,
    sessions: Sessions,
    server: tokio::task::JoinHandle<()>,
}

impl ScriptedWorker {
    /// Starts a worker on a free port of the loopback address.
    pub async fn start(script: impl Into<Script>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Self::serve(listener, address, script.into())
    }

    /// Returns a worker that does not listen before [`StoppedWorker::listen`].
    pub fn stopped() -> StoppedWorker {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        StoppedWorker { address: socket.local_addr().unwrap(), socket }
    }

    fn serve(listener: TcpListener, address: SocketAddr, script: Script) -> Self {
        let tls = script.tls.clone();
        let (service, sessions) = WorkerService::new(script);
        let mut server = tonic::transport::Server::builder();
        if let Some([certificate, key, ca]) = tls {
            let identity = tonic::transport::Identity::from_pem(certificate, key);
            let ca = tonic::transport::Certificate::from_pem(ca);
            let config = tonic::transport::ServerTlsConfig::new().identity(identity).client_ca_root(ca);
            server = server.tls_config(config).unwrap();
        }
        let server = server
            .add_service(WorkerServer::new(service))
            .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
        let server = tokio::spawn(async move { server.await.unwrap() });
        Self { address, sessions, server }
    }

    /// Waits for the next session.
    pub async fn session(&mut self) -> ScriptedSession {
        self.sessions.next().await.unwrap()
    }

    /// Waits for the next observer.
    pub async fn observation(&mut self) -> ScriptedObservation {
        self.sessions.observations.recv().await.unwrap()
    }

    /// Waits for the next request for a diagnosis.
    pub async fn diagnosis(&mut self) -> v1::DiagnoseRequest {
        self.sessions.diagnoses.recv().await.unwrap()
    }

    /// Returns a request for a diagnosis that has already come.
    pub fn try_diagnosis(&mut self) -> Option<v1::DiagnoseRequest> {
        self.sessions.diagnoses.try_recv().ok()
    }

    /// Returns an observer that has already come.
    pub fn try_observation(&mut self) -> Option<ScriptedObservation> {
        self.sessions.observations.try_recv().ok()
    }

    /// Waits for the next session and grants it ample credits.
    pub async fn granted(&mut self) -> ScriptedSession {
        let session = self.session().await;
        session.grant(64, 1 << 16);
        session
    }
}

/// Worker that has an address and refuses connections there until [`StoppedWorker::listen`].
pub struct StoppedWorker {
    /// Address at which it will listen.
    pub address: SocketAddr,
    socket: TcpSocket,
}

impl StoppedWorker {
    /// Starts to listen.
    pub fn listen(self, script: impl Into<Script>) -> ScriptedWorker {
        ScriptedWorker::serve(self.socket.listen(64).unwrap(), self.address, script.into())
    }
}

impl Drop for ScriptedWorker {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Service of a scripted worker, to be served with others on one port.
pub struct WorkerService {
    script: Script,
    challenges: Challenges,
    opened: mpsc::UnboundedSender<ScriptedSession>,
    observed: mpsc::UnboundedSender<ScriptedObservation>,
    diagnosed: mpsc::UnboundedSender<v1::DiagnoseRequest>,
    bad_bundles: Mutex<u32>,
    unread_sessions: Mutex<u32>,
}

impl WorkerService {
    /// Creates the service, and the sessions that routers open with it.
    pub fn new(script: Script) -> (Self, Sessions) {
        let (opened, sessions) = mpsc::unbounded_channel();
        let (observed, observations) = mpsc::unbounded_channel();
        let (diagnosed, diagnoses) = mpsc::unbounded_channel();
        let (bad_bundles, unread_sessions) =
            (Mutex::new(script.bad_bundles), Mutex::new(script.unread_sessions));
        let challenges = Challenges::new();
        let service = Self { script, challenges, opened, observed, diagnosed, bad_bundles, unread_sessions };
        (service, Sessions { sessions, observations, diagnoses })
    }

    fn authenticate<T>(&self, request: &Request<T>, path: &str) -> Result<AnswerProof, Status> {
        match &self.script.access {
            Access::Open => Ok(AnswerProof(Vec::new())),
            Access::Impostor => Ok(AnswerProof(vec![0; 32])),
            Access::Secrets(secrets) => {
                let headers = request.metadata().clone().into_headers();
                let verified = self.challenges.verify(secrets, path, &headers, Instant::now());
                verified.map_err(|error| Status::unauthenticated(error.to_string()))
            }
        }
    }
}

#[tonic::async_trait]
impl Worker for WorkerService {
    type SessionStream = Boxed<v1::SessionResponse>;
    type FetchBundleStream = Boxed<v1::FetchBundleResponse>;
    type ObserveStream = Boxed<v1::ObserveResponse>;

    async fn challenge(
        &self,
        _: Request<v1::ChallengeRequest>,
    ) -> Result<Response<v1::ChallengeResponse>, Status> {
        let challenge = match self.script.access {
            Access::Open => return Ok(Response::new(v1::ChallengeResponse::default())),
            Access::Secrets(_) | Access::Impostor => self.challenges.issue(Instant::now()),
        };
        Ok(Response::new(v1::ChallengeResponse { protocol_version: PROTOCOL_VERSION, challenge }))
    }

    async fn session(
        &self,
        request: Request<Streaming<v1::SessionRequest>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let proof = self.authenticate(&request, SESSION_PATH)?;
        let mut requests = request.into_inner();
        let open = match requests.message().await?.and_then(|request| request.message) {
            Some(Command::Open(open)) => open,
            other => return Err(Status::invalid_argument(format!("expected open, got {other:?}"))),
        };
        let hello = v1::Hello { secret_proof: proof.0, ..self.script.hello.clone() };
        let (updates, outgoing) = mpsc::unbounded_channel();
        let (incoming, commands) = mpsc::unbounded_channel();
        let (tables, services) = mpsc::unbounded_channel();
        let (waiting, backlogs) = mpsc::unbounded_channel();
        let unread = {
            let mut left = self.unread_sessions.lock().unwrap();
            let unread = *left > 0;
            *left = left.saturating_sub(1);
            unread
        };
        tokio::spawn(async move {
            if unread {
                incoming.closed().await;
            }
            while let Ok(Some(v1::SessionRequest { message: Some(command) })) = requests.message().await {
                if let Command::ServiceTable(table) = &command {
                    let _ = tables.send(table.clone());
                }
                if let Command::Backlog(backlog) = &command {
                    let _ = waiting.send(backlog.has_waiting_requests);
                }
                // Other messages are tested elsewhere.
                if matches!(command, Command::ServiceTable(_) | Command::Backlog(_)) {
                    continue;
                }
                if incoming.send(command).is_err() {
                    break;
                }
            }
        });
        let _ = self.opened.send(ScriptedSession { open, commands, services, backlogs, updates });
        let hello = v1::SessionResponse { message: Some(Message::Hello(hello)) };
        let stream = futures::stream::iter([Ok(hello)]).chain(UnboundedReceiverStream::new(outgoing));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn fetch_bundle(
        &self,
        request: Request<v1::FetchBundleRequest>,
    ) -> Result<Response<Self::FetchBundleStream>, Status> {
        self.authenticate(&request, BUNDLE_PATH)?;
        let mut bad = self.bad_bundles.lock().unwrap();
        let corrupted = *bad > 0;
        *bad = bad.saturating_sub(1);
        let pieces: Vec<_> = self
            .script
            .bundle
            .iter()
            .cloned()
            .map(|mut piece| {
                if corrupted {
                    piece.data[0] ^= 1;
                }
                Ok(piece)
            })
            .collect();
        Ok(Response::new(Box::pin(futures::stream::iter(pieces))))
    }

    async fn diagnose(
        &self,
        request: Request<v1::DiagnoseRequest>,
    ) -> Result<Response<v1::DiagnoseResponse>, Status> {
        let _ = self.diagnosed.send(request.into_inner());
        let unimplemented = || Status::unimplemented("a scripted worker has nothing to diagnose");
        self.script.diagnosis.clone().map(Response::new).ok_or_else(unimplemented)
    }

    async fn observe(&self, _: Request<v1::ObserveRequest>) -> Result<Response<Self::ObserveStream>, Status> {
        let (responses, outgoing) = mpsc::unbounded_channel();
        let _ = self.observed.send(ScriptedObservation { responses });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(outgoing))))
    }
}

//! Scripted worker: a gRPC server whose sessions are driven by tests.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures::{Stream, StreamExt};
use inflight_fixtures::Family;
pub use inflight_proto::v1::session_request::Message as Command;
use inflight_proto::v1::session_response::Message;
use inflight_proto::v1::worker_server::{Worker, WorkerServer};
use inflight_proto::{PROTOCOL_VERSION, bundle_digest, v1};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

type Files = BTreeMap<&'static str, Vec<u8>>;
type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Hello message and behaviour of a scripted worker.
#[derive(Clone)]
pub struct WorkerProfile {
    pub model: &'static str,
    pub fingerprint: &'static str,
    pub context_tokens: u32,
    pub heartbeat_interval_ms: u32,
    pub vocab_size: u32,
    pub files: Files,
    /// Number of corrupted bundles served before a valid one.
    pub bad_bundles: u32,
    /// Number of sessions whose commands the worker does not read, before one that it reads.
    pub unread_sessions: u32,
    pub incarnation: &'static str,
    /// Certificate, key, and the authority of routers.
    pub tls: Option<[String; 3]>,
    pub worker_id: &'static str,
}

impl Default for WorkerProfile {
    fn default() -> Self {
        let family = Family::Llama3;
        let files = BTreeMap::from([
            ("tokenizer.json", family.tokenizer_json().as_bytes().to_vec()),
            ("tokenizer_config.json", family.tokenizer_config_json().as_bytes().to_vec()),
        ]);
        Self {
            model: "tiny",
            fingerprint: "f1",
            context_tokens: 256,
            heartbeat_interval_ms: 60_000,
            vocab_size: 285,
            files,
            bad_bundles: 0,
            unread_sessions: 0,
            incarnation: "1",
            tls: None,
            worker_id: "scripted",
        }
    }
}

/// Worker whose sessions a test drives.
pub struct ScriptedWorker {
    pub address: SocketAddr,
    sessions: mpsc::UnboundedReceiver<ScriptedSession>,
    observations: mpsc::UnboundedReceiver<ScriptedObservation>,
    server: tokio::task::JoinHandle<()>,
}

impl ScriptedWorker {
    pub async fn start(profile: WorkerProfile) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Self::serve(listener, address, profile)
    }

    /// Returns a worker that does not listen before [`StoppedWorker::listen`].
    pub fn stopped() -> StoppedWorker {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        StoppedWorker { address: socket.local_addr().unwrap(), socket }
    }

    fn serve(listener: TcpListener, address: SocketAddr, profile: WorkerProfile) -> Self {
        let (opened, sessions) = mpsc::unbounded_channel();
        let (observed, observations) = mpsc::unbounded_channel();
        let bad_bundles = Mutex::new(profile.bad_bundles);
        let tls = profile.tls.clone();
        let unread_sessions = Mutex::new(profile.unread_sessions);
        let service = WorkerServer::new(Service { profile, opened, observed, bad_bundles, unread_sessions });
        let mut server = tonic::transport::Server::builder();
        if let Some([certificate, key, ca]) = tls {
            let identity = tonic::transport::Identity::from_pem(certificate, key);
            let ca = tonic::transport::Certificate::from_pem(ca);
            let config = tonic::transport::ServerTlsConfig::new().identity(identity).client_ca_root(ca);
            server = server.tls_config(config).unwrap();
        }
        let server = server
            .add_service(service)
            .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
        let server = tokio::spawn(async move { server.await.unwrap() });
        Self { address, sessions, observations, server }
    }

    /// Waits for the next session.
    pub async fn session(&mut self) -> ScriptedSession {
        self.sessions.recv().await.unwrap()
    }

    /// Waits for the next observer.
    pub async fn observation(&mut self) -> ScriptedObservation {
        self.observations.recv().await.unwrap()
    }

    /// Returns an observer that has already come.
    pub fn try_observation(&mut self) -> Option<ScriptedObservation> {
        self.observations.try_recv().ok()
    }

    /// Waits for the next session and grants it ample credits.
    pub async fn granted(&mut self) -> ScriptedSession {
        let session = self.session().await;
        session.grant(64, 1 << 16);
        session
    }
}

/// Worker whose address is bound, and refuses connections.
pub struct StoppedWorker {
    pub address: SocketAddr,
    socket: TcpSocket,
}

impl StoppedWorker {
    /// Starts to listen.
    pub fn listen(self, profile: WorkerProfile) -> ScriptedWorker {
        ScriptedWorker::serve(self.socket.listen(64).unwrap(), self.address, profile)
    }
}

impl Drop for ScriptedWorker {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Service {
    profile: WorkerProfile,
    opened: mpsc::UnboundedSender<ScriptedSession>,
    observed: mpsc::UnboundedSender<ScriptedObservation>,
    bad_bundles: Mutex<u32>,
    unread_sessions: Mutex<u32>,
}

/// Worker side of an observation.
pub struct ScriptedObservation {
    responses: mpsc::UnboundedSender<Result<v1::ObserveResponse, Status>>,
}

impl ScriptedObservation {
    pub fn send(&self, response: v1::ObserveResponse) {
        self.responses.send(Ok(response)).unwrap();
    }

    /// Waits until the router observes no more.
    pub async fn ended(&self) {
        self.responses.closed().await;
    }
}

/// Worker side of a session. Dropping it breaks the stream.
pub struct ScriptedSession {
    pub open: v1::SessionOpen,
    commands: mpsc::UnboundedReceiver<Command>,
    /// Received service counters of other incarnations.
    pub services: mpsc::UnboundedReceiver<v1::ServiceTable>,
    /// Received backlog reports.
    pub backlogs: mpsc::UnboundedReceiver<bool>,
    updates: mpsc::UnboundedSender<Result<v1::SessionResponse, Status>>,
}

impl ScriptedSession {
    /// Receives the next command.
    pub async fn command(&mut self) -> Command {
        self.commands.recv().await.expect("the router ended the session")
    }

    /// Returns a command that has already arrived.
    pub fn try_command(&mut self) -> Option<Command> {
        self.commands.try_recv().ok()
    }

    pub async fn submit(&mut self) -> v1::Submit {
        match self.command().await {
            Command::Submit(submit) => submit,
            other => panic!("expected a submission, got {other:?}"),
        }
    }

    /// Receives the next submission; `None` if the router ends the session first.
    pub async fn submit_or_close(&mut self) -> Option<v1::Submit> {
        match self.commands.recv().await? {
            Command::Submit(submit) => Some(submit),
            other => panic!("expected a submission, got {other:?}"),
        }
    }

    pub async fn cancel(&mut self) -> v1::Cancel {
        match self.command().await {
            Command::Cancel(cancel) => cancel,
            other => panic!("expected a cancel, got {other:?}"),
        }
    }

    /// Waits until the router ends the session, ignoring commands.
    pub async fn ended(&mut self) {
        while self.commands.recv().await.is_some() {}
    }

    /// Whether the router has ended the session.
    pub async fn closed(&mut self) -> bool {
        self.commands.recv().await.is_none()
    }

    pub fn update(&self, update: v1::Update) {
        let message = v1::SessionResponse { message: Some(Message::Update(update)) };
        // Fails if the router has closed the session.
        let _ = self.updates.send(Ok(message));
    }

    pub fn grant(&self, sequences: u32, blocks: u32) {
        self.update(v1::Update {
            grant: Some(v1::Grant { sequences, kv_blocks: blocks, priority_sequences: 0 }),
            ..Default::default()
        });
    }

    pub fn sequence(&self, sequence: v1::SequenceUpdate) {
        self.update(v1::Update { sequences: vec![sequence], ..Default::default() });
    }

    pub fn tokens(&self, submit: &v1::Submit, choice: u32, tokens: &[u32]) {
        self.sequence(sequence(submit, choice, tokens, v1::FinishReason::Unspecified));
    }

    pub fn finish(&self, submit: &v1::Submit, choice: u32, tokens: &[u32], reason: v1::FinishReason) {
        self.sequence(sequence(submit, choice, tokens, reason));
    }

    pub fn fail(&self, submit: &v1::Submit, choice: u32, code: tonic::Code) {
        self.sequence(v1::SequenceUpdate {
            error: "scripted".to_owned(),
            error_code: code as i32,
            ..sequence(submit, choice, &[], v1::FinishReason::Error)
        });
    }

    pub fn break_stream(self) {
        let _ = self.updates.send(Err(Status::unknown("scripted")));
    }
}

pub fn sequence(
    submit: &v1::Submit,
    choice: u32,
    tokens: &[u32],
    reason: v1::FinishReason,
) -> v1::SequenceUpdate {
    v1::SequenceUpdate {
        submission_id: submit.submission_id,
        attempt: submit.attempt,
        choice,
        token_ids: tokens.to_vec(),
        finish_reason: reason.into(),
        ..Default::default()
    }
}

fn digest(files: &Files) -> String {
    bundle_digest(files.iter().map(|(name, data)| (*name, data.as_slice())))
}

#[tonic::async_trait]
impl Worker for Service {
    type SessionStream = Boxed<v1::SessionResponse>;
    type FetchBundleStream = Boxed<v1::FetchBundleResponse>;
    type ObserveStream = Boxed<v1::ObserveResponse>;

    async fn challenge(
        &self,
        _: Request<v1::ChallengeRequest>,
    ) -> Result<Response<v1::ChallengeResponse>, Status> {
        Ok(Response::new(v1::ChallengeResponse::default()))
    }

    async fn session(
        &self,
        request: Request<Streaming<v1::SessionRequest>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut requests = request.into_inner();
        let open = match requests.message().await?.and_then(|request| request.message) {
            Some(Command::Open(open)) => open,
            other => return Err(Status::invalid_argument(format!("expected open, got {other:?}"))),
        };
        let profile = &self.profile;
        let hello = v1::Hello {
            protocol_version: PROTOCOL_VERSION,
            worker_id: profile.worker_id.to_owned(),
            incarnation: profile.incarnation.to_owned(),
            fingerprint: profile.fingerprint.to_owned(),
            model: profile.model.to_owned(),
            architecture: "LlamaForCausalLM".to_owned(),
            bundle_digest: digest(&profile.files),
            limits: Some(v1::WorkerLimits {
                vocab_size: self.profile.vocab_size,
                context_tokens: profile.context_tokens,
                block_tokens: 16,
                kv_blocks: 1 << 16,
                max_sequences: 64,
                host_kv_blocks: 0,
            }),
            heartbeat_interval_ms: profile.heartbeat_interval_ms,
            secret_proof: Vec::new(),
        };
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
        _: Request<v1::FetchBundleRequest>,
    ) -> Result<Response<Self::FetchBundleStream>, Status> {
        let files = Arc::new(self.profile.files.clone());
        let mut bad = self.bad_bundles.lock().unwrap();
        let corrupted = *bad > 0;
        *bad = bad.saturating_sub(1);
        let pieces: Vec<_> = files
            .iter()
            .flat_map(|(file, data)| data.chunks(1000).map(|data| (*file, data.to_vec())))
            .map(|(file, mut data)| {
                if corrupted {
                    data[0] ^= 1;
                }
                Ok(v1::FetchBundleResponse { file: file.to_owned(), data })
            })
            .collect();
        Ok(Response::new(Box::pin(futures::stream::iter(pieces))))
    }

    async fn diagnose(
        &self,
        _: Request<v1::DiagnoseRequest>,
    ) -> Result<Response<v1::DiagnoseResponse>, Status> {
        Err(Status::unimplemented("a scripted worker has nothing to diagnose"))
    }

    async fn observe(&self, _: Request<v1::ObserveRequest>) -> Result<Response<Self::ObserveStream>, Status> {
        let (responses, outgoing) = mpsc::unbounded_channel();
        let _ = self.observed.send(ScriptedObservation { responses });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(outgoing))))
    }
}

//! gRPC service of the worker: sessions with routers, model bundles, diagnosis.

mod authentication;
mod cache_feed;
mod compiling;
mod engine_thread;
pub(crate) mod fuzz;
mod load_report;
mod observation;
mod observe;
mod outbox;
mod permits;
mod service_tables;
mod submission;
mod watchdog;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use inflight_contract::Grammar;
use inflight_grammar_service::Grammars;
use inflight_net::{Peer, Turns};
use inflight_proto::v1::{self, session_request, session_response, worker_server};
use inflight_proto::{AnswerProof, LAYER_GROUPS_VERSION};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::bundle::Bundle;
use crate::engine::{Command, Request as EngineRequest, RequestKey, SessionId};
pub(crate) use authentication::{Authentication, Authenticator};
use compiling::Compiling;
pub(crate) use compiling::{COMPILED_AT_ONCE, COMPILED_KIB_MAX};
pub use engine_thread::EngineExecution;
pub(crate) use engine_thread::{COMMANDS_MAX, Clock, EngineThread, Message, RouterName};
pub(crate) use observe::OBSERVERS_MAX;
use outbox::Outbox;
pub(crate) use permits::MeteredSemaphore;
pub(crate) use service_tables::ServiceTables;
pub(crate) use watchdog::Watchdog;

/// Maximum time from the start of a session to its `open` message.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Bundle bytes per message. A `FetchBundle` call whose router does not read buffers a few of them.
const BUNDLE_CHUNK_BYTES: usize = 16 << 10;
/// Maximum concurrent `FetchBundle` streams, and maximum time that a call waits for one of them to end.
pub(crate) const BUNDLES_MAX: usize = 64;
const BUNDLE_WAIT_MAX: Duration = Duration::from_secs(10);
/// Maximum bytes of a router's id and of its incarnation, which the worker stores with each of the router's requests.
const ROUTER_NAME_BYTES_MAX: usize = 512;
/// Maximum memory of the submissions in the engine's queue, in KiB; beyond it, sessions stop reading their streams.
pub(crate) const QUEUED_KIB_MAX: usize = 256 << 10;

/// State shared by all sessions.
pub(crate) struct SessionContext {
    pub hello: v1::Hello,
    pub bundle: Bundle,
    /// Grammars of the model.
    pub grammars: Arc<Grammars>,
    pub heartbeat: Duration,
    pub clock: Clock,
    pub engine: mpsc::Sender<Message>,
    /// Permits for the memory of queued submissions, one for each KiB of [`QUEUED_KIB_MAX`].
    pub queued: MeteredSemaphore,
    /// Permits for the memory of compiled grammars whose submissions the engine has not taken, one for each KiB of [`COMPILED_KIB_MAX`].
    pub compiled: MeteredSemaphore,
    /// Turns of tenants to compile a grammar.
    pub compile_turns: Turns,
    /// Permits to send a bundle.
    pub bundles: MeteredSemaphore,
    /// Permits of open sessions, and their maximum (`--max-sessions`).
    pub permits: Arc<Semaphore>,
    pub sessions_max: u32,
    /// Permits of observers.
    pub observers: Arc<Semaphore>,
    pub draining: Arc<AtomicBool>,
    pub next: AtomicU64,
    pub watchdog: Arc<Watchdog>,
    /// Service tables of other incarnations.
    pub service_tables: ServiceTables,
    /// Verifies callers; `None` without a shared secret.
    pub authenticator: Option<Authenticator>,
}

/// Implementation of the gRPC service `Worker`; cheap to clone.
#[derive(Clone)]
pub(crate) struct WorkerService(pub Arc<SessionContext>);

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl worker_server::Worker for WorkerService {
    type SessionStream = ResponseStream<v1::SessionResponse>;
    type FetchBundleStream = ResponseStream<v1::FetchBundleResponse>;
    type ObserveStream = ResponseStream<v1::ObserveResponse>;

    async fn challenge(
        &self,
        _: Request<v1::ChallengeRequest>,
    ) -> Result<Response<v1::ChallengeResponse>, Status> {
        let challenge = self.0.authenticator.as_ref().map(Authenticator::challenge).unwrap_or_default();
        let protocol_version = inflight_proto::PROTOCOL_VERSION;
        Ok(Response::new(v1::ChallengeResponse { protocol_version, challenge }))
    }

    async fn session(
        &self,
        request: Request<Streaming<v1::SessionRequest>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let sessions = &self.0;
        if sessions.draining.load(Ordering::Acquire) {
            return Err(Status::unavailable("the worker is draining"));
        }
        if sessions.watchdog.is_stuck(sessions.clock.now()) {
            return Err(Status::unavailable("the worker's device does not answer"));
        }
        let Ok(permit) = sessions.permits.clone().try_acquire_owned() else {
            crate::metrics::session_rejected();
            let most = sessions.sessions_max;
            let what = format!("the worker has {most} sessions, the limit (--max-sessions); try again later");
            return Err(Status::resource_exhausted(what));
        };
        let peer = request.extensions().get::<Peer>().cloned();
        let secret_proof = request.extensions().get::<AnswerProof>().cloned();
        let secret_proof = secret_proof.map_or_else(Vec::new, |proof| proof.0);
        let mut requests = request.into_inner();
        let needed = if sessions.hello.layer_groups.is_empty() { 1 } else { LAYER_GROUPS_VERSION };
        let (router, protocol_version) = receive_open(&mut requests, needed).await?;
        if let Some(peer) = peer {
            peer.set_authenticated();
        }
        let id = SessionId(sessions.next.fetch_add(1, Ordering::Relaxed));
        let outbox = Arc::new(Outbox::new());
        outbox.send_service_tables(sessions.service_tables.all(sessions.clock.now()));
        let stopped = || Status::unavailable("the worker is stopping");
        tracing::info!(session = id.0, router_id = router.id, "session opened");
        sessions.engine.send(Message::Open(id, router, outbox.clone())).await.map_err(|_| stopped())?;
        crate::metrics::sessions(1.0);
        let guard = SessionGuard {
            id,
            engine: sessions.engine.clone(),
            inbound: CancellationToken::new(),
            _permit: permit,
        };
        tokio::spawn(receive(requests, id, sessions.clone(), outbox.clone(), guard.inbound.clone()));
        let hello = v1::Hello { protocol_version, secret_proof, ..sessions.hello.clone() };
        let hello = session_response::Message::Hello(hello);
        let updates = updates(outbox, sessions.clone(), guard);
        let messages = futures::stream::once(async { hello }).chain(updates);
        let responses = messages.map(|message| Ok(v1::SessionResponse { message: Some(message) }));
        Ok(Response::new(Box::pin(responses)))
    }

    async fn fetch_bundle(
        &self,
        request: Request<v1::FetchBundleRequest>,
    ) -> Result<Response<Self::FetchBundleStream>, Status> {
        let digest = request.into_inner().digest;
        let bundle = self.0.bundle.clone();
        if digest != bundle.digest() {
            let own = bundle.digest();
            return Err(Status::not_found(format!("no bundle {digest} here; this worker has {own}")));
        }
        let permit =
            tokio::time::timeout(BUNDLE_WAIT_MAX, self.0.bundles.acquire(1)).await.map_err(|_| {
                let what = format!(
                    "the worker is sending {BUNDLES_MAX} bundles, as many as it may; try again later"
                );
                Status::resource_exhausted(what)
            })?;
        let chunks = bundle.chunks(BUNDLE_CHUNK_BYTES).map(move |(file, data)| {
            let _held = &permit;
            Ok(v1::FetchBundleResponse { file, data })
        });
        Ok(Response::new(Box::pin(futures::stream::iter(chunks))))
    }

    async fn diagnose(
        &self,
        request: Request<v1::DiagnoseRequest>,
    ) -> Result<Response<v1::DiagnoseResponse>, Status> {
        let stopping = || Status::unavailable("the worker is stopping");
        let (reply, answer) = oneshot::channel();
        let message = Message::Diagnose { request: request.into_inner(), reply };
        self.0.engine.send(message).await.map_err(|_| stopping())?;
        answer.await.map(Response::new).map_err(|_| stopping())
    }

    async fn observe(
        &self,
        request: Request<v1::ObserveRequest>,
    ) -> Result<Response<Self::ObserveStream>, Status> {
        let Ok(permit) = self.0.observers.clone().try_acquire_owned() else {
            let what =
                format!("the worker has {OBSERVERS_MAX} observers, as many as it takes; try again later");
            return Err(Status::resource_exhausted(what));
        };
        let responses = observe::observe(request.into_inner(), self.0.engine.clone(), permit).await?;
        Ok(Response::new(Box::pin(responses)))
    }
}

/// Waits for the `open` message of a router that speaks protocol version `needed` or a later one; returns the router's name and the
/// protocol version that both sides support.
async fn receive_open(
    requests: &mut Streaming<v1::SessionRequest>,
    needed: u32,
) -> Result<(RouterName, u32), Status> {
    let first = tokio::time::timeout(OPEN_TIMEOUT, requests.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("the session was not opened in time"))??;
    match first.and_then(|request| request.message) {
        Some(session_request::Message::Open(open))
            if open.router_id.len().max(open.incarnation.len()) > ROUTER_NAME_BYTES_MAX =>
        {
            let what = format!("a router's id and incarnation have at most {ROUTER_NAME_BYTES_MAX} bytes");
            Err(Status::invalid_argument(what))
        }
        Some(session_request::Message::Open(open)) if open.protocol_version >= needed => {
            let router = RouterName { id: open.router_id, incarnation: open.incarnation };
            Ok((router, open.protocol_version.min(inflight_proto::PROTOCOL_VERSION)))
        }
        Some(session_request::Message::Open(open)) => Err(Status::failed_precondition(format!(
            "the router speaks protocol version {}, and this worker needs version {needed}{}; update the router",
            open.protocol_version,
            if needed < LAYER_GROUPS_VERSION { "" } else { ", as its model has layers with sliding windows" },
        ))),
        _ => Err(Status::invalid_argument("the first message of a session must be `open`")),
    }
}

/// Receives a router's messages until its stream ends, the session is dropped, or the engine is gone.
async fn receive(
    mut requests: Streaming<v1::SessionRequest>,
    id: SessionId,
    sessions: Arc<SessionContext>,
    outbox: Arc<Outbox>,
    dropped: CancellationToken,
) {
    let mut compiling = Compiling::new(&sessions);
    loop {
        let message = tokio::select! {
            biased;
            () = dropped.cancelled() => break,
            () = outbox.closed() => break,
            message = requests.message() => message,
        };
        let mut queued = Vec::new();
        let command = match message {
            Ok(Some(v1::SessionRequest { message: Some(message) })) => match message {
                session_request::Message::Submit(submit) => {
                    outbox.set_min_waiting_virtual_time(submit.min_waiting_virtual_time);
                    match submission::decode(submit, id, sessions.clock.now()) {
                        Ok(mut request) => {
                            let compiled = take_compiled(&sessions.grammars, &mut request);
                            let permits = sessions.queued.acquire(queued_kib(&request)).await;
                            if !compiled {
                                compiling.start(Box::new(request), permits);
                                continue;
                            }
                            queued.push(permits);
                            Command::Submit(Box::new(request))
                        }
                        Err(rejections) => {
                            outbox.count_submission();
                            rejections.into_iter().for_each(|event| outbox.push(event));
                            outbox.wake();
                            continue;
                        }
                    }
                }
                session_request::Message::Cancel(cancel) => {
                    let key = RequestKey { session: id, request: cancel.submission_id };
                    let command = Command::Cancel { key, choice: cancel.choice };
                    let Some(command) = compiling.hold(key, command) else { continue };
                    command
                }
                session_request::Message::Backlog(backlog) => {
                    if !backlog.has_waiting_requests {
                        outbox.set_min_waiting_virtual_time(None);
                    }
                    Command::Backlog { session: id, has_waiting: backlog.has_waiting_requests }
                }
                session_request::Message::ServiceTable(report) => {
                    if let Err(implausible) =
                        sessions.service_tables.report(id, &report, sessions.clock.now())
                    {
                        tracing::warn!(session = id.0, error = %implausible, "closing session after a protocol violation");
                        crate::metrics::protocol_violation("service_counter");
                        break;
                    }
                    continue;
                }
                session_request::Message::ResyncPrefixCache(_) => {
                    if sessions.engine.send(Message::Resync(id)).await.is_err() {
                        break;
                    }
                    continue;
                }
                session_request::Message::Open(_) => {
                    let error = "`open` was sent twice";
                    tracing::warn!(session = id.0, error, "closing session after a protocol violation");
                    crate::metrics::protocol_violation("open");
                    break;
                }
            },
            Ok(Some(v1::SessionRequest { message: None })) => continue, // from a newer router
            Ok(None) => break,
            Err(status) => {
                tracing::debug!(session = id.0, %status, "session stream failed");
                break;
            }
        };
        if sessions.engine.send(Message::Command(command, queued)).await.is_err() {
            break;
        }
    }
    outbox.close();
    sessions.service_tables.close(id, sessions.clock.now());
    compiling.stop().await;
    // Cancel its requests now, even if the router still reads updates; closing twice is harmless.
    let _ = sessions.engine.send(Message::Command(Command::Close(id), Vec::new())).await;
}

/// Returns the maximum memory of a request in the engine's queue, in KiB. A compiled grammar counts in full, though the cache and other
/// requests may share it; one that is not compiled yet is counted by [`Compiling`].
fn queued_kib(request: &EngineRequest) -> u32 {
    let resumed: usize = request.choices.iter().map(|choice| choice.tokens.len()).sum();
    let grammar = request.sampling.constraint.as_ref().map_or(0, |_| Grammar::BYTES_MAX);
    let compiled = match (&request.sampling.constraint, &request.grammar) {
        (None, _) | (_, Some(Err(_)) | None) => 0,
        (Some(_), Some(Ok(compiled))) => compiled.bytes(),
    };
    let sampling = &request.sampling;
    let words: usize = sampling.bad_word_token_ids.iter().map(Vec::len).sum();
    let lists = sampling.allowed_token_ids.len() + 2 * sampling.logit_bias.len() + words;
    let bytes = size_of::<u32>() * (request.prompt.len() + resumed + lists) + grammar + compiled;
    (1 + bytes.div_ceil(1 << 10)).min(QUEUED_KIB_MAX) as u32
}

/// Sets a request's compiled grammar from the cache. Returns false if the grammar has to be compiled first.
fn take_compiled(grammars: &Grammars, request: &mut EngineRequest) -> bool {
    let Some(constraint) = &request.sampling.constraint else { return true };
    let Some(known) = grammars.compiled(&constraint.grammar) else { return false };
    crate::metrics::grammar_lookup(true, Duration::ZERO, grammars.counters().entries);
    request.grammar = Some(known);
    true
}

/// Stream of the session's updates, with heartbeats while nothing changes.
fn updates(
    outbox: Arc<Outbox>,
    sessions: Arc<SessionContext>,
    guard: SessionGuard,
) -> impl Stream<Item = session_response::Message> + Send {
    futures::stream::unfold((outbox, sessions, guard), |(outbox, sessions, guard)| async move {
        // A timeout makes a heartbeat: an update with the worker's state only.
        let silent = tokio::time::timeout(sessions.heartbeat, outbox.changed()).await.is_err();
        if silent && sessions.watchdog.is_stuck(sessions.clock.now()) {
            tracing::error!(session = guard.id.0, "closing session: the device does not respond");
            return None;
        }
        let update = outbox.take()?;
        Some((session_response::Message::Update(update), (outbox, sessions, guard)))
    })
}

/// Closes the session when the response stream, which owns the guard, is dropped.
struct SessionGuard {
    id: SessionId,
    engine: mpsc::Sender<Message>,
    inbound: CancellationToken,
    _permit: OwnedSemaphorePermit,
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        self.inbound.cancel();
        crate::metrics::sessions(-1.0);
        tracing::info!(session = self.id.0, "session closed");
        let close = Message::Command(Command::Close(self.id), Vec::new());
        let engine = self.engine.clone();
        if let Err(mpsc::error::TrySendError::Full(close)) = engine.try_send(close)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move { engine.send(close).await.ok() });
        }
    }
}

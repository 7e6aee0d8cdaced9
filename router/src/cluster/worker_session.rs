//! Session task of a worker: connect, open a session, forward updates, reconnect with backoff.

use std::error::Error as _;
use std::future::Future;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::{LayerGroup, MemoryShape, ModelLimits};
use inflight_net::SecretFile;
use inflight_proto::v1::session_request::Message as ToWorker;
use inflight_proto::v1::session_response::Message as Response;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::{CallProof, PROTOCOL_VERSION, ProveError, SESSION_PATH, prove, v1};
use inflight_router_core::{Credits, ResubmissionReason, SessionId, Violation, WorkerId, WorkerInfo};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};

use crate::clock;
use crate::cluster::bundle::{BundleError, BundleFiles};
use crate::cluster::connector::Connector;
use crate::cluster::model_cache::ModelCache;
use crate::cluster::observer::Observer;
use crate::cluster::wire;
use crate::dispatcher::{ReportedPool, SharedDispatcher, WorkerConnection};
use crate::metrics as names;
use crate::options::{Options, OptionsError, secure_endpoint};

/// Path of the method that streams a bundle.
const FETCH_BUNDLE_PATH: &str = "/inflight.v1.Worker/FetchBundle";
/// Maximum time to fetch a bundle. Other workers with the same bundle wait meanwhile, for it to be loaded once.
const BUNDLE_TIME_MAX: Duration = Duration::from_secs(60);
/// Maximum bytes of a name in a worker's hello: routers keep them as labels of metrics.
const HELLO_NAME_BYTES_MAX: usize = 512;
/// Maximum further names of a worker's model.
const MODEL_ALIASES_MAX: usize = 64;

/// Failure to open a session, or end of one.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error(transparent)]
    Address(#[from] OptionsError),
    #[error("cannot connect: {0}")]
    Connect(String),
    #[error("no answer to {what} within {} s", .limit.as_secs_f64())]
    Timeout { what: &'static str, limit: Duration },
    #[error(transparent)]
    Prove(#[from] ProveError),
    #[error("the worker does not know the secret of --worker-secret-file: it did not prove it")]
    Unproven,
    #[error("the worker refused {what}: {} ({:?})", .status.message(), .status.code())]
    Refused { what: &'static str, status: Status },
    #[error("protocol violation by the worker: {0}")]
    Protocol(String),
    #[error("protocol violation by the worker: {0}")]
    ProtocolViolation(#[from] Violation),
    #[error("the worker has drained")]
    Drained,
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error("session stream failed: {} ({:?})", .0.message(), .0.code())]
    Broken(Status),
    #[error("session stream closed by the worker")]
    Closed,
    #[error("no update within {} s", .0.as_secs_f64())]
    Silent(Duration),
    #[error("the worker does not read its commands: {0} wait for it, the limit of --worker-commands-max")]
    Overflow(usize),
}

/// Maintains the session with one worker: connects, passes updates to the dispatcher, and reconnects with
/// backoff. Ends once the worker is retired and has nothing in flight.
#[derive(Clone)]
pub(crate) struct SessionTask {
    pub(crate) worker: WorkerId,
    pub(crate) address: String,
    pub(crate) options: Options,
    pub(crate) dispatch: Arc<SharedDispatcher>,
    pub(crate) models: Arc<ModelCache>,
    pub(crate) connector: Option<Connector>,
    /// Cancelled when the worker is removed from discovery.
    pub(crate) retired: CancellationToken,
    /// Reports to the live view, if there is one.
    pub(super) observer: Option<Observer>,
}

/// Closes the session in the dispatcher on drop.
struct OpenSession<'a> {
    task: &'a SessionTask,
    session: SessionId,
    reason: ResubmissionReason,
}

impl Drop for OpenSession<'_> {
    fn drop(&mut self) {
        if let Some(observer) = &self.task.observer {
            observer.closed();
        }
        self.task.dispatch.close(self.task.worker, self.session, self.reason);
    }
}

impl SessionTask {
    /// HTTP/2 keep-alive interval and timeout, which detect a dead peer behind an open connection.
    const KEEPALIVE: Duration = Duration::from_secs(5);
    const UPDATE_BYTES_MAX: usize = 64 << 20;
    /// Large, because updates are many and small, and h2's limit on pending small frames scales with its
    /// window.
    const WINDOW_BYTES: u32 = 16 << 20;
    /// Bounds of heartbeat intervals: no reported value can hide a lost worker.
    const HEARTBEAT: std::ops::RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(60);

    pub(crate) async fn run(self) {
        self.dispatch.join(self.worker);
        let mut backoff = Backoff::new(self.options.reconnect_backoff_max);
        let mut attempts = 0;
        // Errors are logged when they change, not at each attempt.
        let mut reported: Option<String> = None;
        while !self.retired.is_cancelled() {
            let mut opened = None;
            let error = match self.run_session(&mut opened).await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            let lasted = opened.map(|at| clock::now().saturating_duration_since(at));
            let opened = opened.is_some();
            let drained = matches!(error, SessionError::Drained);
            if opened {
                reported = None;
                if !drained {
                    metrics::counter!(names::SESSIONS_LOST, "worker" => self.address.clone()).increment(1);
                }
            }
            if let SessionError::ProtocolViolation(violation) = &error {
                let (worker, kind) = (self.address.clone(), violation.label());
                metrics::counter!(names::VIOLATIONS, "worker" => worker, "kind" => kind).increment(1);
            }
            let reason = error.to_string();
            if reported.as_ref() != Some(&reason) {
                let worker = &self.address;
                match error {
                    // A worker that does not accept connections may still be loading its model.
                    SessionError::Connect(_) if !opened => {
                        tracing::info!(worker, reason, "cannot connect to worker; retrying");
                    }
                    _ if drained => tracing::info!(worker, "session closed: the worker has drained"),
                    _ if opened => tracing::warn!(worker, reason, "session lost; reconnecting"),
                    _ => tracing::warn!(worker, reason, "cannot open session with worker; retrying"),
                }
                reported = Some(reason);
            }
            attempts += 1;
            tokio::select! {
                biased;
                () = self.retired.cancelled() => {}
                () = tokio::time::sleep(backoff.after(lasted).mul_f64(self.jitter(attempts))) => {}
            }
        }
        self.dispatch.leave(self.worker);
        if let Some(observer) = &self.observer {
            observer.left();
        }
    }

    /// Returns a deterministic factor in [0.5, 1) that differs by router, worker and attempt.
    fn jitter(&self, attempts: u64) -> f64 {
        let mut hasher = DefaultHasher::new();
        (&self.options.router_id(), &self.options.incarnation, &self.address, attempts).hash(&mut hasher);
        0.5 + (hasher.finish() >> 11) as f64 / (1u64 << 54) as f64
    }

    async fn connect(&self, limit: Duration) -> Result<Channel, SessionError> {
        let tls = self.options.worker_tls.as_ref();
        let endpoint = secure_endpoint(&self.address, tls)
            .map_err(|error| SessionError::Connect(error.to_string()))?
            .connect_timeout(limit)
            .tcp_nodelay(true)
            .initial_stream_window_size(Self::WINDOW_BYTES)
            .initial_connection_window_size(Self::WINDOW_BYTES)
            .http2_keep_alive_interval(Self::KEEPALIVE)
            .keep_alive_timeout(Self::KEEPALIVE)
            .keep_alive_while_idle(true);
        let channel = match &self.connector {
            None => endpoint.connect().await,
            Some(connector) => endpoint.connect_with_connector(connector.service()).await,
        };
        channel.map_err(|error| SessionError::Connect(chain(&error)))
    }

    async fn run_session(
        &self,
        opened: &mut Option<Instant>,
    ) -> Result<std::convert::Infallible, SessionError> {
        let limit = self.options.connect_timeout;
        let connected = timeout(limit, self.connect(limit)).await;
        let channel = connected.map_err(|_| SessionError::Timeout { what: "a connection", limit })??;
        let mut client = WorkerClient::new(channel).max_decoding_message_size(Self::UPDATE_BYTES_MAX);
        let (commands, receiver) = mpsc::channel(self.options.worker_commands_max);
        let overflow = CancellationToken::new();
        let open = v1::SessionOpen {
            protocol_version: PROTOCOL_VERSION,
            router_id: self.options.router_id(),
            incarnation: self.options.incarnation.clone(),
        };
        let open = tokio_stream::once(v1::SessionRequest { message: Some(ToWorker::Open(open)) });
        let requests = open.chain(ReceiverStream::new(receiver).map(wire::command));
        let (request, proof) = self.prove(&mut client, SESSION_PATH, requests).await?;
        let what = "the opening of a session";
        let response = within(limit, what, client.session(request)).await?;
        let mut updates = response.into_inner();
        let first = within(limit, what, updates.message()).await?;
        let hello = match first.and_then(|response| response.message) {
            Some(Response::Hello(hello)) => hello,
            Some(Response::Update(_)) => {
                return Err(SessionError::Protocol("update before hello".to_owned()));
            }
            None => return Err(SessionError::Closed),
        };
        if proof.is_some_and(|proof| !proof.verify_answer(&hello.secret_proof)) {
            return Err(SessionError::Unproven);
        }
        let (limits, shape, capacity) = check_hello(&hello)?;
        let fetch = self.fetch_bundle(client.clone(), hello.bundle_digest.clone(), limit);
        let fetch = async {
            let late =
                SessionError::Timeout { what: "the fetch of its whole bundle", limit: BUNDLE_TIME_MAX };
            timeout(BUNDLE_TIME_MAX, fetch).await.unwrap_or(Err(late))
        };
        let model = tokio::select! {
            biased;
            // The worker is not listed any more.
            () = self.retired.cancelled() => return Err(SessionError::Closed),
            model = self.models.get(&hello.bundle_digest, fetch) => model?,
        };
        let heartbeat = match hello.heartbeat_interval_ms {
            0 => self.options.session_timeout / 3,
            interval => Duration::from_millis(interval.into()),
        };
        let heartbeat = heartbeat.clamp(*Self::HEARTBEAT.start(), *Self::HEARTBEAT.end());
        let silence = 3 * heartbeat;
        tracing::info!(
            worker = self.address,
            worker_id = hello.worker_id,
            incarnation = hello.incarnation,
            model = hello.model,
            fingerprint = hello.fingerprint,
            "session opened"
        );
        if let Some(observer) = &self.observer {
            observer.opened(&hello, &client);
        }
        let info = WorkerInfo {
            worker: self.worker,
            model: hello.model,
            architecture: hello.architecture,
            bundle_digest: hello.bundle_digest,
            fingerprint: hello.fingerprint,
            incarnation: hello.incarnation,
            limits,
            shape,
            capacity,
            host_blocks: hello.limits.map_or(0, |limits| limits.host_kv_blocks),
            heartbeat,
        };
        let overflowed = overflow.clone();
        let pool = Arc::new(ReportedPool::new(capacity.blocks));
        let address = self.address.clone();
        let aliases = hello.model_aliases;
        let connection = WorkerConnection { address, model, aliases, commands, overflow, pool: pool.clone() };
        let session = self.dispatch.open(info, connection);
        let mut guard = OpenSession { task: self, session, reason: ResubmissionReason::SessionLost };
        *opened = Some(clock::now());
        let observed = async {
            match &self.observer {
                Some(observer) => observer.observe(client.clone()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = overflowed.cancelled() => {
                metrics::counter!(names::COMMAND_OVERFLOWS, "worker" => self.address.clone()).increment(1);
                Err(SessionError::Overflow(self.options.worker_commands_max))
            }
            ended = self.process_updates(&mut updates, &mut guard, &pool, silence) => ended,
            never = observed => match never {},
        }
    }

    /// Returns `message` as a request with a proof of the workers' secret, if the router has one.
    async fn prove<T>(
        &self,
        client: &mut WorkerClient<Channel>,
        path: &str,
        message: T,
    ) -> Result<(Request<T>, Option<CallProof>), SessionError> {
        let limit = self.options.connect_timeout;
        // Read at each call, as the file may have changed.
        let secrets = self.options.worker_secret.as_ref().map(SecretFile::secrets);
        let proved = prove(client, secrets.as_deref().unwrap_or_default(), path, message);
        let proved = timeout(limit, proved).await;
        Ok(proved.map_err(|_| SessionError::Timeout { what: "a challenge", limit })??)
    }

    /// Fetches a bundle; each chunk must arrive within `limit`.
    async fn fetch_bundle(
        &self,
        mut client: WorkerClient<Channel>,
        digest: String,
        limit: Duration,
    ) -> Result<BundleFiles, SessionError> {
        let what = "its bundle";
        let request = v1::FetchBundleRequest { digest };
        let (request, _) = self.prove(&mut client, FETCH_BUNDLE_PATH, request).await?;
        let mut pieces = within(limit, what, client.fetch_bundle(request)).await?.into_inner();
        let mut bundle = BundleFiles::default();
        while let Some(piece) = within(limit, what, pieces.message()).await? {
            bundle.append(&piece.file, &piece.data)?;
        }
        Ok(bundle)
    }

    /// Processes the updates of a session until it ends, which `guard` closes. A worker that is silent for
    /// `silence` counts as lost.
    async fn process_updates(
        &self,
        updates: &mut Streaming<v1::SessionResponse>,
        guard: &mut OpenSession<'_>,
        pool: &ReportedPool,
        silence: Duration,
    ) -> Result<std::convert::Infallible, SessionError> {
        let session = guard.session;
        let (mut retired, mut draining) = (false, false);
        loop {
            let next = tokio::select! {
                biased;
                () = self.retired.cancelled(), if !retired => {
                    retired = true;
                    self.dispatch.retire(self.worker);
                    continue;
                }
                next = timeout(silence, updates.message()) => next,
            };
            let message = next.map_err(|_| SessionError::Silent(silence))?;
            let message = match message {
                // A drained worker exits and closes its connections.
                Err(_) if draining => return Err(SessionError::Drained),
                message => message.map_err(SessionError::Broken)?,
            };
            match message.map(|response| response.message) {
                Some(Some(Response::Update(update))) => {
                    draining |= update.draining;
                    if let Some(load) = &update.load {
                        pool.set_used(load.kv_blocks_used);
                    }
                    if let Some(observer) = &self.observer {
                        observer.load(&update);
                    }
                    if let Err(violation) = self.dispatch.update(self.worker, session, wire::update(update)) {
                        guard.reason = ResubmissionReason::ProtocolViolation { about: violation.request() };
                        return Err(violation.into());
                    }
                }
                Some(Some(Response::Hello(_))) => {
                    return Err(SessionError::Protocol("hello sent twice".to_owned()));
                }
                // Message kind of a newer protocol version.
                Some(None) => {}
                None if draining => return Err(SessionError::Drained),
                None => return Err(SessionError::Closed),
            }
            if retired && self.dispatch.is_idle(self.worker, session) {
                return Err(SessionError::Drained);
            }
        }
    }
}

/// Exponential backoff between attempts, reset by a session that lasts longer than the maximum pause. A
/// session that breaks at once counts as a failed attempt.
#[derive(Debug, Clone, Copy)]
struct Backoff {
    next: Duration,
    most: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(100);

    fn new(most: Duration) -> Self {
        Self { next: Self::FIRST.min(most), most }
    }

    /// Returns the pause after an attempt; `lasted` is the duration of its session, if one opened.
    fn after(&mut self, lasted: Option<Duration>) -> Duration {
        if lasted.is_some_and(|lasted| lasted > self.most) {
            *self = Self::new(self.most);
        }
        let pause = self.next;
        self.next = (2 * pause).min(self.most);
        pause
    }
}

async fn within<T, F>(limit: Duration, what: &'static str, call: F) -> Result<T, SessionError>
where
    F: Future<Output = Result<T, Status>>,
{
    let answer = timeout(limit, call).await.map_err(|_| SessionError::Timeout { what, limit })?;
    answer.map_err(|status| SessionError::Refused { what, status })
}

pub(super) fn check_hello(hello: &v1::Hello) -> Result<(ModelLimits, MemoryShape, Credits), SessionError> {
    let violation = |what: String| Err(SessionError::Protocol(what));
    if hello.protocol_version == 0 || hello.protocol_version > PROTOCOL_VERSION {
        return violation(format!(
            "protocol version {} is not supported; this router supports up to {PROTOCOL_VERSION}",
            hello.protocol_version
        ));
    }
    if hello.model.is_empty() {
        return violation("hello without a model name".to_owned());
    }
    let names = [
        ("model", &hello.model),
        ("worker id", &hello.worker_id),
        ("incarnation", &hello.incarnation),
        ("fingerprint", &hello.fingerprint),
        ("architecture", &hello.architecture),
        ("bundle digest", &hello.bundle_digest),
    ];
    let aliases = hello.model_aliases.len();
    if aliases > MODEL_ALIASES_MAX {
        return violation(format!(
            "hello with {aliases} model aliases; at most {MODEL_ALIASES_MAX} are allowed"
        ));
    }
    if hello.model_aliases.iter().any(String::is_empty) {
        return violation("hello with an empty model alias".to_owned());
    }
    let aliases = hello.model_aliases.iter().map(|alias| ("model alias", alias));
    if let Some((what, name)) =
        names.into_iter().chain(aliases).find(|(_, name)| name.len() > HELLO_NAME_BYTES_MAX)
    {
        let (bytes, most) = (name.len(), HELLO_NAME_BYTES_MAX);
        return violation(format!("hello with a {what} of {bytes} bytes; at most {most} are allowed"));
    }
    let Some(limits) = hello.limits else { return violation("hello without limits".to_owned()) };
    let v1::WorkerLimits { vocab_size, context_tokens, block_tokens, kv_blocks, max_sequences, .. } = limits;
    if [vocab_size, context_tokens, block_tokens, kv_blocks, max_sequences].contains(&0) {
        return violation("hello with limits of zero".to_owned());
    }
    let groups: Vec<LayerGroup> = hello.layer_groups.iter().map(layer_group).collect();
    let shape = match groups.as_slice() {
        [] if hello.state_blocks > 0 => {
            return violation("hello with a state and no groups of layers".to_owned());
        }
        [] => MemoryShape::uniform(block_tokens),
        groups => match MemoryShape::new(block_tokens, groups)
            .and_then(|shape| shape.with_state(hello.state_blocks))
        {
            Ok(shape) => shape,
            Err(error) => return violation(format!("hello with groups of layers that can't be: {error}")),
        },
    };
    let kv_tokens = shape.tokens(kv_blocks);
    if kv_tokens == 0 {
        return violation(format!("hello with {kv_blocks} KV blocks, which hold no token: {shape}"));
    }
    let model =
        ModelLimits { vocab_size: limits.vocab_size, context_tokens: limits.context_tokens, kv_tokens };
    Ok((model, shape, Credits { sequences: max_sequences, blocks: kv_blocks }))
}

fn layer_group(group: &v1::LayerGroup) -> LayerGroup {
    LayerGroup { blocks: group.blocks, window: (group.window > 0).then_some(group.window) }
}

/// Formats an error with its causes: the transport's own message has no detail.
fn chain(error: &tonic::transport::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_that_break_at_once_back_off_until_one_lasts() {
        let millis = Duration::from_millis;
        let mut backoff = Backoff::new(millis(1000));
        let pauses: Vec<_> = (0..6).map(|_| backoff.after(Some(millis(3)))).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000].map(millis));
        assert_eq!(backoff.after(None), millis(1000), "nor does one that never opened help");
        assert_eq!(backoff.after(Some(millis(1001))), millis(100));
        assert_eq!(Backoff::new(millis(20)).after(None), millis(20), "the bound holds from the first");
    }

    #[test]
    fn a_hello_of_a_newer_protocol_or_with_missing_fields_is_rejected() {
        let limits = v1::WorkerLimits {
            vocab_size: 285,
            context_tokens: 256,
            block_tokens: 16,
            kv_blocks: 64,
            max_sequences: 8,
            host_kv_blocks: 0,
            kv_tokens: 0,
        };
        let hello = v1::Hello {
            protocol_version: PROTOCOL_VERSION,
            model: "tiny".to_owned(),
            limits: Some(limits),
            ..v1::Hello::default()
        };
        assert!(check_hello(&hello).is_ok());
        let newer = PROTOCOL_VERSION + 1;
        let empty = v1::WorkerLimits { kv_blocks: 0, ..limits };
        for (wrong, what) in [
            (v1::Hello { protocol_version: newer, ..hello.clone() }, format!("protocol version {newer}")),
            (v1::Hello { protocol_version: 0, ..hello.clone() }, "protocol version 0".to_owned()),
            (v1::Hello { model: String::new(), ..hello.clone() }, "hello without a model name".to_owned()),
            (v1::Hello { limits: None, ..hello.clone() }, "hello without limits".to_owned()),
            (v1::Hello { model: "m".repeat(513), ..hello.clone() }, "a model of 513 bytes".to_owned()),
            (v1::Hello { model_aliases: vec!["m".repeat(513)], ..hello.clone() }, "alias of 513".to_owned()),
            (
                v1::Hello { model_aliases: vec![String::new()], ..hello.clone() },
                "empty model alias".to_owned(),
            ),
            (
                v1::Hello { model_aliases: vec!["m".to_owned(); 65], ..hello.clone() },
                "65 model aliases".to_owned(),
            ),
            (v1::Hello { fingerprint: "f".repeat(513), ..hello.clone() }, "a fingerprint of 513".to_owned()),
            (v1::Hello { limits: Some(empty), ..hello.clone() }, "limits of zero".to_owned()),
        ] {
            let error = check_hello(&wrong).err().unwrap().to_string();
            assert!(error.contains(&what), "{error}");
        }
    }
}

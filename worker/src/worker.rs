//! Worker lifecycle: load a model onto a device, start the engine, serve gRPC, drain.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use inflight_contract::{LayerGroup, MemoryShape, SamplingSpec};
use inflight_grammar::{GrammarError, MemoryBudget, Vocabulary};
use inflight_grammar_service::Grammars;
use inflight_models::{self as models, FingerprintCache, ModelDir};
use inflight_net::{
    Acceptor, ConnectionLimits, Framing, HttpServer, OpenCalls, Protocols, ReceiveBudget, ReceiveLayer,
    ReceiveLimits, ServerTls, TlsError, Turns, UnreadBudget, create_private_file, middleware,
};
use inflight_proto::v1::worker_server::WorkerServer;
use inflight_proto::{FILE_DESCRIPTOR_SET, PROTOCOL_VERSION, v1};
use inflight_runtime::{Capabilities, MemoryLedger, Runtime, RuntimeFacts};
use inflight_worker_core::policy::Aging;
use inflight_worker_core::{CostPrior, priority_sequences_max};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::server::Connected;
use tower::ServiceBuilder;

use crate::bundle::Bundle;
use crate::device;
use crate::engine::{Engine, EngineOptions};
use crate::options::{Device, Options, OptionsError};
use crate::self_test::SelfTest;
use crate::session::{
    Authentication, Authenticator, BUNDLES_MAX, COMMANDS_MAX, COMPILED_AT_ONCE, COMPILED_KIB_MAX, Clock,
    EngineExecution, EngineThread, Message, MeteredSemaphore, OBSERVERS_MAX, QUEUED_KIB_MAX, ServiceTables,
    SessionContext, Watchdog, WorkerService,
};

/// Memory for the grammar state of each of the maximum sequences, twice what usual schemas need.
const MATCHER_BYTES: usize = 2 << 20;
/// Value of the connection metrics' `listener` label.
const LISTENER: &str = "grpc";
/// Maximum connections of routers, probes and tools.
pub const CONNECTIONS_MAX: usize = 1024;
/// Interval of HTTP/2 keep-alive pings, and timeout of their acknowledgements: a dead peer is detected after both, and its requests
/// are cancelled.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(3);
/// Maximum time that connections have to close after the engine has stopped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
/// Connection limits for routers, which stay connected for as long as their sessions, and for probes.
const CONNECTION_LIMITS: ConnectionLimits = ConnectionLimits {
    connections_max: CONNECTIONS_MAX,
    per_address_max: 256,
    handshake_max: Duration::from_secs(10),
    first_call_max: Duration::from_secs(10),
    unauthenticated_idle_max: Duration::from_secs(30),
    idle_max: Duration::from_secs(300),
};
/// Maximum concurrent HTTP/2 streams per connection; a router opens one session and fetches one bundle.
const CONNECTION_STREAMS_MAX: u32 = 32;
/// Maximum time to receive one message; also the write timeout, after which the connection of a peer that reads nothing is closed.
const MESSAGE_TIME_MAX: Duration = Duration::from_secs(30);
/// Maximum size of a request message outside of sessions: a digest, a number or a service name.
const SMALL_MESSAGE_BYTES_MAX: usize = 4 << 10;
/// Maximum size of a call's headers.
const HEADER_BYTES_MAX: u32 = 16 << 10;
/// Maximum bytes of responses that peers have not read; beyond it, the connection with the most of them is closed.
const UNREAD_BYTES_MAX: u64 = 256 << 20;

/// Load progress callback: bytes done, bytes in total.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Failure of a worker to start or to keep running.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options are invalid.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// Binding the listening address failed.
    #[error("can't listen on {address}: {source}; is another process using the port?")]
    Listen {
        /// Address to listen on.
        address: SocketAddr,
        /// Cause.
        source: std::io::Error,
    },
    /// The recording file can't be created.
    #[error("can't record to {}: {source}", path.display())]
    Record {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The model can't be loaded.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The CPU runtime can't run the model.
    #[error(transparent)]
    Runtime(#[from] inflight_runtime_cpu::Error),
    /// The CUDA runtime can't run the model.
    #[error(transparent)]
    Cuda(#[from] inflight_runtime_cuda::Error),
    /// The host pool of a worker on GPUs exceeds a memory limit.
    #[error("the host pool takes {0}; lower --host-cache-bytes")]
    HostMemory(inflight_runtime::OverLimit),
    /// Scheduler limits that contradict each other.
    #[error(transparent)]
    SchedulerLimits(#[from] inflight_worker_core::LimitsError),
    /// A TLS certificate or key can't be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The device or its engine failed.
    #[error("{0}")]
    Device(String),
}

/// Loaded model with its runtime, as a worker serves it.
pub struct Served {
    /// Runtime that executes the model.
    pub runtime: Box<dyn Runtime>,
    /// Prior of the cost model; `None` calibrates it at start-up.
    pub prior: Option<CostPrior>,
    /// Interval of self-tests; `None` if there are none.
    pub self_test_interval: Option<Duration>,
    /// Model name that clients request.
    pub name: String,
    /// Further names.
    pub aliases: Vec<String>,
    /// Architecture name from config.json, such as "LlamaForCausalLM".
    pub architecture: String,
    /// Ids of EOS tokens.
    pub eos_token_ids: Vec<u32>,
    /// Model bundle for routers.
    pub bundle: Bundle,
}

/// Worker without a listener: engine and session service, for any transport.
pub struct Core {
    engine: EngineThread,
    sessions: Arc<SessionContext>,
    drain_timeout: Duration,
    aging: Aging,
}

/// Loaded worker that listens but does not serve yet.
pub struct Worker {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<ServerTls>,
    core: Core,
    /// Memory that is reserved until the worker ends.
    ledger: MemoryLedger,
}

impl Worker {
    /// Binds the port, then loads the model; blocks until it is loaded.
    ///
    /// # Errors
    /// [`Error`] if an option, the address, TLS files, the model or the device can't be used.
    pub fn load(options: &Options, progress: Progress<'_>) -> Result<Self, Error> {
        options.validate()?;
        let listen = |source| Error::Listen { address: options.listen, source };
        // First, so that a taken port is known before minutes of loading.
        let listener = TcpListener::bind(options.listen).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let tls = options.tls.clone().map(ServerTls::load).transpose()?;
        let mut model = ModelDir::open(&options.compute.source())?;
        if let Some(file) = &options.compute.chat_template {
            model = model.with_chat_template(file)?;
        }
        if let Some(directory) = options.compute.fingerprint_cache() {
            model = model.with_fingerprint_cache(FingerprintCache::new(directory));
        }
        let ledger = match options.compute.device {
            Device::Sim(_) => MemoryLedger::alone(),
            Device::Auto | Device::Cpu | Device::Cuda(_) => {
                MemoryLedger::open(options.compute.reservation_dir.as_deref())
            }
        };
        let loaded = device::load_runtime(options, &model, &ledger, progress)?;
        let mut names = options.compute.model_names.iter().cloned();
        let served = Served {
            runtime: loaded.runtime,
            prior: loaded.prior,
            self_test_interval: loaded.self_test_interval,
            name: names.next().unwrap_or_else(|| model.name().to_owned()),
            aliases: names.collect(),
            architecture: model.architecture().to_owned(),
            eos_token_ids: model.eos_token_ids().to_vec(),
            bundle: Bundle::new(model.bundle_files().to_vec()),
        };
        Ok(Self { listener, address, tls, core: Core::new(options, served, incarnation())?, ledger })
    }

    /// Bound listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Name of the served model.
    pub fn model(&self) -> &str {
        &self.core.sessions.hello.model
    }

    /// Limits that the worker reports to routers.
    pub fn limits(&self) -> v1::WorkerLimits {
        self.core.sessions.hello.limits.unwrap_or_default()
    }

    /// Serves until `drain` is cancelled and running sequences have finished, or until the device fails.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub async fn serve(self, drain: CancellationToken) -> Result<(), Error> {
        let Self { listener, address, tls, core, ledger: _reserved } = self;
        core.sessions.grammars.prepare_in_background();
        let incoming = tokio::net::TcpListener::from_std(listener);
        let incoming = incoming.map_err(|source| Error::Listen { address, source })?;
        let incoming = Acceptor::new(LISTENER, incoming, tls, CONNECTION_LIMITS).incoming();
        let incoming = incoming.map(|connection| connection.map_err(|never| match never {}));
        core.serve(incoming, EngineExecution::Thread, drain).await
    }
}

/// Returns the grammars of a model, whose vocabulary is read from its bundle at first use.
fn grammars(bundle: &Bundle, vocab_size: u32, eos_token_ids: &[u32], options: &Options) -> Grammars {
    let bundle = bundle.clone();
    let grammars = Grammars::new(vocab_size, eos_token_ids, move || {
        let tokenizer = bundle.file("tokenizer.json");
        let tokenizer =
            tokenizer.ok_or_else(|| GrammarError::Vocabulary("it has no tokenizer.json".to_owned()))?;
        Vocabulary::from_json(tokenizer).map(Arc::new).map_err(GrammarError::Vocabulary)
    });
    let grammars = match &options.grammar_confinement {
        Some(confinement) => grammars.confined(confinement.clone()),
        None => grammars,
    };
    let bytes = (options.compute.max_sequences as usize).saturating_mul(MATCHER_BYTES);
    grammars.with_matcher_bytes_max(bytes.max(MemoryBudget::DEFAULT_BYTES))
}

/// Returns the groups of layers of a hello; none for one group with full attention, which older routers know.
fn layer_groups(shape: &MemoryShape) -> Vec<v1::LayerGroup> {
    let groups = if shape.is_uniform() { &[] } else { shape.groups() };
    let message =
        |group: &LayerGroup| v1::LayerGroup { blocks: group.blocks, window: group.window.unwrap_or(0) };
    groups.iter().map(message).collect()
}

/// Returns what a worker tells operators about itself; its KV block pool has `kv_cache_bytes`.
fn worker_facts(facts: RuntimeFacts, kv_cache_bytes: u64) -> v1::WorkerFacts {
    v1::WorkerFacts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        device: facts.device,
        tensor_parallel: facts.ranks,
        memory_bytes: facts.memory_bytes,
        weight_bytes: facts.weight_bytes,
        kv_cache_bytes,
        weight_encoding: facts.weight_encoding,
        kv_encoding: facts.kv_encoding,
    }
}

impl Core {
    /// Creates a worker for `served`; `incarnation` must be unique per start.
    ///
    /// # Errors
    /// The limits contradict each other, the recording can't be created, or the device fails during
    /// calibration.
    pub fn new(options: &Options, served: Served, incarnation: String) -> Result<Self, Error> {
        let Served { runtime, prior, self_test_interval, name, aliases, architecture, eos_token_ids, bundle } =
            served;
        let recording = options.record.as_ref().map(|path| {
            let create = create_private_file(path);
            create.map_err(|source| Error::Record { path: path.clone(), source })
        });
        let recording = recording.transpose()?;
        let Capabilities { fingerprint, facts, .. } = runtime.capabilities().clone();
        let queue_ahead = (options.compute.max_sequences / 8).max(1);
        let priority_sequences = priority_sequences_max(options.compute.max_sequences, queue_ahead);
        let mut scheduling = options.compute.scheduling;
        // The waiting queue must hold everything that was granted, or granted submissions would be rejected.
        scheduling.max_waiting = scheduling.max_waiting.max(
            options.compute.max_sequences + queue_ahead + priority_sequences + SamplingSpec::CHOICES_MAX,
        );
        let engine_options = EngineOptions {
            scheduling,
            queue_ahead,
            govern_drafts: true,
            prior: prior.unwrap_or_default(),
            record: options.record.is_some(),
        };
        let mut engine = Engine::new(runtime, &eos_token_ids, engine_options)?;
        // The costs of a simulated device are its profile's; there is nothing to measure.
        if prior.is_none() {
            engine.calibrate().map_err(|error| Error::Device(error.to_string()))?;
        }
        let mut self_test = self_test_interval.map(|interval| SelfTest::new(interval, engine.model_limits()));
        if let Some(test) = &mut self_test {
            engine.record_self_test(test).map_err(|failed| Error::Device(failed.to_string()))?;
        }
        let grammars = Arc::new(grammars(&bundle, engine.model_limits().vocab_size, &eos_token_ids, options));
        engine.set_grammars(grammars.clone());
        let limits = *engine.limits();
        let pool_tokens = limits.shape.pool_tokens(limits.blocks.into(), limits.sequence_tokens_max());
        let hello = v1::Hello {
            protocol_version: PROTOCOL_VERSION,
            worker_id: options.worker_id(),
            incarnation,
            fingerprint,
            model: name,
            architecture,
            bundle_digest: bundle.digest().to_owned(),
            limits: Some(v1::WorkerLimits {
                vocab_size: engine.model_limits().vocab_size,
                context_tokens: engine.model_limits().context_tokens,
                block_tokens: limits.block_tokens(),
                kv_blocks: limits.blocks,
                max_sequences: limits.running_max,
                host_kv_blocks: limits.host_blocks,
                kv_tokens: u32::try_from(pool_tokens).unwrap_or(u32::MAX),
            }),
            heartbeat_interval_ms: u32::try_from(options.heartbeat.as_millis()).unwrap_or(u32::MAX),
            secret_proof: Vec::new(),
            model_aliases: aliases,
            facts: Some(worker_facts(facts, u64::from(limits.blocks) * engine.block_bytes())),
            layer_groups: layer_groups(&limits.shape),
            state_blocks: limits.shape.state_blocks(),
        };
        let service_tables = ServiceTables::new(&hello.incarnation);
        let (sender, messages) = mpsc::channel(COMMANDS_MAX);
        let clock = Clock::start();
        let watchdog = Arc::new(Watchdog::new(options.heartbeat));
        let sessions = Arc::new(SessionContext {
            hello,
            bundle,
            grammars,
            heartbeat: options.heartbeat,
            clock,
            engine: sender,
            queued: MeteredSemaphore::new(QUEUED_KIB_MAX, crate::metrics::queued_kib),
            compiled: MeteredSemaphore::new(COMPILED_KIB_MAX, crate::metrics::queued_kib),
            compile_turns: Turns::new(COMPILED_AT_ONCE),
            bundles: MeteredSemaphore::new(BUNDLES_MAX, crate::metrics::bundle_streams),
            permits: Arc::new(Semaphore::new(options.max_sessions as usize)),
            sessions_max: options.max_sessions,
            observers: Arc::new(Semaphore::new(OBSERVERS_MAX)),
            draining: Arc::new(AtomicBool::new(false)),
            next: AtomicU64::new(1),
            watchdog: watchdog.clone(),
            service_tables,
            authenticator: options.secret.clone().map(Authenticator::new),
        });
        let engine = EngineThread::new(engine, messages, clock, recording, watchdog, self_test);
        Ok(Self {
            engine,
            sessions,
            drain_timeout: options.drain_timeout,
            aging: options.compute.scheduling.policy.aging,
        })
    }

    /// Serves connections until `drain` is cancelled and running sequences have finished, or until the device
    /// fails.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub async fn serve<I, S>(
        self,
        incoming: I,
        execution: EngineExecution,
        drain: CancellationToken,
    ) -> Result<(), Error>
    where
        I: Stream<Item = std::io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let Self { engine: engine_thread, sessions, drain_timeout, aging } = self;
        let sessions_max = sessions.permits.available_permits();
        crate::metrics::describe();
        crate::metrics::sessions_max(sessions_max);
        crate::metrics::aging(&aging);
        let hello = &sessions.hello;
        crate::metrics::model_info(&hello.model, &hello.architecture, &hello.fingerprint);
        let (ended, mut engine) = oneshot::channel();
        match execution {
            EngineExecution::Thread => spawn_engine_thread(engine_thread, ended)?,
            EngineExecution::Task => {
                tokio::spawn(async move {
                    let outcome = engine_thread.run(execution).await;
                    let _ = ended.send(outcome.map_err(|failed| Error::Device(failed.to_string())));
                });
            }
        }

        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<WorkerServer<WorkerService>>().await;
        // For liveness probes: serving also while the worker drains.
        health.set_service_status("liveness", tonic_health::ServingStatus::Serving).await;
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        // The descriptors are generated by this build, so they decode.
        let reflection_v1 = reflection().build_v1().expect("generated descriptors decode");
        let reflection_v1alpha = reflection().build_v1alpha().expect("generated descriptors decode");
        let context_tokens = sessions.hello.limits.map_or(0, |limits| limits.context_tokens);
        let submit_bytes_max = inflight_proto::submit_bytes_max(context_tokens);
        let service =
            WorkerServer::new(WorkerService(sessions.clone())).max_decoding_message_size(submit_bytes_max);
        let shutdown = CancellationToken::new();
        let routes = Routes::new(health_service)
            .add_service(reflection_v1)
            .add_service(reflection_v1alpha)
            .add_service(service);
        let service = ServiceBuilder::new()
            .layer(middleware(OpenCalls))
            .layer(middleware(Authentication(sessions.authenticator.clone())))
            .layer(ReceiveLayer::new(receive_budget(sessions_max, submit_bytes_max), move |path: &str| {
                receive_limits(path, submit_bytes_max)
            }))
            .service(routes.prepare());
        let unread = UnreadBudget::new(UNREAD_BYTES_MAX, crate::metrics::unread_bytes());
        let _enforced = AbortOnDropHandle::new(tokio::spawn(unread.clone().enforce()));
        let server = HttpServer {
            listener: LISTENER,
            protocols: Protocols::Http2,
            keepalive_interval: KEEP_ALIVE_INTERVAL,
            header_bytes_max: HEADER_BYTES_MAX,
            streams_max: CONNECTION_STREAMS_MAX,
            write_timeout: MESSAGE_TIME_MAX,
            unread,
            fault: || Status::internal("the call failed on a fault of the worker").into_http(),
        };
        let server = tokio::spawn(server.serve(incoming, service, shutdown.clone()));

        let outcome = tokio::select! {
            biased;
            outcome = &mut engine => outcome,
            () = drain.cancelled() => {
                tracing::info!("draining");
                sessions.draining.store(true, Ordering::Release);
                health.set_not_serving::<WorkerServer<WorkerService>>().await;
                health.set_service_status("", tonic_health::ServingStatus::NotServing).await;
                let _ = sessions.engine.send(Message::Drain).await;
                match tokio::time::timeout(drain_timeout, &mut engine).await {
                    Ok(outcome) => outcome,
                    Err(_) => {
                        tracing::warn!("drain timed out; routers will move the requests that still run");
                        let _ = sessions.engine.send(Message::Stop).await;
                        engine.await
                    }
                }
            }
        };
        shutdown.cancel();
        // Sessions end with the engine; wait only briefly for connections that stay open.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, server).await;
        outcome.unwrap_or_else(|_| Err(Error::Device("the engine's thread is gone".to_owned())))
    }
}

/// Returns the byte budget for all messages being received. A session receives one message at a time, so
/// correct routers never exhaust it.
fn receive_budget(sessions_max: usize, submit_bytes_max: usize) -> ReceiveBudget {
    let max = (submit_bytes_max as u64).saturating_mul(sessions_max as u64 + 1);
    let spent = move || {
        let what = format!(
            "the worker is receiving {max} bytes, the limit (one message for each of --max-sessions); try again later"
        );
        Status::resource_exhausted(what)
    };
    ReceiveBudget::new(max, crate::metrics::receive_bytes(), spent)
}

/// Receive limits for the messages of a gRPC path.
fn receive_limits(path: &str, submit_bytes_max: usize) -> ReceiveLimits {
    let session = path == "/inflight.v1.Worker/Session";
    ReceiveLimits {
        framing: Framing::Grpc,
        message_bytes_max: if session { submit_bytes_max } else { SMALL_MESSAGE_BYTES_MAX },
        option: None,
        time_option: None,
        message_time_max: MESSAGE_TIME_MAX,
        streaming: session || path.starts_with("/grpc.reflection."),
    }
}

fn spawn_engine_thread(engine: EngineThread, ended: oneshot::Sender<Result<(), Error>>) -> Result<(), Error> {
    let runtime = tokio::runtime::Handle::current();
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        // For its timers.
        let _runtime = runtime.enter();
        let run = || futures::executor::block_on(engine.run(EngineExecution::Thread));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        // The receiver is gone if the server has failed already.
        let _ = ended.send(match outcome {
            Ok(outcome) => outcome.map_err(|failed| Error::Device(failed.to_string())),
            Err(_) => Err(Error::Device("the engine panicked; the log above says where".to_owned())),
        });
    });
    thread.map(drop).map_err(|error| Error::Device(format!("no thread for the engine: {error}")))
}

/// Id that is unique per start: time since the epoch and process id.
fn incarnation() -> String {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", since_epoch.as_nanos(), std::process::id())
}

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use inflight_contract::SamplingSpec;
use inflight_kernels::cpu::KvDtype;
use inflight_proto::v1::worker_server::WorkerServer;
use inflight_proto::{FILE_DESCRIPTOR_SET, PROTOCOL_VERSION, v1};
use inflight_transport::{
    Accept, Limits as ConnectionLimits, OpenCallsLayer, ReceiveBudget, ReceiveLayer, ReceiveLimits,
    ServerTls, TlsError,
};
use inflight_worker_core::CostPrior;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use crate::bundle::Bundle;
use crate::engine::{Engine, Settings};
use crate::models::{self, ModelDir};
use crate::options::{Device, KvCacheDtype, Options, OptionsError};
use crate::runtime::Runtime;
use crate::runtime::cpu::{self, CpuOptions, CpuRuntime};
#[cfg(feature = "cuda")]
use crate::runtime::cuda::{self, CudaOptions, CudaRuntime};
use crate::runtime::sim::{SimOptions, SimRuntime};
use crate::session::{COMMANDS_MAX, Clock, Driver, Message, Pulse, Service, Services, Sessions};

/// A router that was cut off is noticed, and what it submitted is freed, after the two together.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(3);
/// Limits of connections: those of routers, which stay as long as their sessions, and of probes.
const CONNECTION_LIMITS: ConnectionLimits = ConnectionLimits {
    connections_max: 1024,
    per_address_max: 256,
    handshake_max: Duration::from_secs(10),
    first_call_max: Duration::from_secs(10),
    unauthenticated_idle_max: Duration::from_secs(30),
    idle_max: Duration::from_secs(300),
};
/// Calls open at once on one connection: a router has one session and fetches one bundle.
const CONNECTION_STREAMS_MAX: u32 = 32;
/// Longest time for a message to arrive.
const MESSAGE_TIME_MAX: Duration = Duration::from_secs(30);
/// Largest message to anything but a session: a digest, a number, the name of a service.
const SMALL_MESSAGE_BYTES_MAX: usize = 4 << 10;
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// Hears how far loading is: bytes done, bytes in all.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Why a worker could not start or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options can't work.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The address can't be listened on.
    #[error("can't listen on {address}: {source}; is another process using the port?")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The recording can't be written.
    #[error("can't record to {}: {source}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The model can't be loaded.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The runtime can't run it.
    #[error(transparent)]
    Runtime(#[from] cpu::Error),
    /// The GPU can't run it.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] cuda::Error),
    /// This build has no GPUs.
    #[cfg(not(feature = "cuda"))]
    #[error("this build computes on CPUs alone; build with the feature `cuda`, or take --device cpu")]
    NoCuda,
    /// Limits that contradict each other.
    #[error(transparent)]
    Limits(#[from] inflight_worker_core::LimitsError),
    /// A certificate or key can't be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The server failed.
    #[error("the gRPC server failed: {0}")]
    Server(#[from] tonic::transport::Error),
    /// The device failed.
    #[error("{0}")]
    Device(String),
}

/// What turns the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turning {
    /// A thread of its own.
    Thread,
    /// A task of the runtime, which sleeps as long as each step says it took: for simulations, whose clock is not the
    /// system's.
    Task,
}

/// What a worker serves.
pub struct Served {
    /// Runs it.
    pub runtime: Box<dyn Runtime>,
    /// What its steps cost, if that is known beforehand; else it is measured.
    pub prior: Option<CostPrior>,
    /// The name clients ask for.
    pub name: String,
    /// Architecture, such as "LlamaForCausalLM".
    pub architecture: String,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// What routers need of it.
    pub bundle: Bundle,
}

/// A worker without a network.
pub struct Core {
    driver: Driver,
    sessions: Arc<Sessions>,
    drain_timeout: Duration,
}

/// A loaded worker, listening but not yet serving.
pub struct Worker {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<ServerTls>,
    core: Core,
}

impl Worker {
    /// Takes the port, then loads the model. Blocks for as long as that takes.
    ///
    /// # Errors
    /// [`Error`], saying what is wrong and where.
    pub fn load(options: &Options, progress: Progress<'_>) -> Result<Self, Error> {
        options.validate()?;
        let listen = |source| Error::Listen { address: options.listen, source };
        // First, so that a taken port is known before minutes of loading.
        let listener = TcpListener::bind(options.listen).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let tls = options.tls.clone().map(ServerTls::load).transpose()?;
        let model = ModelDir::open(&options.model)?;
        let (runtime, prior) = runtime(options, &model, progress)?;
        let served = Served {
            runtime,
            prior,
            name: options.model_name.clone().unwrap_or_else(|| model.name().to_owned()),
            architecture: model.architecture().to_owned(),
            eos_token_ids: model.eos_token_ids().to_vec(),
            bundle: Bundle::new(model.bundle_files().to_vec()),
        };
        Ok(Self { listener, address, tls, core: Core::new(options, served, incarnation())? })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Name of the model it serves.
    pub fn model(&self) -> &str {
        &self.core.sessions.hello.model
    }

    /// What routers are told of its bounds.
    pub fn limits(&self) -> v1::WorkerLimits {
        self.core.sessions.hello.limits.unwrap_or_default()
    }

    /// Serves until `drain` is cancelled and what runs has ended, or until the device fails.
    ///
    /// # Errors
    /// [`Error::Server`] or [`Error::Device`].
    pub async fn serve(self, drain: CancellationToken) -> Result<(), Error> {
        let Self { listener, address, tls, core } = self;
        let incoming = tokio::net::TcpListener::from_std(listener);
        let incoming = incoming.map_err(|source| Error::Listen { address, source })?;
        let incoming = Accept::new("grpc", incoming, tls, CONNECTION_LIMITS).incoming();
        let incoming = incoming.map(|connection| connection.map_err(|never| match never {}));
        core.serve(incoming, Turning::Thread, drain).await
    }
}

impl Core {
    /// A worker that serves this; `incarnation` differs from one start to the next.
    ///
    /// # Errors
    /// The limits contradict each other, the recording can't be written, or the device fails at once.
    pub fn new(options: &Options, served: Served, incarnation: String) -> Result<Self, Error> {
        let Served { runtime, prior, name, architecture, eos_token_ids, bundle } = served;
        let recording = options.record.as_ref().map(|path| {
            let create = std::fs::File::create(path);
            create.map_err(|source| Error::Record { path: path.clone(), source })
        });
        let recording = recording.transpose()?;
        let fingerprint = runtime.capabilities().fingerprint.clone();
        let queue_ahead = (options.max_sequences / 8).max(1);
        let settings = Settings {
            // Whatever the routers were granted must find room, or they would be refused what they may send.
            waiting_max: options
                .max_waiting
                .max(options.max_sequences + 2 * queue_ahead + SamplingSpec::CHOICES_MAX),
            queue_ahead,
            policy: options.policy,
            prefix_cache: options.prefix_cache,
            step_target: options.step_target,
            prior: prior.unwrap_or_default(),
            record: options.record.is_some(),
        };
        let mut engine = Engine::new(runtime, &eos_token_ids, settings)?;
        // A simulated device costs what its profile says: nothing is to be found out.
        if prior.is_none() {
            engine.calibrate().map_err(|error| Error::Device(error.to_string()))?;
        }
        let limits = *engine.limits();
        let hello = v1::Hello {
            protocol_version: PROTOCOL_VERSION,
            worker_id: options.worker_id.clone(),
            incarnation,
            fingerprint,
            model: name,
            architecture,
            bundle_digest: bundle.digest().to_owned(),
            limits: Some(v1::WorkerLimits {
                vocab_size: engine.model_limits().vocab_size,
                context_tokens: engine.model_limits().context_tokens,
                block_tokens: limits.block_tokens,
                kv_blocks: limits.blocks,
                max_sequences: limits.running_max,
                host_kv_blocks: limits.host_blocks,
            }),
            heartbeat_interval_ms: u32::try_from(options.heartbeat.as_millis()).unwrap_or(u32::MAX),
        };
        let services = Services::new(&hello.incarnation);
        let (sender, messages) = mpsc::channel(COMMANDS_MAX);
        let clock = Clock::start();
        let pulse = Arc::new(Pulse::new(options.heartbeat));
        let sessions = Arc::new(Sessions {
            hello,
            bundle,
            heartbeat: options.heartbeat,
            clock,
            engine: sender,
            permits: Arc::new(Semaphore::new(options.max_sessions as usize)),
            draining: Arc::new(AtomicBool::new(false)),
            next: AtomicU64::new(1),
            pulse: pulse.clone(),
            services,
        });
        let driver = Driver::new(engine, messages, clock, recording, pulse);
        Ok(Self { driver, sessions, drain_timeout: options.drain_timeout })
    }

    /// Serves connections until `drain` is cancelled and what runs has ended, or until the device fails.
    ///
    /// # Errors
    /// [`Error::Server`] or [`Error::Device`].
    pub async fn serve<I, S>(
        self,
        incoming: I,
        turning: Turning,
        drain: CancellationToken,
    ) -> Result<(), Error>
    where
        I: Stream<Item = std::io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let Self { driver, sessions, drain_timeout } = self;
        let sessions_max = sessions.permits.available_permits();
        crate::metrics::describe();
        let (ended, mut engine) = oneshot::channel();
        match turning {
            Turning::Thread => turn_in_thread(driver, ended)?,
            Turning::Task => {
                tokio::spawn(async move {
                    let outcome = driver.run_as_task().await;
                    let _ = ended.send(outcome.map_err(|fatal| Error::Device(fatal.to_string())));
                });
            }
        }

        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<WorkerServer<Service>>().await;
        // For probes that ask whether the process lives, also while it drains.
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
            WorkerServer::new(Service(sessions.clone())).max_decoding_message_size(submit_bytes_max);
        let shutdown = CancellationToken::new();
        let server = Server::builder()
            .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
            .max_concurrent_streams(Some(CONNECTION_STREAMS_MAX))
            .layer(OpenCallsLayer)
            .layer(ReceiveLayer::new(receive_budget(sessions_max, submit_bytes_max), move |path: &str| {
                receive_limits(path, submit_bytes_max)
            }))
            .add_service(health_service)
            .add_service(reflection_v1)
            .add_service(reflection_v1alpha)
            .add_service(service)
            .serve_with_incoming_shutdown(incoming, shutdown.clone().cancelled_owned());
        let server = tokio::spawn(server);

        let outcome = tokio::select! {
            outcome = &mut engine => outcome,
            () = drain.cancelled() => {
                tracing::info!("draining");
                sessions.draining.store(true, Ordering::Release);
                health.set_not_serving::<WorkerServer<Service>>().await;
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
        // Sessions end with the engine; a connection that stays is not worth more than a moment.
        if let Ok(Ok(served)) = tokio::time::timeout(KEEP_ALIVE_TIMEOUT, server).await {
            served?
        }
        outcome.unwrap_or_else(|_| Err(Error::Device("the engine's thread is gone".to_owned())))
    }
}

/// The budget of all messages being received. Each session has at most one on its way, so sound routers never spend it.
fn receive_budget(sessions_max: usize, submit_bytes_max: usize) -> ReceiveBudget {
    let max = (submit_bytes_max as u64).saturating_mul(sessions_max as u64 + 1);
    let spent =
        || Status::resource_exhausted("the worker is receiving as many bytes as it may; try again later");
    ReceiveBudget::new(max, crate::metrics::receive_bytes(), spent)
}

/// The limits within which the messages of a path are received.
fn receive_limits(path: &str, submit_bytes_max: usize) -> ReceiveLimits {
    let session = path == "/inflight.v1.Worker/Session";
    ReceiveLimits {
        message_bytes_max: if session { submit_bytes_max } else { SMALL_MESSAGE_BYTES_MAX },
        option: None,
        message_time_max: MESSAGE_TIME_MAX,
        streaming: session || path.starts_with("/grpc.reflection."),
    }
}

fn turn_in_thread(driver: Driver, ended: oneshot::Sender<Result<(), Error>>) -> Result<(), Error> {
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| driver.run()));
        // Nobody listens any more if the server has failed already.
        let _ = ended.send(match outcome {
            Ok(outcome) => outcome.map_err(|fatal| Error::Device(fatal.to_string())),
            Err(_) => Err(Error::Device("the engine panicked; the log above says where".to_owned())),
        });
    });
    thread.map(drop).map_err(|error| Error::Device(format!("no thread for the engine: {error}")))
}

/// The device, and what is known of its costs beforehand.
fn runtime(
    options: &Options,
    model: &ModelDir,
    progress: Progress<'_>,
) -> Result<(Box<dyn Runtime>, Option<CostPrior>), Error> {
    if let Device::Sim(profile) = options.device {
        let config = model.config();
        let sim = SimOptions {
            profile,
            vocab_size: config.vocab_size as u32,
            // There are no positions to be out of range of, so it takes longer sequences than the model would.
            context_tokens: options.max_context_tokens.unwrap_or(config.context_tokens),
            block_tokens: options.block_tokens,
            slots: options.max_sequences,
            batch_tokens: options.max_batch_tokens,
            overlap: options.overlap,
        };
        let runtime = SimRuntime::new(&sim).map_err(|error| Error::Device(error.to_string()))?;
        tracing::warn!(model = model.name(), ?profile, "device is simulated; tokens are meaningless");
        return Ok((Box::new(runtime), Some(profile.prior(options.block_tokens))));
    }
    match options.device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => return Ok((load_cuda(model, options, progress)?, None)),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => return Err(Error::NoCuda),
        #[cfg(feature = "cuda")]
        Device::Auto => match cuda::available(&ordinals(options)) {
            Ok(()) => match cuda::supports(model, options.tensor_parallel) {
                Ok(()) => return Ok((load_cuda(model, options, progress)?, None)),
                Err(reason) => tracing::warn!(%reason, "GPU cannot run this model; computing on the CPU"),
            },
            Err(reason) if options.gpus.is_empty() => tracing::info!(%reason, "computing on the CPU"),
            // Who names GPUs wants these.
            Err(reason) => return Err(cuda::Error::from(reason).into()),
        },
        #[cfg(not(feature = "cuda"))]
        Device::Auto => {}
        Device::Cpu | Device::Sim(_) => {}
    }
    let kv_dtype = match options.kv_cache_dtype {
        KvCacheDtype::Auto => None,
        KvCacheDtype::Int8 => Some(KvDtype::Int8),
        KvCacheDtype::Fp8 => return Err(wrong_kv_dtype(options, Options::KV_CACHE_DTYPES_ON_CPUS)),
    };
    let cpu = CpuOptions {
        threads: options.threads,
        kv_bytes: options.kv_cache_bytes,
        host_bytes: options.host_cache_bytes,
        block_tokens: options.block_tokens,
        slots: options.max_sequences,
        batch_tokens: options.max_batch_tokens,
        context_tokens: options.max_context_tokens,
        isa: None,
        quantize: options.quantize,
        kv_dtype,
        tensor_parallel: options.tensor_parallel,
    };
    let runtime = CpuRuntime::load(model, &cpu, progress)?;
    let runtime: Box<dyn Runtime> =
        if options.overlap { Box::new(runtime.overlapped()?) } else { Box::new(runtime) };
    Ok((runtime, None))
}

/// What [`Device::Auto`] took stores no keys and values of the dtype asked for.
fn wrong_kv_dtype(options: &Options, range: &'static str) -> Error {
    let (name, value) = ("kv_cache_dtype", options.kv_cache_dtype.to_string());
    OptionsError::OutOfRange { name, value, range }.into()
}

/// The GPUs that a worker can use, by their numbers among those visible; none in a build without the feature `cuda`.
pub fn usable_gpus() -> Vec<u32> {
    #[cfg(feature = "cuda")]
    return (0..cuda::count()).filter(|gpu| cuda::available(&[*gpu as usize]).is_ok()).collect();
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

#[cfg(feature = "cuda")]
fn ordinals(options: &Options) -> Vec<usize> {
    options.gpus_of_ranks().into_iter().map(|gpu| gpu as usize).collect()
}

#[cfg(feature = "cuda")]
fn load_cuda(model: &ModelDir, options: &Options, progress: Progress<'_>) -> Result<Box<dyn Runtime>, Error> {
    if let Some(quantize) = options.quantize {
        let range = "left out on GPUs, which keep weights in 16 bits; --device cpu rounds them";
        let (name, value) = ("quantize", quantize.to_string());
        return Err(OptionsError::OutOfRange { name, value, range }.into());
    }
    let cuda = CudaOptions {
        gpus: ordinals(options),
        lone_communicator: false,
        utilization: options.gpu_memory_utilization,
        kv_bytes: None,
        host_bytes: options.host_cache_bytes,
        block_tokens: options.block_tokens,
        slots: options.max_sequences,
        batch_tokens: options.max_batch_tokens,
        context_tokens: options.max_context_tokens,
        kv_store: match options.kv_cache_dtype {
            KvCacheDtype::Auto => cuda::KvStore::Half,
            KvCacheDtype::Fp8 => cuda::KvStore::Fp8,
            KvCacheDtype::Int8 => return Err(wrong_kv_dtype(options, Options::KV_CACHE_DTYPES_ON_GPUS)),
        },
        deterministic: options.deterministic,
        graphs: true,
        autotune: options.autotune,
        overlap: true,
    };
    Ok(Box::new(CudaRuntime::load(model, &cuda, progress)?))
}

/// Differs from one start to the next.
fn incarnation() -> String {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", since_epoch.as_nanos(), std::process::id())
}

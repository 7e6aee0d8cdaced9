//! `inflight worker`: flags of a worker, and its process.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use inflight_net::SecretFile;
use inflight_worker::metrics::BUCKETS;
use inflight_worker::{
    Aging, CONNECTIONS_MAX, Device, Drafts, KvCacheDtype, ModelSource, Options, PolicyKind, Quantization,
    SelfTestInterval, Worker,
};

use crate::event::{self, RoleEvent};
use crate::exit::{CommandError, Exit};
use crate::grammar_helper;
use crate::metrics_endpoint;
use crate::quick_build;
use crate::role;
use crate::signals;
use crate::step_target::StepTargetArg;
use crate::telemetry;
use crate::tls;
use crate::trace_sampler::RemoteParent;
use inflight_options::{ByteSize, ListenAt, Span, SpanOrOff};

/// Time for closing connections in addition to the drain timeout.
const CLOSE_MARGIN: Duration = Duration::from_secs(1);
/// Minimum interval of load progress events.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Options that decide what is computed and how; `inflight up` takes them too, for its workers.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Worker")]
pub struct EngineArgs {
    /// Hugging Face model directory (config.json, *.safetensors, tokenizer.json) or a .gguf file [default:
    /// the embedded demo model]
    #[arg(long, value_name = "PATH", env = "INFLIGHT_WORKER_MODEL")]
    pub model: Option<PathBuf>,
    /// Served model name [default: the directory's name]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_WORKER_MODEL_NAME")]
    pub model_name: Option<String>,
    /// Device: auto (GPUs if they can run the model, else the CPU), cpu, cuda (GPUs), cuda:N (GPU N), or
    /// sim:PROFILE (a simulated device that takes the time of real hardware and generates meaningless tokens)
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "INFLIGHT_WORKER_DEVICE")]
    pub device: Device,
    /// Compute threads [default: one per core; `up` divides the cores among its workers]
    #[arg(long, value_name = "N", env = "INFLIGHT_WORKER_THREADS")]
    pub threads: Option<usize>,
    /// Weight quantization at load, on CPUs: int8 or int4, with `:GROUP` for the group size [default: the
    /// checkpoint's dtype]
    #[arg(long, visible_alias = "quantization", value_name = "KIND", env = "INFLIGHT_WORKER_QUANTIZE")]
    pub quantize: Option<Quantization>,
    /// Directory that keeps the digests of large weight files, so that they are hashed once and not at every
    /// start, or `off` [default: inflight in $XDG_CACHE_HOME or ~/.cache; `off` without either]
    #[arg(long, value_name = "DIR|off", env = "INFLIGHT_WORKER_FINGERPRINT_CACHE")]
    pub fingerprint_cache: Option<PathBuf>,
    /// KV cache dtype: auto (the model's), int8 (CPUs) or fp8 (GPUs); 8 bits halve its size and lose
    /// precision
    #[arg(long, value_name = "DTYPE", default_value_t = Options::default().kv_cache_dtype, env = "INFLIGHT_WORKER_KV_CACHE_DTYPE")]
    pub kv_cache_dtype: KvCacheDtype,
    /// Tensor-parallel ranks: each holds a shard of weights and KV cache on a GPU of its own, or on its share
    /// of the threads
    #[arg(long, value_name = "N", default_value_t = Options::default().tensor_parallel, env = "INFLIGHT_WORKER_TENSOR_PARALLEL")]
    pub tensor_parallel: usize,
    /// KV cache memory on CPUs, such as 512MiB or 4GB
    #[arg(long, value_name = "BYTES", default_value_t = ByteSize(Options::default().kv_cache_bytes), env = "INFLIGHT_WORKER_KV_CACHE_BYTES")]
    pub kv_cache_bytes: ByteSize,
    /// Fraction of GPU memory to use for weights, buffers and, with the rest, the KV cache
    #[arg(long, value_name = "PART", default_value_t = Options::default().gpu_memory_utilization, env = "INFLIGHT_WORKER_GPU_MEMORY_UTILIZATION")]
    pub gpu_memory_utilization: f32,
    /// Batch-invariant results on GPUs: tokens do not depend on other requests; slower. CPUs are always
    /// batch-invariant
    #[arg(long, env = "INFLIGHT_WORKER_DETERMINISTIC")]
    pub deterministic: bool,
    /// Disable GEMM autotuning at load on GPUs; use cuBLASLt's first heuristic choice
    #[arg(long, env = "INFLIGHT_WORKER_NO_AUTOTUNE")]
    pub no_autotune: bool,
    /// Directory that keeps the choices of GEMM autotuning for later starts, or `off` [default: inflight in
    /// $XDG_CACHE_HOME or ~/.cache; `off` without either]
    #[arg(long, value_name = "DIR|off", env = "INFLIGHT_WORKER_GEMM_CACHE")]
    pub gemm_cache: Option<PathBuf>,
    /// Host memory for KV blocks of preempted (swapped) sequences, such as 1GiB; 0: always recompute
    #[arg(long, value_name = "BYTES", default_value_t = ByteSize(Options::default().host_cache_bytes), env = "INFLIGHT_WORKER_HOST_CACHE_BYTES")]
    pub host_cache_bytes: ByteSize,
    /// Directory in which workers of this host see each other's promised memory; absolute, writable by this user
    /// only, and the same for all of them [default: /dev/shm/inflight-UID]
    #[arg(long, value_name = "DIR", env = "INFLIGHT_WORKER_RESERVATION_DIR")]
    pub reservation_dir: Option<PathBuf>,
    /// Scheduling policy: fair, fcfs, priority or static
    #[arg(long, value_name = "POLICY", default_value_t = Options::default().policy, env = "INFLIGHT_WORKER_POLICY")]
    pub policy: PolicyKind,
    /// Aging of --policy fair: queueing time after which a sequence goes before all that have
    /// waited less, whatever their priorities
    #[arg(long, value_name = "DURATION", default_value_t = Span(Aging::default().threshold), env = "INFLIGHT_WORKER_AGING_THRESHOLD")]
    pub aging_threshold: Span,
    /// Aging of --policy fair: service, in tokens of weight 1, forgiven per second of queueing
    #[arg(long, value_name = "TOKENS", default_value_t = Aging::default().tokens_per_second, env = "INFLIGHT_WORKER_AGING_TOKENS_PER_SECOND")]
    pub aging_tokens_per_second: f64,
    /// Aging of --policy fair: maximum service forgiven; the fairness bound between two tenants grows by it
    #[arg(long, value_name = "TOKENS", default_value_t = Aging::default().tokens_max, env = "INFLIGHT_WORKER_AGING_TOKENS_MAX")]
    pub aging_tokens_max: f64,
    /// Aging of --policy priority: queueing time per priority level gained
    #[arg(long, value_name = "DURATION", default_value_t = Span(Aging::default().level_every), env = "INFLIGHT_WORKER_AGING_LEVEL_EVERY")]
    pub aging_level_every: Span,
    /// Aging of --policy priority: maximum number of levels gained
    #[arg(long, value_name = "LEVELS", default_value_t = Aging::default().levels_max, env = "INFLIGHT_WORKER_AGING_LEVELS_MAX")]
    pub aging_levels_max: u32,
    /// Disable prefix caching
    #[arg(long, env = "INFLIGHT_WORKER_NO_PREFIX_CACHE")]
    pub no_prefix_cache: bool,
    /// Overlap scheduling of the next iteration with the running one; pays off with a spare core
    #[arg(long, env = "INFLIGHT_WORKER_OVERLAP")]
    pub overlap: bool,
    /// Target duration of an iteration with decodes, which bounds the prefill chunks beside them and so
    /// inter-token latency: auto (follows the decodes' time and the prefill load), a duration, or off
    #[arg(long, value_name = "auto|off|DURATION", default_value_t = StepTargetArg::Auto, env = "INFLIGHT_WORKER_STEP_TARGET")]
    pub step_target: StepTargetArg,
    /// Objective for the time to first token: prefill gets more time while its backlog would exceed it
    #[arg(long, value_name = "DURATION", env = "INFLIGHT_WORKER_SLO_TTFT")]
    pub slo_ttft: Option<Span>,
    /// Objective for the gap between tokens: bounds iterations with decodes and prefill; takes precedence over --slo-ttft
    #[arg(long, value_name = "DURATION", env = "INFLIGHT_WORKER_SLO_GAP")]
    pub slo_gap: Option<Span>,
    /// Source of drafted tokens (speculative decoding): off, or prompt-lookup, which drafts what followed the last
    /// tokens where they occurred before. Drafts are verified, so the output is the same
    #[arg(long, value_name = "off|prompt-lookup", default_value_t = Options::default().drafts, env = "INFLIGHT_WORKER_DRAFTS")]
    pub drafts: Drafts,
    /// Maximum tokens drafted for a sequence and iteration
    #[arg(long, value_name = "K", default_value_t = Options::default().drafts_max, env = "INFLIGHT_WORKER_DRAFTS_MAX")]
    pub drafts_max: u32,
    /// Tokens per KV block
    #[arg(long, value_name = "N", default_value_t = Options::default().block_tokens, env = "INFLIGHT_WORKER_BLOCK_TOKENS")]
    pub block_tokens: u32,
    /// Maximum running sequences
    #[arg(long, value_name = "N", default_value_t = Options::default().max_sequences, env = "INFLIGHT_WORKER_MAX_SEQUENCES")]
    pub max_sequences: u32,
    /// Token budget of an iteration, over all sequences
    #[arg(long, value_name = "N", default_value_t = Options::default().max_batch_tokens, env = "INFLIGHT_WORKER_MAX_BATCH_TOKENS")]
    pub max_batch_tokens: u32,
    /// Output tokens for which a sequence reserves KV blocks at admission [default: one block]
    #[arg(long, value_name = "N", env = "INFLIGHT_WORKER_DECODE_RESERVE_TOKENS")]
    pub decode_reserve_tokens: Option<u32>,
    /// Share of the KV blocks that admission keeps free for the growth of running sequences, from 0 to 0.5: more
    /// means fewer preemptions and fewer sequences at once
    #[arg(long, value_name = "PART", default_value_t = Options::default().kv_watermark, env = "INFLIGHT_WORKER_KV_WATERMARK")]
    pub kv_watermark: f64,
    /// Minimum difference of priorities for a waiting request to preempt a running one, at least 1: more means fewer
    /// preemptions and longer waits of important requests
    #[arg(long, value_name = "LEVELS", default_value_t = Options::default().preemption_threshold, env = "INFLIGHT_WORKER_PREEMPTION_THRESHOLD")]
    pub preemption_threshold: u32,
    /// Maximum number of sequences admitted past a waiting one for which too few KV blocks are free, at most 10000;
    /// fewer means shorter waits of large requests and longer ones of small requests
    #[arg(long, value_name = "N", default_value_t = Options::default().bypass_max, env = "INFLIGHT_WORKER_BYPASS_MAX")]
    pub bypass_max: u32,
    /// Maximum sequence length, prompt and output together [default: the model's context length]
    #[arg(long, value_name = "N", env = "INFLIGHT_WORKER_MAX_CONTEXT_TOKENS")]
    pub max_context_tokens: Option<u32>,
    /// Maximum sequences waiting in the worker
    #[arg(long, value_name = "N", default_value_t = Options::default().max_waiting, env = "INFLIGHT_WORKER_MAX_WAITING")]
    pub max_waiting: u32,
    /// Interval of self-tests, or `off`: a prompt whose answer was recorded at the start, beside the others; a worker that answers it with
    /// other bits ends. On GPUs only with --deterministic, and unproven [default: 5m on CPUs, off on GPUs]
    #[arg(long, value_name = "DURATION|off", env = "INFLIGHT_WORKER_SELF_TEST_INTERVAL")]
    pub self_test_interval: Option<SpanOrOff>,
}

impl EngineArgs {
    fn self_test_interval(&self) -> SelfTestInterval {
        match self.self_test_interval {
            None => SelfTestInterval::Auto,
            Some(SpanOrOff(None)) => SelfTestInterval::Off,
            Some(SpanOrOff(Some(Span(interval)))) => SelfTestInterval::Every(interval),
        }
    }

    fn aging(&self) -> Aging {
        Aging {
            threshold: self.aging_threshold.0,
            tokens_per_second: self.aging_tokens_per_second,
            tokens_max: self.aging_tokens_max,
            level_every: self.aging_level_every.0,
            levels_max: self.aging_levels_max,
        }
    }
}

/// Returns the given directory of a cache, or the default one; `None` if it is off.
fn cache_directory(given: Option<&PathBuf>) -> Option<PathBuf> {
    if let Some(given) = given {
        return (given.as_os_str() != "off").then(|| given.clone());
    }
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("inflight"))
}

/// Options of `inflight worker`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Address on which to listen for routers; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8652", env = "INFLIGHT_WORKER_LISTEN")]
    pub listen: SocketAddr,
    /// Address of the Prometheus endpoint, or `off`
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:8653",
        env = "INFLIGHT_WORKER_METRICS_LISTEN"
    )]
    pub metrics_listen: ListenAt,
    /// Name of this worker, stable over restarts [default: worker@ADDRESS]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_WORKER_ID")]
    pub worker_id: Option<String>,
    /// Heartbeat interval: how often an idle worker sends an update; routers take it for lost after three
    /// intervals
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().heartbeat), env = "INFLIGHT_WORKER_HEARTBEAT")]
    pub heartbeat: Span,
    /// Maximum sessions with routers
    #[arg(long, value_name = "N", default_value_t = Options::default().max_sessions, env = "INFLIGHT_WORKER_MAX_SESSIONS")]
    pub max_sessions: u32,
    /// GPUs to use, one per tensor-parallel rank, by their index among the visible ones [default: the GPU of
    /// --device, or the first one, and those after it]
    #[arg(long, value_name = "N,...", value_delimiter = ',', env = "INFLIGHT_WORKER_GPU")]
    pub gpu: Vec<u32>,
    /// Record all inputs of the scheduler to this file, for `inflight replay`
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_RECORD")]
    pub record: Option<PathBuf>,
    /// File with the secret that routers must prove, and that the worker proves to them, one on each line: all
    /// are accepted, so that a secret can be replaced step by step. Reread when it changes
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_SECRET_FILE")]
    pub secret_file: Option<PathBuf>,
    /// Permit --listen on other addresses than loopback without --secret-file or --tls-client-ca
    #[arg(long, env = "INFLIGHT_WORKER_INSECURE")]
    pub insecure: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub tls: tls::ServerArgs,
    #[command(flatten)]
    pub telemetry: telemetry::Args,
    /// TOML configuration file; its keys are the names of these flags. Flags and environment variables
    /// override it
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub role: role::Args,
}

impl Args {
    fn options(&self) -> Result<Options, CommandError> {
        let engine = &self.engine;
        Ok(Options {
            listen: self.listen,
            tls: self.tls.files()?,
            secret: (self.secret_file.as_deref().map(SecretFile::open).transpose())
                .map_err(|error| CommandError::chain("--secret-file", &error))?,
            insecure: self.insecure,
            model: match &engine.model {
                Some(directory) => ModelSource::Directory(directory.clone()),
                None => ModelSource::Embedded,
            },
            model_name: engine.model_name.clone(),
            device: engine.device,
            gpus: self.gpu.clone(),
            threads: engine.threads,
            quantize: engine.quantize,
            kv_cache_dtype: engine.kv_cache_dtype,
            tensor_parallel: engine.tensor_parallel,
            kv_cache_bytes: engine.kv_cache_bytes.0,
            gpu_memory_utilization: engine.gpu_memory_utilization,
            deterministic: engine.deterministic,
            autotune: !engine.no_autotune,
            gemm_cache: cache_directory(engine.gemm_cache.as_ref()),
            host_cache_bytes: engine.host_cache_bytes.0,
            reservation_dir: engine.reservation_dir.clone(),
            policy: engine.policy,
            aging: engine.aging(),
            prefix_cache: !engine.no_prefix_cache,
            overlap: engine.overlap,
            step_target: engine.step_target()?,
            drafts: engine.drafts,
            drafts_max: engine.drafts_max,
            block_tokens: engine.block_tokens,
            max_sequences: engine.max_sequences,
            max_batch_tokens: engine.max_batch_tokens,
            decode_reserve_tokens: engine.decode_reserve_tokens,
            kv_watermark: engine.kv_watermark,
            preemption_threshold: engine.preemption_threshold,
            bypass_max: engine.bypass_max,
            max_context_tokens: engine.max_context_tokens,
            max_waiting: engine.max_waiting,
            grammar_confinement: Some(grammar_helper::confinement(self.role.grammar_memory_max.0)),
            max_sessions: self.max_sessions,
            heartbeat: self.heartbeat.0,
            self_test_interval: engine.self_test_interval(),
            drain_timeout: self.role.drain_timeout.0,
            record: self.record.clone(),
            fingerprint_cache: cache_directory(engine.fingerprint_cache.as_ref()),
            worker_id: self.worker_id.clone().unwrap_or_else(|| format!("worker@{}", self.listen)),
        })
    }
}

/// Runs a worker until it is signalled to stop.
///
/// # Errors
/// An option is invalid, the model does not load, a port is taken, or the worker did not drain in time.
pub async fn run(args: Args) -> Result<(), CommandError> {
    let stop = signals::watch(args.role.supervised)
        .map_err(|error| CommandError::chain("cannot watch for signals", &error))?;
    signals::exit_on_abort(&stop);
    let options = args.options()?;
    options.validate().map_err(|error| CommandError::new(Exit::Usage, error.to_string()))?;
    let worker_id = options.worker_id.clone();
    let telemetry = telemetry::start(
        &args.telemetry,
        "inflight-worker",
        &worker_id,
        args.metrics_listen,
        BUCKETS,
        // Its callers are routers, which have drawn.
        RemoteParent::Decides,
    )
    .await?;
    let metrics = telemetry.metrics;
    quick_build::log(args.role.supervised);
    role::check_open_files(CONNECTIONS_MAX, "start fewer routers");
    let outcome = Box::pin(async {
        let progress = LoadProgressDisplay::new(args.role.supervised);
        let loading = tokio::task::spawn_blocking(move || {
            Worker::load(&options, &|done, total| progress.show(done, total))
        });
        let worker = tokio::select! {
            loaded = loading => match loaded {
                Ok(loaded) => loaded.map_err(|error| CommandError::chain("", &error))?,
                Err(panic) => return Err(CommandError::chain("loading the model", &panic)),
            },
            () = stop.drain.cancelled() => return Ok(()),
        };
        let address = worker.address();
        let drain = stop.drain.clone();
        metrics_endpoint::ready_when(move || !drain.is_cancelled());
        tracing::info!(%address, worker = worker_id, "ready");
        event::emit(&RoleEvent::Ready { address, metrics, http: None });
        let drain_timeout = args.role.drain_timeout.0 + CLOSE_MARGIN;
        let serving = Box::pin(worker.serve(stop.drain.clone()));
        role::within_drain(serving, &stop.drain, drain_timeout).await
    })
    .await;
    telemetry.stop().await;
    outcome
}

/// Display of load progress: a bar on a terminal, events for a supervisor, nothing otherwise.
enum LoadProgressDisplay {
    Bar(ProgressBar),
    Events(Mutex<Instant>),
    Silent,
}

impl LoadProgressDisplay {
    fn new(supervised: bool) -> Self {
        if supervised {
            return Self::Events(Mutex::new(Instant::now()));
        }
        if !std::io::stderr().is_terminal() {
            return Self::Silent;
        }
        let style = ProgressStyle::with_template("loading {bar:40} {bytes}/{total_bytes}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        Self::Bar(ProgressBar::no_length().with_style(style))
    }

    fn show(&self, done: u64, total: u64) {
        match self {
            Self::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done);
                if done >= total {
                    bar.finish_and_clear();
                }
            }
            Self::Events(last) => {
                let Ok(mut last) = last.lock() else { return };
                if last.elapsed() >= PROGRESS_INTERVAL {
                    *last = Instant::now();
                    event::emit(&RoleEvent::Loading { done, total });
                }
            }
            Self::Silent => {}
        }
    }
}

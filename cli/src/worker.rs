//! `inflight worker`.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use inflight_worker::metrics::BUCKETS;
use inflight_worker::runtime::cpu::Quantization;
use inflight_worker::{Device, KvCacheDtype, ModelSource, Options, PolicyKind, Worker};

use crate::event::{self, RoleEvent};
use crate::exit::{Exit, Failure};
use crate::metrics_endpoint;
use crate::role;
use crate::signals;
use crate::telemetry;
use crate::tls;
use crate::units::{Bytes, ListenAt, Span};

/// What closing connections gets beyond the drain timeout.
const CLOSE_MARGIN: Duration = Duration::from_secs(1);
/// How often loading is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Options that decide what is computed and how; `inflight up` takes them too, for its workers.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Worker")]
pub struct EngineArgs {
    /// Directory of a Hugging Face model (config.json, *.safetensors, tokenizer.json) or a .gguf file [default: the
    /// embedded model]
    #[arg(long, value_name = "PATH", env = "INFLIGHT_WORKER_MODEL")]
    pub model: Option<PathBuf>,
    /// Name under which clients ask for the model [default: the directory's name]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_WORKER_MODEL_NAME")]
    pub model_name: Option<String>,
    /// Where to compute: auto (GPUs if there are any that can run the model, else the CPU), cpu, cuda (GPUs), cuda:N (GPU N), or sim:PROFILE, which
    /// computes nothing but takes the time that hardware would
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "INFLIGHT_WORKER_DEVICE")]
    pub device: Device,
    /// Threads that compute [default: one for each core; `up` divides the cores among its workers]
    #[arg(long, value_name = "N", env = "INFLIGHT_WORKER_THREADS")]
    pub threads: Option<usize>,
    /// On CPUs, round weights to integers as they are loaded: int8 or int4, `:GROUP` for how many share a scale [default: as
    /// the model has them]
    #[arg(long, visible_alias = "quantization", value_name = "KIND", env = "INFLIGHT_WORKER_QUANTIZE")]
    pub quantize: Option<Quantization>,
    /// What the KV cache holds: auto, numbers as the model computes them, or half as large and less exact: int8 on CPUs, fp8
    /// on GPUs
    #[arg(long, value_name = "DTYPE", default_value_t = Options::default().kv_cache_dtype, env = "INFLIGHT_WORKER_KV_CACHE_DTYPE")]
    pub kv_cache_dtype: KvCacheDtype,
    /// Ranks to divide the model among, each with a shard of weights and KV cache, and a GPU or its part of the threads
    #[arg(long, value_name = "N", default_value_t = Options::default().tensor_parallel, env = "INFLIGHT_WORKER_TENSOR_PARALLEL")]
    pub tensor_parallel: usize,
    /// Memory for the KV cache on CPUs, such as 512MiB or 4GB
    #[arg(long, value_name = "BYTES", default_value_t = Bytes(Options::default().kv_cache_bytes), env = "INFLIGHT_WORKER_KV_CACHE_BYTES")]
    pub kv_cache_bytes: Bytes,
    /// Part of a GPU's memory to use: weights, buffers, and the KV cache in all that is left
    #[arg(long, value_name = "PART", default_value_t = Options::default().gpu_memory_utilization, env = "INFLIGHT_WORKER_GPU_MEMORY_UTILIZATION")]
    pub gpu_memory_utilization: f32,
    /// On a GPU: answers whose bits do not depend on what else runs, at a price in speed; on CPUs it is always so
    #[arg(long, env = "INFLIGHT_WORKER_DETERMINISTIC")]
    pub deterministic: bool,
    /// On a GPU, products are made by the library's first algorithm, not by the one found to be the fastest at load
    #[arg(long, env = "INFLIGHT_WORKER_NO_AUTOTUNE")]
    pub no_autotune: bool,
    /// Host memory for the KV cache of sequences that give way, such as 1GiB; 0: they are computed again
    #[arg(long, value_name = "BYTES", default_value_t = Bytes(Options::default().host_cache_bytes), env = "INFLIGHT_WORKER_HOST_CACHE_BYTES")]
    pub host_cache_bytes: Bytes,
    /// Who goes first: fair, fcfs, priority or static
    #[arg(long, value_name = "POLICY", default_value_t = Options::default().policy, env = "INFLIGHT_WORKER_POLICY")]
    pub policy: PolicyKind,
    /// Prompts that begin alike compute the beginning again, each for itself
    #[arg(long, env = "INFLIGHT_WORKER_NO_PREFIX_CACHE")]
    pub no_prefix_cache: bool,
    /// Plan the next iteration while one runs; pays where a core is left beside those that compute
    #[arg(long, env = "INFLIGHT_WORKER_OVERLAP")]
    pub overlap: bool,
    /// How long an iteration with decodes in it should take at most; bounds the prefill beside them
    #[arg(long, value_name = "DURATION", default_value_t = Span(Duration::from_millis(50)), env = "INFLIGHT_WORKER_STEP_TARGET")]
    pub step_target: Span,
    /// Tokens in a block of the KV cache
    #[arg(long, value_name = "N", default_value_t = Options::default().block_tokens, env = "INFLIGHT_WORKER_BLOCK_TOKENS")]
    pub block_tokens: u32,
    /// Most sequences in the running batch
    #[arg(long, value_name = "N", default_value_t = Options::default().max_sequences, env = "INFLIGHT_WORKER_MAX_SEQUENCES")]
    pub max_sequences: u32,
    /// Most tokens in one forward pass, over all sequences
    #[arg(long, value_name = "N", default_value_t = Options::default().max_batch_tokens, env = "INFLIGHT_WORKER_MAX_BATCH_TOKENS")]
    pub max_batch_tokens: u32,
    /// Most tokens in a sequence, prompt and output together [default: the model's own context]
    #[arg(long, value_name = "N", env = "INFLIGHT_WORKER_MAX_CONTEXT_TOKENS")]
    pub max_context_tokens: Option<u32>,
    /// Most sequences that wait in the worker for their first iteration
    #[arg(long, value_name = "N", default_value_t = Options::default().max_waiting, env = "INFLIGHT_WORKER_MAX_WAITING")]
    pub max_waiting: u32,
}

/// Options of `inflight worker`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Address for routers; port 0 takes a free one
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
    /// Name of this worker, the same over restarts [default: worker@ADDRESS]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_WORKER_ID")]
    pub worker_id: Option<String>,
    /// How often routers hear from an idle worker; they take it for lost after three times this long
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().heartbeat), env = "INFLIGHT_WORKER_HEARTBEAT")]
    pub heartbeat: Span,
    /// Most routers connected at once
    #[arg(long, value_name = "N", default_value_t = Options::default().max_sessions, env = "INFLIGHT_WORKER_MAX_SESSIONS")]
    pub max_sessions: u32,
    /// Which GPUs to take, one for each rank, by their numbers among those visible [default: the one that --device names, or
    /// the first, and those after it]
    #[arg(long, value_name = "N,...", value_delimiter = ',', env = "INFLIGHT_WORKER_GPU")]
    pub gpu: Vec<u32>,
    /// Record everything that reaches the scheduler to this file, for `inflight replay`
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_RECORD")]
    pub record: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub tls: tls::ServerArgs,
    #[command(flatten)]
    pub telemetry: telemetry::Args,
    /// TOML file whose keys are the names of these flags; flags and environment win over it
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub role: role::Args,
}

impl Args {
    fn options(&self) -> Result<Options, Failure> {
        let engine = &self.engine;
        Ok(Options {
            listen: self.listen,
            tls: self.tls.files()?,
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
            host_cache_bytes: engine.host_cache_bytes.0,
            policy: engine.policy,
            prefix_cache: !engine.no_prefix_cache,
            overlap: engine.overlap,
            step_target: Some(engine.step_target.0),
            block_tokens: engine.block_tokens,
            max_sequences: engine.max_sequences,
            max_batch_tokens: engine.max_batch_tokens,
            max_context_tokens: engine.max_context_tokens,
            max_waiting: engine.max_waiting,
            max_sessions: self.max_sessions,
            heartbeat: self.heartbeat.0,
            drain_timeout: self.role.drain_timeout.0,
            record: self.record.clone(),
            worker_id: self.worker_id.clone().unwrap_or_else(|| format!("worker@{}", self.listen)),
        })
    }
}

/// Runs a worker until it is told to stop.
///
/// # Errors
/// A bad option, a model that does not load, a taken port.
pub async fn run(args: Args) -> Result<(), Failure> {
    let stop = signals::watch(args.role.supervised)
        .map_err(|error| Failure::chain("cannot watch for signals", &error))?;
    signals::exit_on_abort(&stop);
    let options = args.options()?;
    options.validate().map_err(|error| Failure::new(Exit::Usage, error.to_string()))?;
    let worker_id = options.worker_id.clone();
    let telemetry =
        telemetry::start(&args.telemetry, "inflight-worker", &worker_id, args.metrics_listen, BUCKETS)
            .await?;
    let metrics = telemetry.metrics;
    let outcome = Box::pin(async {
        let progress = Progress::new(args.role.supervised);
        let loading = tokio::task::spawn_blocking(move || {
            Worker::load(&options, &|done, total| progress.show(done, total))
        });
        let worker = tokio::select! {
            loaded = loading => match loaded {
                Ok(loaded) => loaded.map_err(|error| Failure::chain("", &error))?,
                Err(panic) => return Err(Failure::chain("loading the model", &panic)),
            },
            () = stop.drain.cancelled() => return Ok(()),
        };
        let address = worker.address();
        let drain = stop.drain.clone();
        metrics_endpoint::ready_when(move || !drain.is_cancelled());
        tracing::info!(%address, worker = worker_id, "ready");
        event::emit(&RoleEvent::Ready { address, metrics });
        let drain_timeout = args.role.drain_timeout.0 + CLOSE_MARGIN;
        role::within_drain(worker.serve(stop.drain.clone()), &stop.drain, drain_timeout).await
    })
    .await;
    telemetry.stop().await;
    outcome
}

/// Shows how far loading is: a bar on a terminal, events for a supervisor, nothing otherwise.
enum Progress {
    Bar(ProgressBar),
    Events(Mutex<Instant>),
    Silent,
}

impl Progress {
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

//! Options that decide what is computed and how.

use std::path::PathBuf;

use inflight_models::ModelSource;
use inflight_options::{Span, SpanOrOff, bytes};
use inflight_runtime_cpu::Quantization;
use inflight_worker_core::SchedulingOptions;

use super::{Device, KvCacheDtype};
use crate::self_test_interval::SelfTestInterval;

/// Options that decide what is computed and how; `inflight up` takes them too, for its workers.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Worker")]
pub struct ComputeOptions {
    /// Model of the Hugging Face Hub (org/name, org/name@revision, org/name:Q4_K_M), a directory in its layout (config.json,
    /// *.safetensors, tokenizer.json) or a .gguf file [default: inflight-demo, the embedded demo model]
    #[arg(long, short, value_name = "MODEL", env = "INFLIGHT_WORKER_MODEL")]
    pub model: Option<PathBuf>,
    /// Names of the served model, separated by commas or in several flags; responses and metrics have the first one
    /// [default: org/name, or the directory's name]
    #[arg(
        id = "model_name",
        long = "model-name",
        visible_alias = "served-model-name",
        value_name = "NAME,...",
        value_delimiter = ',',
        env = "INFLIGHT_WORKER_MODEL_NAME"
    )]
    pub model_names: Vec<String>,
    /// File with a chat template (Jinja) in place of the model's own ones, for conversations with and without
    /// tools
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_CHAT_TEMPLATE")]
    pub chat_template: Option<PathBuf>,
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
    #[arg(
        long,
        value_name = "DTYPE",
        default_value_t = KvCacheDtype::default(),
        env = "INFLIGHT_WORKER_KV_CACHE_DTYPE"
    )]
    pub kv_cache_dtype: KvCacheDtype,
    /// Tensor-parallel ranks: each holds a shard of weights and KV cache on a GPU of its own, or on its share
    /// of the threads
    #[arg(long, value_name = "N", default_value_t = 1, env = "INFLIGHT_WORKER_TENSOR_PARALLEL")]
    pub tensor_parallel: usize,
    /// KV cache memory on CPUs, such as 512MiB or 4GB
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "1GiB",
        value_parser = bytes::<u64>,
        env = "INFLIGHT_WORKER_KV_CACHE_BYTES"
    )]
    pub kv_cache_bytes: u64,
    /// Fraction of GPU memory to use for weights, buffers and, with the rest, the KV cache
    #[arg(long, value_name = "PART", default_value_t = 0.9, env = "INFLIGHT_WORKER_GPU_MEMORY_UTILIZATION")]
    pub gpu_memory_utilization: f32,
    /// Batch-invariant results on GPUs: tokens do not depend on other requests; slower. CPUs are always
    /// batch-invariant
    #[arg(long, env = "INFLIGHT_WORKER_DETERMINISTIC")]
    pub deterministic: bool,
    /// On GPUs, also what was tested in emulation only: Gemma 3, Qwen3.5, and the release of KV blocks that a sliding window has passed
    #[arg(long, env = "INFLIGHT_WORKER_GPU_EXPERIMENTAL")]
    pub gpu_experimental: bool,
    /// Disable GEMM autotuning at load on GPUs; use cuBLASLt's first heuristic choice
    #[arg(long, env = "INFLIGHT_WORKER_NO_AUTOTUNE")]
    pub no_autotune: bool,
    /// Directory that keeps the choices of GEMM autotuning for later starts, or `off` [default: inflight in
    /// $XDG_CACHE_HOME or ~/.cache; `off` without either]
    #[arg(long, value_name = "DIR|off", env = "INFLIGHT_WORKER_GEMM_CACHE")]
    pub gemm_cache: Option<PathBuf>,
    /// Host memory for KV blocks of preempted (swapped) sequences, such as 1GiB; 0: always recompute
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "256MiB",
        value_parser = bytes::<u64>,
        env = "INFLIGHT_WORKER_HOST_CACHE_BYTES"
    )]
    pub host_cache_bytes: u64,
    /// Directory in which workers of this host see each other's promised memory; absolute, writable by this user
    /// only, and the same for all of them [default: /dev/shm/inflight-UID]
    #[arg(long, value_name = "DIR", env = "INFLIGHT_WORKER_RESERVATION_DIR")]
    pub reservation_dir: Option<PathBuf>,
    /// What the scheduler does.
    #[command(flatten)]
    pub scheduling: SchedulingOptions,
    /// Overlap scheduling of the next iteration with the running one; pays off with a spare core
    #[arg(long, env = "INFLIGHT_WORKER_OVERLAP")]
    pub overlap: bool,
    /// Tokens per KV block
    #[arg(long, value_name = "N", default_value_t = 16, env = "INFLIGHT_WORKER_BLOCK_TOKENS")]
    pub block_tokens: u32,
    /// Maximum running sequences
    #[arg(long, value_name = "N", default_value_t = 256, env = "INFLIGHT_WORKER_MAX_SEQUENCES")]
    pub max_sequences: u32,
    /// Token budget of an iteration, over all sequences
    #[arg(long, value_name = "N", default_value_t = 512, env = "INFLIGHT_WORKER_MAX_BATCH_TOKENS")]
    pub max_batch_tokens: u32,
    /// Maximum sequence length, prompt and output together [default: the model's context length]
    #[arg(long, value_name = "N", env = "INFLIGHT_WORKER_MAX_CONTEXT_TOKENS")]
    pub max_context_tokens: Option<u32>,
    /// Interval of self-tests, or `off`: a prompt whose answer was recorded at the start, beside the others; a worker that answers it with
    /// other bits ends. On GPUs only with --deterministic, and unproven [default: 5m on CPUs, off on GPUs]
    #[arg(long, value_name = "DURATION|off", env = "INFLIGHT_WORKER_SELF_TEST_INTERVAL")]
    pub self_test_interval: Option<SpanOrOff>,
}

impl Default for ComputeOptions {
    fn default() -> Self {
        inflight_options::defaults()
    }
}

impl ComputeOptions {
    /// Returns the model to serve.
    pub fn source(&self) -> ModelSource {
        ModelSource::of_argument(self.model.as_deref())
    }

    /// Returns the directory of the fingerprint cache; `None`: weights are hashed at every start.
    pub(crate) fn fingerprint_cache(&self) -> Option<PathBuf> {
        cache_directory(self.fingerprint_cache.as_ref())
    }

    /// Returns the directory that keeps the choices of autotuning; `None`: each start times the algorithms.
    pub(crate) fn gemm_cache(&self) -> Option<PathBuf> {
        cache_directory(self.gemm_cache.as_ref())
    }

    /// Returns the interval of self-tests.
    pub(crate) fn self_test_interval(&self) -> SelfTestInterval {
        match self.self_test_interval {
            None => SelfTestInterval::Auto,
            Some(SpanOrOff(None)) => SelfTestInterval::Off,
            Some(SpanOrOff(Some(Span(interval)))) => SelfTestInterval::Every(interval),
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

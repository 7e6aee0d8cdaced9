//! Worker options, their defaults and their validation.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use inflight_grammar_service::Confinement;
use inflight_models::ModelSource;
use inflight_net::{SecretFile, ServerTlsFiles};
use inflight_runtime::sharding::RANKS_MAX;
use inflight_runtime_cpu::Quantization;
use inflight_runtime_sim::{SpecError, read_profile};
use inflight_worker_core::policy::{Aging, PolicyKind};
use inflight_worker_core::{DeviceProfile, LatencyObjectives, SchedulerLimits, StepTarget};

use crate::self_test_interval::SelfTestInterval;

/// Device that runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Device {
    /// GPUs ([`Options::gpus`]) if they are available and can run the model, else the CPU.
    #[default]
    Auto,
    /// CPU cores.
    Cpu,
    /// NVIDIA GPU by ordinal among the visible ones, by default 0; with tensor parallelism, the GPU of rank
    /// 0.
    Cuda(Option<u32>),
    /// Simulated device: takes the time that the profile says and generates meaningless tokens.
    Sim(DeviceProfile),
}

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvCacheDtype {
    /// The model's own 16-bit type.
    #[default]
    Auto,
    /// 8-bit integers with a scale per token and head; CPUs only.
    Int8,
    /// FP8 e4m3 with a scale per token and head; GPUs only.
    Fp8,
}

/// Error for an unknown KV cache dtype.
#[derive(Debug, thiserror::Error)]
#[error(
    "unknown dtype `{0}` of the KV cache; it is `auto`, as the model computes, `int8` on CPUs, or `fp8` on GPUs"
)]
pub struct UnknownKvCacheDtype(String);

impl FromStr for KvCacheDtype {
    type Err = UnknownKvCacheDtype;

    fn from_str(name: &str) -> Result<Self, UnknownKvCacheDtype> {
        match name {
            "auto" => Ok(Self::Auto),
            "int8" => Ok(Self::Int8),
            "fp8" => Ok(Self::Fp8),
            other => Err(UnknownKvCacheDtype(other.to_owned())),
        }
    }
}

impl std::fmt::Display for KvCacheDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        })
    }
}

/// Source of drafted tokens, which are verified so that the output does not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Drafts {
    /// No drafts.
    #[default]
    Off,
    /// Tokens that followed the last ones where they occurred before, in prompt or output.
    PromptLookup,
}

/// Error for an unknown source of drafts.
#[derive(Debug, thiserror::Error)]
#[error("unknown source of drafts `{0}`; there are `off` and `prompt-lookup`")]
pub struct UnknownDrafts(String);

impl FromStr for Drafts {
    type Err = UnknownDrafts;

    fn from_str(name: &str) -> Result<Self, UnknownDrafts> {
        match name {
            "off" => Ok(Self::Off),
            "prompt-lookup" => Ok(Self::PromptLookup),
            other => Err(UnknownDrafts(other.to_owned())),
        }
    }
}

impl std::fmt::Display for Drafts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::PromptLookup => "prompt-lookup",
        })
    }
}

/// Error for an unknown device.
#[derive(Debug, thiserror::Error)]
pub enum UnknownDevice {
    /// Unknown device name.
    #[error("unknown device `{0}`; this build knows `auto`, `cpu`, `cuda`, `cuda:N` and `sim:PROFILE`")]
    Name(String),
    /// Invalid profile of a simulated device.
    #[error(transparent)]
    Profile(#[from] SpecError),
}

impl FromStr for Device {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, UnknownDevice> {
        match name {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            other => match (other.strip_prefix("sim:"), other.strip_prefix("cuda:")) {
                (Some(profile), _) => Ok(Self::Sim(read_profile(profile)?)),
                (_, Some(ordinal)) => {
                    let unknown = |_| UnknownDevice::Name(other.to_owned());
                    ordinal.parse().map(|ordinal| Self::Cuda(Some(ordinal))).map_err(unknown)
                }
                _ => Err(UnknownDevice::Name(other.to_owned())),
            },
        }
    }
}

/// Configuration of a worker.
#[derive(Debug, Clone)]
pub struct Options {
    /// Listening address for routers; port 0 picks a free port.
    pub listen: SocketAddr,
    /// TLS certificate, key and trusted client CAs; `None`: plaintext.
    pub tls: Option<ServerTlsFiles>,
    /// Secret that callers must prove, and that the worker proves to routers; `None`: every caller is
    /// served, unless TLS requires client certificates.
    pub secret: Option<SecretFile>,
    /// Permits listening on other addresses than loopback although callers need not authenticate.
    pub insecure: bool,
    /// Model to serve.
    pub model: ModelSource,
    /// Model name that clients request; defaults to the name of the model's directory.
    pub model_name: Option<String>,
    /// Device to run on.
    pub device: Device,
    /// GPU ordinals by rank, among the visible GPUs; by default consecutive from the one that
    /// [`Options::device`] names, or from 0.
    pub gpus: Vec<u32>,
    /// Threads of the CPU runtime; defaults to the CPUs available to the process.
    pub threads: Option<usize>,
    /// Weight quantization at load; `None` keeps the checkpoint's types.
    pub quantize: Option<Quantization>,
    /// Element type of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Tensor-parallel degree; each rank has a GPU or an equal part of the threads.
    pub tensor_parallel: usize,
    /// Bytes of the KV block pool on CPUs; on GPUs the pool gets what `gpu_memory_utilization` leaves.
    pub kv_cache_bytes: u64,
    /// Fraction of each GPU's memory for weights, buffers and KV block pool.
    pub gpu_memory_utilization: f32,
    /// Batch-invariant kernels on GPUs, at a cost in speed; CPU kernels always are.
    pub deterministic: bool,
    /// Autotunes GEMM algorithms at load, on GPUs without `deterministic`.
    pub autotune: bool,
    /// Directory that keeps the choices of autotuning for later starts; `None`: each start times the algorithms.
    pub gemm_cache: Option<PathBuf>,
    /// Bytes of the host pool for swapped sequences and evicted cache blocks; 0: preemption is by recompute
    /// only.
    pub host_cache_bytes: u64,
    /// Directory in which the workers of a host see each other's promised memory; by default one of the user, see
    /// [`MemoryLedger::open`](inflight_runtime::MemoryLedger::open).
    pub reservation_dir: Option<PathBuf>,
    /// Scheduling policy.
    pub policy: PolicyKind,
    /// Aging of waiting sequences, for policies that have it.
    pub aging: Aging,
    /// Enables prefix caching, per tenant.
    pub prefix_cache: bool,
    /// Bound of the duration of an iteration with decodes, and so of the prefill chunks beside them.
    pub step_target: StepTarget,
    /// Source of drafted tokens.
    pub drafts: Drafts,
    /// Maximum tokens drafted for a sequence and iteration.
    pub drafts_max: u32,
    /// Plans the next iteration while one runs. On CPUs, steps then run on a dedicated thread, which pays
    /// where a core is idle.
    pub overlap: bool,
    /// Tokens per KV block; a power of two.
    pub block_tokens: u32,
    /// Maximum running sequences.
    pub max_sequences: u32,
    /// Token budget of an iteration.
    pub max_batch_tokens: u32,
    /// Output tokens for which a sequence reserves KV blocks at admission; `None`: one block.
    pub decode_reserve_tokens: Option<u32>,
    /// Share of the KV blocks that admission keeps free for the growth of running sequences; from 0 to
    /// [`Options::KV_WATERMARK_MAX`].
    pub kv_watermark: f64,
    /// Minimum difference of priorities for a waiting sequence to preempt a running one.
    pub preemption_threshold: u32,
    /// Maximum number of sequences admitted past a waiting one that does not fit.
    pub bypass_max: u32,
    /// Maximum tokens per sequence; by default, and at most, the model's context length.
    pub max_context_tokens: Option<u32>,
    /// Maximum waiting sequences.
    pub max_waiting: u32,
    /// Processes that compile the grammars of requests first; `None` compiles them in this one only, which a hostile grammar can end.
    pub grammar_confinement: Option<Confinement>,
    /// Maximum open sessions.
    pub max_sessions: u32,
    /// Interval of heartbeat updates on an otherwise silent session.
    pub heartbeat: Duration,
    /// Interval of self-tests.
    pub self_test_interval: SelfTestInterval,
    /// Maximum time that a drain waits for running sequences.
    pub drain_timeout: Duration,
    /// Worker id in logs; stable across restarts.
    pub worker_id: String,
    /// File that records all scheduler inputs, for `replay`.
    pub record: Option<PathBuf>,
    /// Directory of the fingerprint cache; `None`: weights are hashed at every start.
    pub fingerprint_cache: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            tls: None,
            secret: None,
            insecure: false,
            model: ModelSource::Embedded,
            model_name: None,
            device: Device::Auto,
            gpus: Vec::new(),
            threads: None,
            quantize: None,
            kv_cache_dtype: KvCacheDtype::Auto,
            tensor_parallel: 1,
            kv_cache_bytes: 1 << 30,
            gpu_memory_utilization: 0.9,
            deterministic: false,
            autotune: true,
            gemm_cache: None,
            host_cache_bytes: 256 << 20,
            reservation_dir: None,
            policy: PolicyKind::default(),
            aging: Aging::default(),
            prefix_cache: true,
            step_target: StepTarget::adaptive(),
            drafts: Drafts::Off,
            drafts_max: 8,
            overlap: false,
            block_tokens: 16,
            max_sequences: 256,
            max_batch_tokens: 512,
            decode_reserve_tokens: None,
            kv_watermark: SchedulerLimits::WATERMARK_SHARE,
            preemption_threshold: SchedulerLimits::PREEMPTION_THRESHOLD,
            bypass_max: SchedulerLimits::BYPASS_MAX,
            max_context_tokens: None,
            max_waiting: 1024,
            grammar_confinement: None,
            max_sessions: 64,
            heartbeat: Duration::from_millis(500),
            self_test_interval: SelfTestInterval::Auto,
            drain_timeout: Duration::from_secs(300),
            worker_id: "worker".to_owned(),
            record: None,
            fingerprint_cache: None,
        }
    }
}

/// Error for invalid options.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// A value is out of its range.
    #[error("{name} is {value}; it must be {range}")]
    OutOfRange {
        /// Name of the option.
        name: &'static str,
        /// Given value.
        value: String,
        /// Allowed range.
        range: &'static str,
    },
    /// Callers need not authenticate, and others than this host's processes can connect.
    #[error(
        "listening on {0} without authentication: everyone who can connect could read prompts and take the worker's capacity; \
         give --secret-file, or --tls-client-ca for client certificates, or --insecure where only routers can connect"
    )]
    Unauthenticated(SocketAddr),
}

impl Options {
    /// Allowed KV cache dtypes on CPUs and on GPUs, as error sentences.
    pub(crate) const KV_CACHE_DTYPES_ON_CPUS: &str = "auto or int8 on CPUs: only GPUs compute with fp8";
    /// Maximum of [`Options::kv_watermark`].
    pub const KV_WATERMARK_MAX: f64 = 0.5;
    /// Maximum of [`Options::bypass_max`]: more would let a stream of small requests keep a large one waiting for
    /// hours.
    pub const BYPASS_MAX: u32 = 10_000;
    pub(crate) const KV_CACHE_DTYPES_ON_GPUS: &str = "auto or fp8 on GPUs: int8 is for CPUs (--device cpu)";

    /// Checks every option that does not depend on the model.
    ///
    /// # Errors
    /// [`OptionsError`] for the first invalid option.
    pub fn validate(&self) -> Result<(), OptionsError> {
        let check = |ok: bool, name, value: &dyn std::fmt::Display, range| {
            if ok { Ok(()) } else { Err(OptionsError::OutOfRange { name, value: value.to_string(), range }) }
        };
        let power = self.block_tokens.is_power_of_two() && (1..=256).contains(&self.block_tokens);
        check(power, "block_tokens", &self.block_tokens, "a power of two from 1 to 256")?;
        let sequences = (1..=4096).contains(&self.max_sequences);
        check(sequences, "max_sequences", &self.max_sequences, "from 1 to 4096")?;
        let batch = self.max_batch_tokens >= self.max_sequences && self.max_batch_tokens <= 65_536;
        check(batch, "max_batch_tokens", &self.max_batch_tokens, "from max_sequences to 65536")?;
        let watermark = (0.0..=Self::KV_WATERMARK_MAX).contains(&self.kv_watermark);
        check(watermark, "kv_watermark", &self.kv_watermark, "a share of the KV blocks from 0 to 0.5")?;
        let threshold = self.preemption_threshold >= 1;
        let range = "at least 1: a sequence is not preempted for one of its own priority";
        check(threshold, "preemption_threshold", &self.preemption_threshold, range)?;
        check(self.bypass_max <= Self::BYPASS_MAX, "bypass_max", &self.bypass_max, "from 0 to 10000")?;
        self.validate_aging()?;
        let drafts = (1..=32).contains(&self.drafts_max);
        check(drafts, "drafts_max", &self.drafts_max, "from 1 to 32")?;
        check(self.max_waiting >= 1, "max_waiting", &self.max_waiting, "at least 1")?;
        check(self.max_sessions >= 1, "max_sessions", &self.max_sessions, "at least 1")?;
        check(self.kv_cache_bytes >= 1, "kv_cache_bytes", &self.kv_cache_bytes, "at least 1")?;
        let utilization = self.gpu_memory_utilization > 0.0 && self.gpu_memory_utilization <= 1.0;
        let range = "above 0 and at most 1";
        check(utilization, "gpu_memory_utilization", &self.gpu_memory_utilization, range)?;
        match self.step_target {
            StepTarget::Unbounded => {}
            StepTarget::Fixed(target) => {
                check(!target.is_zero(), "step_target", &"0", "above 0, auto or off")?
            }
            StepTarget::Adaptive(LatencyObjectives { first_token, gap }) => {
                check(first_token != Some(Duration::ZERO), "slo_ttft", &"0", "above 0")?;
                check(gap != Some(Duration::ZERO), "slo_gap", &"0", "above 0")?;
            }
        }
        if !(self.listen.ip().is_loopback() || self.authenticates_callers() || self.insecure) {
            return Err(OptionsError::Unauthenticated(self.listen));
        }
        check(self.max_context_tokens != Some(0), "max_context_tokens", &0, "at least 1")?;
        check(self.threads != Some(0), "threads", &0, "at least 1")?;
        let (stores, range) = match (self.device, self.kv_cache_dtype) {
            (_, KvCacheDtype::Auto) | (Device::Auto, _) => (true, ""),
            (Device::Cpu, dtype) => (dtype == KvCacheDtype::Int8, Self::KV_CACHE_DTYPES_ON_CPUS),
            (Device::Cuda(_), dtype) => (dtype == KvCacheDtype::Fp8, Self::KV_CACHE_DTYPES_ON_GPUS),
            (Device::Sim(_), _) => (false, "auto on a simulated device, which stores none"),
        };
        check(stores, "kv_cache_dtype", &self.kv_cache_dtype, range)?;
        let ranks = self.tensor_parallel;
        check((1..=RANKS_MAX).contains(&ranks), "tensor_parallel", &ranks, "from 1 to 64")?;
        let divides = ranks == 1 || !matches!(self.device, Device::Sim(_));
        let range = "1 on a simulated device, whose costs are those of the whole";
        check(divides, "tensor_parallel", &ranks, range)?;
        let threads = self.threads.unwrap_or(ranks);
        let enough = threads >= ranks || matches!(self.device, Device::Cuda(_));
        check(enough, "threads", &threads, "at least tensor_parallel: each rank needs one")?;
        let gpus = self.gpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let given = !self.gpus.is_empty();
        let range = "as many GPUs as there are ranks, which tensor_parallel says";
        check(!given || self.gpus.len() == ranks, "gpu", &gpus, range)?;
        let twice = self.gpus.iter().enumerate().any(|(i, gpu)| self.gpus[..i].contains(gpu));
        check(!twice, "gpu", &gpus, "different GPUs, one for each rank")?;
        let first = match self.device {
            Device::Cuda(Some(first)) if given => self.gpus[0] == first,
            _ => true,
        };
        check(
            first,
            "gpu",
            &gpus,
            "a list that begins with the GPU that device names; or give --device cuda",
        )?;
        let heartbeat =
            self.heartbeat >= Duration::from_millis(10) && self.heartbeat <= Duration::from_secs(60);
        check(heartbeat, "heartbeat", &format!("{:?}", self.heartbeat), "from 10 ms to 60 s")
    }
}

impl Options {
    /// Checks the parameters of aging.
    fn validate_aging(&self) -> Result<(), OptionsError> {
        let check = |ok: bool, name, value: String, range| {
            if ok { Ok(()) } else { Err(OptionsError::OutOfRange { name, value, range }) }
        };
        let Aging { threshold, tokens_per_second, tokens_max, level_every, .. } = self.aging;
        check(!threshold.is_zero(), "aging_threshold", "0".to_owned(), "above 0")?;
        check(!level_every.is_zero(), "aging_level_every", "0".to_owned(), "above 0")?;
        let services = [("aging_tokens_per_second", tokens_per_second), ("aging_tokens_max", tokens_max)];
        services.into_iter().try_for_each(|(name, tokens)| {
            let range = "a number of tokens, at least 0";
            check(tokens.is_finite() && tokens >= 0.0, name, tokens.to_string(), range)
        })
    }

    /// Whether callers need the shared secret or a client certificate.
    pub fn authenticates_callers(&self) -> bool {
        let certificates = |tls: &ServerTlsFiles| tls.client_ca.is_some() && !tls.client_optional;
        self.secret.is_some() || self.tls.as_ref().is_some_and(certificates)
    }

    /// GPU ordinals by rank, if the model runs on GPUs.
    pub fn gpus_of_ranks(&self) -> Vec<u32> {
        let first = match self.device {
            Device::Cuda(Some(first)) => first,
            Device::Cuda(None) | Device::Auto | Device::Cpu | Device::Sim(_) => 0,
        };
        match self.gpus.is_empty() {
            true => (first..=u32::MAX).take(self.tensor_parallel).collect(),
            false => self.gpus.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_options_are_rejected_by_name() {
        let named =
            |options: Options| options.validate().err().map(|error| error.to_string()).unwrap_or_default();
        for block_tokens in [0, 3, 24, 512] {
            let error = named(Options { block_tokens, ..Options::default() });
            assert!(error.contains("block_tokens") && error.contains("power of two"), "{error}");
        }
        assert!(named(Options { kv_cache_bytes: 0, ..Options::default() }).contains("kv_cache_bytes"));
        let public = || Options { listen: ([0, 0, 0, 0], 8652).into(), ..Options::default() };
        let error = named(public());
        assert!(error.contains("0.0.0.0:8652") && error.contains("--secret-file"), "{error}");
        let secret = SecretFile::fixed([vec![b'a'; 32]].into());
        for safe in [Options { secret: Some(secret), ..public() }, Options { insecure: true, ..public() }] {
            assert_eq!(named(safe), "");
        }
        let tls = |optional| ServerTlsFiles {
            certificate: "cert.pem".into(),
            key: "key.pem".into(),
            client_ca: Some("ca.pem".into()),
            client_optional: optional,
        };
        assert_eq!(named(Options { tls: Some(tls(false)), ..public() }), "");
        assert!(named(Options { tls: Some(tls(true)), ..public() }).contains("without authentication"));
        for (device, works, fails, clue) in [
            ("cpu", "int8", "fp8", "only GPUs"),
            ("cuda", "fp8", "int8", "int8 is for CPUs"),
            ("sim:flat", "auto", "int8", "simulated"),
        ] {
            let device = device.parse().unwrap();
            let of = |name: &str| {
                named(Options { device, kv_cache_dtype: name.parse().unwrap(), ..Options::default() })
            };
            assert_eq!(of(works), "");
            assert!(of(fails).contains(&format!("kv_cache_dtype is {fails}")), "{}", of(fails));
            assert!(of(fails).contains(clue), "{}", of(fails));
        }
        assert!("int4".parse::<KvCacheDtype>().unwrap_err().to_string().contains("`fp8`"));
        for tensor_parallel in [0, 65] {
            let error = named(Options { tensor_parallel, ..Options::default() });
            assert!(error.contains("tensor_parallel") && error.contains("from 1 to 64"), "{error}");
        }
        let device = "sim:flat".parse().unwrap();
        let divided = Options { device, tensor_parallel: 2, ..Options::default() };
        assert!(named(divided.clone()).contains("simulated"), "{}", named(divided));
        assert_eq!(Options { device, ..Options::default() }.validate(), Ok(()));
        let divided = Options { device: Device::Cpu, tensor_parallel: 4, ..Options::default() };
        assert_eq!(divided.validate(), Ok(()));
        assert!(named(Options { threads: Some(3), ..divided }).contains("threads is 3"));
        assert!(named(Options { max_sequences: 0, ..Options::default() }).contains("max_sequences"));
        assert!(named(Options { max_batch_tokens: 255, ..Options::default() }).contains("max_batch_tokens"));
        assert!(named(Options { max_waiting: 0, ..Options::default() }).contains("max_waiting"));
        for kv_watermark in [-0.01, 0.51, 1.0, f64::NAN, f64::INFINITY] {
            let error = named(Options { kv_watermark, ..Options::default() });
            assert!(error.contains("kv_watermark") && error.contains("from 0 to 0.5"), "{error}");
        }
        let error = named(Options { preemption_threshold: 0, ..Options::default() });
        assert!(error.contains("preemption_threshold is 0; it must be at least 1"), "{error}");
        let error = named(Options { bypass_max: 10_001, ..Options::default() });
        assert!(error.contains("bypass_max is 10001; it must be from 0 to 10000"), "{error}");
        let aged = |change: fn(&mut Aging)| {
            let mut options = Options::default();
            change(&mut options.aging);
            named(options)
        };
        assert!(aged(|aging| aging.threshold = Duration::ZERO).contains("aging_threshold is 0"));
        assert!(aged(|aging| aging.level_every = Duration::ZERO).contains("aging_level_every is 0"));
        assert!(aged(|aging| aging.tokens_max = f64::NAN).contains("aging_tokens_max is NaN"));
        assert!(aged(|aging| aging.tokens_per_second = -1.0).contains("aging_tokens_per_second is -1"));
        for (kv_watermark, bypass_max) in [(0.0, 0), (0.5, 10_000)] {
            let preemption_threshold = u32::MAX;
            let options = Options { kv_watermark, bypass_max, preemption_threshold, ..Options::default() };
            assert_eq!(options.validate(), Ok(()));
        }
        for drafts_max in [0, 33] {
            assert!(named(Options { drafts_max, ..Options::default() }).contains("drafts_max"));
        }
        for drafts in [Drafts::Off, Drafts::PromptLookup] {
            assert_eq!(drafts.to_string().parse::<Drafts>().ok(), Some(drafts));
        }
        assert!("eagle".parse::<Drafts>().is_err_and(|error| error.to_string().contains("prompt-lookup")));
        assert!(
            named(Options { step_target: StepTarget::Fixed(Duration::ZERO), ..Options::default() })
                .contains("step_target")
        );
        assert_eq!(
            Options { host_cache_bytes: 0, ..Options::default() }.validate(),
            Ok(()),
            "no host pool is fine"
        );
    }

    #[test]
    fn each_rank_has_a_gpu_and_short_or_duplicate_lists_are_rejected() {
        let options = |device: &str, gpus: &[u32], tensor_parallel| Options {
            device: device.parse().unwrap(),
            gpus: gpus.to_vec(),
            tensor_parallel,
            ..Options::default()
        };
        for (device, gpus, ranks, expected) in [
            ("cuda", &[][..], 1, &[0][..]),
            ("cuda:3", &[], 1, &[3]),
            ("cuda:2", &[], 3, &[2, 3, 4]),
            ("cuda", &[5, 1], 2, &[5, 1]),
            ("cuda:5", &[5, 1], 2, &[5, 1]),
            ("auto", &[], 2, &[0, 1]),
            ("auto", &[4], 1, &[4]),
        ] {
            let options = options(device, gpus, ranks);
            assert_eq!(options.validate(), Ok(()), "{device} {gpus:?}");
            assert_eq!(options.gpus_of_ranks(), expected, "{device} {gpus:?}");
        }
        for (device, gpus, ranks, clues) in [
            ("cuda", &[0, 1][..], 1, ["gpu is 0,1", "as many GPUs as there are ranks"]),
            ("auto", &[3], 2, ["gpu is 3;", "as many GPUs as there are ranks"]),
            ("cuda", &[1, 0, 1], 3, ["gpu is 1,0,1", "different GPUs"]),
            ("cuda:2", &[1, 2], 2, ["gpu is 1,2", "begins with the GPU that device names"]),
        ] {
            let refused = options(device, gpus, ranks).validate().unwrap_err().to_string();
            for clue in clues {
                assert!(refused.contains(clue), "{clue}: {refused}");
            }
        }
    }

    #[test]
    fn device_names_are_parsed_and_unknown_ones_are_rejected() {
        for (name, device) in
            [("auto", Device::Auto), ("cpu", Device::Cpu), ("cuda:3", Device::Cuda(Some(3)))]
        {
            assert_eq!(name.parse::<Device>().unwrap(), device);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::Cuda(None));
        for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA"] {
            let refused = name.parse::<Device>().unwrap_err().to_string();
            assert!(refused.contains("cuda:N"), "{refused}");
        }
    }
}

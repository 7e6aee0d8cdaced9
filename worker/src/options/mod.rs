//! Worker options, their defaults and their validation.

mod compute;
mod device;
mod error;
mod kv_cache_dtype;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use inflight_grammar_service::Confinement;
use inflight_net::{SecretFile, ServerTlsFiles};
use inflight_options::duration;
use inflight_runtime::sharding::RANKS_MAX;
use inflight_worker_core::policy::Aging;
use inflight_worker_core::{LatencyObjectives, StepTargetOption};

pub use self::compute::ComputeOptions;
pub use self::device::{Device, UnknownDevice};
pub use self::error::OptionsError;
pub use self::kv_cache_dtype::KvCacheDtype;

/// Options of a worker, each with its name, environment variable, default and help.
///
/// What has no flag here (`skip`) is what files say and what the process brings: certificates, secrets, the program of grammar helpers.
#[derive(Debug, Clone, clap::Args)]
// Without a group, whose name would be that of the router's options.
#[group(skip)]
#[allow(rustdoc::broken_intra_doc_links, reason = "brackets of a flag's help are no links")]
pub struct Options {
    /// Address on which to listen for routers; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8652", env = "INFLIGHT_WORKER_LISTEN")]
    pub listen: SocketAddr,
    /// Name of this worker, stable over restarts [default: worker@ADDRESS]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_WORKER_ID")]
    pub worker_id: Option<String>,
    /// Heartbeat interval: how often an idle worker sends an update; routers take it for lost after three
    /// intervals
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "500ms",
        value_parser = duration,
        env = "INFLIGHT_WORKER_HEARTBEAT"
    )]
    pub heartbeat: Duration,
    /// Maximum sessions with routers
    #[arg(long, value_name = "N", default_value_t = 64, env = "INFLIGHT_WORKER_MAX_SESSIONS")]
    pub max_sessions: u32,
    /// GPUs to use, one per tensor-parallel rank, by their index among the visible ones [default: the GPU of
    /// --device, or the first one, and those after it]
    #[arg(
        id = "gpu",
        long = "gpu",
        value_name = "N,...",
        value_delimiter = ',',
        env = "INFLIGHT_WORKER_GPU"
    )]
    pub gpus: Vec<u32>,
    /// Record all inputs of the scheduler to this file, for `inflight replay`
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_RECORD")]
    pub record: Option<PathBuf>,
    /// Permit --listen on other addresses than loopback without --secret-file or --tls-client-ca
    #[arg(long, env = "INFLIGHT_WORKER_INSECURE")]
    pub insecure: bool,
    /// What is computed and how.
    #[command(flatten)]
    pub compute: ComputeOptions,
    /// TLS certificate, key and trusted client CAs; `None`: plaintext.
    #[arg(skip)]
    pub tls: Option<ServerTlsFiles>,
    /// Secret that callers must prove, and that the worker proves to routers; `None`: every caller is
    /// served, unless TLS requires client certificates.
    #[arg(skip)]
    pub secret: Option<SecretFile>,
    /// Processes that compile the grammars of requests first; `None` compiles them in this one only, which a hostile grammar can end.
    #[arg(skip)]
    pub grammar_confinement: Option<Confinement>,
    /// Maximum time that a drain waits for running sequences.
    #[arg(skip = Duration::from_secs(300))]
    pub drain_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        inflight_options::defaults()
    }
}

impl Options {
    /// Allowed KV cache dtypes on CPUs and on GPUs, as error sentences.
    pub(crate) const KV_CACHE_DTYPES_ON_CPUS: &str = "auto or int8 on CPUs: only GPUs compute with fp8";
    /// Maximum names of the model, the first one included.
    pub const MODEL_NAMES_MAX: usize = 65;
    /// Maximum length of a name, as routers take it.
    pub const MODEL_NAME_BYTES_MAX: usize = 512;
    /// Maximum of [`SchedulingOptions::kv_watermark`](inflight_worker_core::SchedulingOptions::kv_watermark).
    pub const KV_WATERMARK_MAX: f64 = 0.5;
    /// Maximum of [`SchedulingOptions::bypass_max`](inflight_worker_core::SchedulingOptions::bypass_max): more would let a stream of small requests keep a large one waiting for
    /// hours.
    pub const BYPASS_MAX: u32 = 10_000;
    pub(crate) const KV_CACHE_DTYPES_ON_GPUS: &str = "auto or fp8 on GPUs: int8 is for CPUs (--device cpu)";

    /// Returns the name of this worker, stable across restarts.
    pub fn worker_id(&self) -> String {
        self.worker_id.clone().unwrap_or_else(|| format!("worker@{}", self.listen))
    }

    /// Checks every option that does not depend on the model.
    ///
    /// # Errors
    /// [`OptionsError`] for the first invalid option.
    pub fn validate(&self) -> Result<(), OptionsError> {
        let check = |ok: bool, name, value: &dyn std::fmt::Display, range| {
            if ok { Ok(()) } else { Err(OptionsError::OutOfRange { name, value: value.to_string(), range }) }
        };
        let power =
            self.compute.block_tokens.is_power_of_two() && (1..=256).contains(&self.compute.block_tokens);
        check(power, "--block-tokens", &self.compute.block_tokens, "a power of two from 1 to 256")?;
        let sequences = (1..=4096).contains(&self.compute.max_sequences);
        check(sequences, "--max-sequences", &self.compute.max_sequences, "from 1 to 4096")?;
        let batch = self.compute.max_batch_tokens >= self.compute.max_sequences
            && self.compute.max_batch_tokens <= 65_536;
        check(batch, "--max-batch-tokens", &self.compute.max_batch_tokens, "from --max-sequences to 65536")?;
        let watermark = (0.0..=Self::KV_WATERMARK_MAX).contains(&self.compute.scheduling.kv_watermark);
        check(
            watermark,
            "--kv-watermark",
            &self.compute.scheduling.kv_watermark,
            "a share of the KV blocks from 0 to 0.5",
        )?;
        let threshold = self.compute.scheduling.preemption_threshold >= 1;
        let range = "at least 1: a sequence is not preempted for one of its own priority";
        check(threshold, "--preemption-threshold", &self.compute.scheduling.preemption_threshold, range)?;
        check(
            self.compute.scheduling.bypass_max <= Self::BYPASS_MAX,
            "--bypass-max",
            &self.compute.scheduling.bypass_max,
            "from 0 to 10000",
        )?;
        self.validate_aging()?;
        let drafts = (1..=32).contains(&self.compute.scheduling.drafts_max);
        check(drafts, "--drafts-max", &self.compute.scheduling.drafts_max, "from 1 to 32")?;
        check(
            self.compute.scheduling.max_waiting >= 1,
            "--max-waiting",
            &self.compute.scheduling.max_waiting,
            "at least 1",
        )?;
        check(self.max_sessions >= 1, "--max-sessions", &self.max_sessions, "at least 1")?;
        check(
            self.compute.kv_cache_bytes >= 1,
            "--kv-cache-bytes",
            &self.compute.kv_cache_bytes,
            "at least 1",
        )?;
        let utilization =
            self.compute.gpu_memory_utilization > 0.0 && self.compute.gpu_memory_utilization <= 1.0;
        let range = "above 0 and at most 1";
        check(utilization, "--gpu-memory-utilization", &self.compute.gpu_memory_utilization, range)?;
        let scheduling = &self.compute.scheduling;
        let target = scheduling.step_target;
        if target != StepTargetOption::Auto && scheduling.objectives() != LatencyObjectives::default() {
            return Err(OptionsError::Objectives(target));
        }
        let zero = target == StepTargetOption::Fixed(Duration::ZERO);
        check(!zero, "--step-target", &"0", "above 0, auto or off")?;
        check(scheduling.slo_ttft != Some(Duration::ZERO), "--slo-ttft", &"0", "above 0")?;
        check(scheduling.slo_gap != Some(Duration::ZERO), "--slo-gap", &"0", "above 0")?;
        if !(self.listen.ip().is_loopback() || self.authenticates_callers() || self.insecure) {
            return Err(OptionsError::Unauthenticated(self.listen));
        }
        check(self.compute.max_context_tokens != Some(0), "--max-context-tokens", &0, "at least 1")?;
        check(self.compute.threads != Some(0), "--threads", &0, "at least 1")?;
        let (stores, range) = match (self.compute.device, self.compute.kv_cache_dtype) {
            (_, KvCacheDtype::Auto) | (Device::Auto, _) => (true, ""),
            (Device::Cpu, dtype) => (dtype == KvCacheDtype::Int8, Self::KV_CACHE_DTYPES_ON_CPUS),
            (Device::Cuda(_), dtype) => (dtype == KvCacheDtype::Fp8, Self::KV_CACHE_DTYPES_ON_GPUS),
            (Device::Sim(_), _) => (false, "auto on a simulated device, which stores none"),
        };
        check(stores, "--kv-cache-dtype", &self.compute.kv_cache_dtype, range)?;
        let ranks = self.compute.tensor_parallel;
        check((1..=RANKS_MAX).contains(&ranks), "--tensor-parallel", &ranks, "from 1 to 64")?;
        let divides = ranks == 1 || !matches!(self.compute.device, Device::Sim(_));
        let range = "1 on a simulated device, whose costs are those of the whole";
        check(divides, "--tensor-parallel", &ranks, range)?;
        let threads = self.compute.threads.unwrap_or(ranks);
        let enough = threads >= ranks || matches!(self.compute.device, Device::Cuda(_));
        check(enough, "--threads", &threads, "at least --tensor-parallel: each rank needs one")?;
        let gpus = self.gpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let given = !self.gpus.is_empty();
        let range = "as many GPUs as there are ranks, which --tensor-parallel says";
        check(!given || self.gpus.len() == ranks, "--gpu", &gpus, range)?;
        let twice = self.gpus.iter().enumerate().any(|(i, gpu)| self.gpus[..i].contains(gpu));
        check(!twice, "--gpu", &gpus, "different GPUs, one for each rank")?;
        let first = match self.compute.device {
            Device::Cuda(Some(first)) if given => self.gpus[0] == first,
            _ => true,
        };
        check(
            first,
            "--gpu",
            &gpus,
            "a list that begins with the GPU that --device names; or give --device cuda",
        )?;
        self.validate_names()?;
        let heartbeat =
            self.heartbeat >= Duration::from_millis(10) && self.heartbeat <= Duration::from_secs(60);
        check(heartbeat, "--heartbeat", &format!("{:?}", self.heartbeat), "from 10 ms to 60 s")
    }
}

impl Options {
    /// Checks the names of the model.
    fn validate_names(&self) -> Result<(), OptionsError> {
        let names = &self.compute.model_names;
        let refused = |value: &str, range| {
            Err(OptionsError::OutOfRange { name: "--model-name", value: format!("{value:?}"), range })
        };
        if names.len() > Self::MODEL_NAMES_MAX {
            return refused(&format!("{} names", names.len()), "at most 65 names");
        }
        for (at, name) in names.iter().enumerate() {
            if name.is_empty() || name.trim() != name || name.len() > Self::MODEL_NAME_BYTES_MAX {
                return refused(name, "a name of 1 to 512 bytes without spaces around it");
            }
            if names[..at].contains(name) {
                return refused(name, "given once: each name of a model differs from the others");
            }
        }
        Ok(())
    }

    /// Checks the parameters of aging.
    fn validate_aging(&self) -> Result<(), OptionsError> {
        let check = |ok: bool, name, value: String, range| {
            if ok { Ok(()) } else { Err(OptionsError::OutOfRange { name, value, range }) }
        };
        let Aging { threshold, tokens_per_second, tokens_max, level_every, .. } =
            self.compute.scheduling.policy.aging;
        check(!threshold.is_zero(), "--aging-threshold", "0".to_owned(), "above 0")?;
        check(!level_every.is_zero(), "--aging-level-every", "0".to_owned(), "above 0")?;
        let services = [("--aging-tokens-per-second", tokens_per_second), ("--aging-tokens-max", tokens_max)];
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
        let first = match self.compute.device {
            Device::Cuda(Some(first)) => first,
            Device::Cuda(None) | Device::Auto | Device::Cpu | Device::Sim(_) => 0,
        };
        match self.gpus.is_empty() {
            true => (first..=u32::MAX).take(self.compute.tensor_parallel).collect(),
            false => self.gpus.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(flags: &[&str]) -> Options {
        inflight_options::parse(flags).unwrap()
    }

    /// Returns what is wrong with the options; empty if nothing is.
    fn refused(options: &Options) -> String {
        options.validate().err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn invalid_options_are_rejected_by_name() {
        for (flags, clues) in [
            (&["--block-tokens=0"][..], &["--block-tokens is 0", "power of two"][..]),
            (&["--block-tokens=3"], &["--block-tokens is 3", "power of two"]),
            (&["--block-tokens=24"], &["--block-tokens is 24"]),
            (&["--block-tokens=512"], &["--block-tokens is 512"]),
            (&["--kv-cache-bytes=0"], &["--kv-cache-bytes"]),
            (&["--device=cpu", "--kv-cache-dtype=fp8"], &["--kv-cache-dtype is fp8", "only GPUs"]),
            (&["--device=cuda", "--kv-cache-dtype=int8"], &["--kv-cache-dtype is int8", "int8 is for CPUs"]),
            (&["--device=sim:flat", "--kv-cache-dtype=int8"], &["--kv-cache-dtype is int8", "simulated"]),
            (&["--tensor-parallel=0"], &["--tensor-parallel", "from 1 to 64"]),
            (&["--tensor-parallel=65"], &["--tensor-parallel", "from 1 to 64"]),
            (&["--device=sim:flat", "--tensor-parallel=2"], &["--tensor-parallel", "simulated"]),
            (&["--device=cpu", "--tensor-parallel=4", "--threads=3"], &["--threads is 3"]),
            (&["--max-sequences=0"], &["--max-sequences"]),
            (&["--max-batch-tokens=255"], &["--max-batch-tokens"]),
            (&["--max-waiting=0"], &["--max-waiting"]),
            (&["--kv-watermark=-0.01"], &["--kv-watermark", "from 0 to 0.5"]),
            (&["--kv-watermark=0.51"], &["--kv-watermark"]),
            (&["--kv-watermark=NaN"], &["--kv-watermark"]),
            (&["--kv-watermark=inf"], &["--kv-watermark"]),
            (&["--preemption-threshold=0"], &["--preemption-threshold is 0; it must be at least 1"]),
            (&["--bypass-max=10001"], &["--bypass-max is 10001; it must be from 0 to 10000"]),
            (&["--aging-threshold=0s"], &["--aging-threshold is 0"]),
            (&["--aging-level-every=0s"], &["--aging-level-every is 0"]),
            (&["--aging-tokens-max=NaN"], &["--aging-tokens-max is NaN"]),
            (&["--aging-tokens-per-second=-1"], &["--aging-tokens-per-second is -1"]),
            (&["--drafts-max=0"], &["--drafts-max"]),
            (&["--drafts-max=33"], &["--drafts-max"]),
            (&["--step-target=0s"], &["--step-target"]),
            (&["--slo-gap=0s"], &["--slo-gap"]),
            (&["--step-target=off", "--slo-ttft=1s"], &["need --step-target auto, not off"]),
            (&["--listen=0.0.0.0:8652"], &["0.0.0.0:8652", "--secret-file"]),
            (&["--model-name=a,b", "--model-name=a"], &["--model-name is \"a\"", "given once"]),
            (&["--model-name=a,,b"], &["--model-name is \"\"", "1 to 512 bytes"]),
        ] {
            let refused = refused(&of(flags));
            for clue in clues {
                assert!(refused.contains(clue), "{flags:?}: {refused}");
            }
        }
        for flags in [
            &["--device=cpu", "--kv-cache-dtype=int8"][..],
            &["--device=cuda", "--kv-cache-dtype=fp8"],
            &["--device=sim:flat"],
            &["--device=cpu", "--tensor-parallel=4"],
            &["--kv-watermark=0", "--bypass-max=0", "--preemption-threshold=4294967295"],
            &["--kv-watermark=0.5", "--bypass-max=10000"],
            &["--host-cache-bytes=0"],
            &["--model-name=a,b", "--served-model-name=org/c"],
            &["--listen=0.0.0.0:8652", "--insecure"],
        ] {
            assert_eq!(of(flags).validate(), Ok(()), "{flags:?}");
        }
    }

    #[test]
    fn only_workers_that_authenticate_their_callers_listen_on_a_network() {
        let public = || of(&["--listen=0.0.0.0:8652"]);
        let secret = SecretFile::fixed([vec![b'a'; 32]].into());
        assert_eq!(refused(&Options { secret: Some(secret), ..public() }), "");
        let tls = |optional| ServerTlsFiles {
            certificate: "cert.pem".into(),
            key: "key.pem".into(),
            client_ca: Some("ca.pem".into()),
            client_optional: optional,
        };
        assert_eq!(refused(&Options { tls: Some(tls(false)), ..public() }), "");
        let optional = Options { tls: Some(tls(true)), ..public() };
        assert!(refused(&optional).contains("without authentication"));
    }

    #[test]
    fn each_rank_has_a_gpu_and_short_or_duplicate_lists_are_rejected() {
        for (flags, expected) in [
            (&["--device=cuda"][..], &[0][..]),
            (&["--device=cuda:3"], &[3]),
            (&["--device=cuda:2", "--tensor-parallel=3"], &[2, 3, 4]),
            (&["--device=cuda", "--gpu=5,1", "--tensor-parallel=2"], &[5, 1]),
            (&["--device=cuda:5", "--gpu=5,1", "--tensor-parallel=2"], &[5, 1]),
            (&["--tensor-parallel=2"], &[0, 1]),
            (&["--gpu=4"], &[4]),
        ] {
            let options = of(flags);
            assert_eq!(options.validate(), Ok(()), "{flags:?}");
            assert_eq!(options.gpus_of_ranks(), expected, "{flags:?}");
        }
        for (flags, clues) in [
            (&["--device=cuda", "--gpu=0,1"][..], ["--gpu is 0,1", "as many GPUs as there are ranks"]),
            (&["--gpu=3", "--tensor-parallel=2"], ["--gpu is 3;", "as many GPUs as there are ranks"]),
            (&["--device=cuda", "--gpu=1,0,1", "--tensor-parallel=3"], ["--gpu is 1,0,1", "different GPUs"]),
            (
                &["--device=cuda:2", "--gpu=1,2", "--tensor-parallel=2"],
                ["--gpu is 1,2", "begins with the GPU that --device names"],
            ),
        ] {
            let refused = refused(&of(flags));
            for clue in clues {
                assert!(refused.contains(clue), "{clue}: {refused}");
            }
        }
    }
}

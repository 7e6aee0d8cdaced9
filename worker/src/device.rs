//! Choice of the runtime: loads a model onto the device that the options name.

use std::time::Duration;

use inflight_kernels::cpu::{Isa, KvDtype};
use inflight_models::ModelDir;
use inflight_runtime::DRAFT_ROWS;
use inflight_runtime::{HostMemory, MemoryLedger, Runtime};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};
use inflight_runtime_cuda::{self as cuda, CudaOptions, CudaRuntime};
use inflight_runtime_sim::{SimOptions, SimRuntime};
use inflight_worker_core::CostPrior;

use crate::options::{Device, KvCacheDtype, Options, OptionsError};
use crate::self_test_interval::SelfTestDevice;
use crate::worker::{Error, Progress};
use inflight_worker_core::Drafts;

/// Runtime of the chosen device.
pub(crate) struct LoadedRuntime {
    pub runtime: Box<dyn Runtime>,
    /// Prior of its cost model, if known.
    pub prior: Option<CostPrior>,
    /// Interval of self-tests; `None` if there are none.
    pub self_test_interval: Option<Duration>,
}

impl LoadedRuntime {
    fn new(runtime: Box<dyn Runtime>, options: &Options, device: SelfTestDevice) -> Result<Self, Error> {
        let self_test_interval = options.compute.self_test_interval().on(device)?;
        Ok(Self { runtime, prior: None, self_test_interval })
    }
}

/// Loads the runtime for the chosen device, whose host memory is reserved in the ledger.
pub(crate) fn load_runtime(
    options: &Options,
    model: &ModelDir,
    ledger: &MemoryLedger,
    progress: Progress<'_>,
) -> Result<LoadedRuntime, Error> {
    if options.compute.scheduling.drafts == Drafts::Mtp {
        if matches!(options.compute.device, Device::Sim(_)) {
            return Err(wrong_drafts(options, "off on simulated devices, which take no drafts"));
        }
        if !model.has_mtp() {
            let range = "auto, prompt-lookup or off for this model: it has no layer of multi-token prediction that can be used \
                         (`mtp_num_hidden_layers` 1 in config.json, and tensors `mtp.*`)";
            return Err(wrong_drafts(options, range));
        }
    }
    if let Device::Sim(profile) = options.compute.device {
        let config = model.config();
        let sim = SimOptions {
            profile,
            vocab_size: config.vocab_size as u32,
            // A simulated device has no positional limit, so contexts may exceed the model's.
            context_tokens: options.compute.max_context_tokens.unwrap_or(config.context_tokens),
            block_tokens: options.compute.block_tokens,
            slots: options.compute.max_sequences,
            batch_tokens: options.compute.max_batch_tokens,
            overlap: options.compute.overlap,
        };
        let runtime = SimRuntime::new(&sim).map_err(|error| Error::Device(error.to_string()))?;
        tracing::warn!(model = model.name(), ?profile, "device is simulated; tokens are meaningless");
        let loaded = LoadedRuntime::new(Box::new(runtime), options, SelfTestDevice::Simulated)?;
        return Ok(LoadedRuntime { prior: Some(profile.prior(options.compute.block_tokens)), ..loaded });
    }
    let cuda = || {
        let device = SelfTestDevice::Gpu { deterministic: options.compute.deterministic };
        LoadedRuntime::new(load_cuda(model, options, ledger, progress)?, options, device)
    };
    match options.compute.device {
        Device::Cuda(_) => return cuda(),
        Device::Auto => match cuda::available(&ordinals(options)) {
            Ok(()) => {
                match cuda::supports(model, options.compute.tensor_parallel, options.compute.gpu_experimental)
                {
                    Ok(()) => return cuda(),
                    Err(reason) => tracing::warn!(%reason, "GPU cannot run this model; computing on the CPU"),
                }
            }
            Err(reason) if options.gpus.is_empty() => tracing::info!(%reason, "computing on the CPU"),
            // Explicitly listed GPUs are required: no fallback to the CPU.
            Err(reason) => return Err(cuda::Error::from(reason).into()),
        },
        Device::Cpu | Device::Sim(_) => {}
    }
    let cpu = cpu_options(options)?;
    check_known_answer(options, &cpu)?;
    let runtime = CpuRuntime::load_beside(model, &cpu, ledger, progress)?;
    let runtime: Box<dyn Runtime> =
        if options.compute.overlap { Box::new(runtime.overlapped()?) } else { Box::new(runtime) };
    LoadedRuntime::new(runtime, options, SelfTestDevice::Cpu)
}

/// Returns the options of the CPU runtime.
pub(crate) fn cpu_options(options: &Options) -> Result<CpuOptions, Error> {
    let kv_dtype = match options.compute.kv_cache_dtype {
        KvCacheDtype::Auto => None,
        KvCacheDtype::Int8 => Some(KvDtype::Int8),
        KvCacheDtype::Fp8 => return Err(wrong_kv_dtype(options, Options::KV_CACHE_DTYPES_ON_CPUS)),
    };
    Ok(CpuOptions {
        threads: options.compute.threads,
        kv_bytes: options.compute.kv_cache_bytes,
        host_bytes: options.compute.host_cache_bytes,
        block_tokens: options.compute.block_tokens,
        slots: options.compute.max_sequences,
        batch_tokens: options.compute.max_batch_tokens,
        context_tokens: options.compute.max_context_tokens,
        isa: None,
        quantize: options.compute.quantize,
        kv_dtype,
        tensor_parallel: options.compute.tensor_parallel,
        mtp: options.compute.scheduling.drafts.uses_mtp(),
    })
}

/// Compares what this processor computes with what is recorded for its instruction set, unless self-tests are off.
fn check_known_answer(options: &Options, cpu: &CpuOptions) -> Result<(), Error> {
    if options.compute.self_test_interval().on(SelfTestDevice::Cpu)?.is_none() {
        return Ok(());
    }
    let isa = Isa::detect();
    let checked = inflight_runtime_cpu::check_known_answer(isa, cpu.quantize, cpu.kv_dtype);
    match checked.map_err(|error| Error::Device(error.to_string()))? {
        true => tracing::debug!(isa = isa.name(), "known answer computed"),
        false => tracing::info!(
            isa = isa.name(),
            "no answer is recorded for this instruction set and these formats"
        ),
    }
    Ok(())
}

/// Error for a KV cache dtype that the device chosen by [`Device::Auto`] does not support.
fn wrong_kv_dtype(options: &Options, range: &'static str) -> Error {
    let (name, value) = ("kv_cache_dtype", options.compute.kv_cache_dtype.to_string());
    OptionsError::OutOfRange { name, value, range }.into()
}

/// Error for a source of drafts that model or device do not have.
fn wrong_drafts(options: &Options, range: &'static str) -> Error {
    let (name, value) = ("--drafts", options.compute.scheduling.drafts.to_string());
    OptionsError::OutOfRange { name, value, range }.into()
}

/// Ordinals of the visible GPUs that a worker can use.
pub fn usable_gpus() -> Vec<u32> {
    (0..cuda::count()).filter(|gpu| cuda::available(&[*gpu as usize]).is_ok()).collect()
}

/// Memory of the host in bytes that this process may use: the machine's or, if less, its control groups'.
pub fn host_memory_limit() -> Option<u64> {
    HostMemory::read().map(|memory| memory.limit())
}

fn ordinals(options: &Options) -> Vec<usize> {
    options.gpus_of_ranks().into_iter().map(|gpu| gpu as usize).collect()
}

fn load_cuda(
    model: &ModelDir,
    options: &Options,
    ledger: &MemoryLedger,
    progress: Progress<'_>,
) -> Result<Box<dyn Runtime>, Error> {
    let cuda = cuda_options(options)?;
    // Pinned memory is taken at once and cannot be swapped out.
    ledger.reserve(options.compute.host_cache_bytes).map_err(Error::HostMemory)?;
    Ok(Box::new(CudaRuntime::load(model, &cuda, progress)?))
}

/// Returns the options of the CUDA runtime.
pub(crate) fn cuda_options(options: &Options) -> Result<CudaOptions, Error> {
    if let Some(quantize) = options.compute.quantize {
        let range = "left out on GPUs, which keep weights in 16 bits; --device cpu rounds them";
        let (name, value) = ("quantize", quantize.to_string());
        return Err(OptionsError::OutOfRange { name, value, range }.into());
    }
    if options.compute.scheduling.drafts == Drafts::Mtp {
        return Err(wrong_drafts(
            options,
            "auto, prompt-lookup or off on GPUs, which compute no MTP layers yet",
        ));
    }
    Ok(CudaOptions {
        gpus: ordinals(options),
        lone_communicator: false,
        utilization: options.compute.gpu_memory_utilization,
        kv_bytes: None,
        host_bytes: options.compute.host_cache_bytes,
        block_tokens: options.compute.block_tokens,
        slots: options.compute.max_sequences,
        draft_rows: if options.compute.scheduling.drafts == Drafts::Off { 0 } else { DRAFT_ROWS },
        batch_tokens: options.compute.max_batch_tokens,
        context_tokens: options.compute.max_context_tokens,
        kv_store: match options.compute.kv_cache_dtype {
            KvCacheDtype::Auto => cuda::KvStore::Half,
            KvCacheDtype::Fp8 => cuda::KvStore::Fp8,
            KvCacheDtype::Int8 => return Err(wrong_kv_dtype(options, Options::KV_CACHE_DTYPES_ON_GPUS)),
        },
        deterministic: options.compute.deterministic,
        experimental: options.compute.gpu_experimental,
        graphs: true,
        copy_streams: true,
        autotune: !options.compute.no_autotune,
        gemm_cache: options
            .compute
            .gemm_cache()
            .map(|path| inflight_models::CacheDirectory::new(path, "--gemm-cache")),
        overlap: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_rows_for_drafts_only_if_there_are_some() {
        for (drafts, rows) in
            [("--drafts=off", 0), ("--drafts=prompt-lookup", DRAFT_ROWS), ("--drafts=auto", DRAFT_ROWS)]
        {
            let options: Options = inflight_options::parse(&[drafts]).unwrap();
            assert_eq!(cuda_options(&options).ok().map(|cuda| cuda.draft_rows), Some(rows));
        }
        let options: Options = inflight_options::parse(&["--drafts=mtp"]).unwrap();
        assert!(cuda_options(&options).is_err_and(|error| error.to_string().contains("--drafts is mtp")));
    }
}

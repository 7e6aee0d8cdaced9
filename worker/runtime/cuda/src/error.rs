//! Errors of loading a model on GPUs.

use inflight_kernels::cuda::DeviceError;
use inflight_models as models;
use inflight_runtime::KvPlanError;
use inflight_runtime::sharding::Indivisible;

use super::gpu_info::{GpuInfo, Unavailable};
use super::memory_plan::mebibytes;

/// Reasons why the runtime cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model is unusable.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// No usable GPU.
    #[error("cannot compute on CUDA: {0}; --device cpu computes on the host")]
    Unavailable(#[from] Unavailable),
    /// The model cannot be sharded over this number of GPUs.
    #[error(transparent)]
    Indivisible(#[from] Indivisible),
    /// The KV memory of the layers cannot be planned.
    #[error(transparent)]
    KvPlan(#[from] KvPlanError),
    /// An option is out of range.
    #[error("{name} is {value}; it must be {range}")]
    Option {
        /// Name of the option.
        name: &'static str,
        /// Given value.
        value: String,
        /// Allowed values.
        range: String,
    },
    /// Weights, buffers and the KV blocks of one short sequence exceed the memory limit.
    #[error(
        "the model does not fit {name}: {missing} MiB are missing of the {allowed} MiB that it may use of {total} (in MiB: \
         {components}); lower {options}, raise --gpu-memory-utilization, end what else uses the GPU, or take a smaller model"
    )]
    Memory {
        /// Name of the GPU.
        name: String,
        /// MiB missing for these KV blocks.
        missing: u64,
        /// MiB that this process may use.
        allowed: u64,
        /// Total MiB of the GPU.
        total: u64,
        /// MiB per component, largest first.
        components: String,
        /// Options to lower, the one with the largest effect first.
        options: String,
    },
    /// A driver or library call failed.
    #[error("the GPU failed while loading: {0}")]
    Device(String),
    /// The device thread could not be started.
    #[error("cannot start the GPU's thread: {0}")]
    Threads(#[from] std::io::Error),
}

impl Error {
    /// Converts an error of the GPU `gpu`.
    pub(super) fn from_device(error: DeviceError, gpu: &GpuInfo) -> Self {
        match error {
            DeviceError::Memory { bytes } => Self::Device(format!(
                "{} has no {} MiB left; another process may have taken them: lower --gpu-memory-utilization",
                gpu.name,
                mebibytes(bytes)
            )),
            failed @ DeviceError::Failed { .. } => Self::Device(failed.to_string()),
        }
    }
}

//! Memory that a worker will take with a model, from its options and the headers of the model's files: known before anything is
//! loaded, so that several workers can be fitted into one machine.

use inflight_models::ModelDir;
use inflight_runtime::MemoryNeeds;
use inflight_runtime_cuda as cuda;

use crate::device::{cpu_options, cuda_options};
use crate::options::{ComputeOptions, Options};
use crate::worker::Error;

/// Returns the memory that a worker takes with a model, on each of its GPUs or else on the host.
///
/// # Errors
/// [`Error`] if the device cannot run the model with these options.
pub fn memory_needs(model: &ModelDir, compute: &ComputeOptions, on_gpus: bool) -> Result<MemoryNeeds, Error> {
    let options = Options { compute: compute.clone(), ..Options::default() };
    options.validate()?;
    if on_gpus {
        Ok(cuda::memory_needs(model, &cuda_options(&options)?)?)
    } else {
        Ok(inflight_runtime_cpu::memory_needs(model, &cpu_options(&options)?)?)
    }
}

/// Checks that GPUs can run a model with these options.
///
/// # Errors
/// [`Error`] with the reason.
pub fn gpus_support(model: &ModelDir, compute: &ComputeOptions) -> Result<(), Error> {
    Ok(cuda::supports(model, compute.tensor_parallel, compute.gpu_experimental)?)
}

/// Bytes of a visible GPU's memory; `None` without a driver or such a GPU.
pub fn gpu_memory(gpu: u32) -> Option<u64> {
    cuda::memory_bytes(gpu as usize)
}

//! Result slots: where the steps in flight write their results.

use inflight_kernels::cuda::{DeviceError, SamplingResult};
use inflight_runtime::SCORES_MAX;

use super::device_memory::PinnedMemory;
use super::driver::CudaDevice;
use super::stream::CudaEvent;

/// Maximum number of steps launched and not completed.
pub(super) const DEPTH: u32 = 2;

/// Pinned results and events of a step in flight, shared with the thread that waits for it.
pub(super) struct ResultSlot {
    pub(super) results: PinnedMemory,
    /// Results of the scored rows.
    pub(super) scores: PinnedMemory,
    pub(super) begin: CudaEvent,
    pub(super) done: CudaEvent,
}

impl ResultSlot {
    /// Allocates a slot for the results of up to `samples` samples.
    pub(super) fn new(device: &CudaDevice, samples: u32) -> Result<Self, DeviceError> {
        Ok(Self {
            results: PinnedMemory::new(&device.context, samples as usize * size_of::<SamplingResult>())?,
            scores: PinnedMemory::new(&device.context, SCORES_MAX as usize * size_of::<SamplingResult>())?,
            begin: CudaEvent::new(&device.context)?,
            done: CudaEvent::new(&device.context)?,
        })
    }
}

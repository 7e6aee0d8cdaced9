//! GPU memory and pinned host memory, freed when dropped.

use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};
use inflight_kernels::cuda::DeviceError;

use super::driver_error::{error_message, failed};
use super::gpu::GpuMemory;

/// Allocation in GPU memory.
pub(super) struct DeviceMemory {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates `bytes` bytes of undefined content.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DeviceError> {
        let failed = |error: DriverError| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::Memory { bytes: bytes as u64 },
            _ => failed("allocating memory")(error),
        };
        // SAFETY: the context is bound to the device thread, which alone allocates.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(failed)?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }

    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl GpuMemory for DeviceMemory {
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // If the context is lost, so is the memory.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `new` and freed once; the driver waits for work that uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Pinned host memory, which the GPU's copy engines access directly.
pub(super) struct PinnedMemory {
    context: Arc<CudaContext>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: it owns plain memory that is not tied to a thread.
unsafe impl Send for PinnedMemory {}
// SAFETY: `&self` gives out the pointer only; `as_slice` leaves exclusive access to its caller.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `bytes` bytes of undefined content.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DeviceError> {
        // Portable, and not write-combined because the host also reads it.
        // SAFETY: the caller has bound `context` to this thread.
        let pointer = unsafe { result::malloc_host(bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(|error| DeviceError::Failed {
                what: format!("pinning {bytes} bytes of host memory"),
                reason: match error.0 {
                    sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY => {
                        "the system has not as much; lower --host-cache-bytes".to_owned()
                    }
                    _ => error_message(error),
                },
            })?
            .cast();
        Ok(Self { context: Arc::clone(context), pointer, bytes })
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.pointer
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// # Safety
    /// While the slice lives, no other slice exists, and copies in flight do not access the ranges that are
    /// used through it.
    #[expect(clippy::mut_from_ref, reason = "the GPU shares it; callers order accesses by events")]
    pub(super) unsafe fn as_slice(&self) -> &mut [u8] {
        // SAFETY: the allocation has `bytes` bytes and lives as long as `self`; the caller guarantees
        // exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `new` and freed once.
            let _ = unsafe { result::free_host(self.pointer.cast()) };
        }
    }
}

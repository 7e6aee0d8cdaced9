//! Kernel of a loaded module and its launch, optionally with programmatic dependent launch (PDL): the kernel
//! then starts while its predecessor ends.

use std::ffi::c_void;

use cudarc::driver::{DriverError, sys};
use inflight_kernels::cuda::Launch;

/// First virtual architecture with PDL; only code compiled for it contains the kernels' waits.
const OVERLAP_PTX_VERSION: i32 = 90;

/// Kernel of a loaded module.
pub(super) struct KernelFunction {
    function: sys::CUfunction,
    /// Whether its code waits for its predecessor (`griddepcontrol.wait`).
    waits_for_predecessor: bool,
}

impl KernelFunction {
    /// Wraps a loaded kernel. PDL depends on the virtual architecture that its code was compiled for, not on
    /// the GPU: code that the driver compiles from older PTX has no wait.
    pub(super) fn new(function: sys::CUfunction) -> Self {
        let mut version = 0;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        // SAFETY: `function` is of a loaded module; the driver writes one `int`.
        let queried = unsafe { sys::cuFuncGetAttribute(&mut version, attribute, function) }.result();
        Self { function, waits_for_predecessor: queried.is_ok() && version >= OVERLAP_PTX_VERSION }
    }

    /// Returns whether the kernel waits for its predecessor itself, so that it may start before that one has
    /// ended.
    pub(super) fn supports_overlap(&self) -> bool {
        self.waits_for_predecessor
    }

    /// Enqueues the kernel. With `overlap` it starts once all blocks of its predecessor have started, not
    /// once they have ended.
    ///
    /// # Safety
    /// As [`inflight_kernels::cuda::Device::launch`]. With `overlap`, the last work on the stream is a
    /// built-in kernel that waits for its own predecessor.
    pub(super) unsafe fn launch(
        &self,
        launch: &Launch<'_>,
        stream: sys::CUstream,
        overlap: bool,
    ) -> Result<(), DriverError> {
        let mut params = [launch.params.as_ptr().cast_mut().cast::<c_void>()];
        let mut serialization = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid.0,
            gridDimY: launch.grid.1,
            gridDimZ: 1,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: stream,
            attrs: &mut serialization,
            numAttrs: u32::from(overlap),
        };
        // SAFETY: `params` is the kernel's parameter block; the caller guarantees its addresses and the order
        // for `overlap`.
        unsafe {
            sys::cuLaunchKernelEx(&config, self.function, params.as_mut_ptr(), std::ptr::null_mut()).result()
        }
    }
}

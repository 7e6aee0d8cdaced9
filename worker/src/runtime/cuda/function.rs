//! A kernel of a loaded module, and how it is launched: after the one before it, or while that one ends.

use std::ffi::c_void;

use cudarc::driver::{DriverError, sys};
use inflight_kernels::cuda::Launch;

/// The first virtual architecture with programmatic dependent launch; code of it has the kernels' waits.
const OVERLAP_PTX_VERSION: i32 = 90;

/// A kernel, loaded.
pub(super) struct Function {
    function: sys::CUfunction,
    /// It waits for the kernel before it by itself.
    waits: bool,
}

impl Function {
    /// The architecture that a kernel's code was written for decides, not the one that it runs on: what the driver
    /// compiles of older PTX does not wait.
    pub(super) fn of(function: sys::CUfunction) -> Self {
        let mut version = 0;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        // SAFETY: the function is loaded; one number is written.
        let asked = unsafe { sys::cuFuncGetAttribute(&mut version, attribute, function) }.result();
        Self { function, waits: asked.is_ok() && version >= OVERLAP_PTX_VERSION }
    }

    /// Whether it waits by itself for the kernel before it, so that it may begin while that one ends.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// Enqueues it; to `overlap`, it begins when all blocks of the kernel before it have, and not when that one has ended.
    ///
    /// # Safety
    /// As [`inflight_kernels::cuda::Device::launch`]. To `overlap`, what the stream was told last is one of our kernels that waits.
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
        // SAFETY: the parameter block is what the kernel takes; the rest is passed on to the caller.
        unsafe {
            sys::cuLaunchKernelEx(&config, self.function, params.as_mut_ptr(), std::ptr::null_mut()).result()
        }
    }
}

//! Simulated CUDA modules and kernel functions.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::sys::CUresult;
use inflight_kernels::cuda::{Harness, kernel_names};

use crate::DriverResult;
use crate::settings::Settings;

/// Magic number of fatbins.
const FATBIN: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
/// Default limit of dynamic shared memory per block, in bytes.
const SHARED_BYTES: u32 = 48 << 10;

pub(crate) struct SimulatedModule {
    /// PTX text, in which kernels are looked up; `None` for a fatbin.
    text: Option<String>,
    /// Virtual architecture that it was compiled for.
    ptx: i32,
}

pub(crate) struct SimulatedFunction {
    /// Its module, unless unloaded.
    pub(crate) module: Weak<SimulatedModule>,
    pub(crate) name: &'static str,
    pub(crate) parameter_bytes: usize,
    pub(crate) ptx: i32,
    /// Limit of dynamic shared memory per block, in bytes.
    pub(crate) shared_bytes: AtomicU32,
}

impl SimulatedModule {
    /// # Safety
    /// `image` is a fatbin from nvcc, or a zero-terminated PTX text.
    pub(crate) unsafe fn load(image: *const c_void) -> DriverResult<Arc<Self>> {
        // SAFETY: the caller guarantees a fatbin or a PTX text, both of at least four bytes.
        let magic = unsafe { image.cast::<[u8; 4]>().read_unaligned() };
        let ptx = Settings::get().ptx;
        if magic == FATBIN {
            // The fatbin has code for sm_90, which supports programmatic dependent launch.
            return Ok(Arc::new(Self { text: None, ptx: ptx.unwrap_or(90) }));
        }
        // SAFETY: it is no fatbin, so the caller guarantees a zero-terminated text.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_str();
        let text = text.map_err(|_| CUresult::CUDA_ERROR_INVALID_PTX)?.to_owned();
        let target = text.lines().find_map(|line| line.strip_prefix(".target sm_"));
        let digits = target.map(|target| target.chars().take_while(char::is_ascii_digit).collect::<String>());
        let target =
            digits.and_then(|digits| digits.parse::<i32>().ok()).ok_or(CUresult::CUDA_ERROR_INVALID_PTX)?;
        let (major, minor) = Settings::get().compute;
        if target > major * 10 + minor {
            return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        }
        Ok(Arc::new(Self { text: Some(text), ptx: ptx.unwrap_or(target) }))
    }

    pub(crate) fn function(self: &Arc<Self>, name: &CStr) -> DriverResult<Arc<SimulatedFunction>> {
        let name =
            name.to_str().ok().and_then(|name| kernel_names().into_iter().find(|known| *known == name));
        let name = name.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        let entry = format!(".entry {name}(");
        if self.text.as_ref().is_some_and(|text| !text.contains(&entry)) {
            return Err(CUresult::CUDA_ERROR_NOT_FOUND);
        }
        let parameter_bytes = Harness::parameter_bytes(name).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        let shared_bytes = AtomicU32::new(SHARED_BYTES);
        let module = Arc::downgrade(self);
        Ok(Arc::new(SimulatedFunction { module, name, parameter_bytes, ptx: self.ptx, shared_bytes }))
    }
}

impl SimulatedFunction {
    /// Sets the limit of dynamic shared memory, at most `max` bytes.
    pub(crate) fn set_shared_limit(&self, bytes: i32, max: i32) -> DriverResult {
        if !(0..=max).contains(&bytes) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        self.shared_bytes.store(bytes as u32, Ordering::Relaxed);
        Ok(())
    }
}

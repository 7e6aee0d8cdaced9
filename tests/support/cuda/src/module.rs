//! Simulated CUDA modules and kernel functions.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::sys::CUresult;
use inflight_kernel_harness::Harness;
use inflight_kernels::cuda::kernel_names;

use crate::DriverResult;
use crate::cubin;
use crate::settings::Settings;

/// Default limit of dynamic shared memory per block, in bytes.
const SHARED_BYTES: u32 = 48 << 10;

pub(crate) struct SimulatedModule {
    code: ModuleCode,
    /// Virtual architecture that it was compiled for.
    ptx: i32,
}

/// Contents of a module, in which kernels are looked up.
enum ModuleCode {
    /// PTX text.
    Ptx(String),
    /// Kernels of machine code.
    Cubin(Vec<String>),
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
    /// `image` is an ELF file from nvcc, or a zero-terminated PTX text.
    pub(crate) unsafe fn load(image: *const c_void) -> DriverResult<Arc<Self>> {
        let Settings { compute: (major, minor), cuda, .. } = *Settings::get();
        // SAFETY: the caller guarantees an ELF file or a PTX text, both of at least four bytes.
        let magic = unsafe { image.cast::<[u8; 4]>().read_unaligned() };
        let (code, target) = if magic == cubin::MAGIC {
            // SAFETY: it begins as an ELF file, so the caller guarantees a whole one.
            let (kernels, target) =
                unsafe { cubin::read(image.cast(), cuda) }.ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
            // Machine code runs on the same major version only, and here of the same or a later minor one.
            if target / 10 != major || target % 10 > minor {
                return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
            }
            (ModuleCode::Cubin(kernels), target)
        } else {
            // SAFETY: it is no ELF file, so the caller guarantees a zero-terminated text.
            let text = unsafe { CStr::from_ptr(image.cast()) }.to_str();
            let text = text.map_err(|_| CUresult::CUDA_ERROR_INVALID_PTX)?.to_owned();
            let target = text.lines().find_map(|line| line.strip_prefix(".target sm_"));
            let digits =
                target.map(|target| target.chars().take_while(char::is_ascii_digit).collect::<String>());
            let target = digits
                .and_then(|digits| digits.parse::<i32>().ok())
                .ok_or(CUresult::CUDA_ERROR_INVALID_PTX)?;
            if target > major * 10 + minor {
                return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
            }
            (ModuleCode::Ptx(text), target)
        };
        Ok(Arc::new(Self { code, ptx: Settings::get().ptx.unwrap_or(target) }))
    }

    pub(crate) fn function(self: &Arc<Self>, name: &CStr) -> DriverResult<Arc<SimulatedFunction>> {
        let name =
            name.to_str().ok().and_then(|name| kernel_names().into_iter().find(|known| *known == name));
        let name = name.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        let found = match &self.code {
            ModuleCode::Ptx(text) => text.contains(&format!(".entry {name}(")),
            ModuleCode::Cubin(kernels) => kernels.iter().any(|kernel| kernel == name),
        };
        if !found {
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

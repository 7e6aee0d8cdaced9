//! Loaded kernels.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::sys::CUresult;
use inflight_kernels::cuda::{Harness, kernel_names};

use crate::Outcome;
use crate::settings::Settings;

/// What images of several architectures begin with.
const FATBIN: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
/// What a launch may have without asking for more.
const SHARED_BYTES: u32 = 48 << 10;

pub(crate) struct Module {
    /// The text, if it is one: kernels must be in it.
    text: Option<String>,
    /// The virtual architecture that it was compiled of.
    ptx: i32,
}

pub(crate) struct Function {
    /// Gone once it is unloaded.
    pub(crate) module: Weak<Module>,
    pub(crate) name: &'static str,
    pub(crate) parameter_bytes: usize,
    pub(crate) ptx: i32,
    /// Most dynamic shared memory of a launch.
    pub(crate) shared_bytes: AtomicU32,
}

impl Module {
    /// # Safety
    /// It is an image as nvcc makes them, or a text that ends with a zero byte.
    pub(crate) unsafe fn load(image: *const c_void) -> Outcome<Arc<Self>> {
        // SAFETY: both forms have four bytes.
        let magic = unsafe { image.cast::<[u8; 4]>().read_unaligned() };
        let ptx = Settings::get().ptx;
        if magic == FATBIN {
            // The list of architectures has one that programmatic launches are for.
            return Ok(Arc::new(Self { text: None, ptx: ptx.unwrap_or(90) }));
        }
        // SAFETY: it is a text, then.
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

    pub(crate) fn function(self: &Arc<Self>, name: &CStr) -> Outcome<Arc<Function>> {
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
        Ok(Arc::new(Function { module, name, parameter_bytes, ptx: self.ptx, shared_bytes }))
    }
}

impl Function {
    pub(crate) fn allow_shared(&self, bytes: i32, most: i32) -> Outcome {
        if !(0..=most).contains(&bytes) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        self.shared_bytes.store(bytes as u32, Ordering::Relaxed);
        Ok(())
    }
}

//! Device under test: the harness, or with `INFLIGHT_TEST_GPU=1` the first GPU.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::{CudaContext, DriverError, result, sys};
use inflight_kernel_harness::{Harness, HostMemory};
use inflight_kernels::cuda::{Device, DeviceError, Image, Images, Launch, Profile, Target, family_of};

/// Harness or GPU.
pub(crate) enum TestDevice {
    Harness(Harness),
    Gpu(Arc<Gpu>),
}

/// Device memory of the harness or a GPU.
pub(crate) enum Buffer {
    Host(HostMemory),
    Gpu { gpu: Arc<Gpu>, address: u64, bytes: usize },
}

/// Guard bytes before and after each allocation, which must stay unwritten.
const GUARD: usize = 256;
const PATTERN: u8 = 0xff;

impl TestDevice {
    /// Returns whether there is a device to test.
    pub(crate) fn available() -> bool {
        Harness::AVAILABLE || on_gpu()
    }

    /// Returns whether tests run on the harness.
    pub(crate) fn is_harness() -> bool {
        Harness::AVAILABLE && !on_gpu()
    }

    pub(crate) fn new() -> Self {
        if on_gpu() { Self::Gpu(Gpu::first()) } else { Self::Harness(Harness::overlapping()) }
    }

    pub(crate) fn alloc(&self, bytes: usize) -> Buffer {
        match self {
            Self::Harness(harness) => Buffer::Host(harness.alloc(bytes)),
            Self::Gpu(gpu) => {
                gpu.context.bind_to_thread().unwrap();
                let all = bytes + 2 * GUARD;
                let address = unsafe { result::malloc_sync(all) }.unwrap();
                unsafe { result::memset_d8_sync(address, PATTERN, all) }.unwrap();
                Buffer::Gpu { gpu: Arc::clone(gpu), address, bytes }
            }
        }
    }

    /// Uploads values that no kernel may overwrite.
    pub(crate) fn upload_constant<T: Copy>(&self, values: &[T]) -> Buffer {
        match self {
            Self::Harness(harness) => Buffer::Host(harness.upload_constant(values)),
            Self::Gpu(_) => self.upload(values),
        }
    }

    pub(crate) fn upload<T: Copy>(&self, values: &[T]) -> Buffer {
        match self {
            Self::Harness(harness) => Buffer::Host(harness.upload(values)),
            Self::Gpu(_) => {
                let buffer = self.alloc(size_of_val(values));
                unsafe { result::memcpy_htod_sync(buffer.address(), values) }.unwrap();
                buffer
            }
        }
    }
}

impl Buffer {
    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::Host(memory) => memory.address(),
            Self::Gpu { address, .. } => address + GUARD as u64,
        }
    }

    pub(crate) fn read<T: Copy>(&self, count: usize) -> Vec<T> {
        match self {
            Self::Host(memory) => memory.read(count),
            Self::Gpu { gpu, bytes, .. } => {
                assert!(count * size_of::<T>() <= *bytes, "more is read than there is");
                gpu.context.bind_to_thread().unwrap();
                let mut raw = vec![0u8; count * size_of::<T>()];
                // The null stream waits for all earlier kernels.
                unsafe { result::memcpy_dtoh_sync(&mut raw, self.address()) }.unwrap();
                raw.chunks_exact(size_of::<T>())
                    .map(|chunk| unsafe { chunk.as_ptr().cast::<T>().read_unaligned() })
                    .collect()
            }
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Self::Gpu { gpu, address, bytes } = self {
            let checked = gpu.context.bind_to_thread().and_then(|()| {
                let (mut before, mut after) = ([0u8; GUARD], [0u8; GUARD]);
                unsafe {
                    result::memcpy_dtoh_sync(&mut before, *address)?;
                    result::memcpy_dtoh_sync(&mut after, *address + (GUARD + *bytes) as u64)?;
                    result::free_sync(*address)?;
                }
                Ok(before.iter().chain(&after).all(|byte| *byte == PATTERN))
            });
            // After a kernel failure every call fails; a second panic would hide the first message.
            if !std::thread::panicking() {
                assert!(checked.unwrap(), "a kernel wrote beside a buffer");
            }
        }
    }
}

fn on_gpu() -> bool {
    std::env::var_os("INFLIGHT_TEST_GPU").is_some_and(|value| value == "1")
}

/// First GPU with all kernels loaded.
pub(crate) struct Gpu {
    context: Arc<CudaContext>,
    modules: HashMap<&'static str, sys::CUmodule>,
    functions: Mutex<HashMap<&'static str, sys::CUfunction>>,
    pub(crate) profile: Profile,
}

// Driver handles are usable from any thread with the context current.
unsafe impl Send for Gpu {}
unsafe impl Sync for Gpu {}

impl Gpu {
    fn first() -> Arc<Self> {
        static GPU: OnceLock<Arc<Gpu>> = OnceLock::new();
        Arc::clone(GPU.get_or_init(|| {
            assert!(
                unsafe { sys::is_culib_present() },
                "INFLIGHT_TEST_GPU is set, but there is no NVIDIA driver"
            );
            let context = CudaContext::new(0).unwrap();
            use sys::CUdevice_attribute as Attribute;
            let attribute = |which| context.attribute(which).unwrap() as u32;
            let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) as i32;
            let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) as i32;
            let target = Target::of(major, minor).expect("the GPU is supported");
            let images =
                Images::unpack().unwrap().of_environment(target).unwrap_or_else(|error| panic!("{error}"));
            let load = |image: &Image| {
                if image.file().is_some() {
                    eprintln!("kernel image replaced: {image}");
                }
                unsafe { result::module::load_data(image.as_ptr()) }
                    .unwrap_or_else(|error| panic!("loading the kernels of {image}: {error}"))
            };
            let modules = images.iter().map(|image| (image.family, load(image))).collect();
            let profile = Profile {
                multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
                multiprocessor_shared_bytes: attribute(
                    Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
                ),
            };
            Arc::new(Gpu { context, modules, functions: Mutex::default(), profile })
        }))
    }

    pub(crate) fn bind(&self) {
        self.context.bind_to_thread().unwrap();
    }

    /// Returns a kernel's function, looked up once, with the maximum dynamic shared memory allowed.
    fn function(&self, kernel: &'static str) -> sys::CUfunction {
        *self.functions.lock().unwrap().entry(kernel).or_insert_with(|| {
            let module = self.modules[family_of(kernel).unwrap()];
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = self.profile.shared_bytes as i32;
            unsafe {
                let function = result::module::get_function(module, CString::new(kernel).unwrap()).unwrap();
                result::function::set_function_attribute(function, attribute, bytes).unwrap();
                function
            }
        })
    }

    /// Enqueues a kernel, with programmatic dependent launch if `overlap` is set and its code supports it.
    ///
    /// # Safety
    /// As for [`Device::launch`].
    pub(crate) unsafe fn enqueue(
        &self,
        launch: &Launch<'_>,
        stream: sys::CUstream,
        overlap: bool,
    ) -> Result<(), DeviceError> {
        let function = self.function(launch.kernel);
        let mut version = 0;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        unsafe { sys::cuFuncGetAttribute(&mut version, attribute, function) }.result().unwrap();
        let mut params = [launch.params.as_ptr().cast_mut().cast()];
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
            numAttrs: u32::from(overlap && version >= 90),
        };
        unsafe { sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(|error| failed(launch, error))
    }
}

impl Device for TestDevice {
    fn profile(&self) -> Profile {
        match self {
            Self::Harness(harness) => harness.profile(),
            Self::Gpu(gpu) => gpu.profile,
        }
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let gpu = match self {
            Self::Harness(harness) => return unsafe { harness.launch(launch) },
            Self::Gpu(gpu) => gpu,
        };
        gpu.bind();
        unsafe { gpu.enqueue(launch, std::ptr::null_mut(), false) }?;
        result::ctx::synchronize().map_err(|error| failed(launch, error))
    }
}

fn failed(launch: &Launch<'_>, error: DriverError) -> DeviceError {
    DeviceError::Failed { what: launch.kernel.to_owned(), reason: error.to_string() }
}

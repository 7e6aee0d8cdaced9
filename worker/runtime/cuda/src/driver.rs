//! A GPU through the CUDA driver API: context, kernels, uploads, GEMMs and graphs. Together with
//! `device_memory.rs`, `driver_error.rs`, `stream.rs`, `kernel_function.rs`, `cublaslt.rs`, `copy_engine.rs`
//! and `nccl.rs` it makes all FFI calls.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CString;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use cudarc::driver::{CudaContext, DriverError, result, sys};
use inflight_kernels::cpu::Activation;
use inflight_kernels::cuda::{
    Device, DeviceError, GemmParams, HalfDtype, Images, Launch, Profile, SwigluParams, Target, family_of,
    kernel_names, skinny_gemm_swiglu,
};

use super::cublaslt::CublasLt;
use super::device_memory::{DeviceMemory, PinnedMemory};
use super::driver_error::{error_message, failed};
use super::gemm::{GemmAlgorithm, GemmKernel};
use super::gpu::{ColumnCopy, DeviceCollective, Gpu, GpuMemory, Matmul, gated};
use super::gpu_info::GpuInfo;
use super::gpu_paths;
use super::kernel_function::KernelFunction;
use super::nccl::NcclRank;
use super::staging::StagingRing;
use super::stream::{CudaEvent, CudaStream};

/// Bytes of the pinned staging buffer for uploads.
const STAGING_BYTES: usize = 32 << 20;

/// Instantiated CUDA graph of one step.
pub(super) struct CudaGraph {
    executable: sys::CUgraphExec,
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // SAFETY: `capture` instantiated it, it is destroyed once, and on the device thread.
        let _ = unsafe { result::graph::exec_destroy(self.executable) };
    }
}

/// GPU of one device thread: context, compute stream, kernels and libraries.
pub(super) struct CudaDevice {
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: CudaStream,
    profile: Profile,
    /// Digest of the sources of the kernels.
    sources: String,
    kernels: HashMap<&'static str, KernelFunction>,
    modules: Vec<sys::CUmodule>,
    cublaslt: Option<CublasLt>,
    staging: PinnedMemory,
    /// Allocator of the staging buffer.
    staging_ring: RefCell<StagingRing<CudaEvent>>,
    /// Whether kernels are launched with programmatic dependent launch.
    overlap: Arc<AtomicBool>,
    /// Whether the last work on the stream is a kernel that supports programmatic dependent launch.
    after_kernel: Cell<bool>,
    /// Whether a kernel was launched with overlap since the capture began.
    overlapped: Cell<bool>,
    /// Collectives of the tensor-parallel group; `None` without one.
    collective: Option<Rc<NcclRank>>,
    /// Graphs may only be used by the thread that captured them.
    not_send: PhantomData<*const ()>,
}

impl CudaDevice {
    /// Returns the embedded code that a GPU runs.
    pub(super) fn target(gpu_info: &GpuInfo) -> Result<Target, DeviceError> {
        let (major, minor) = gpu_info.compute;
        Target::of(major, minor).ok_or_else(|| DeviceError::Failed {
            what: "loading the kernels".to_owned(),
            reason: format!("there are none for compute capability {major}.{minor}"),
        })
    }

    /// Opens a GPU and loads the kernels. GEMMs run on cuBLASLt where it is installed, unless
    /// `deterministic`. `collective` is this rank's communicator, if any.
    pub(super) fn open(
        gpu_info: &GpuInfo,
        deterministic: bool,
        collective: Option<Rc<NcclRank>>,
    ) -> Result<Self, DeviceError> {
        let context = CudaContext::new(gpu_info.ordinal).map_err(failed("opening the GPU"))?;
        // SAFETY: all streams are ordered by this module's own events; cudarc's event tracking would break
        // graph capture.
        unsafe { context.disable_event_tracking() };
        let mut modules = Vec::new();
        let mut loaded = HashMap::new();
        let target = Self::target(gpu_info)?;
        let images = Images::unpack()?;
        let sources = images.sources().unwrap_or_default().to_owned();
        for image in images.of_environment(target)? {
            // SAFETY: the image is a complete ELF file, whose header holds its length, or zero-terminated PTX.
            let module = unsafe { result::module::load_data(image.as_ptr()) }
                .map_err(failed(&format!("loading the kernels of {image}")))?;
            modules.push(module);
            loaded.insert(image.family, (module, image.to_string()));
        }
        let mut kernels = HashMap::new();
        for name in kernel_names() {
            let module = family_of(name).and_then(|family| loaded.get(family));
            let (module, image) = module.ok_or_else(|| DeviceError::Failed {
                what: format!("looking up {name}"),
                reason: "no embedded image has it".to_owned(),
            })?;
            let text = CString::new(name).map_err(|_| DeviceError::Failed {
                what: format!("looking up {name}"),
                reason: "its name has a zero byte".to_owned(),
            })?;
            // SAFETY: the module is loaded, and is unloaded only when `self` drops.
            let function = unsafe { result::module::get_function(*module, text) }
                .map_err(failed(&format!("looking up {name} in {image}")))?;
            // Allow all shared memory of a block. Refused where the kernel's static part leaves less; a
            // launch that needs more then fails.
            let set = |attribute, value| {
                // SAFETY: `function` belongs to a loaded module.
                let _ = unsafe { result::function::set_function_attribute(function, attribute, value) };
            };
            use sys::CUfunction_attribute as Attribute;
            let bytes = gpu_info.profile.shared_bytes as i32;
            set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes);
            // The same for all kernels of a step: a multiprocessor has to be idle to change its carveout, so kernels
            // would not overlap. Grids of attention and GEMMs assume an occupancy that needs the full one.
            set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100);
            kernels.insert(name, KernelFunction::new(function));
        }
        let stream = CudaStream::new(&context)?;
        if let Some(collective) = &collective {
            collective.enqueue_on(stream.stream.cast());
        }
        let staging = PinnedMemory::new(&context, STAGING_BYTES)?;
        let cublaslt = match deterministic {
            true => None,
            false => {
                let workspace = DeviceMemory::new(&context, super::memory_plan::WORKSPACE_BYTES as usize)?;
                CublasLt::open(workspace)?
            }
        };
        Ok(Self {
            stream,
            profile: gpu_info.profile,
            sources,
            kernels,
            modules,
            cublaslt,
            staging,
            staging_ring: RefCell::new(StagingRing::new(STAGING_BYTES)),
            overlap: Arc::default(),
            after_kernel: Cell::new(false),
            overlapped: Cell::new(false),
            collective,
            not_send: PhantomData,
            context,
        })
    }

    /// Name of the GEMM backend, for logs.
    pub(super) fn gemm_backend(&self) -> &'static str {
        if self.cublaslt.is_some() { "cublaslt" } else { "own" }
    }

    /// Digest of the sources of the kernels.
    pub(super) fn sources(&self) -> &str {
        &self.sources
    }

    /// Whether kernels overlap by programmatic dependent launch. It becomes false where the driver refuses such a launch.
    pub(super) fn overlap(&self) -> &Arc<AtomicBool> {
        &self.overlap
    }

    /// Enqueues a GEMM with one algorithm of [`CublasLt::candidates`]. Returns false, having enqueued
    /// nothing, if the algorithm rejects the shape.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(super) unsafe fn matmul_with(
        &self,
        algorithm: GemmAlgorithm,
        half: HalfDtype,
        matmul: &Matmul,
    ) -> Result<bool, DeviceError> {
        // SAFETY: the caller guarantees that the addresses are of this device and of matrices with the given
        // shapes.
        unsafe {
            match (algorithm, &self.cublaslt) {
                (GemmAlgorithm::BuiltIn(kernel), _) => kernel.launch(self, half, matmul).map(|()| true),
                (GemmAlgorithm::CublasLt(algorithm), Some(cublaslt)) => {
                    self.end_kernel_chain();
                    cublaslt.run_with(algorithm, half, matmul, self.stream.stream)
                }
                (GemmAlgorithm::CublasLt(_), None) => Ok(false),
            }
        }
    }

    /// Enqueues a GEMM by cuBLASLt, or returns the built-in kernel that is to compute it, having enqueued nothing.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn run_cublaslt(
        &self,
        half: HalfDtype,
        matmul: &Matmul,
    ) -> Result<Option<GemmKernel>, DeviceError> {
        let Some(cublaslt) = &self.cublaslt else { return Ok(Some(GemmKernel::Tiled)) };
        // SAFETY: the caller guarantees that the addresses are of this device and of matrices with the given
        // shapes.
        let kernel = unsafe { cublaslt.run(half, matmul, self.stream.stream) }?;
        if kernel.is_none() {
            self.end_kernel_chain();
        }
        Ok(kernel)
    }

    /// cuBLASLt, if it is in use.
    pub(super) fn cublaslt(&self) -> Option<&CublasLt> {
        self.cublaslt.as_ref()
    }

    /// Enables programmatic dependent launch if `wanted` and all kernels support it.
    pub(super) fn set_overlap(&self, wanted: bool) {
        self.overlap.store(wanted && self.kernels.values().all(KernelFunction::supports_overlap), Relaxed);
    }

    /// Records that the next work on the stream is no built-in kernel: the kernel after it must wait for its
    /// end.
    fn end_kernel_chain(&self) {
        self.after_kernel.set(false);
    }

    /// Disables programmatic dependent launch. Returns whether it was enabled.
    fn disable_overlap(&self, why: &str) -> bool {
        if self.overlap.swap(false, Relaxed) {
            gpu_paths::overlap_lost();
            tracing::warn!(why, "programmatic dependent launch is off; kernels run one after another");
            return true;
        }
        false
    }

    /// Makes the work that follows wait for an event of another stream.
    pub(super) fn wait_for(&self, event: &CudaEvent) -> Result<(), DeviceError> {
        self.end_kernel_chain();
        self.stream.wait_for(event)
    }

    /// Returns free and total bytes of device memory.
    pub(super) fn memory(&self) -> Result<(u64, u64), DeviceError> {
        let (free, total) = result::mem_get_info().map_err(failed("querying free memory"))?;
        Ok((free as u64, total as u64))
    }

    /// Captures what `work` enqueues into a graph. If that fails with overlapping kernels, captures once more
    /// without overlap.
    pub(super) fn capture(
        &self,
        work: impl Fn() -> Result<(), DeviceError>,
    ) -> Result<CudaGraph, DeviceError> {
        self.overlapped.set(false);
        self.capture_once(&work).or_else(|error| {
            // Without overlapping kernels, the error has another cause.
            if !self.overlapped.get() {
                return Err(error);
            }
            self.disable_overlap(&error.to_string());
            self.capture_once(&work)
        })
    }

    fn capture_once(&self, work: impl Fn() -> Result<(), DeviceError>) -> Result<CudaGraph, DeviceError> {
        // A graph's first kernel has no predecessor, and kernels after the capture do not follow the captured
        // ones.
        self.end_kernel_chain();
        // Calls of other threads, such as allocations of other ranks, do not end the capture. What is captured uses one stream and a
        // cuBLASLt workspace of its own, so that a replay has the bits of the eager step.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: `self` owns the stream, and no other capture is active on this thread.
        unsafe { result::stream::begin_capture(self.stream.stream, mode) }
            .map_err(failed("capturing a step"))?;
        let enqueued = work();
        self.end_kernel_chain();
        // SAFETY: the capture of this live stream began above.
        let graph = unsafe { result::stream::end_capture(self.stream.stream) };
        let executable = enqueued.and_then(|()| {
            let graph = *graph.as_ref().map_err(|error| failed("capturing a step")(*error))?;
            // SAFETY: `graph` was returned by `end_capture` and is destroyed only below.
            unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) }
                .map_err(failed("instantiating a captured step"))
        });
        if let Ok(graph) = graph {
            // NCCL frees a communicator only once all graphs captured with it are destroyed.
            // SAFETY: the graph is destroyed once; the executable graph does not refer to it.
            let _ = unsafe { result::graph::destroy(graph) };
        }
        Ok(CudaGraph { executable: executable? })
    }

    /// Uploads a captured graph to the GPU, so that its first launch does not have to.
    pub(super) fn upload_graph(&self, graph: &CudaGraph) -> Result<(), DeviceError> {
        self.end_kernel_chain();
        // SAFETY: `graph` owns the executable and `self` the stream; both are of this context.
        unsafe { sys::cuGraphUpload(graph.executable, self.stream.stream) }
            .result()
            .map_err(failed("uploading a captured step"))
    }

    /// Launches a captured graph.
    pub(super) fn replay(&self, graph: &CudaGraph) -> Result<(), DeviceError> {
        self.end_kernel_chain();
        // SAFETY: `graph` owns the executable and `self` the stream; both are of this context.
        unsafe { result::graph::launch(graph.executable, self.stream.stream) }
            .map_err(failed("launching a captured step"))
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        for module in self.modules.drain(..) {
            // SAFETY: `open` loaded it, it is unloaded once, and the stream was synchronized above.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

impl Device for CudaDevice {
    fn profile(&self) -> Profile {
        self.profile
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let Some(kernel) = self.kernels.get(launch.kernel) else {
            let reason = "it was not looked up at load".to_owned();
            return Err(DeviceError::Failed { what: format!("launching {}", launch.kernel), reason });
        };
        // Each kernel of the chain waits for its predecessor, so waiting for the last one covers all before
        // it.
        let overlap = self.overlap.load(Relaxed)
            && launch.overlaps
            && kernel.supports_overlap()
            && self.after_kernel.get();
        self.after_kernel.set(kernel.supports_overlap());
        self.overlapped.set(self.overlapped.get() || overlap);
        let stream = self.stream.stream;
        // SAFETY: the caller guarantees parameters and addresses. With `overlap`, the last work on the stream
        // is a built-in kernel that waits for its predecessor, and this kernel reads only weights before its
        // own wait.
        let mut launched = unsafe { kernel.launch(launch, stream, overlap) };
        use sys::CUresult::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
        if let Err(error @ DriverError(CUDA_ERROR_NOT_SUPPORTED | CUDA_ERROR_INVALID_VALUE)) = launched
            && overlap
            && self.disable_overlap(&error_message(error))
        {
            // SAFETY: as for the launch above, which was refused and enqueued nothing.
            launched = unsafe { kernel.launch(launch, stream, false) };
        }
        launched.map_err(failed(&format!("launching {}", launch.kernel)))
    }
}

impl Gpu for CudaDevice {
    type Memory = DeviceMemory;

    fn alloc(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        DeviceMemory::new(&self.context, bytes)
    }

    fn fill(&self, memory: &DeviceMemory, byte: u8) -> Result<(), DeviceError> {
        self.end_kernel_chain();
        // SAFETY: the range is all of a live allocation of this device.
        unsafe { result::memset_d8_async(memory.address(), byte, memory.bytes(), self.stream.stream) }
            .map_err(failed("filling memory"))
    }

    fn upload(&self, to: &DeviceMemory, byte: usize, from: &[u8]) -> Result<(), DeviceError> {
        self.end_kernel_chain();
        let mut ring = self.staging_ring.borrow_mut();
        let mut at = to.address() + byte as u64;
        for chunk in from.chunks(ring.chunk_max()) {
            let range = ring.reserve(chunk.len())?;
            let fence = ring.reuse_fence().map_or_else(|| CudaEvent::new(&self.context), Ok)?;
            // SAFETY: `reserve` returned a range that no copy in flight reads, and it stays reserved until
            // `fence` passes; the callers keep `to` allocated until the stream has run, and `byte +
            // from.len()` within it.
            unsafe {
                self.staging.as_slice()[range.clone()].copy_from_slice(chunk);
                self.stream.copy_to_device(at, self.staging.as_ptr().add(range.start), chunk.len())?;
            }
            if let Err(error) = fence.record(&self.stream) {
                // Without a fence the range would be reused while the copy may still read it.
                self.stream.synchronize()?;
                return Err(error);
            }
            ring.commit(range, fence);
            at += chunk.len() as u64;
        }
        Ok(())
    }

    unsafe fn matmul(&self, half: HalfDtype, matmul: &Matmul) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that the addresses are of this device and of matrices with the given
        // shapes.
        unsafe {
            match self.run_cublaslt(half, matmul)? {
                Some(kernel) => kernel.launch(self, half, matmul),
                None => Ok(()),
            }
        }
    }

    unsafe fn matmul_gated(
        &self,
        half: HalfDtype,
        activation: Activation,
        matmul: &Matmul,
        out: u64,
    ) -> Result<(), DeviceError> {
        let Matmul { m, n, y, .. } = *matmul;
        // SAFETY: the caller guarantees that the addresses are of this device and of matrices with the given
        // shapes.
        unsafe {
            match self.run_cublaslt(half, matmul)? {
                Some(GemmKernel::Skinny) if activation == Activation::Silu => {
                    let params = GemmParams { out, stride: n / 2, ..GemmKernel::params(matmul) };
                    return skinny_gemm_swiglu(self, half, &params);
                }
                Some(kernel) => kernel.launch(self, half, matmul)?,
                None => {}
            }
            gated(self, half, activation, &SwigluParams { gate_up: y, out, rows: m, width: n / 2 })
        }
    }

    unsafe fn copy_columns(&self, columns: &ColumnCopy) -> Result<(), DeviceError> {
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: columns.from,
            srcArray: std::ptr::null_mut(),
            srcPitch: columns.from_stride,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: columns.to,
            dstArray: std::ptr::null_mut(),
            dstPitch: columns.to_stride,
            WidthInBytes: columns.width,
            Height: columns.rows,
        };
        self.end_kernel_chain();
        // SAFETY: the caller guarantees that both matrices lie in live allocations of this device and do not
        // overlap.
        unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream.stream) }
            .result()
            .map_err(failed("copying columns"))
    }

    fn collective(&self) -> Option<&dyn DeviceCollective> {
        let collective = self.collective.as_deref()?;
        // NCCL enqueues kernels of its own.
        self.end_kernel_chain();
        Some(collective)
    }
}

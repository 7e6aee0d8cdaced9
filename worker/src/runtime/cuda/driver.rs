//! A GPU through the CUDA driver: memory, streams, kernels, graphs. Thin, and the only place beside `products.rs` and
//! `swap.rs` that calls it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};
use inflight_kernels::cuda::{
    Device, DeviceError, Form, Half, IMAGES, Launch, Profile, image_of, kernel_names,
};

use super::OwnProduct;
use super::found::Found;
use super::function::Function;
use super::gpu::{Columns, Gpu, Matmul, Memory, Peers};
use super::nccl::End;
use super::products::{Products, Way};
use super::staging::{Fence, Ring};

/// Bytes of pinned memory that uploads go through.
const STAGING_BYTES: usize = 32 << 20;

/// What the driver calls an error. To be called only where there is a driver.
pub(super) fn explain(error: DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_string()), text(error.error_name()))
}

pub(super) fn failed(what: &str) -> impl Fn(DriverError) -> DeviceError {
    move |error| DeviceError::Failed { what: what.to_owned(), reason: explain(error) }
}

/// Memory on the GPU.
pub(super) struct DeviceMemory {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DeviceError> {
        let failed = |error: DriverError| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::Memory { bytes: bytes as u64 },
            _ => failed("allocating memory")(error),
        };
        // SAFETY: the context is bound to the thread that owns the GPU.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(failed)?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }

    /// Bytes of it.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Memory for DeviceMemory {
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // If the context is lost, so is the memory.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated above, freed once; the driver waits for what still uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Pinned memory of the host: the GPU copies from and to it by itself.
pub(super) struct PinnedMemory {
    context: Arc<CudaContext>,
    at: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, owned.
unsafe impl Send for PinnedMemory {}
// SAFETY: reading it is what `&self` allows; who writes says so.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DeviceError> {
        // Portable, and not write-combined: the host reads it, too.
        // SAFETY: the context is bound to this thread.
        let at = unsafe { result::malloc_host(bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(|error| DeviceError::Failed {
                what: format!("pinning {bytes} bytes of host memory"),
                reason: match error.0 {
                    sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY => {
                        "the system has not as much; lower --host-cache-bytes".to_owned()
                    }
                    _ => explain(error),
                },
            })?
            .cast();
        Ok(Self { context: Arc::clone(context), at, bytes })
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.at
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// # Safety
    /// The GPU neither reads nor writes it meanwhile, and nobody else has it.
    #[expect(clippy::mut_from_ref, reason = "the GPU shares it; callers keep to turns by events")]
    pub(super) unsafe fn as_slice(&self) -> &mut [u8] {
        // SAFETY: allocated with that size; the rest is passed on to the caller.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated above, freed once.
            let _ = unsafe { result::free_host(self.at.cast()) };
        }
    }
}

/// A point in a stream.
pub(super) struct Event {
    event: sys::CUevent,
    context: Arc<CudaContext>,
}

// SAFETY: the driver's events may be used from any thread that has the context.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that can tell the time.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(failed("creating an event"))?;
        Ok(Self { event, context: Arc::clone(context) })
    }

    pub(super) fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both are alive.
        unsafe { result::event::record(self.event, stream.stream) }.map_err(failed("recording an event"))
    }

    /// Waits until all before it is done; errors of that come here.
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        self.context.bind_to_thread().map_err(failed("waiting for the device"))?;
        // SAFETY: it is alive.
        unsafe { result::event::synchronize(self.event) }.map_err(failed("waiting for the device"))
    }

    /// Whether all before it is done.
    pub(super) fn is_done(&self) -> Result<bool, DeviceError> {
        self.context.bind_to_thread().map_err(failed("asking the device"))?;
        // SAFETY: it is alive.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failed("asking the device")(error)),
        }
    }

    /// Milliseconds from `begin` to this, both done.
    pub(super) fn since(&self, begin: &Self) -> f32 {
        // SAFETY: both are alive.
        unsafe { result::event::elapsed(begin.event, self.event) }.unwrap_or(0.0)
    }
}

impl Fence for Event {
    fn is_passed(&self) -> Result<bool, DeviceError> {
        self.is_done()
    }

    fn wait(&self) -> Result<(), DeviceError> {
        Self::wait(self)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: created above, destroyed once.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

/// Work in order.
pub(super) struct Stream {
    pub(super) stream: sys::CUstream,
    context: Arc<CudaContext>,
}

// SAFETY: the driver's streams may be used from any thread that has the context.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(failed("creating a stream"))?;
        Ok(Self { stream, context: Arc::clone(context) })
    }

    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: it is alive.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("waiting for the device"))
    }

    /// Copies from pinned memory to the GPU, later.
    ///
    /// # Safety
    /// Both ranges are allocated and stay so, and nobody writes to the source until it has run.
    pub(super) unsafe fn copy_in(&self, to: u64, from: *const u8, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream) }
            .result()
            .map_err(failed("copying to the device"))
    }

    /// Copies from the GPU to pinned memory, later.
    ///
    /// # Safety
    /// Both ranges are allocated and stay so, and nobody touches the target until it has run.
    pub(super) unsafe fn copy_out(&self, to: *mut u8, from: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream) }
            .result()
            .map_err(failed("copying from the device"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: created above, destroyed once.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}

/// A captured step.
pub(super) struct Graph {
    executable: sys::CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `Driver::capture`, destroyed once, on the thread that owns the GPU.
        let _ = unsafe { result::graph::exec_destroy(self.executable) };
    }
}

/// A GPU, owned by one thread.
pub(super) struct Driver {
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: Stream,
    profile: Profile,
    functions: HashMap<&'static str, Function>,
    modules: Vec<sys::CUmodule>,
    products: Option<Products>,
    staging: PinnedMemory,
    /// Which parts of it no copy reads any more.
    ring: RefCell<Ring<Event>>,
    /// Whether kernels may begin while those before them end.
    overlap: Cell<bool>,
    /// Whether what the stream was told last is a kernel that lets the next one begin.
    after_kernel: Cell<bool>,
    /// Whether any kernel was launched to overlap since the capture began.
    overlapped: Cell<bool>,
    /// The others that share the model.
    peers: Option<Rc<End>>,
    /// Graphs belong to the thread that captured them.
    not_send: PhantomData<*const ()>,
}

/// Kernels that work on tiles in shared memory.
const TILED: [&str; 2] = ["attention_", "gemm_"];

impl Driver {
    /// Takes a GPU and loads the kernels. `deterministic` products are our own; else the vendor's library makes them,
    /// where it is found. `peers` are those that share the model with it.
    pub(super) fn open(
        found: &Found,
        deterministic: bool,
        peers: Option<Rc<End>>,
    ) -> Result<Self, DeviceError> {
        let context = CudaContext::new(found.ordinal).map_err(failed("taking the GPU"))?;
        // SAFETY: every stream is ordered by events of our own; tracking breaks the capture of graphs.
        unsafe { context.disable_event_tracking() };
        let mut modules = Vec::new();
        let mut loaded = HashMap::new();
        for image in IMAGES {
            let what = format!("loading the kernels of {}", image.name);
            let module = match image.form {
                // SAFETY: a whole image, as nvcc made it.
                Form::Fatbin => unsafe { result::module::load_data(image.bytes.as_ptr().cast::<c_void>()) },
                Form::Ptx => {
                    let text = CString::new(image.bytes).map_err(|_| DeviceError::Failed {
                        what: what.clone(),
                        reason: "the embedded PTX has a zero byte".to_owned(),
                    })?;
                    // SAFETY: a whole text, ended by a zero byte.
                    unsafe { result::module::load_data(text.as_ptr().cast()) }
                }
            }
            .map_err(failed(&what))?;
            modules.push(module);
            loaded.insert(image.name, module);
        }
        let mut functions = HashMap::new();
        for name in kernel_names() {
            let module = image_of(name).and_then(|image| loaded.get(image.name));
            let module = module.ok_or_else(|| DeviceError::Failed {
                what: format!("looking up {name}"),
                reason: "no embedded image has it".to_owned(),
            })?;
            let text = CString::new(name).map_err(|_| DeviceError::Failed {
                what: format!("looking up {name}"),
                reason: "its name has a zero byte".to_owned(),
            })?;
            // SAFETY: the module is loaded and stays so.
            let function = unsafe { result::module::get_function(*module, text) }
                .map_err(failed(&format!("looking up {name}")))?;
            // As much shared memory as there is, less what the kernel has without asking; refused where the device has
            // less than a launch asks for, which the launch then says.
            let set = |attribute, value| {
                // SAFETY: the function exists.
                let _ = unsafe { result::function::set_function_attribute(function, attribute, value) };
            };
            use sys::CUfunction_attribute as Attribute;
            let bytes = found.profile.shared_bytes as i32;
            set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes);
            if TILED.iter().any(|prefix| name.starts_with(prefix)) {
                // Their grids count on as many blocks a multiprocessor as its shared memory holds, not its cache.
                set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100);
            }
            functions.insert(name, Function::of(function));
        }
        let stream = Stream::new(&context)?;
        if let Some(peers) = &peers {
            peers.enqueue_on(stream.stream.cast());
        }
        let staging = PinnedMemory::new(&context, STAGING_BYTES)?;
        let products = match deterministic {
            true => None,
            false => {
                let workspace = DeviceMemory::new(&context, super::sizing::WORKSPACE_BYTES as usize)?;
                Products::open(workspace)?
            }
        };
        Ok(Self {
            stream,
            profile: found.profile,
            functions,
            modules,
            products,
            staging,
            ring: RefCell::new(Ring::new(STAGING_BYTES)),
            overlap: Cell::new(false),
            after_kernel: Cell::new(false),
            overlapped: Cell::new(false),
            peers,
            not_send: PhantomData,
            context,
        })
    }

    /// Who makes products.
    pub(super) fn products(&self) -> &'static str {
        if self.products.is_some() { "cublaslt" } else { "own" }
    }

    /// A product in one of the ways that the library named; false, and nothing done, if it can't be made so.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(super) unsafe fn matmul_by(
        &self,
        way: Way,
        half: Half,
        matmul: &Matmul,
    ) -> Result<bool, DeviceError> {
        // SAFETY: passed on to the caller.
        unsafe {
            match (way, &self.products) {
                (Way::Own(own), _) => own.make(self, half, matmul).map(|()| true),
                (Way::Library(algorithm), Some(products)) => {
                    self.interrupt();
                    products.run_by(algorithm, half, matmul, self.stream.stream)
                }
                (Way::Library(_), None) => Ok(false),
            }
        }
    }

    /// The vendor's library, if it makes products.
    pub(super) fn library(&self) -> Option<&Products> {
        self.products.as_ref()
    }

    /// Whether kernels may begin while those before them end, if they can.
    pub(super) fn overlap(&self, wanted: bool) {
        self.overlap.set(wanted && self.functions.values().all(Function::waits));
        tracing::debug!(overlap = self.overlap.get(), wanted, "programmatic dependent launch probed");
    }

    /// Something other than one of our kernels comes next: what follows it waits until it has ended.
    fn interrupt(&self) {
        self.after_kernel.set(false);
    }

    /// Kernels follow each other one by one from now on. Whether they did not before.
    fn give_overlap_up(&self, why: &str) -> bool {
        if self.overlap.replace(false) {
            tracing::warn!(why, "programmatic dependent launch is off; kernels run one after another");
            return true;
        }
        false
    }

    /// Bytes of memory: free, and in all.
    pub(super) fn memory(&self) -> Result<(u64, u64), DeviceError> {
        let (free, total) = result::mem_get_info().map_err(failed("asking for free memory"))?;
        Ok((free as u64, total as u64))
    }

    /// Records what `work` enqueues instead of running it; where that fails of kernels that overlap, once more without.
    pub(super) fn capture(&self, work: impl Fn() -> Result<(), DeviceError>) -> Result<Graph, DeviceError> {
        self.overlapped.set(false);
        self.capture_once(&work).or_else(|error| {
            // What the library can't have captured is not due to kernels of ours.
            if !self.overlapped.get() {
                return Err(error);
            }
            self.give_overlap_up(&error.to_string());
            self.capture_once(&work)
        })
    }

    fn capture_once(&self, work: impl Fn() -> Result<(), DeviceError>) -> Result<Graph, DeviceError> {
        // A graph begins with nothing before it, and nothing goes on from what was only recorded.
        self.interrupt();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and idle in this thread.
        unsafe { result::stream::begin_capture(self.stream.stream, mode) }
            .map_err(failed("capturing a step"))?;
        let worked = work();
        self.interrupt();
        // SAFETY: capture began above; it is ended whatever came of the work.
        let graph = unsafe { result::stream::end_capture(self.stream.stream) };
        let executable = worked.and_then(|()| {
            let graph = *graph.as_ref().map_err(|error| failed("capturing a step")(*error))?;
            // SAFETY: the graph is alive.
            unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) }
                .map_err(failed("instantiating a captured step"))
        });
        if let Ok(graph) = graph {
            // A communicator can't end while something that was captured is left of it.
            // SAFETY: it is destroyed once, after it was instantiated or could not be.
            let _ = unsafe { result::graph::destroy(graph) };
        }
        Ok(Graph { executable: executable? })
    }

    /// Runs a captured step.
    pub(super) fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        self.interrupt();
        // SAFETY: both are alive.
        unsafe { result::graph::launch(graph.executable, self.stream.stream) }
            .map_err(failed("launching a captured step"))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.stream.wait();
        for module in self.modules.drain(..) {
            // SAFETY: loaded above, unloaded once, and nothing runs any more.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

impl Device for Driver {
    fn profile(&self) -> Profile {
        self.profile
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let Some(function) = self.functions.get(launch.kernel) else {
            let reason = "it was not looked up at load".to_owned();
            return Err(DeviceError::Failed { what: format!("launching {}", launch.kernel), reason });
        };
        // Every kernel of the chain waits, so what it waits for has waited, too: all before is complete.
        let overlap = self.overlap.get() && launch.overlaps && function.waits() && self.after_kernel.get();
        self.after_kernel.set(function.waits());
        self.overlapped.set(self.overlapped.get() || overlap);
        let stream = self.stream.stream;
        // SAFETY: passed on to the caller; the last is one of our kernels, and no kernel touches memory before it waits
        // but for weights.
        let mut launched = unsafe { function.launch(launch, stream, overlap) };
        use sys::CUresult::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
        if let Err(error @ DriverError(CUDA_ERROR_NOT_SUPPORTED | CUDA_ERROR_INVALID_VALUE)) = launched
            && overlap
            && self.give_overlap_up(&explain(error))
        {
            // SAFETY: as above.
            launched = unsafe { function.launch(launch, stream, false) };
        }
        launched.map_err(failed(&format!("launching {}", launch.kernel)))
    }
}

impl Gpu for Driver {
    type Memory = DeviceMemory;

    fn alloc(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        DeviceMemory::new(&self.context, bytes)
    }

    fn zero(&self, memory: &DeviceMemory) -> Result<(), DeviceError> {
        self.interrupt();
        // SAFETY: the whole of an allocation.
        unsafe { result::memset_d8_async(memory.address, 0, memory.bytes(), self.stream.stream) }
            .map_err(failed("clearing memory"))
    }

    fn upload(&self, to: &DeviceMemory, byte: usize, from: &[u8]) -> Result<(), DeviceError> {
        self.interrupt();
        let mut ring = self.ring.borrow_mut();
        let mut at = to.address + byte as u64;
        for piece in from.chunks(ring.piece_max()) {
            let room = ring.take(piece.len())?;
            let fence = ring.spare().map_or_else(|| Event::new(&self.context), Ok)?;
            // SAFETY: no copy reads from the room, which is held until this one has; the ranges are within the allocations.
            unsafe {
                self.staging.as_slice()[room.clone()].copy_from_slice(piece);
                self.stream.copy_in(at, self.staging.as_ptr().add(room.start), piece.len())?;
            }
            if let Err(error) = fence.record(&self.stream) {
                // Nothing holds the room, and a copy may still read from it.
                self.stream.wait()?;
                return Err(error);
            }
            ring.hold(room, fence);
            at += piece.len() as u64;
        }
        Ok(())
    }

    unsafe fn matmul(&self, half: Half, matmul: &Matmul) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        unsafe {
            let own = match &self.products {
                Some(products) => products.run(half, matmul, self.stream.stream)?,
                None => Some(OwnProduct::Tiled),
            };
            match own {
                Some(own) => own.make(self, half, matmul),
                None => {
                    self.interrupt();
                    Ok(())
                }
            }
        }
    }

    unsafe fn copy_columns(&self, columns: &Columns) -> Result<(), DeviceError> {
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
        self.interrupt();
        // SAFETY: passed on to the caller.
        unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream.stream) }
            .result()
            .map_err(failed("copying columns"))
    }

    fn peers(&self) -> Option<&dyn Peers> {
        let end = self.peers.as_deref()?;
        // What they are asked for is done by kernels of their own.
        self.interrupt();
        Some(end)
    }
}

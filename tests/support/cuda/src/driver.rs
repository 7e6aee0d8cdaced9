//! Entry points of libcuda.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec,
    CUlaunchAttributeID, CUlaunchConfig, CUmemorytype, CUmodule, CUresult, CUstream,
};
use inflight_kernels::cuda::Launch;

use crate::device::{self, SimulatedDevice};
use crate::error_names::name_and_description;
use crate::event::SimulatedEvent;
use crate::handle_table::HandleTable;
use crate::module::{SimulatedFunction, SimulatedModule};
use crate::settings::Settings;
use crate::stream::{SimulatedStream, StreamWork};
use crate::{DriverResult, lock, pinned};

static INITIALIZED: AtomicBool = AtomicBool::new(false);
static STREAMS: HandleTable<SimulatedStream> = HandleTable::new();
static EVENTS: HandleTable<SimulatedEvent> = HandleTable::new();
static MODULES: HandleTable<SimulatedModule> = HandleTable::new();
static FUNCTIONS: HandleTable<SimulatedFunction> = HandleTable::new();
static GRAPHS: HandleTable<Vec<StreamWork>> = HandleTable::new();
static EXECUTABLES: HandleTable<Vec<StreamWork>> = HandleTable::new();

/// Handle of device 0's primary context; device n's is 16 * n higher.
const CONTEXT_BASE: usize = 0x100;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// Stream that this thread captures.
    static CAPTURING: RefCell<Option<Arc<SimulatedStream>>> = const { RefCell::new(None) };
}

use CUresult as Error;

fn check_initialized() -> DriverResult {
    INITIALIZED.load(Ordering::Relaxed).then_some(()).ok_or(Error::CUDA_ERROR_NOT_INITIALIZED)
}

fn device(ordinal: CUdevice) -> DriverResult<&'static Arc<SimulatedDevice>> {
    check_initialized()?;
    let device = usize::try_from(ordinal).ok().and_then(|ordinal| device::all().get(ordinal));
    device.ok_or(Error::CUDA_ERROR_INVALID_DEVICE)
}

/// Returns the device of a retained context.
fn device_of_context(context: usize) -> DriverResult<&'static Arc<SimulatedDevice>> {
    let ordinal = context.checked_sub(CONTEXT_BASE).map(|offset| offset / 16);
    let device = ordinal.and_then(|ordinal| device::all().get(ordinal));
    let retained = device.filter(|device| *lock(&device.retained) > 0);
    retained.ok_or(Error::CUDA_ERROR_INVALID_CONTEXT)
}

/// Returns the device of this thread's current context, or its failure.
pub(crate) fn current() -> DriverResult<&'static Arc<SimulatedDevice>> {
    check_initialized()?;
    let device = device_of_context(CURRENT.get())?;
    device.check().map(|()| device)
}

/// Refuses calls that may synchronize with the device while this thread captures.
fn check_not_capturing() -> DriverResult {
    CAPTURING.with_borrow(|capturing| match capturing {
        Some(stream) => {
            stream.break_capture();
            Err(Error::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        }
        None => Ok(()),
    })
}

/// Looks up a stream of the current context.
pub(crate) fn stream(handle: CUstream) -> DriverResult<Arc<SimulatedStream>> {
    let device = current()?;
    if handle.is_null() {
        // The null stream synchronizes with captured streams.
        check_not_capturing()?;
        return Ok(device.null_stream());
    }
    let stream = STREAMS.get(handle).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
    if !Arc::ptr_eq(&stream.device, device) {
        return Err(Error::CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(stream)
}

fn event(handle: CUevent) -> DriverResult<Arc<SimulatedEvent>> {
    let device = current()?;
    let event = EVENTS.get(handle).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
    Arc::ptr_eq(&event.device, device).then_some(event).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)
}

fn check_value(valid: bool) -> DriverResult {
    valid.then_some(()).ok_or(Error::CUDA_ERROR_INVALID_VALUE)
}

/// Returns an illegal-address error unless the ranges of running work are valid.
pub(crate) fn check_ranges(valid: bool) -> DriverResult {
    valid.then_some(()).ok_or(Error::CUDA_ERROR_ILLEGAL_ADDRESS)
}

/// Copies bytes without checks.
fn copy(to: usize, from: usize, bytes: usize) {
    let (to, from) =
        (std::ptr::with_exposed_provenance_mut::<u8>(to), std::ptr::with_exposed_provenance::<u8>(from));
    // SAFETY: the callers have checked that both ranges are allocated; as on a device, their content may
    // change concurrently.
    unsafe { std::ptr::copy(from, to, bytes) };
}

/// Enqueues a copy whose ranges are checked by `valid_ranges` now and when it runs.
fn enqueue_copy(
    stream: CUstream,
    to: usize,
    from: usize,
    bytes: usize,
    valid_ranges: impl Fn(&SimulatedDevice) -> bool + Send + Sync + 'static,
) -> DriverResult {
    let stream = self::stream(stream)?;
    check_value(valid_ranges(&stream.device))?;
    let work = move |device: &SimulatedDevice| {
        check_ranges(valid_ranges(device))?;
        copy(to, from, bytes);
        Ok(())
    };
    stream.enqueue(StreamWork::new(work)).map(drop)
}

/// `CU_STREAM_NON_BLOCKING`, the only kind supported beside the null stream.
const NON_BLOCKING: c_uint = 1;

/// # Safety
/// `to` is null or valid for writes.
unsafe fn put<T>(to: *mut T, value: T) -> DriverResult {
    check_value(!to.is_null())?;
    // SAFETY: `to` is not null, and the caller guarantees that it is then valid for writes.
    unsafe { to.write(value) };
    Ok(())
}

macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the driver.")]
        ///
        /// # Safety
        /// As the driver's documentation says: pointers are null or valid, and memory of enqueued work stays
        /// allocated until it has run.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
            let call = || -> DriverResult { $body };
            let outcome = call();
            outcome.err().unwrap_or(CUresult::CUDA_SUCCESS)
        }
    )*};
}

calls! {
    fn cuInit(_flags: c_uint) {
        INITIALIZED.store(true, Ordering::Relaxed);
        if device::all().is_empty() { Err(Error::CUDA_ERROR_NO_DEVICE) } else { Ok(()) }
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        let (major, minor) = Settings::get().cuda;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(version, major * 1000 + minor * 10) }
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        check_initialized()?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(count, device::all().len() as c_int) }
    }

    fn cuDeviceGet(out: *mut CUdevice, ordinal: c_int) {
        device(ordinal)?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(out, ordinal) }
    }

    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, ordinal: CUdevice) {
        device(ordinal)?;
        let text = c"Simulated GPU".to_bytes_with_nul();
        check_value(usize::try_from(bytes).is_ok_and(|bytes| bytes >= text.len()))?;
        // SAFETY: the caller guarantees room for `bytes` bytes, which the text fits.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
        Ok(())
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, ordinal: CUdevice) {
        use cudarc::driver::sys::CUdevice_attribute as Attribute;
        const MULTIPROCESSORS: c_uint = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as c_uint;
        const MAJOR: c_uint = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as c_uint;
        const MINOR: c_uint = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as c_uint;
        const SHARED: c_uint = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as c_uint;
        const ALL_SHARED: c_uint = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR as c_uint;
        const POOLS: c_uint = Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED as c_uint;
        let device = device(ordinal)?;
        let result = match attribute {
            MULTIPROCESSORS => device.multiprocessors(),
            MAJOR => Settings::get().compute.0,
            MINOR => Settings::get().compute.1,
            SHARED => device.shared_bytes(),
            ALL_SHARED => device.multiprocessor_shared_bytes(),
            POOLS => 0,
            _ => return Err(Error::CUDA_ERROR_INVALID_VALUE),
        };
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(value, result) }
    }

    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, ordinal: CUdevice) {
        let device = device(ordinal)?;
        *lock(&device.retained) += 1;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(context, std::ptr::without_provenance_mut(CONTEXT_BASE + 16 * device.ordinal)) }
    }

    fn cuDevicePrimaryCtxRelease_v2(ordinal: CUdevice) {
        let mut retained = lock(&device(ordinal)?.retained);
        *retained = retained.checked_sub(1).ok_or(Error::CUDA_ERROR_INVALID_CONTEXT)?;
        Ok(())
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        check_initialized()?;
        if !context.is_null() {
            device_of_context(context.addr())?;
        }
        CURRENT.set(context.addr());
        Ok(())
    }

    fn cuCtxGetCurrent(context: *mut CUcontext) {
        check_initialized()?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(context, std::ptr::without_provenance_mut(CURRENT.get())) }
    }

    fn cuCtxSynchronize() {
        let device = current()?;
        check_not_capturing()?;
        device.synchronize();
        device.check()
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (left, all) = current()?.bytes();
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(free, left as usize).and_then(|()| put(total, all as usize)) }
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, ordinal: CUdevice) {
        let (_, all) = device(ordinal)?.bytes();
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(bytes, all as usize) }
    }

    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) {
        let device = current()?;
        check_not_capturing()?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(address, device.alloc(bytes)?) }
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        let device = current()?;
        check_not_capturing()?;
        device.free(address)?;
        device.check()
    }

    fn cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        current()?;
        check_not_capturing()?;
        check_value(bytes > 0)?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(at, pinned::alloc(bytes)) }
    }

    fn cuMemFreeHost(at: *mut c_void) {
        current()?;
        check_not_capturing()?;
        pinned::free(at)
    }

    fn cuMemsetD8Async(address: CUdeviceptr, byte: u8, bytes: usize, stream: CUstream) {
        let stream = self::stream(stream)?;
        check_value(stream.device.holds(address, bytes))?;
        let work = move |device: &SimulatedDevice| {
            check_ranges(device.holds(address, bytes))?;
            let at = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            // SAFETY: the range was just checked to be within an allocation of the device.
            unsafe { at.write_bytes(byte, bytes) };
            Ok(())
        };
        stream.enqueue(StreamWork::new(work)).map(drop)
    }

    fn cuMemsetD8_v2(address: CUdeviceptr, byte: u8, bytes: usize) {
        // SAFETY: the arguments are those of this entry point, whose caller guarantees them.
        let status = unsafe { cuMemsetD8Async(address, byte, bytes, std::ptr::null_mut()) };
        if status == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(status) }
    }

    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) {
        let (to, from) = (to as usize, from.expose_provenance());
        let valid_ranges =
            move |device: &SimulatedDevice| pinned::holds(from, bytes) && device.holds(to as u64, bytes);
        if !self::stream(stream)?.device.copies_to(to as u64) {
            return Ok(());
        }
        enqueue_copy(stream, to, from, bytes, valid_ranges)
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        let (to, from) = (to.expose_provenance(), from as usize);
        let valid_ranges =
            move |device: &SimulatedDevice| pinned::holds(to, bytes) && device.holds(from as u64, bytes);
        enqueue_copy(stream, to, from, bytes, valid_ranges)
    }

    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        let valid_ranges =
            move |device: &SimulatedDevice| device.holds(to, bytes) && device.holds(from, bytes);
        enqueue_copy(stream, to as usize, from as usize, bytes, valid_ranges)
    }

    fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) {
        let device = current()?;
        check_not_capturing()?;
        check_value(device.holds(to, bytes))?;
        device.null_stream().synchronize();
        copy(to as usize, from.expose_provenance(), bytes);
        device.check()
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) {
        let device = current()?;
        check_not_capturing()?;
        check_value(device.holds(from, bytes))?;
        device.null_stream().synchronize();
        copy(to.expose_provenance(), from as usize, bytes);
        device.check()
    }

    fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) {
        check_value(!copy.is_null())?;
        // SAFETY: `copy` is not null, and the caller guarantees that it points to a copy descriptor.
        let c = unsafe { &*copy };
        let on_device = CUmemorytype::CU_MEMORYTYPE_DEVICE;
        if c.srcMemoryType != on_device || c.dstMemoryType != on_device {
            return Err(Error::CUDA_ERROR_NOT_SUPPORTED);
        }
        let (width, height) = (c.WidthInBytes, c.Height);
        check_value(width > 0 && height > 0)?;
        check_value(width + c.srcXInBytes <= c.srcPitch && width + c.dstXInBytes <= c.dstPitch)?;
        let (from_pitch, to_pitch) = (c.srcPitch, c.dstPitch);
        let from = c.srcDevice as usize + c.srcY * from_pitch + c.srcXInBytes;
        let to = c.dstDevice as usize + c.dstY * to_pitch + c.dstXInBytes;
        let valid_ranges = move |device: &SimulatedDevice| {
            let range = |at: usize, pitch: usize| device.holds(at as u64, (height - 1) * pitch + width);
            range(from, from_pitch) && range(to, to_pitch)
        };
        let stream = self::stream(stream)?;
        check_value(valid_ranges(&stream.device))?;
        let work = move |device: &SimulatedDevice| {
            check_ranges(valid_ranges(device))?;
            (0..height).for_each(|row| self::copy(to + row * to_pitch, from + row * from_pitch, width));
            Ok(())
        };
        stream.enqueue(StreamWork::new(work)).map(drop)
    }

    fn cuStreamCreate(handle: *mut CUstream, flags: c_uint) {
        let device = current()?;
        if flags != NON_BLOCKING {
            return Err(Error::CUDA_ERROR_NOT_SUPPORTED);
        }
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(handle, STREAMS.add(device.stream())) }
    }

    fn cuStreamDestroy_v2(handle: CUstream) {
        let stream = STREAMS.remove(handle).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        stream.end();
        current().map(drop)
    }

    fn cuStreamSynchronize(handle: CUstream) {
        let stream = stream(handle)?;
        check_not_capturing()?;
        if stream.is_capturing() {
            stream.break_capture();
            return Err(Error::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        stream.synchronize();
        stream.device.check()
    }

    fn cuStreamWaitEvent(handle: CUstream, awaited: CUevent, flags: c_uint) {
        check_value(flags == 0)?;
        let work = event(awaited)?.wait_work();
        stream(handle)?.enqueue(work).map(drop)
    }

    fn cuStreamBeginCapture_v2(handle: CUstream, mode: c_uint) {
        use cudarc::driver::sys::CUstreamCaptureMode as Mode;
        if handle.is_null() || mode != Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_uint {
            return Err(Error::CUDA_ERROR_NOT_SUPPORTED);
        }
        let stream = stream(handle)?;
        check_not_capturing()?;
        stream.begin_capture()?;
        CAPTURING.set(Some(stream));
        Ok(())
    }

    fn cuStreamEndCapture(handle: CUstream, graph: *mut CUgraph) {
        // The capture ends even if another error is returned.
        let captured = STREAMS.get(handle).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?.end_capture();
        CAPTURING.set(None);
        current()?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(graph, std::ptr::null_mut()).and_then(|()| put(graph, GRAPHS.add(Arc::new(captured?)))) }
    }

    fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) {
        current()?;
        check_value(flags == 0)?;
        let graph = GRAPHS.get(graph).ok_or(Error::CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(executable, EXECUTABLES.add(Arc::new(graph.to_vec()))) }
    }

    fn cuGraphDestroy(graph: CUgraph) {
        check_initialized()?;
        GRAPHS.remove(graph).map(drop).ok_or(Error::CUDA_ERROR_INVALID_VALUE)
    }

    fn cuGraphExecDestroy(executable: CUgraphExec) {
        check_initialized()?;
        EXECUTABLES.remove(executable).map(drop).ok_or(Error::CUDA_ERROR_INVALID_VALUE)
    }

    fn cuGraphUpload(executable: CUgraphExec, handle: CUstream) {
        let stream = stream(handle)?;
        check_value(EXECUTABLES.get(executable).is_some() && !stream.is_capturing())
    }

    fn cuGraphLaunch(executable: CUgraphExec, handle: CUstream) {
        let stream = stream(handle)?;
        let executable = EXECUTABLES.get(executable).ok_or(Error::CUDA_ERROR_INVALID_VALUE)?;
        if stream.is_capturing() {
            return Err(Error::CUDA_ERROR_NOT_SUPPORTED);
        }
        executable.iter().try_for_each(|work| stream.enqueue(work.clone()).map(drop))
    }

    fn cuEventCreate(handle: *mut CUevent, _flags: c_uint) {
        let device = current()?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(handle, EVENTS.add(SimulatedEvent::new(Arc::clone(device)))) }
    }

    fn cuEventDestroy_v2(handle: CUevent) {
        current()?;
        EVENTS.remove(handle).map(drop).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuEventRecord(handle: CUevent, on: CUstream) {
        let stream = stream(on)?;
        event(handle)?.record(&stream)
    }

    fn cuEventQuery(handle: CUevent) {
        let event = event(handle)?;
        check_not_capturing()?;
        let done = event.is_done();
        event.device.check()?;
        if done { Ok(()) } else { Err(Error::CUDA_ERROR_NOT_READY) }
    }

    fn cuEventSynchronize(handle: CUevent) {
        let event = event(handle)?;
        check_not_capturing()?;
        event.synchronize();
        event.device.check()
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, begin: CUevent, end: CUevent) {
        let elapsed = event(end)?.milliseconds_since(&*event(begin)?)?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(milliseconds, elapsed) }
    }

    fn cuModuleLoadData(handle: *mut CUmodule, image: *const c_void) {
        current()?;
        check_not_capturing()?;
        check_value(!image.is_null())?;
        // SAFETY: `image` is not null; the caller guarantees a complete image and a valid output pointer.
        unsafe { put(handle, MODULES.add(SimulatedModule::load(image)?)) }
    }

    fn cuModuleUnload(handle: CUmodule) {
        current()?;
        MODULES.remove(handle).map(drop).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuModuleGetFunction(handle: *mut CUfunction, module: CUmodule, name: *const c_char) {
        current()?;
        check_value(!name.is_null())?;
        let module = MODULES.get(module).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        // SAFETY: `name` is not null; the caller guarantees that it ends with a zero byte and `handle` is valid.
        unsafe { put(handle, FUNCTIONS.add(module.function(CStr::from_ptr(name))?)) }
    }

    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: CUfunction) {
        use cudarc::driver::sys::CUfunction_attribute as Attribute;
        check_initialized()?;
        let function = FUNCTIONS.get(function).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        check_value(attribute == Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION as c_uint)?;
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(value, function.ptx) }
    }

    fn cuFuncSetAttribute(function: CUfunction, attribute: c_uint, value: c_int) {
        use cudarc::driver::sys::CUfunction_attribute as Attribute;
        const SHARED: c_uint = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_uint;
        const CARVEOUT: c_uint = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT as c_uint;
        let device = current()?;
        let function = FUNCTIONS.get(function).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        match attribute {
            SHARED => function.set_shared_limit(value, device.shared_bytes()),
            CARVEOUT => check_value((-1..=100).contains(&value)),
            _ => Err(Error::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        check_value(!config.is_null() && !parameters.is_null() && extra.is_null())?;
        // SAFETY: `config` is not null, and the caller guarantees that it points to a launch configuration.
        let config = unsafe { &*config };
        let stream = stream(config.hStream)?;
        let function = FUNCTIONS.get(function).filter(|function| function.module.strong_count() > 0);
        let function = function.ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        let grid = (config.gridDimX, config.gridDimY);
        check_value(grid.0 > 0 && (1..=65_535).contains(&grid.1) && config.gridDimZ == 1)?;
        check_value(config.blockDimY == 1 && config.blockDimZ == 1 && (1..=1024).contains(&config.blockDimX))?;
        check_value(config.sharedMemBytes <= function.shared_bytes.load(Ordering::Relaxed))?;
        let overlaps = config.numAttrs > 0;
        for i in 0..config.numAttrs as usize {
            // SAFETY: the caller guarantees `numAttrs` attributes.
            let id = unsafe { (*config.attrs.add(i)).id };
            let known = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            if id != known || function.ptx < 90 || !Settings::get().overlap {
                return Err(Error::CUDA_ERROR_NOT_SUPPORTED);
            }
        }
        // SAFETY: the caller guarantees one parameter block of the kernel's size, which is copied at launch
        // as by the driver.
        let parameters = unsafe {
            let first = *parameters;
            check_value(!first.is_null())?;
            std::slice::from_raw_parts(first.cast::<u8>(), function.parameter_bytes).to_vec()
        };
        let (threads, shared_bytes, kernel) = (config.blockDimX, config.sharedMemBytes, function.name);
        let work = move |device: &SimulatedDevice| {
            device.launch(&Launch { kernel, grid, threads, shared_bytes, params: &parameters, overlaps: false })
        };
        stream.enqueue_kernel(StreamWork::new(work), overlaps).map(drop)
    }

    fn cuGetErrorName(error: CUresult, text: *mut *const c_char) {
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(text, name_and_description(error).0.as_ptr()) }
    }

    fn cuGetErrorString(error: CUresult, text: *mut *const c_char) {
        // SAFETY: the caller guarantees that the output pointer is null or valid for writes.
        unsafe { put(text, name_and_description(error).1.as_ptr()) }
    }
}

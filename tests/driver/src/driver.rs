//! The driver's calls.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec,
    CUlaunchAttributeID, CUlaunchConfig, CUmemorytype, CUmodule, CUresult, CUstream,
};
use inflight_kernels::cuda::Launch;

use crate::device::{self, Device};
use crate::event::Event;
use crate::handles::Handles;
use crate::module::{Function, Module};
use crate::settings::Settings;
use crate::stream::{Stream, Work};
use crate::{Outcome, locked, pinned};

static STARTED: AtomicBool = AtomicBool::new(false);
static STREAMS: Handles<Stream> = Handles::new();
static EVENTS: Handles<Event> = Handles::new();
static MODULES: Handles<Module> = Handles::new();
static FUNCTIONS: Handles<Function> = Handles::new();
static GRAPHS: Handles<Vec<Work>> = Handles::new();
static EXECUTABLES: Handles<Vec<Work>> = Handles::new();

/// Device n's primary context is this plus n times 16.
const CONTEXTS: usize = 0x100;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// The stream that this thread captures.
    static CAPTURING: RefCell<Option<Arc<Stream>>> = const { RefCell::new(None) };
}

use CUresult as Error;

fn started() -> Outcome {
    STARTED.load(Ordering::Relaxed).then_some(()).ok_or(Error::CUDA_ERROR_NOT_INITIALIZED)
}

fn device(ordinal: CUdevice) -> Outcome<&'static Arc<Device>> {
    started()?;
    let found = usize::try_from(ordinal).ok().and_then(|ordinal| device::all().get(ordinal));
    found.ok_or(Error::CUDA_ERROR_INVALID_DEVICE)
}

/// The device of a context that somebody holds.
fn of_context(context: usize) -> Outcome<&'static Arc<Device>> {
    let ordinal = context.checked_sub(CONTEXTS).map(|behind| behind / 16);
    let device = ordinal.and_then(|ordinal| device::all().get(ordinal));
    let held = device.filter(|device| *locked(&device.retained) > 0);
    held.ok_or(Error::CUDA_ERROR_INVALID_CONTEXT)
}

/// The device of this thread's context, if it works.
pub(crate) fn current() -> Outcome<&'static Arc<Device>> {
    started()?;
    let device = of_context(CURRENT.get())?;
    device.check().map(|()| device)
}

/// Refuses what may wait for the device while this thread captures.
fn not_captured() -> Outcome {
    CAPTURING.with_borrow(|capturing| match capturing {
        Some(stream) => {
            stream.break_capture();
            Err(Error::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        }
        None => Ok(()),
    })
}

/// A stream of the current context, by its handle.
pub(crate) fn stream(handle: CUstream) -> Outcome<Arc<Stream>> {
    let device = current()?;
    if handle.is_null() {
        // It would wait for streams that are captured.
        not_captured()?;
        return Ok(device.null_stream());
    }
    let stream = STREAMS.get(handle).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
    if !Arc::ptr_eq(&stream.device, device) {
        return Err(Error::CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(stream)
}

fn event(handle: CUevent) -> Outcome<Arc<Event>> {
    let device = current()?;
    let event = EVENTS.get(handle).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
    Arc::ptr_eq(&event.device, device).then_some(event).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)
}

fn valid(whether: bool) -> Outcome {
    whether.then_some(()).ok_or(Error::CUDA_ERROR_INVALID_VALUE)
}

/// What a range has become until work on it runs.
pub(crate) fn still(whether: bool) -> Outcome {
    whether.then_some(()).ok_or(Error::CUDA_ERROR_ILLEGAL_ADDRESS)
}

/// Copies, without looking at anything.
fn copy(to: usize, from: usize, bytes: usize) {
    let (to, from) =
        (std::ptr::with_exposed_provenance_mut::<u8>(to), std::ptr::with_exposed_provenance::<u8>(from));
    // SAFETY: whoever calls has looked whether both ranges are there; as on a device, they may change meanwhile.
    unsafe { std::ptr::copy(from, to, bytes) };
}

/// Enqueues a copy of ranges that are looked at by `there`, now and when it runs.
fn copy_later(
    stream: CUstream,
    to: usize,
    from: usize,
    bytes: usize,
    there: impl Fn(&Device) -> bool + Send + Sync + 'static,
) -> Outcome {
    let stream = self::stream(stream)?;
    valid(there(&stream.device))?;
    let work = move |device: &Device| {
        still(there(device))?;
        copy(to, from, bytes);
        Ok(())
    };
    stream.enqueue(Work::new(work)).map(drop)
}

/// What streams that wait for nobody are flagged as; the only kind there is here beside the null stream.
const NON_BLOCKING: c_uint = 1;

/// # Safety
/// It is null or may be written to.
unsafe fn put<T>(to: *mut T, value: T) -> Outcome {
    valid(!to.is_null())?;
    // SAFETY: passed on to the caller.
    unsafe { to.write(value) };
    Ok(())
}

macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the driver.")]
        ///
        /// # Safety
        /// As the driver's documentation says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
            let call = || -> Outcome { $body };
            let outcome = call();
            outcome.err().unwrap_or(CUresult::CUDA_SUCCESS)
        }
    )*};
}

calls! {
    fn cuInit(_flags: c_uint) {
        STARTED.store(true, Ordering::Relaxed);
        if device::all().is_empty() { Err(Error::CUDA_ERROR_NO_DEVICE) } else { Ok(()) }
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        let (major, minor) = Settings::get().cuda;
        // SAFETY: passed on to the caller.
        unsafe { put(version, major * 1000 + minor * 10) }
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        started()?;
        // SAFETY: passed on to the caller.
        unsafe { put(count, device::all().len() as c_int) }
    }

    fn cuDeviceGet(out: *mut CUdevice, ordinal: c_int) {
        device(ordinal)?;
        // SAFETY: passed on to the caller.
        unsafe { put(out, ordinal) }
    }

    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, ordinal: CUdevice) {
        device(ordinal)?;
        let text = c"Simulated GPU".to_bytes_with_nul();
        valid(usize::try_from(bytes).is_ok_and(|bytes| bytes >= text.len()))?;
        // SAFETY: there is room for it.
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
        let found = match attribute {
            MULTIPROCESSORS => device.multiprocessors(),
            MAJOR => Settings::get().compute.0,
            MINOR => Settings::get().compute.1,
            SHARED => device.shared_bytes(),
            ALL_SHARED => device.multiprocessor_shared_bytes(),
            POOLS => 0,
            _ => return Err(Error::CUDA_ERROR_INVALID_VALUE),
        };
        // SAFETY: passed on to the caller.
        unsafe { put(value, found) }
    }

    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, ordinal: CUdevice) {
        let device = device(ordinal)?;
        *locked(&device.retained) += 1;
        // SAFETY: passed on to the caller.
        unsafe { put(context, std::ptr::without_provenance_mut(CONTEXTS + 16 * device.ordinal)) }
    }

    fn cuDevicePrimaryCtxRelease_v2(ordinal: CUdevice) {
        let mut retained = locked(&device(ordinal)?.retained);
        *retained = retained.checked_sub(1).ok_or(Error::CUDA_ERROR_INVALID_CONTEXT)?;
        Ok(())
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        started()?;
        if !context.is_null() {
            of_context(context.addr())?;
        }
        CURRENT.set(context.addr());
        Ok(())
    }

    fn cuCtxGetCurrent(context: *mut CUcontext) {
        started()?;
        // SAFETY: passed on to the caller.
        unsafe { put(context, std::ptr::without_provenance_mut(CURRENT.get())) }
    }

    fn cuCtxSynchronize() {
        let device = current()?;
        not_captured()?;
        device.wait();
        device.check()
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (left, all) = current()?.bytes();
        // SAFETY: passed on to the caller.
        unsafe { put(free, left as usize).and_then(|()| put(total, all as usize)) }
    }

    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) {
        let device = current()?;
        not_captured()?;
        // SAFETY: passed on to the caller.
        unsafe { put(address, device.alloc(bytes)?) }
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        let device = current()?;
        not_captured()?;
        device.free(address)?;
        device.check()
    }

    fn cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        current()?;
        not_captured()?;
        valid(bytes > 0)?;
        // SAFETY: passed on to the caller.
        unsafe { put(at, pinned::alloc(bytes)) }
    }

    fn cuMemFreeHost(at: *mut c_void) {
        current()?;
        not_captured()?;
        pinned::free(at)
    }

    fn cuMemsetD8Async(address: CUdeviceptr, byte: u8, bytes: usize, stream: CUstream) {
        let stream = self::stream(stream)?;
        valid(stream.device.holds(address, bytes))?;
        let work = move |device: &Device| {
            still(device.holds(address, bytes))?;
            let at = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            // SAFETY: within an allocation, as was just seen.
            unsafe { at.write_bytes(byte, bytes) };
            Ok(())
        };
        stream.enqueue(Work::new(work)).map(drop)
    }

    fn cuMemsetD8_v2(address: CUdeviceptr, byte: u8, bytes: usize) {
        // SAFETY: passed on to the caller.
        let told = unsafe { cuMemsetD8Async(address, byte, bytes, std::ptr::null_mut()) };
        if told == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(told) }
    }

    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) {
        let (to, from) = (to as usize, from.expose_provenance());
        let there = move |device: &Device| pinned::holds(from, bytes) && device.holds(to as u64, bytes);
        copy_later(stream, to, from, bytes, there)
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        let (to, from) = (to.expose_provenance(), from as usize);
        let there = move |device: &Device| pinned::holds(to, bytes) && device.holds(from as u64, bytes);
        copy_later(stream, to, from, bytes, there)
    }

    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        let there = move |device: &Device| device.holds(to, bytes) && device.holds(from, bytes);
        copy_later(stream, to as usize, from as usize, bytes, there)
    }

    fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) {
        let device = current()?;
        not_captured()?;
        valid(device.holds(to, bytes))?;
        device.null_stream().wait();
        copy(to as usize, from.expose_provenance(), bytes);
        device.check()
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) {
        let device = current()?;
        not_captured()?;
        valid(device.holds(from, bytes))?;
        device.null_stream().wait();
        copy(to.expose_provenance(), from as usize, bytes);
        device.check()
    }

    fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) {
        valid(!copy.is_null())?;
        // SAFETY: passed on to the caller.
        let c = unsafe { &*copy };
        let on_device = CUmemorytype::CU_MEMORYTYPE_DEVICE;
        if c.srcMemoryType != on_device || c.dstMemoryType != on_device {
            return Err(Error::CUDA_ERROR_NOT_SUPPORTED);
        }
        let (width, height) = (c.WidthInBytes, c.Height);
        valid(width > 0 && height > 0)?;
        valid(width + c.srcXInBytes <= c.srcPitch && width + c.dstXInBytes <= c.dstPitch)?;
        let (from_pitch, to_pitch) = (c.srcPitch, c.dstPitch);
        let from = c.srcDevice as usize + c.srcY * from_pitch + c.srcXInBytes;
        let to = c.dstDevice as usize + c.dstY * to_pitch + c.dstXInBytes;
        let there = move |device: &Device| {
            let range = |at: usize, pitch: usize| device.holds(at as u64, (height - 1) * pitch + width);
            range(from, from_pitch) && range(to, to_pitch)
        };
        let stream = self::stream(stream)?;
        valid(there(&stream.device))?;
        let work = move |device: &Device| {
            still(there(device))?;
            (0..height).for_each(|row| self::copy(to + row * to_pitch, from + row * from_pitch, width));
            Ok(())
        };
        stream.enqueue(Work::new(work)).map(drop)
    }

    fn cuStreamCreate(handle: *mut CUstream, flags: c_uint) {
        let device = current()?;
        if flags != NON_BLOCKING {
            return Err(Error::CUDA_ERROR_NOT_SUPPORTED);
        }
        // SAFETY: passed on to the caller.
        unsafe { put(handle, STREAMS.add(device.stream())) }
    }

    fn cuStreamDestroy_v2(handle: CUstream) {
        let stream = STREAMS.remove(handle).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        stream.end();
        current().map(drop)
    }

    fn cuStreamSynchronize(handle: CUstream) {
        let stream = stream(handle)?;
        not_captured()?;
        if stream.is_capturing() {
            stream.break_capture();
            return Err(Error::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        stream.wait();
        stream.device.check()
    }

    fn cuStreamBeginCapture_v2(handle: CUstream, mode: c_uint) {
        use cudarc::driver::sys::CUstreamCaptureMode as Mode;
        if handle.is_null() || mode != Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_uint {
            return Err(Error::CUDA_ERROR_NOT_SUPPORTED);
        }
        let stream = stream(handle)?;
        not_captured()?;
        stream.begin_capture()?;
        CAPTURING.set(Some(stream));
        Ok(())
    }

    fn cuStreamEndCapture(handle: CUstream, graph: *mut CUgraph) {
        // It ends, whatever else there is to say.
        let captured = STREAMS.get(handle).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?.end_capture();
        CAPTURING.set(None);
        current()?;
        // SAFETY: passed on to the caller.
        unsafe { put(graph, std::ptr::null_mut()).and_then(|()| put(graph, GRAPHS.add(Arc::new(captured?)))) }
    }

    fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) {
        current()?;
        valid(flags == 0)?;
        let graph = GRAPHS.get(graph).ok_or(Error::CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: passed on to the caller.
        unsafe { put(executable, EXECUTABLES.add(Arc::new(graph.to_vec()))) }
    }

    fn cuGraphDestroy(graph: CUgraph) {
        started()?;
        GRAPHS.remove(graph).map(drop).ok_or(Error::CUDA_ERROR_INVALID_VALUE)
    }

    fn cuGraphExecDestroy(executable: CUgraphExec) {
        started()?;
        EXECUTABLES.remove(executable).map(drop).ok_or(Error::CUDA_ERROR_INVALID_VALUE)
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
        // SAFETY: passed on to the caller.
        unsafe { put(handle, EVENTS.add(Event::new(Arc::clone(device)))) }
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
        not_captured()?;
        let done = event.is_done();
        event.device.check()?;
        if done { Ok(()) } else { Err(Error::CUDA_ERROR_NOT_READY) }
    }

    fn cuEventSynchronize(handle: CUevent) {
        let event = event(handle)?;
        not_captured()?;
        event.wait();
        event.device.check()
    }

    fn cuEventElapsedTime_v2(milliseconds: *mut f32, begin: CUevent, end: CUevent) {
        let between = event(end)?.since(&*event(begin)?)?;
        // SAFETY: passed on to the caller.
        unsafe { put(milliseconds, between) }
    }

    fn cuModuleLoadData(handle: *mut CUmodule, image: *const c_void) {
        current()?;
        not_captured()?;
        valid(!image.is_null())?;
        // SAFETY: passed on to the caller.
        unsafe { put(handle, MODULES.add(Module::load(image)?)) }
    }

    fn cuModuleUnload(handle: CUmodule) {
        current()?;
        MODULES.remove(handle).map(drop).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuModuleGetFunction(handle: *mut CUfunction, module: CUmodule, name: *const c_char) {
        current()?;
        valid(!name.is_null())?;
        let module = MODULES.get(module).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        // SAFETY: passed on to the caller.
        unsafe { put(handle, FUNCTIONS.add(module.function(CStr::from_ptr(name))?)) }
    }

    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: CUfunction) {
        use cudarc::driver::sys::CUfunction_attribute as Attribute;
        started()?;
        let function = FUNCTIONS.get(function).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        valid(attribute == Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION as c_uint)?;
        // SAFETY: passed on to the caller.
        unsafe { put(value, function.ptx) }
    }

    fn cuFuncSetAttribute(function: CUfunction, attribute: c_uint, value: c_int) {
        use cudarc::driver::sys::CUfunction_attribute as Attribute;
        const SHARED: c_uint = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_uint;
        const CARVEOUT: c_uint = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT as c_uint;
        let device = current()?;
        let function = FUNCTIONS.get(function).ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        match attribute {
            SHARED => function.allow_shared(value, device.shared_bytes()),
            CARVEOUT => valid((-1..=100).contains(&value)),
            _ => Err(Error::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        valid(!config.is_null() && !parameters.is_null() && extra.is_null())?;
        // SAFETY: passed on to the caller.
        let config = unsafe { &*config };
        let stream = stream(config.hStream)?;
        let function = FUNCTIONS.get(function).filter(|function| function.module.strong_count() > 0);
        let function = function.ok_or(Error::CUDA_ERROR_INVALID_HANDLE)?;
        let grid = (config.gridDimX, config.gridDimY);
        valid(grid.0 > 0 && (1..=65_535).contains(&grid.1) && config.gridDimZ == 1)?;
        valid(config.blockDimY == 1 && config.blockDimZ == 1 && (1..=1024).contains(&config.blockDimX))?;
        valid(config.sharedMemBytes <= function.shared_bytes.load(Ordering::Relaxed))?;
        let overlaps = config.numAttrs > 0;
        for i in 0..config.numAttrs as usize {
            // SAFETY: there are so many.
            let id = unsafe { (*config.attrs.add(i)).id };
            let known = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            if id != known || function.ptx < 90 || !Settings::get().overlap {
                return Err(Error::CUDA_ERROR_NOT_SUPPORTED);
            }
        }
        // SAFETY: kernels have one parameter of that many bytes, which is copied when they are launched.
        let parameters = unsafe {
            let first = *parameters;
            valid(!first.is_null())?;
            std::slice::from_raw_parts(first.cast::<u8>(), function.parameter_bytes).to_vec()
        };
        let (threads, shared_bytes, kernel) = (config.blockDimX, config.sharedMemBytes, function.name);
        let work = move |device: &Device| {
            device.launch(&Launch { kernel, grid, threads, shared_bytes, params: &parameters, overlaps: false })
        };
        stream.enqueue_kernel(Work::new(work), overlaps).map(drop)
    }

    fn cuGetErrorName(error: CUresult, text: *mut *const c_char) {
        // SAFETY: passed on to the caller.
        unsafe { put(text, words(error).0.as_ptr()) }
    }

    fn cuGetErrorString(error: CUresult, text: *mut *const c_char) {
        // SAFETY: passed on to the caller.
        unsafe { put(text, words(error).1.as_ptr()) }
    }
}

/// Name and meaning.
fn words(error: CUresult) -> (&'static CStr, &'static CStr) {
    macro_rules! table {
        ($($name:ident $meaning:literal),* $(,)?) => {
            match error {
                $(CUresult::$name => {
                    const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("it ends with the only zero byte"),
                    };
                    (NAME, $meaning)
                })*
                _ => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
            }
        };
    }
    table! {
        CUDA_SUCCESS c"no error",
        CUDA_ERROR_INVALID_VALUE c"invalid argument",
        CUDA_ERROR_OUT_OF_MEMORY c"out of memory",
        CUDA_ERROR_NOT_INITIALIZED c"initialization error",
        CUDA_ERROR_NO_DEVICE c"no CUDA-capable device is detected",
        CUDA_ERROR_INVALID_DEVICE c"invalid device ordinal",
        CUDA_ERROR_INVALID_CONTEXT c"invalid device context",
        CUDA_ERROR_NO_BINARY_FOR_GPU c"no kernel image is available for execution on the device",
        CUDA_ERROR_ECC_UNCORRECTABLE c"uncorrectable ECC error encountered",
        CUDA_ERROR_INVALID_PTX c"a PTX JIT compilation failed",
        CUDA_ERROR_INVALID_HANDLE c"invalid resource handle",
        CUDA_ERROR_ILLEGAL_STATE c"the operation cannot be performed in the present state",
        CUDA_ERROR_NOT_FOUND c"named symbol not found",
        CUDA_ERROR_NOT_READY c"device not ready",
        CUDA_ERROR_ILLEGAL_ADDRESS c"an illegal memory access was encountered",
        CUDA_ERROR_LAUNCH_FAILED c"unspecified launch failure",
        CUDA_ERROR_NOT_SUPPORTED c"operation not supported",
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED c"operation not permitted when stream is capturing",
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED c"operation failed due to a previous error during capture",
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD c"attempt to terminate a thread-local capture sequence from another thread",
    }
}

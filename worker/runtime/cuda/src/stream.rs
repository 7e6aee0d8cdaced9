//! CUDA streams and events.

use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaContext, DriverError, result, sys};
use inflight_kernels::cuda::DeviceError;

use super::driver_error::failed;
use super::staging::Fence;

/// CUDA event: a point in a stream's order, with a timestamp unless it was created without.
pub(super) struct CudaEvent {
    event: sys::CUevent,
    context: Arc<CudaContext>,
}

// SAFETY: driver events may be used from any thread that has bound the context.
unsafe impl Send for CudaEvent {}
// SAFETY: the driver synchronizes concurrent calls with one event.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Creates an event with timing enabled.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        Self::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// Creates an event without a timestamp, which costs less to record and to wait for.
    pub(super) fn untimed(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        Self::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(context: &Arc<CudaContext>, flags: sys::CUevent_flags) -> Result<Self, DeviceError> {
        let event = result::event::create(flags).map_err(failed("creating an event"))?;
        Ok(Self { event, context: Arc::clone(context) })
    }

    /// Records the event behind all work enqueued on `stream` so far.
    pub(super) fn record(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        // SAFETY: `self` and `stream` own their live handles, of one context.
        unsafe { result::event::record(self.event, stream.stream) }.map_err(failed("recording an event"))
    }

    /// Blocks until all work before the event has completed; returns that work's errors.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        self.context.bind_to_thread().map_err(failed("waiting for the device"))?;
        // SAFETY: `self` owns the live event, and its context is bound.
        unsafe { result::event::synchronize(self.event) }.map_err(failed("waiting for the device"))
    }

    /// Returns whether all work before the event has completed.
    pub(super) fn is_done(&self) -> Result<bool, DeviceError> {
        self.context.bind_to_thread().map_err(failed("querying the device"))?;
        // SAFETY: `self` owns the live event, and its context is bound.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failed("querying the device")(error)),
        }
    }

    /// Returns the milliseconds from `begin` to this event; both have completed.
    pub(super) fn milliseconds_since(&self, begin: &Self) -> f32 {
        let Some(elapsed) = elapsed_time() else { return 0.0 };
        let mut milliseconds = 0.0;
        // SAFETY: `begin` and `self` own their live events; the driver writes one `float`.
        let result = unsafe { elapsed(&mut milliseconds, begin.event, self.event) };
        if result == sys::CUresult::CUDA_SUCCESS { milliseconds } else { 0.0 }
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// Returns the driver's `cuEventElapsedTime`, which every release has. cudarc's bindings for CUDA 13 call its successor, which
/// drivers before 570 lack.
fn elapsed_time() -> Option<ElapsedTime> {
    static FUNCTION: OnceLock<Option<ElapsedTime>> = OnceLock::new();
    *FUNCTION.get_or_init(|| {
        // SAFETY: the driver is loaded already; this only counts a reference to it, which is kept for good.
        let driver = ["libcuda.so.1", "libcuda.so"]
            .into_iter()
            .find_map(|name| unsafe { libloading::Library::new(name) }.ok())?;
        // SAFETY: the type is that of the driver's documentation.
        let function =
            unsafe { driver.get::<ElapsedTime>(b"cuEventElapsedTime\0") }.ok().map(|function| *function);
        std::mem::forget(driver);
        function
    })
}

impl Fence for CudaEvent {
    fn is_passed(&self) -> Result<bool, DeviceError> {
        self.is_done()
    }

    fn wait(&self) -> Result<(), DeviceError> {
        self.synchronize()
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: created in `new` and destroyed once.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

/// CUDA stream that does not synchronize with the default stream.
pub(super) struct CudaStream {
    pub(super) stream: sys::CUstream,
    context: Arc<CudaContext>,
}

// SAFETY: driver streams may be used from any thread that has bound the context.
unsafe impl Send for CudaStream {}

impl CudaStream {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(failed("creating a stream"))?;
        Ok(Self { stream, context: Arc::clone(context) })
    }

    /// Makes work enqueued from now on wait for the event's last record.
    pub(super) fn wait_for(&self, event: &CudaEvent) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: `self` and `event` own their live handles, of one context.
        unsafe { result::stream::wait_event(self.stream, event.event, flags) }
            .map_err(failed("waiting for another stream"))
    }

    /// Blocks until all enqueued work has completed; returns its errors.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: `self` owns the live stream.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("waiting for the device"))
    }

    /// Enqueues a copy from pinned memory to the GPU.
    ///
    /// # Safety
    /// Both ranges stay allocated, and the source is not written, until the copy has run.
    pub(super) unsafe fn copy_to_device(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that both ranges stay allocated and the source unchanged until the
        // copy has run.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream) }
            .result()
            .map_err(failed("copying to the device"))
    }

    /// Enqueues a copy from the GPU to pinned memory.
    ///
    /// # Safety
    /// Both ranges stay allocated, and the target is not accessed, until the copy has run.
    pub(super) unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that both ranges stay allocated and the target unused until the copy
        // has run.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream) }
            .result()
            .map_err(failed("copying from the device"))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: created in `new` and destroyed once.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}

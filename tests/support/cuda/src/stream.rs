//! Simulated CUDA streams: each runs its work in order on its own thread, as late as possible, or captures
//! it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use cudarc::driver::sys::CUresult;

use crate::device::SimulatedDevice;
use crate::settings::Settings;
use crate::{DriverResult, lock};

/// Unit of work of a stream.
#[derive(Clone)]
pub(crate) enum StreamWork {
    /// Operation whose error fails the device.
    Operation(Arc<dyn Fn(&SimulatedDevice) -> DriverResult + Send + Sync>),
    /// Record of an event, which is marked as passed even if the device has failed, or wait for one.
    Event(Arc<dyn Fn() + Send + Sync>),
}

impl StreamWork {
    pub(crate) fn new(work: impl Fn(&SimulatedDevice) -> DriverResult + Send + Sync + 'static) -> Self {
        Self::Operation(Arc::new(work))
    }
}

#[derive(Default)]
struct StreamState {
    queue: VecDeque<StreamWork>,
    /// Numbers of work units enqueued, completed, and waited for.
    enqueued: u64,
    done: u64,
    required: u64,
    capture: Option<StreamCapture>,
    ended: bool,
    /// State of the random generator for delays.
    random: u64,
}

struct StreamCapture {
    thread: ThreadId,
    work: Vec<StreamWork>,
    /// Whether the last captured work is a kernel.
    after_kernel: bool,
    broken: bool,
}

pub(crate) struct SimulatedStream {
    pub(crate) device: Arc<SimulatedDevice>,
    state: Mutex<StreamState>,
    changed: Condvar,
}

impl SimulatedStream {
    pub(crate) fn start(device: Arc<SimulatedDevice>) -> Arc<Self> {
        let state = StreamState { random: 0x9e37_79b9_7f4a_7c15, ..StreamState::default() };
        let stream = Arc::new(Self { device, state: Mutex::new(state), changed: Condvar::new() });
        let runner = Arc::clone(&stream);
        let thread = std::thread::Builder::new().name("stream".to_owned());
        thread.spawn(move || runner.run()).expect("a thread for a stream");
        stream
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            if state.done >= state.required && !state.queue.is_empty() {
                // Nothing waits for the work yet.
                state.random = state.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let delay = Settings::get().late.mul_f64((state.random >> 40) as f64 / f64::from(1 << 24));
                let waited =
                    self.changed.wait_timeout_while(state, delay, |state| state.required <= state.done);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                state.required = state.enqueued;
            }
            match state.queue.pop_front() {
                Some(work) => {
                    drop(state);
                    match work {
                        StreamWork::Event(pass) => pass(),
                        StreamWork::Operation(work) => {
                            // Work after a failure does not run.
                            if self.device.check().is_ok()
                                && let Err(error) = work(&self.device)
                            {
                                self.device.fail(error, "enqueued work failed");
                            }
                        }
                    }
                    state = lock(&self.state);
                    state.done += 1;
                    self.changed.notify_all();
                }
                None if state.ended => return,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Enqueues work, or captures it. Returns the work's number in the stream, or 0 if captured.
    pub(crate) fn enqueue(&self, work: StreamWork) -> DriverResult<u64> {
        self.add(work, false, false)
    }

    /// Enqueues or captures a kernel. In a capture, a kernel with programmatic serialization must follow a
    /// kernel.
    pub(crate) fn enqueue_kernel(&self, work: StreamWork, overlaps: bool) -> DriverResult<u64> {
        self.add(work, true, overlaps)
    }

    fn add(&self, work: StreamWork, kernel: bool, overlaps: bool) -> DriverResult<u64> {
        let mut state = lock(&self.state);
        if let Some(capture) = &mut state.capture {
            if capture.thread != std::thread::current().id() {
                capture.broken = true;
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
            }
            if capture.broken {
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            }
            if matches!(work, StreamWork::Event(..)) {
                // It would become a graph edge, which the runtime does not use.
                return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
            }
            if overlaps && !capture.after_kernel {
                return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
            }
            capture.after_kernel = kernel;
            capture.work.push(work);
            return Ok(0);
        }
        state.queue.push_back(work);
        state.enqueued += 1;
        self.changed.notify_all();
        Ok(state.enqueued)
    }

    /// Requires all work up to `number` to run without further delay.
    pub(crate) fn require(&self, number: u64) {
        let mut state = lock(&self.state);
        state.required = state.required.max(number);
        self.changed.notify_all();
    }

    /// Waits for all work enqueued so far.
    pub(crate) fn synchronize(&self) {
        let mut state = lock(&self.state);
        let all = state.enqueued;
        state.required = state.required.max(all);
        self.changed.notify_all();
        while state.done < all {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the thread once all work has run.
    pub(crate) fn end(&self) {
        lock(&self.state).ended = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_capturing(&self) -> bool {
        lock(&self.state).capture.is_some()
    }

    pub(crate) fn begin_capture(&self) -> DriverResult {
        let mut state = lock(&self.state);
        if state.capture.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        let thread = std::thread::current().id();
        state.capture = Some(StreamCapture { thread, work: Vec::new(), after_kernel: false, broken: false });
        Ok(())
    }

    /// Invalidates a capture after a call that is not permitted during it.
    pub(crate) fn break_capture(&self) {
        if let Some(capture) = &mut lock(&self.state).capture {
            capture.broken = true;
        }
    }

    pub(crate) fn end_capture(&self) -> DriverResult<Vec<StreamWork>> {
        let mut state = lock(&self.state);
        let capture = state.capture.take().ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        if capture.thread != std::thread::current().id() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        if capture.broken {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        Ok(capture.work)
    }
}

/// Interval of polling for conditions without notification.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_micros(200);

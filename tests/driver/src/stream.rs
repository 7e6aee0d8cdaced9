//! Streams: work in order, on a thread of its own, as late as may be; and work that is captured instead.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use cudarc::driver::sys::CUresult;

use crate::device::Device;
use crate::event::Event;
use crate::settings::Settings;
use crate::{Outcome, locked};

/// What a stream does.
#[derive(Clone)]
pub(crate) enum Work {
    /// Something that may fail, and then fails the device.
    Do(Arc<dyn Fn(&Device) -> Outcome + Send + Sync>),
    /// An event's n-th record: told even if the device has failed.
    Mark(Arc<Event>, u64),
}

impl Work {
    pub(crate) fn new(work: impl Fn(&Device) -> Outcome + Send + Sync + 'static) -> Self {
        Self::Do(Arc::new(work))
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<Work>,
    /// How many were enqueued, have run, and somebody waits for.
    enqueued: u64,
    done: u64,
    wanted: u64,
    capture: Option<Capture>,
    ended: bool,
    /// Random bits.
    word: u64,
}

struct Capture {
    thread: ThreadId,
    work: Vec<Work>,
    /// Whether what was captured last is a kernel.
    after_kernel: bool,
    broken: bool,
}

pub(crate) struct Stream {
    pub(crate) device: Arc<Device>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Stream {
    pub(crate) fn start(device: Arc<Device>) -> Arc<Self> {
        let state = State { word: 0x9e37_79b9_7f4a_7c15, ..State::default() };
        let stream = Arc::new(Self { device, state: Mutex::new(state), changed: Condvar::new() });
        let runner = Arc::clone(&stream);
        let thread = std::thread::Builder::new().name("stream".to_owned());
        thread.spawn(move || runner.run()).expect("a thread for a stream");
        stream
    }

    fn run(&self) {
        let mut state = locked(&self.state);
        loop {
            if state.done >= state.wanted && !state.queue.is_empty() {
                // Nobody waits for it yet.
                state.word = state.word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let late = Settings::get().late.mul_f64((state.word >> 40) as f64 / f64::from(1 << 24));
                let waited = self.changed.wait_timeout_while(state, late, |state| state.wanted <= state.done);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                state.wanted = state.enqueued;
            }
            match state.queue.pop_front() {
                Some(work) => {
                    drop(state);
                    match work {
                        Work::Mark(event, record) => event.pass(record),
                        Work::Do(work) => {
                            // What comes behind a failure does not run.
                            if self.device.check().is_ok()
                                && let Err(error) = work(&self.device)
                            {
                                self.device.fail(error, "what was enqueued failed");
                            }
                        }
                    }
                    state = locked(&self.state);
                    state.done += 1;
                    self.changed.notify_all();
                }
                None if state.ended => return,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Enqueues, or captures; the number of the work if it will run.
    pub(crate) fn enqueue(&self, work: Work) -> Outcome<u64> {
        self.add(work, false, false)
    }

    /// The same for a kernel; in a capture, one that may begin while what is before it ends must come behind a kernel.
    pub(crate) fn enqueue_kernel(&self, work: Work, overlaps: bool) -> Outcome<u64> {
        self.add(work, true, overlaps)
    }

    fn add(&self, work: Work, kernel: bool, overlaps: bool) -> Outcome<u64> {
        let mut state = locked(&self.state);
        if let Some(capture) = &mut state.capture {
            if capture.thread != std::thread::current().id() {
                capture.broken = true;
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
            }
            if capture.broken {
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            }
            if matches!(work, Work::Mark(..)) {
                // It would become an edge of the graph, which nothing here asks for.
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

    /// Somebody wants all up to that number.
    pub(crate) fn want(&self, number: u64) {
        let mut state = locked(&self.state);
        state.wanted = state.wanted.max(number);
        self.changed.notify_all();
    }

    /// Waits for all that was enqueued so far.
    pub(crate) fn wait(&self) {
        let mut state = locked(&self.state);
        let all = state.enqueued;
        state.wanted = state.wanted.max(all);
        self.changed.notify_all();
        while state.done < all {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends once all has run.
    pub(crate) fn end(&self) {
        locked(&self.state).ended = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_capturing(&self) -> bool {
        locked(&self.state).capture.is_some()
    }

    pub(crate) fn begin_capture(&self) -> Outcome {
        let mut state = locked(&self.state);
        if state.capture.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        let thread = std::thread::current().id();
        state.capture = Some(Capture { thread, work: Vec::new(), after_kernel: false, broken: false });
        Ok(())
    }

    /// Something was called that must not be during a capture.
    pub(crate) fn break_capture(&self) {
        if let Some(capture) = &mut locked(&self.state).capture {
            capture.broken = true;
        }
    }

    pub(crate) fn end_capture(&self) -> Outcome<Vec<Work>> {
        let mut state = locked(&self.state);
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

/// How long two looks at something that nobody tells of are apart.
pub(crate) const POLL: Duration = Duration::from_micros(200);

//! Events: points in streams.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use cudarc::driver::sys::CUresult;

use crate::device::Device;
use crate::stream::{Stream, Work};
use crate::{Outcome, locked};

#[derive(Default)]
struct State {
    /// How often it was recorded, and how many of these have passed.
    recorded: u64,
    passed: u64,
    at: Option<Instant>,
    /// The stream that was told last, and the number of the record there.
    stream: Weak<Stream>,
    number: u64,
}

pub(crate) struct Event {
    pub(crate) device: Arc<Device>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Event {
    pub(crate) fn new(device: Arc<Device>) -> Arc<Self> {
        Arc::new(Self { device, state: Mutex::default(), changed: Condvar::new() })
    }

    pub(crate) fn record(self: &Arc<Self>, stream: &Arc<Stream>) -> Outcome {
        let mut state = locked(&self.state);
        let record = state.recorded + 1;
        let number = stream.enqueue(Work::Mark(Arc::clone(self), record))?;
        state.recorded = record;
        state.stream = Arc::downgrade(stream);
        state.number = number;
        Ok(())
    }

    /// The stream has come to a record.
    pub(crate) fn pass(&self, record: u64) {
        let mut state = locked(&self.state);
        // The last record counts, on whichever stream it is.
        if record > state.passed {
            state.passed = record;
            state.at = Some(Instant::now());
        }
        self.changed.notify_all();
    }

    pub(crate) fn is_done(&self) -> bool {
        let state = locked(&self.state);
        state.passed == state.recorded
    }

    pub(crate) fn wait(&self) {
        let (stream, number) = {
            let state = locked(&self.state);
            (state.stream.upgrade(), state.number)
        };
        if let Some(stream) = stream {
            stream.want(number);
        }
        let mut state = locked(&self.state);
        while state.passed < state.recorded {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Milliseconds since another one.
    pub(crate) fn since(&self, begin: &Self) -> Outcome<f32> {
        let at = |event: &Self| {
            let state = locked(&event.state);
            match state.at {
                _ if state.recorded == 0 => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
                Some(at) if state.passed == state.recorded => Ok(at),
                _ => Err(CUresult::CUDA_ERROR_NOT_READY),
            }
        };
        Ok((at(self)?.duration_since(at(begin)?).as_secs_f64() * 1e3) as f32)
    }
}

//! Simulated CUDA events.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use cudarc::driver::sys::CUresult;

use crate::device::SimulatedDevice;
use crate::stream::{SimulatedStream, StreamWork};
use crate::{DriverResult, lock};

#[derive(Default)]
struct EventState {
    /// Number of records, and of records that have passed.
    recorded: u64,
    passed: u64,
    passed_at: Option<Instant>,
    /// Stream of the last record, and the record's position in it.
    stream: Weak<SimulatedStream>,
    number: u64,
}

pub(crate) struct SimulatedEvent {
    pub(crate) device: Arc<SimulatedDevice>,
    state: Mutex<EventState>,
    changed: Condvar,
}

impl SimulatedEvent {
    pub(crate) fn new(device: Arc<SimulatedDevice>) -> Arc<Self> {
        Arc::new(Self { device, state: Mutex::default(), changed: Condvar::new() })
    }

    pub(crate) fn record(self: &Arc<Self>, stream: &Arc<SimulatedStream>) -> DriverResult {
        let mut state = lock(&self.state);
        let record = state.recorded + 1;
        let event = Arc::clone(self);
        let number = stream.enqueue(StreamWork::Event(Arc::new(move || event.pass(record))))?;
        state.recorded = record;
        state.stream = Arc::downgrade(stream);
        state.number = number;
        Ok(())
    }

    /// Marks a record as passed by its stream.
    fn pass(&self, record: u64) {
        let mut state = lock(&self.state);
        // The last record counts, on any stream.
        if record > state.passed {
            state.passed = record;
            state.passed_at = Some(Instant::now());
        }
        self.changed.notify_all();
    }

    pub(crate) fn is_done(&self) -> bool {
        let state = lock(&self.state);
        state.passed == state.recorded
    }

    pub(crate) fn synchronize(&self) {
        let (stream, number, record) = self.last_record();
        self.wait(stream, number, record);
    }

    /// Returns work of another stream that waits for the event's last record so far.
    pub(crate) fn wait_work(self: &Arc<Self>) -> StreamWork {
        let (event, (stream, number, record)) = (Arc::clone(self), self.last_record());
        StreamWork::Event(Arc::new(move || event.wait(stream.clone(), number, record)))
    }

    /// Returns the stream of the last record, the record's position in it, and the record.
    fn last_record(&self) -> (Weak<SimulatedStream>, u64, u64) {
        let state = lock(&self.state);
        (Weak::clone(&state.stream), state.number, state.recorded)
    }

    fn wait(&self, stream: Weak<SimulatedStream>, number: u64, record: u64) {
        if let Some(stream) = stream.upgrade() {
            stream.require(number);
        }
        let mut state = lock(&self.state);
        while state.passed < record {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the milliseconds from `begin` to this event.
    pub(crate) fn milliseconds_since(&self, begin: &Self) -> DriverResult<f32> {
        let at = |event: &Self| {
            let state = lock(&event.state);
            match state.passed_at {
                _ if state.recorded == 0 => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
                Some(at) if state.passed == state.recorded => Ok(at),
                _ => Err(CUresult::CUDA_ERROR_NOT_READY),
            }
        };
        Ok((at(self)?.duration_since(at(begin)?).as_secs_f64() * 1e3) as f32)
    }
}

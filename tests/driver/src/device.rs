//! A GPU: its memory, its streams, and whether it still works.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use cudarc::driver::sys::CUresult;
use inflight_kernels::cuda::{Device as _, DeviceError, Harness, HostMemory, Launch};

use crate::settings::Settings;
use crate::stream::Stream;
use crate::{Outcome, locked};

/// What contexts and loaded kernels take for themselves.
const OVERHEAD_BYTES: u64 = 16 << 20;

pub(crate) struct Device {
    pub(crate) ordinal: usize,
    harness: Mutex<Harness>,
    memory: Mutex<BTreeMap<u64, HostMemory>>,
    failure: OnceLock<CUresult>,
    streams: Mutex<Vec<Weak<Stream>>>,
    null: OnceLock<Arc<Stream>>,
    /// How often the primary context was taken and not given back.
    pub(crate) retained: Mutex<u32>,
}

/// All there are.
pub(crate) fn all() -> &'static [Arc<Device>] {
    static DEVICES: OnceLock<Vec<Arc<Device>>> = OnceLock::new();
    DEVICES.get_or_init(|| (0..Settings::get().gpus).map(|ordinal| Arc::new(Device::new(ordinal))).collect())
}

/// What an allocation takes: small ones lie beside each other, large ones have pages of their own.
fn taken(bytes: u64) -> u64 {
    bytes.next_multiple_of(if bytes < 1 << 20 { 512 } else { 2 << 20 })
}

impl Device {
    fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            harness: Mutex::new(Harness::new()),
            memory: Mutex::default(),
            failure: OnceLock::new(),
            streams: Mutex::default(),
            null: OnceLock::new(),
            retained: Mutex::default(),
        }
    }

    pub(crate) fn multiprocessors(&self) -> i32 {
        locked(&self.harness).profile().multiprocessors as i32
    }

    pub(crate) fn shared_bytes(&self) -> i32 {
        locked(&self.harness).profile().shared_bytes as i32
    }

    pub(crate) fn multiprocessor_shared_bytes(&self) -> i32 {
        locked(&self.harness).profile().multiprocessor_shared_bytes as i32
    }

    /// The error that it has failed with: every call says it from then on.
    pub(crate) fn check(&self) -> Outcome {
        self.failure.get().map_or(Ok(()), |failure| Err(*failure))
    }

    /// Fails for good, as a GPU does after a fault in a kernel.
    pub(crate) fn fail(&self, error: CUresult, why: &str) {
        if self.failure.set(error).is_ok() {
            eprintln!("simulated GPU {}: {error:?}: {why}", self.ordinal);
        }
    }

    /// Free bytes, and all.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let (total, others) = (Settings::get().memory_mib << 20, Settings::get().taken_mib << 20);
        let used: u64 = locked(&self.memory).values().map(|memory| taken(memory.bytes() as u64)).sum();
        (total.saturating_sub(used + others + OVERHEAD_BYTES), total)
    }

    pub(crate) fn alloc(&self, bytes: usize) -> Outcome<u64> {
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if taken(bytes as u64) + (Settings::get().racing_mib << 20) > self.bytes().0 {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let memory = locked(&self.harness).alloc(bytes);
        let address = memory.address();
        locked(&self.memory).insert(address, memory);
        Ok(address)
    }

    /// Waits for everything, and frees.
    pub(crate) fn free(&self, address: u64) -> Outcome {
        if !locked(&self.memory).contains_key(&address) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        self.wait();
        let freed = locked(&self.memory).remove(&address);
        if let Some(damaged) = freed.filter(|memory| !memory.is_intact()) {
            self.fail(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "something was written beside a buffer");
            // It would panic, and this thread can't.
            std::mem::forget(damaged);
        }
        Ok(())
    }

    /// Whether a range lies in one allocation.
    pub(crate) fn holds(&self, address: u64, bytes: usize) -> bool {
        let memory = locked(&self.memory);
        let below = memory.range(..=address).next_back();
        below.is_some_and(|(from, memory)| address + bytes as u64 <= from + memory.bytes() as u64)
    }

    /// The error that somebody wants of this device.
    fn fault(&self) -> Option<CUresult> {
        let wanted = std::fs::read_to_string(Settings::get().fault.as_ref()?).ok()?;
        let mut words = wanted.split_whitespace();
        let error = words.next()?;
        if words.next().is_some_and(|gpu| gpu != self.ordinal.to_string()) {
            return None;
        }
        Some(match error {
            "214" => CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            "700" => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            _ => CUresult::CUDA_ERROR_LAUNCH_FAILED,
        })
    }

    pub(crate) fn launch(&self, launch: &Launch<'_>) -> Outcome {
        if let Some(error) = self.fault() {
            self.fail(error, "a fault was asked for");
            return Err(error);
        }
        // SAFETY: the harness checks every address; those of its memory stay until all that was launched has run.
        unsafe { locked(&self.harness).launch(launch) }.map_err(|error: DeviceError| {
            self.fail(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, &error.to_string());
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        })
    }

    pub(crate) fn stream(self: &Arc<Self>) -> Arc<Stream> {
        let stream = Stream::start(Arc::clone(self));
        let mut streams = locked(&self.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&stream));
        stream
    }

    /// The one that needs no handle.
    pub(crate) fn null_stream(self: &Arc<Self>) -> Arc<Stream> {
        Arc::clone(self.null.get_or_init(|| self.stream()))
    }

    /// Waits for all that was enqueued.
    pub(crate) fn wait(&self) {
        let streams: Vec<_> = locked(&self.streams).iter().filter_map(Weak::upgrade).collect();
        for stream in streams {
            stream.wait();
        }
    }
}

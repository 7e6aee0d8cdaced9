//! Simulated GPU: its memory, its streams and its failure.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use cudarc::driver::sys::CUresult;
use inflight_kernel_harness::{Harness, HostMemory, run_harness_unchecked};
use inflight_kernels::cuda::{Device as _, DeviceError, Launch};

use crate::lie::{Lie, begins_step, overwrite_embeddings};
use crate::settings::Settings;
use crate::stream::SimulatedStream;
use crate::{DriverResult, lock};

/// Bytes used by contexts and loaded kernels.
const OVERHEAD_BYTES: u64 = 16 << 20;

pub(crate) struct SimulatedDevice {
    pub(crate) ordinal: usize,
    harness: Mutex<Harness>,
    memory: Mutex<BTreeMap<u64, HostMemory>>,
    failure: OnceLock<CUresult>,
    streams: Mutex<Vec<Weak<SimulatedStream>>>,
    null: OnceLock<Arc<SimulatedStream>>,
    /// Steps begun.
    steps: AtomicU64,
    /// Reference count of the primary context.
    pub(crate) retained: Mutex<u32>,
}

/// Returns all simulated GPUs.
pub(crate) fn all() -> &'static [Arc<SimulatedDevice>] {
    static DEVICES: OnceLock<Vec<Arc<SimulatedDevice>>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        if !Settings::get().checks {
            run_harness_unchecked();
        }
        (0..Settings::get().gpus).map(|ordinal| Arc::new(SimulatedDevice::new(ordinal))).collect()
    })
}

/// Returns the bytes that an allocation uses: small ones share pages, large ones have their own.
fn allocated_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(if bytes < 1 << 20 { 512 } else { 2 << 20 })
}

impl SimulatedDevice {
    fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            harness: Mutex::new(Harness::new()),
            memory: Mutex::default(),
            failure: OnceLock::new(),
            streams: Mutex::default(),
            null: OnceLock::new(),
            steps: AtomicU64::new(0),
            retained: Mutex::default(),
        }
    }

    pub(crate) fn multiprocessors(&self) -> i32 {
        lock(&self.harness).profile().multiprocessors as i32
    }

    pub(crate) fn shared_bytes(&self) -> i32 {
        lock(&self.harness).profile().shared_bytes as i32
    }

    pub(crate) fn multiprocessor_shared_bytes(&self) -> i32 {
        lock(&self.harness).profile().multiprocessor_shared_bytes as i32
    }

    /// Returns the device's failure, which every call reports from then on.
    pub(crate) fn check(&self) -> DriverResult {
        self.failure.get().map_or(Ok(()), |failure| Err(*failure))
    }

    /// Fails the device permanently, as a kernel fault does on a GPU.
    pub(crate) fn fail(&self, error: CUresult, why: &str) {
        if self.failure.set(error).is_ok() {
            eprintln!("simulated GPU {}: {error:?}: {why}", self.ordinal);
        }
    }

    /// Returns free and total bytes.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let (total, others) = (Settings::get().memory_mib << 20, Settings::get().taken_mib << 20);
        let used: u64 =
            lock(&self.memory).values().map(|memory| allocated_bytes(memory.bytes() as u64)).sum();
        (total.saturating_sub(used + others + OVERHEAD_BYTES), total)
    }

    pub(crate) fn alloc(&self, bytes: usize) -> DriverResult<u64> {
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if allocated_bytes(bytes as u64) + (Settings::get().racing_mib << 20) > self.bytes().0 {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let memory = lock(&self.harness).alloc(bytes);
        let address = memory.address();
        lock(&self.memory).insert(address, memory);
        Ok(address)
    }

    /// Frees an allocation after all streams are idle.
    pub(crate) fn free(&self, address: u64) -> DriverResult {
        if !lock(&self.memory).contains_key(&address) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        self.synchronize();
        let freed = lock(&self.memory).remove(&address);
        if let Some(damaged) = freed.filter(|memory| !memory.is_intact()) {
            self.fail(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "something was written beside a buffer");
            // Its drop would panic, which must not cross the C boundary.
            std::mem::forget(damaged);
        }
        Ok(())
    }

    /// Returns whether a range lies within one allocation.
    pub(crate) fn holds(&self, address: u64, bytes: usize) -> bool {
        let memory = lock(&self.memory);
        let below = memory.range(..=address).next_back();
        below.is_some_and(|(from, memory)| address + bytes as u64 <= from + memory.bytes() as u64)
    }

    /// Returns the error to inject into this device, if any.
    fn fault(&self) -> Option<CUresult> {
        let injected = std::fs::read_to_string(Settings::get().fault.as_ref()?).ok()?;
        let mut words = injected.split_whitespace();
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

    pub(crate) fn launch(&self, launch: &Launch<'_>) -> DriverResult {
        if let Some(error) = self.fault() {
            self.fail(error, "injected fault");
            return Err(error);
        }
        if begins_step(launch.kernel) {
            self.steps.fetch_add(1, Ordering::Relaxed);
        }
        if !self.computes() {
            return Ok(());
        }
        // SAFETY: the harness checks every address; its memory is freed only after all enqueued work has run.
        unsafe { lock(&self.harness).launch(launch) }.map_err(|error: DeviceError| {
            self.fail(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, &error.to_string());
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        })?;
        if Lie::Nan.told() && begins_step(launch.kernel) {
            // SAFETY: the kernel was launched with them and has run.
            unsafe { overwrite_embeddings(launch.params) };
        }
        Ok(())
    }

    /// Whether kernels and GEMMs compute now.
    pub(crate) fn computes(&self) -> bool {
        let stale = Lie::Stale.told() && self.steps.load(Ordering::Relaxed).is_multiple_of(2);
        !Lie::Nothing.told() && !stale
    }

    /// Whether a copy from the host to this address is made.
    pub(crate) fn copies_to(&self, address: u64) -> bool {
        let memory = lock(&self.memory);
        let largest = memory.iter().max_by_key(|(_, memory)| memory.bytes());
        let pool =
            largest.is_some_and(|(from, memory)| (*from..from + memory.bytes() as u64).contains(&address));
        !(Lie::Copies.told() && pool)
    }

    pub(crate) fn stream(self: &Arc<Self>) -> Arc<SimulatedStream> {
        let stream = SimulatedStream::start(Arc::clone(self));
        let mut streams = lock(&self.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&stream));
        stream
    }

    /// Returns the null stream.
    pub(crate) fn null_stream(self: &Arc<Self>) -> Arc<SimulatedStream> {
        Arc::clone(self.null.get_or_init(|| self.stream()))
    }

    /// Waits for all enqueued work.
    pub(crate) fn synchronize(&self) {
        let streams: Vec<_> = lock(&self.streams).iter().filter_map(Weak::upgrade).collect();
        for stream in streams {
            stream.synchronize();
        }
    }
}

//! Kernel timings as JSON lines: `INFLIGHT_TEST_GPU=1 kernel-tests --ignored --nocapture timing::`. Each figure is the
//! median of several passes after warm-up; `spread` is the range of the passes as a part of it.

mod attention;
mod products;
mod rows;
mod sampling;

use std::cell::Cell;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use inflight_kernels::cuda::{Device, DeviceError, HalfDtype, Launch, Profile};

use crate::SeededRng;
use crate::device::{Buffer, Gpu, TestDevice};

/// GPU stream that does not synchronise after each launch.
pub(crate) struct StreamDevice {
    gpu: Arc<Gpu>,
    stream: sys::CUstream,
    /// Whether programmatic dependent launch is used.
    overlap: bool,
    /// Whether the last work on the stream is a kernel, which only then may be overlapped.
    after_kernel: Cell<bool>,
}

impl StreamDevice {
    pub(crate) fn new(gpu: &Arc<Gpu>, overlap: bool) -> Self {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        Self { gpu: Arc::clone(gpu), stream, overlap, after_kernel: Cell::new(false) }
    }
}

impl Drop for StreamDevice {
    fn drop(&mut self) {
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

impl Device for StreamDevice {
    fn profile(&self) -> Profile {
        self.gpu.profile
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let overlap = self.overlap && launch.overlaps && self.after_kernel.replace(true);
        unsafe { self.gpu.enqueue(launch, self.stream, overlap) }
    }
}

/// Passes before the clock starts: caches, clocks and the TLB settle.
const WARM_UP: usize = 3;
/// Measured passes, fewer if they take longer than [`PASSES_SECONDS`].
const PASSES: usize = 11;
const PASSES_MIN: usize = 3;
const PASSES_SECONDS: f64 = 0.4;

/// Seconds of one pass.
struct Timing {
    median: f64,
    /// Range of all passes, as a part of the median.
    spread: f64,
}

impl Timing {
    /// Returns the JSON fields of a pass that ran `launches` times the same.
    fn fields(&self, launches: usize) -> String {
        format!("\"us\": {:.2}, \"spread\": {:.3}", self.us(launches), self.spread)
    }

    fn us(&self, launches: usize) -> f64 {
        self.median * 1e6 / launches as f64
    }
}

/// GPU under measurement and its bandwidth.
struct Bench {
    device: TestDevice,
    gpu: Arc<Gpu>,
    overlapping: StreamDevice,
    /// Bytes per second that shares are given of: what [`BANDWIDTH`] says, else of a copy within device memory, read plus written.
    bandwidth: f64,
}

/// Environment variable with the GB/s that this GPU reads.
const BANDWIDTH: &str = "INFLIGHT_TEST_BANDWIDTH_GB_S";
/// Bytes of the copy that bandwidth is measured with: more than any cache.
const COPY_BYTES: usize = 3 << 29;
/// Elements of the random pattern that large buffers are filled with.
const PATTERN: usize = 4 << 20;

impl Bench {
    /// Opens the GPU and measures its bandwidth; `None` on the harness.
    fn new() -> Option<Self> {
        let device = TestDevice::new();
        let TestDevice::Gpu(gpu) = &device else { return None };
        let gpu = Arc::clone(gpu);
        gpu.bind();
        let overlapping = StreamDevice::new(&gpu, true);
        let mut bench = Self { device, gpu, overlapping, bandwidth: 0.0 };
        let bytes = COPY_BYTES.min(bench.free() / 4);
        let [from, to] = [(); 2].map(|()| bench.device.alloc(bytes));
        let copied = bench.measure(&bench.overlapping, || {
            let stream = bench.overlapping.stream;
            unsafe { result::memcpy_dtod_async(to.address(), from.address(), bytes, stream) }.unwrap();
        });
        drop((from, to));
        bench.bandwidth = 2.0 * bytes as f64 / copied.median;
        println!("{{\"copy_gb_s\": {:.0}, \"spread\": {:.3}}}", bench.bandwidth / 1e9, copied.spread);
        // One yardstick for all figures of a run, where it has one.
        if let Some(measured) = std::env::var(BANDWIDTH).ok().and_then(|text| text.parse::<f64>().ok()) {
            bench.bandwidth = measured * 1e9;
        }
        Some(bench)
    }

    /// Bytes that may still be allocated.
    fn free(&self) -> usize {
        self.gpu.bind();
        result::mem_get_info().unwrap().0
    }

    /// Captures what `work` enqueues on `stream` and times replays of it: launches from the host would take longer
    /// than small kernels.
    fn measure(&self, stream: &StreamDevice, work: impl FnOnce()) -> Timing {
        // Uploads use the null stream, with which a non-blocking stream does not synchronise.
        result::ctx::synchronize().unwrap();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
        let (begin, end) = (event(), event());
        let mut passes = Vec::new();
        unsafe {
            result::stream::begin_capture(stream.stream, mode).unwrap();
            // A graph's first kernel has no predecessor.
            stream.after_kernel.set(false);
            work();
            stream.after_kernel.set(false);
            let graph = result::stream::end_capture(stream.stream).unwrap();
            let executable = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).unwrap();
            let pass = || {
                result::event::record(begin, stream.stream).unwrap();
                result::graph::launch(executable, stream.stream).unwrap();
                result::event::record(end, stream.stream).unwrap();
                result::stream::synchronize(stream.stream).unwrap();
                f64::from(result::event::elapsed(begin, end).unwrap()) / 1e3
            };
            for _ in 0..WARM_UP {
                pass();
            }
            while passes.len() < PASSES
                && (passes.len() < PASSES_MIN || passes.iter().sum::<f64>() < PASSES_SECONDS)
            {
                passes.push(pass());
            }
            result::graph::exec_destroy(executable).unwrap();
            result::graph::destroy(graph).unwrap();
            result::event::destroy(begin).unwrap();
            result::event::destroy(end).unwrap();
        }
        passes.sort_by(f64::total_cmp);
        let median = passes[passes.len() / 2];
        Timing { median, spread: (passes[passes.len() - 1] - passes[0]) / median }
    }

    /// Allocates memory full of random bf16 numbers in [-scale, scale): zeros take less power, so clocks would be
    /// higher than in use.
    fn random(&self, bytes: usize, scale: f32) -> Buffer {
        let mut rng = SeededRng::new(7);
        let pattern = rng.halves(HalfDtype::Bf16, PATTERN.min(bytes / 2), scale);
        self.tiled(bytes, &pattern)
    }

    /// Allocates memory that repeats `pattern`.
    fn tiled<T: Copy>(&self, bytes: usize, pattern: &[T]) -> Buffer {
        let buffer = self.device.alloc(bytes);
        let at = buffer.address();
        let mut filled = size_of_val(pattern).min(bytes);
        unsafe { result::memcpy_htod_sync(at, &pattern[..filled / size_of::<T>()]) }.unwrap();
        while filled < bytes {
            let more = filled.min(bytes - filled);
            let stream = self.overlapping.stream;
            unsafe { result::memcpy_dtod_async(at + filled as u64, at, more, stream) }.unwrap();
            unsafe { result::stream::synchronize(stream) }.unwrap();
            filled += more;
        }
        buffer
    }

    /// Returns the JSON fields of a rate of memory accesses.
    fn rate(&self, bytes: f64, seconds: f64) -> String {
        let rate = bytes / seconds;
        format!("\"gb_s\": {:.0}, \"share_of_reading\": {:.3}", rate / 1e9, rate / self.bandwidth)
    }
}

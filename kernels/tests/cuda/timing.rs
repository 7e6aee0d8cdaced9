//! Kernel timings as JSON lines: `INFLIGHT_TEST_GPU=1 kernel-tests --ignored --nocapture timing::`.

use std::sync::Arc;

use cudarc::driver::{result, sys};
use inflight_kernels::cuda::{
    Device, DeviceError, GemmParams, HalfDtype, Launch, Profile, gemm, skinny_gemm,
};

use crate::device::{Buffer, Gpu, TestDevice};

/// GPU stream that does not synchronise after each launch.
pub(crate) struct StreamDevice {
    gpu: Arc<Gpu>,
    stream: sys::CUstream,
    /// Whether programmatic dependent launch is used.
    overlap: bool,
}

impl StreamDevice {
    pub(crate) fn new(gpu: &Arc<Gpu>, overlap: bool) -> Self {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        Self { gpu: Arc::clone(gpu), stream, overlap }
    }

    /// Returns the seconds of `work`, the minimum of several rounds.
    fn seconds(&self, mut work: impl FnMut()) -> f64 {
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
        let (begin, end) = (event(), event());
        let mut best = f64::INFINITY;
        for _ in 0..8 {
            let took = unsafe {
                result::event::record(begin, self.stream).unwrap();
                work();
                result::event::record(end, self.stream).unwrap();
                result::stream::synchronize(self.stream).unwrap();
                result::event::elapsed(begin, end).unwrap()
            };
            best = best.min(f64::from(took) / 1e3);
        }
        unsafe {
            result::event::destroy(begin).unwrap();
            result::event::destroy(end).unwrap();
        }
        best
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
        unsafe { self.gpu.enqueue(launch, self.stream, self.overlap && launch.overlaps) }
    }
}

/// Weight bytes per pass: more than any cache, and at least the largest matrix.
const WEIGHT_BYTES: usize = 3 << 29;
/// GEMM shapes (n, k) of Qwen3-0.6B, 1.7B and 8B: QKV, attention output, gate and up, down, LM head.
const SHAPES: [(u32, u32); 15] = [
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (151_936, 1024),
    (4096, 2048),
    (2048, 2048),
    (12_288, 2048),
    (2048, 6144),
    (151_936, 2048),
    (6144, 4096),
    (4096, 4096),
    (24_576, 4096),
    (4096, 12_288),
    (151_936, 4096),
];

#[test]
#[ignore = "measures a GPU; run by the GPU suite"]
fn skinny_gemm_as_a_share_of_copy_bandwidth() {
    let device = TestDevice::new();
    let TestDevice::Gpu(gpu) = &device else { return };
    gpu.bind();
    let (weights, copies) = (device.alloc(WEIGHT_BYTES), device.alloc(WEIGHT_BYTES));
    let (x, out) = (device.alloc(8 * 12_288 * 2), device.alloc(8 * 151_936 * 4));
    for buffer in [&weights, &copies, &x] {
        let Buffer::Gpu { bytes, .. } = buffer else { return };
        unsafe { result::memset_d8_sync(buffer.address(), 0x11, *bytes) }.unwrap();
    }
    let plain = StreamDevice::new(gpu, false);
    let copied = plain.seconds(|| {
        unsafe { result::memcpy_dtod_async(copies.address(), weights.address(), WEIGHT_BYTES, plain.stream) }
            .unwrap();
    });
    let copy = 2.0 * WEIGHT_BYTES as f64 / copied / 1e9;
    println!("{{\"copy_gb_s\": {copy:.0}}}");
    for overlap in [false, true] {
        let stream = StreamDevice::new(gpu, overlap);
        for (n, k) in SHAPES {
            let each = n as usize * k as usize * 2;
            let matrices = WEIGHT_BYTES / each;
            assert!(matrices > 0, "a matrix of {n} by {k} has room");
            let wide = n > 100_000;
            for m in [1u32, 8] {
                let run = |skinny: bool| {
                    let seconds = stream.seconds(|| {
                        for i in 0..matrices {
                            let p = GemmParams {
                                x: x.address(),
                                weight: weights.address() + (i * each) as u64,
                                bias: 0,
                                out: out.address(),
                                m,
                                n,
                                k,
                                stride: n,
                            };
                            match skinny {
                                true => unsafe { skinny_gemm(&stream, HalfDtype::Bf16, wide, &p) }.unwrap(),
                                false => unsafe { gemm(&stream, HalfDtype::Bf16, wide, &p) }.unwrap(),
                            }
                        }
                    });
                    seconds / matrices as f64
                };
                let (skinny, few) = (run(true), run(false));
                let rate = each as f64 / skinny / 1e9;
                println!(
                    "{{\"m\": {m}, \"n\": {n}, \"k\": {k}, \"overlap\": {overlap}, \"us\": {:.2}, \"gb_s\": {rate:.0}, \
                     \"share_of_copy\": {:.3}, \"deterministic_us\": {:.2}}}",
                    skinny * 1e6,
                    rate / copy,
                    few * 1e6
                );
            }
        }
    }
}

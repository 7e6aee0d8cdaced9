//! Roofline measurements: peak memory bandwidth and arithmetic throughput of this machine.
//!
//! Each measurement runs only the named work, on every thread of a pool at once, and returns a rate. A
//! kernel's efficiency is its own rate over this one, taken in the same run.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::buffer::{Buffer, Pages};
use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::isa::IsaKind;
use super::pool::Pool;
use super::simd::{self, Kernel, Simd};

/// Independent chains of additions: enough to hide the latency of any unit.
const CHAINS: usize = 12;
/// Steps of a chain in one unit of work, some 20 us.
const STEPS: usize = 8 << 10;
/// Candidate distances between the streams that a thread reads concurrently, in bytes. The best one differs
/// between machines, so all are measured.
const STREAM_BYTES: [usize; 3] = [4 << 10, 64 << 10, 256 << 10];
/// Streams that a thread reads concurrently.
const STREAMS: usize = 4;

/// Kind of arithmetic to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Multiply and add in f32.
    F32,
    /// Dot products of bf16 pairs in f32; [`Arithmetic::F32`] if the instruction set lacks them.
    Bf16,
    /// Dot products of four 8-bit integers in 32 bits; through 16 bits if the instruction set lacks them.
    Int8,
}

/// Memory for bandwidth measurements, larger than any cache.
pub struct Memory {
    bytes: Buffer,
}

impl Memory {
    /// Allocates and writes `bytes` bytes, in huge or in small pages.
    ///
    /// # Errors
    /// If the operating system cannot provide the memory.
    pub fn new(bytes: usize, huge: bool) -> std::io::Result<Self> {
        let pages = if huge { Pages::Huge } else { Pages::Small };
        let mut buffer = Buffer::zeroed(bytes, pages)?;
        for at in (0..bytes).step_by(64) {
            // SAFETY: `at` is within the buffer.
            unsafe { buffer.as_mut_ptr().add(at).write(at as u8) };
        }
        Ok(Self { bytes: buffer })
    }

    /// Returns the read bandwidth of all threads together in bytes per second: the best pass within `time`.
    pub fn read(&self, pool: &Pool, isa: Isa, time: Duration) -> f64 {
        let parts = pool.threads();
        let unit = STREAM_BYTES[STREAM_BYTES.len() - 1] * STREAMS;
        let part = self.bytes.len() / parts / unit * unit;
        let rates = STREAM_BYTES.map(|stream_bytes| {
            best(time / STREAM_BYTES.len() as u32, || {
                pool.each(parts, &|index| {
                    // SAFETY: `index * part` is below `parts * part`, which is at most the buffer's length.
                    let from = unsafe { self.bytes.as_ptr().add(index * part) };
                    simd::run(isa, ReadStreams { from, bytes: part, stream_bytes });
                });
                (part * parts) as f64
            })
        });
        rates.into_iter().fold(0.0, f64::max)
    }
}

/// Returns the throughput of all threads together in operations per second, where a multiply-add counts as
/// two: the best pass within `time`.
pub fn arithmetic(pool: &Pool, isa: Isa, kind: Arithmetic, time: Duration) -> f64 {
    let per_step = match (kind, isa.0) {
        #[cfg(target_arch = "x86_64")]
        (Arithmetic::Bf16, IsaKind::Avx512Bf16) => 64,
        #[cfg(target_arch = "x86_64")]
        (Arithmetic::Int8, path) if path.has_vnni() => 128,
        (Arithmetic::Int8, _) => 4 * simd::lanes(isa),
        _ => 2 * simd::lanes(isa),
    };
    best(time, || {
        pool.each(pool.threads(), &|_| match (kind, isa.0) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` of this kind exists only where BF16 was detected.
            (Arithmetic::Bf16, IsaKind::Avx512Bf16) => unsafe { simd::run_avx512_bf16(DotBf16Chains) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` with VNNI exists only where it was detected.
            (Arithmetic::Int8, path) if path.has_vnni() => unsafe { simd::run_avx512_vnni(DotInt8Chains) },
            (Arithmetic::Int8, _) => simd::run(isa, DotInt16Chains),
            _ => simd::run(isa, FmaChains),
        });
        (pool.threads() * STEPS * CHAINS * per_step) as f64
    })
}

/// Returns the highest rate of `work`, which returns the amount of work done.
fn best(time: Duration, work: impl Fn() -> f64) -> f64 {
    let start = Instant::now();
    let mut best = 0.0f64;
    while start.elapsed() < time {
        let begun = Instant::now();
        let done = work();
        best = best.max(done / begun.elapsed().as_secs_f64());
    }
    best
}

/// Reads a range as several concurrent streams.
struct ReadStreams {
    from: *const u8,
    bytes: usize,
    stream_bytes: usize,
}

impl Kernel for ReadStreams {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        const VECTOR: usize = size_of::<f32>();
        // SAFETY: the caller guarantees the instruction set; every load is within `bytes` bytes of `from`.
        unsafe {
            let mut sums = [S::splat(0.0); STREAMS];
            for at in (0..self.bytes).step_by(self.stream_bytes * STREAMS) {
                for line in (0..self.stream_bytes).step_by(2 * VECTOR * S::LANES) {
                    for stream in 0..STREAMS {
                        let from = self.from.add(at + stream * self.stream_bytes + line).cast::<f32>();
                        sums[stream] = S::add(sums[stream], S::load(from));
                        sums[stream] = S::add(sums[stream], S::load(from.add(S::LANES)));
                    }
                }
            }
            black_box(S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]))));
        }
    }
}

/// Chains of fused multiply-adds.
struct FmaChains;

impl Kernel for FmaChains {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller guarantees `S`'s instruction set; no memory is accessed.
        unsafe {
            let mut sums = [S::splat(0.0); CHAINS];
            let factor = S::splat(black_box(1.0));
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = S::fma(factor, factor, *sum);
                }
            }
            let total = sums.into_iter().reduce(|a, b| S::add(a, b));
            black_box(total.map_or(0.0, |total| S::sum(total)));
        }
    }
}

/// Chains of 16-bit dot products.
struct DotInt16Chains;

impl Kernel for DotInt16Chains {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller guarantees `S`'s instruction set; no memory is accessed.
        unsafe {
            let mut sums = [S::splat_int(0); CHAINS];
            let factor = S::splat_int(black_box(0x0001_0001));
            for _ in 0..STEPS {
                for sum in &mut sums {
                    // The sum is an operand, as a loop-invariant product would be hoisted.
                    *sum = S::dot_halves(*sum, *sum, factor);
                }
            }
            for sum in sums {
                black_box(S::sum(S::int_to_f32(sum)));
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
struct DotBf16Chains;

#[cfg(target_arch = "x86_64")]
impl Kernel for DotBf16Chains {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        use std::arch::x86_64::{_mm512_add_ps, _mm512_reduce_add_ps, _mm512_set1_epi32, _mm512_setzero_ps};
        // SAFETY: runs only through `run_avx512_bf16`, whose caller guarantees BF16; no memory is accessed.
        unsafe {
            let mut sums = [_mm512_setzero_ps(); CHAINS];
            let factor = _mm512_set1_epi32(black_box(0x3f80_3f80));
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = simd::dot_bf16(*sum, factor, factor);
                }
            }
            let total = sums.into_iter().reduce(|a, b| _mm512_add_ps(a, b));
            black_box(total.map_or(0.0, |total| _mm512_reduce_add_ps(total)));
        }
    }
}

#[cfg(target_arch = "x86_64")]
struct DotInt8Chains;

#[cfg(target_arch = "x86_64")]
impl Kernel for DotInt8Chains {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        use std::arch::x86_64::{
            _mm512_add_epi32, _mm512_reduce_add_epi32, _mm512_set1_epi32, _mm512_setzero_si512,
        };
        // SAFETY: runs only through `run_avx512_vnni`, whose caller guarantees VNNI; no memory is accessed.
        unsafe {
            let mut sums = [_mm512_setzero_si512(); CHAINS];
            let factor = _mm512_set1_epi32(black_box(0x0101_0101));
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = simd::dot_int8(*sum, factor, factor);
                }
            }
            let total = sums.into_iter().reduce(|a, b| _mm512_add_epi32(a, b));
            black_box(total.map_or(0, |total| _mm512_reduce_add_epi32(total)));
        }
    }
}

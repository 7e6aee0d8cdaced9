//! What this machine can do at most: the yardstick for every kernel's share.
//!
//! Each measurement does nothing but the work it is named after, on every thread of a pool at once, and gives a rate.
//! A kernel's share is its own rate over this one, taken in the same run.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::buffer::{Buffer, Pages};
use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::isa::Path;
use super::pool::Pool;
use super::simd::{self, Kernel, Simd};

/// Independent chains of additions: enough to hide the latency of any unit.
const CHAINS: usize = 12;
/// Steps of a chain in one unit of work, some 20 us.
const STEPS: usize = 8 << 10;
/// How far apart lie the streams that a thread reads side by side. What suits the memory best differs from machine to
/// machine, so all are tried.
const STREAM_BYTES: [usize; 3] = [4 << 10, 64 << 10, 256 << 10];
/// Streams that a thread reads side by side.
const STREAMS: usize = 4;

/// Kind of arithmetic to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Multiply and add in f32.
    F32,
    /// Pairs of bf16 numbers, added in f32; [`Arithmetic::F32`] where the instruction set lacks it.
    Bf16,
    /// Fours of 8-bit integers, added in 32 bits; by way of 16 bits where the instruction set lacks it.
    Int8,
}

/// Memory to read from, larger than any cache.
pub struct Memory {
    bytes: Buffer,
}

impl Memory {
    /// `bytes` of memory, written once, in huge pages or in small ones.
    ///
    /// # Errors
    /// The operating system refuses as much.
    pub fn new(bytes: usize, huge: bool) -> std::io::Result<Self> {
        let pages = if huge { Pages::Huge } else { Pages::Small };
        let mut buffer = Buffer::zeroed(bytes, pages)?;
        for at in (0..bytes).step_by(64) {
            // SAFETY: `at` is within the buffer.
            unsafe { buffer.as_mut_ptr().add(at).write(at as u8) };
        }
        Ok(Self { bytes: buffer })
    }

    /// Bytes a second that all threads read together; the best of the passes that fit into `time`.
    pub fn read(&self, pool: &Pool, isa: Isa, time: Duration) -> f64 {
        let parts = pool.threads();
        let unit = STREAM_BYTES[STREAM_BYTES.len() - 1] * STREAMS;
        let part = self.bytes.len() / parts / unit * unit;
        let rates = STREAM_BYTES.map(|stream_bytes| {
            best(time / STREAM_BYTES.len() as u32, || {
                pool.each(parts, &|index| {
                    // SAFETY: the parts lie one after the other within the buffer.
                    let from = unsafe { self.bytes.as_ptr().add(index * part) };
                    simd::run(isa, Read { from, bytes: part, stream_bytes });
                });
                (part * parts) as f64
            })
        });
        rates.into_iter().fold(0.0, f64::max)
    }
}

/// Operations a second that all threads do together, a multiplication and an addition being two; the best of the
/// passes that fit into `time`.
pub fn arithmetic(pool: &Pool, isa: Isa, kind: Arithmetic, time: Duration) -> f64 {
    let per_step = match (kind, isa.0) {
        #[cfg(target_arch = "x86_64")]
        (Arithmetic::Bf16, Path::Avx512Bf16) => 64,
        #[cfg(target_arch = "x86_64")]
        (Arithmetic::Int8, path) if path.has_vnni() => 128,
        (Arithmetic::Int8, _) => 4 * simd::lanes(isa),
        _ => 2 * simd::lanes(isa),
    };
    best(time, || {
        pool.each(pool.threads(), &|_| match (kind, isa.0) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this `Isa` exists only where its features are.
            (Arithmetic::Bf16, Path::Avx512Bf16) => unsafe { simd::run_avx512_bf16(DotBf16) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            (Arithmetic::Int8, path) if path.has_vnni() => unsafe { simd::run_avx512_vnni(DotInt8) },
            (Arithmetic::Int8, _) => simd::run(isa, DotHalves),
            _ => simd::run(isa, Fma),
        });
        (pool.threads() * STEPS * CHAINS * per_step) as f64
    })
}

/// The highest rate of `work`, which returns how much it did.
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

struct Read {
    from: *const u8,
    bytes: usize,
    stream_bytes: usize,
}

impl Kernel for Read {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        const VECTOR: usize = size_of::<f32>();
        // SAFETY: every load is within the part.
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

struct Fma;

impl Kernel for Fma {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: no memory is touched.
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

struct DotHalves;

impl Kernel for DotHalves {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: no memory is touched.
        unsafe {
            let mut sums = [S::splat_int(0); CHAINS];
            let factor = S::splat_int(black_box(0x0001_0001));
            for _ in 0..STEPS {
                for sum in &mut sums {
                    // Of the sum itself, as the same product would be computed only once.
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
struct DotBf16;

#[cfg(target_arch = "x86_64")]
impl Kernel for DotBf16 {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        use std::arch::x86_64::{_mm512_add_ps, _mm512_reduce_add_ps, _mm512_set1_epi32, _mm512_setzero_ps};
        // SAFETY: called only with the features of AVX-512 with BF16; no memory is touched.
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
struct DotInt8;

#[cfg(target_arch = "x86_64")]
impl Kernel for DotInt8 {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        use std::arch::x86_64::{
            _mm512_add_epi32, _mm512_reduce_add_epi32, _mm512_set1_epi32, _mm512_setzero_si512,
        };
        // SAFETY: called only with the features of AVX-512 with VNNI; no memory is touched.
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

//! Floating-point GEMM microkernels for f32, f16 and bf16 weights.

use std::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
use super::super::simd;
use super::super::simd::{Simd, opaque};
use super::{GemmTask, LINE, MicroKernel, TilePosition};

/// Element type of float weights: its storage per step and its multiply-add.
///
/// # Safety
/// The caller guarantees `S`'s instruction set, and pointers valid for one step of a vector's columns and for
/// [`FloatFormat::WORDS`] of activations.
pub(super) trait FloatFormat<S: Simd> {
    /// Bytes of one column per step.
    const BYTES: usize;
    /// Words of one row's activations per step.
    const WORDS: usize;
    /// Products that a step adds to an accumulator, one after the other; at most two.
    const PARTS: usize = 1;
    /// Weights of one part of a step for a vector of columns.
    type W: Copy;
    /// Activations of one part of a step for one row, broadcast to all lanes.
    type X: Copy;

    unsafe fn weights(from: *const u8, part: usize) -> Self::W;
    unsafe fn activations(from: *const u32, part: usize) -> Self::X;
    unsafe fn add_product(sum: S::V, x: Self::X, w: Self::W) -> S::V;
}

/// Float GEMM microkernel: one accumulator per row and column.
pub(super) struct FloatKernel<F>(PhantomData<F>);

impl<S: Simd, F: FloatFormat<S>> MicroKernel<S> for FloatKernel<F> {
    const ROWS: usize = S::TILE_ROWS;

    #[inline(always)]
    unsafe fn tile<const M: usize, const P: usize>(job: &GemmTask<'_>, position: TilePosition) {
        let TilePosition { row, panel, gap, step, steps, next } = position;
        let vector_bytes = F::BYTES * S::LANES;
        // SAFETY: panel, step and row are within the packed operands, see `GemmTask::run_all`; `load_sums`
        // and `store_sums` stay within `y`, whose columns in these panels belong to this thread.
        unsafe {
            let mut w = job.w.data.as_ptr().add(panel * job.w.panel_bytes + step * 2 * vector_bytes);
            let mut x = job.x.add(row * job.row_words + step * M * F::WORDS);
            // A step reads and prefetches at most two cache lines. Unneeded prefetches hit a cached line.
            let stride = next.bytes.div_ceil(steps);
            let second = if stride > LINE { LINE } else { 0 };
            let mut prefetch = if stride > 0 { next.from } else { w };
            let mut sums = job.load_sums::<S, M, P>(&position);
            for _ in 0..steps {
                if P == 1 {
                    S::prefetch_far(prefetch);
                    S::prefetch_far(prefetch.wrapping_add(second));
                    prefetch = prefetch.wrapping_add(stride);
                }
                for p in 0..P {
                    let mut at = w.add(p * gap * job.w.panel_bytes);
                    // Registers for accumulators, both parts of the weights, activations and temporaries.
                    if F::PARTS > 1 && 2 * M * P + 7 > S::REGISTERS {
                        for part in 0..F::PARTS {
                            // Opaque, so that packed weights are not kept in registers across parts.
                            at = opaque(at);
                            let (w0, w1) = (F::weights(at, part), F::weights(at.add(vector_bytes), part));
                            for m in 0..M {
                                let xs = F::activations(x.add(m * F::WORDS), part);
                                sums[m][p][0] = F::add_product(sums[m][p][0], xs, w0);
                                sums[m][p][1] = F::add_product(sums[m][p][1], xs, w1);
                            }
                        }
                        continue;
                    }
                    // Without a second part, both indices refer to the first.
                    let (first, second) = (at, at.add(vector_bytes));
                    let last = F::PARTS - 1;
                    let w0 = [F::weights(first, 0), F::weights(first, last)];
                    let w1 = [F::weights(second, 0), F::weights(second, last)];
                    for m in 0..M {
                        for part in 0..F::PARTS {
                            let xs = F::activations(x.add(m * F::WORDS), part);
                            sums[m][p][0] = F::add_product(sums[m][p][0], xs, w0[part]);
                            sums[m][p][1] = F::add_product(sums[m][p][1], xs, w1[part]);
                        }
                    }
                }
                // Incremented: recomputing addresses from the step would cost one of fifteen instructions.
                w = opaque(w.add(2 * vector_bytes));
                x = opaque(x.add(M * F::WORDS));
            }
            job.store_sums::<S, M, P>(&position, &sums);
        }
    }
}

/// f32 weights, one k per step.
pub(super) struct F32;

impl<S: Simd> FloatFormat<S> for F32 {
    const BYTES: usize = 4;
    const WORDS: usize = 1;
    type W = S::V;
    type X = S::V;

    #[inline(always)]
    unsafe fn weights(from: *const u8, _part: usize) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and `LANES` readable f32 weights.
        unsafe { S::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32, _part: usize) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and one readable word.
        unsafe { S::splat(from.cast::<f32>().read()) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: S::V, x: S::V, w: S::V) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set; no memory is accessed.
        unsafe { S::fma(x, w, sum) }
    }
}

/// f16 weights, widened on the fly; activations stay f32.
pub(super) struct F16;

impl<S: Simd> FloatFormat<S> for F16 {
    const BYTES: usize = 2;
    const WORDS: usize = 1;
    type W = S::V;
    type X = S::V;

    #[inline(always)]
    unsafe fn weights(from: *const u8, _part: usize) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and `LANES` readable f16 weights.
        unsafe { S::load_f16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32, _part: usize) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and one readable word.
        unsafe { S::splat(from.cast::<f32>().read()) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: S::V, x: S::V, w: S::V) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set; no memory is accessed.
        unsafe { S::fma(x, w, sum) }
    }
}

/// bf16 weights in pairs of k, widened on the fly; activations were rounded to bf16 and widened before.
pub(super) struct Bf16;

impl<S: Simd> FloatFormat<S> for Bf16 {
    const BYTES: usize = 4;
    const WORDS: usize = 2;
    const PARTS: usize = 2;
    type W = S::V;
    type X = S::V;

    #[inline(always)]
    unsafe fn weights(from: *const u8, part: usize) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and `LANES` readable bf16 pairs.
        unsafe {
            let (first, second) = S::load_bf16_pairs(from.cast());
            if part == 0 { first } else { second }
        }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32, part: usize) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and two readable words.
        unsafe { S::splat(from.cast::<f32>().add(part).read()) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: S::V, x: S::V, w: S::V) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set; no memory is accessed.
        unsafe { S::fma(x, w, sum) }
    }
}

/// bf16 weights in pairs of k, multiplied by the bf16 dot product instruction.
#[cfg(target_arch = "x86_64")]
pub(super) struct Bf16Dot;

#[cfg(target_arch = "x86_64")]
impl FloatFormat<simd::Avx512> for Bf16Dot {
    const BYTES: usize = 4;
    const WORDS: usize = 1;
    type W = std::arch::x86_64::__m512i;
    type X = std::arch::x86_64::__m512i;

    #[inline(always)]
    unsafe fn weights(from: *const u8, _part: usize) -> Self::W {
        // SAFETY: the caller guarantees AVX-512 and sixteen readable bf16 pairs.
        unsafe { std::arch::x86_64::_mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32, _part: usize) -> Self::X {
        // SAFETY: the caller guarantees AVX-512 and one readable word.
        unsafe { std::arch::x86_64::_mm512_set1_epi32(from.read() as i32) }
    }

    #[inline(always)]
    unsafe fn add_product(
        sum: <simd::Avx512 as Simd>::V,
        x: Self::X,
        w: Self::W,
    ) -> <simd::Avx512 as Simd>::V {
        // SAFETY: the caller guarantees AVX-512 BF16; no memory is accessed.
        unsafe { simd::dot_bf16(sum, x, w) }
    }
}

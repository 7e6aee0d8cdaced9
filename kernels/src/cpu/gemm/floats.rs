use std::marker::PhantomData;

use super::super::simd::{self, Simd, opaque};
use super::{Format, LINE, Multiply, Place};

/// How the weights of one step are stored, and what they are multiplied with.
///
/// # Safety
/// As [`Simd`]: the instruction set is there and pointers are valid for one step of a vector's columns, and for
/// [`Numbers::WORDS`] of activations.
pub(super) trait Numbers<S: Simd> {
    /// Bytes of one column in one step.
    const BYTES: usize;
    /// Words of one row's activations in one step.
    const WORDS: usize;
    /// Products that a step adds to a sum, one after the other; at most two.
    const PARTS: usize = 1;
    /// Weights of one part of a step for a vector of columns.
    type W: Copy;
    /// Activations of one part of a step for one row, in all lanes.
    type X: Copy;

    unsafe fn weights(from: *const u8, part: usize) -> Self::W;
    unsafe fn activations(from: *const u32, part: usize) -> Self::X;
    unsafe fn add_product(sum: S::V, x: Self::X, w: Self::W) -> S::V;
}

/// Numbers of one kind, a sum for each row and column.
pub(super) struct Floats<F>(PhantomData<F>);

impl<S: Simd, F: Numbers<S>> Format<S> for Floats<F> {
    const ROWS: usize = S::TILE_ROWS;

    #[inline(always)]
    unsafe fn tile<const M: usize, const P: usize>(job: &Multiply<'_>, place: Place) {
        let Place { row, panel, gap, step, steps, next } = place;
        let vector_bytes = F::BYTES * S::LANES;
        // SAFETY: panel, step and row are within the packed operands, see `Multiply::all`; `load_sums` and `store_sums`
        // stay within `y`, of which this thread alone touches its panels' columns.
        unsafe {
            let mut w = job.w.data.as_ptr().add(panel * job.w.panel_bytes + step * 2 * vector_bytes);
            let mut x = job.x.add(row * job.row_words + step * M * F::WORDS);
            // A step asks for at most two lines, as it reads at most two. Without branches: what is not needed is a line that
            // is there or on its way.
            let stride = next.bytes.div_ceil(steps);
            let second = if stride > LINE { LINE } else { 0 };
            let mut soon = if stride > 0 { next.from } else { w };
            let mut sums = job.load_sums::<S, M, P>(&place);
            for _ in 0..steps {
                if P == 1 {
                    S::prefetch_far(soon);
                    S::prefetch_far(soon.wrapping_add(second));
                    soon = soon.wrapping_add(stride);
                }
                for p in 0..P {
                    let mut at = w.add(p * gap * job.w.panel_bytes);
                    // Sums, both parts of the weights and one row's activations, and something to take parts out with.
                    if F::PARTS > 1 && 2 * M * P + 7 > S::REGISTERS {
                        for part in 0..F::PARTS {
                            // Opaque, as the whole would otherwise be kept from part to part.
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
                    // A part that there is not is the first one.
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
                // Counted up: computed anew from the step, addresses take one of fifteen instructions.
                w = opaque(w.add(2 * vector_bytes));
                x = opaque(x.add(M * F::WORDS));
            }
            job.store_sums::<S, M, P>(&place, &sums);
        }
    }
}

/// f32, one k to a step.
pub(super) struct F32;

impl<S: Simd> Numbers<S> for F32 {
    const BYTES: usize = 4;
    const WORDS: usize = 1;
    type W = S::V;
    type X = S::V;

    #[inline(always)]
    unsafe fn weights(from: *const u8, _part: usize) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32, _part: usize) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::splat(from.cast::<f32>().read()) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: S::V, x: S::V, w: S::V) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::fma(x, w, sum) }
    }
}

/// f16, widened on the fly; activations stay f32.
pub(super) struct F16;

impl<S: Simd> Numbers<S> for F16 {
    const BYTES: usize = 2;
    const WORDS: usize = 1;
    type W = S::V;
    type X = S::V;

    #[inline(always)]
    unsafe fn weights(from: *const u8, _part: usize) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load_f16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32, _part: usize) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::splat(from.cast::<f32>().read()) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: S::V, x: S::V, w: S::V) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::fma(x, w, sum) }
    }
}

/// bf16 in pairs of k, widened on the fly; activations are bf16 numbers widened before.
pub(super) struct Bf16;

impl<S: Simd> Numbers<S> for Bf16 {
    const BYTES: usize = 4;
    const WORDS: usize = 2;
    const PARTS: usize = 2;
    type W = S::V;
    type X = S::V;

    #[inline(always)]
    unsafe fn weights(from: *const u8, part: usize) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe {
            let (first, second) = S::load_bf16_pairs(from.cast());
            if part == 0 { first } else { second }
        }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32, part: usize) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::splat(from.cast::<f32>().add(part).read()) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: S::V, x: S::V, w: S::V) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::fma(x, w, sum) }
    }
}

/// bf16 in pairs of k, multiplied as they are.
#[cfg(target_arch = "x86_64")]
pub(super) struct NativeBf16;

#[cfg(target_arch = "x86_64")]
impl Numbers<simd::Avx512> for NativeBf16 {
    const BYTES: usize = 4;
    const WORDS: usize = 1;
    type W = std::arch::x86_64::__m512i;
    type X = std::arch::x86_64::__m512i;

    #[inline(always)]
    unsafe fn weights(from: *const u8, _part: usize) -> Self::W {
        // SAFETY: passed on to the caller.
        unsafe { std::arch::x86_64::_mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32, _part: usize) -> Self::X {
        // SAFETY: passed on to the caller.
        unsafe { std::arch::x86_64::_mm512_set1_epi32(from.read() as i32) }
    }

    #[inline(always)]
    unsafe fn add_product(
        sum: <simd::Avx512 as Simd>::V,
        x: Self::X,
        w: Self::W,
    ) -> <simd::Avx512 as Simd>::V {
        // SAFETY: passed on to the caller.
        unsafe { simd::dot_bf16(sum, x, w) }
    }
}

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
    /// Weights of one step for a vector of columns.
    type W: Copy;
    /// Activations of one step for one row, in all lanes.
    type X: Copy;

    unsafe fn weights(from: *const u8) -> Self::W;
    unsafe fn activations(from: *const u32) -> Self::X;
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
                    let at = w.add(p * gap * job.w.panel_bytes);
                    let (w0, w1) = (F::weights(at), F::weights(at.add(vector_bytes)));
                    for m in 0..M {
                        let xs = F::activations(x.add(m * F::WORDS));
                        sums[m][p][0] = F::add_product(sums[m][p][0], xs, w0);
                        sums[m][p][1] = F::add_product(sums[m][p][1], xs, w1);
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
    unsafe fn weights(from: *const u8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32) -> S::V {
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
    unsafe fn weights(from: *const u8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load_f16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32) -> S::V {
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
    type W = (S::V, S::V);
    type X = (S::V, S::V);

    #[inline(always)]
    unsafe fn weights(from: *const u8) -> (S::V, S::V) {
        // SAFETY: passed on to the caller.
        unsafe { S::load_bf16_pairs(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32) -> (S::V, S::V) {
        // SAFETY: passed on to the caller.
        unsafe { (S::splat(from.cast::<f32>().read()), S::splat(from.cast::<f32>().add(1).read())) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: S::V, x: (S::V, S::V), w: (S::V, S::V)) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::fma(x.1, w.1, S::fma(x.0, w.0, sum)) }
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
    unsafe fn weights(from: *const u8) -> Self::W {
        // SAFETY: passed on to the caller.
        unsafe { std::arch::x86_64::_mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32) -> Self::X {
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

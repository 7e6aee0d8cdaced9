use super::super::simd::{self, Simd};

/// How the weights of one step are stored, and what they are multiplied with.
///
/// # Safety
/// As [`Simd`]: the instruction set is there and pointers are valid for one step of a vector's columns, and for
/// [`Format::WORDS`] of activations.
pub(crate) trait Format<S: Simd> {
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

/// f32, one k to a step.
pub(crate) struct F32;

impl<S: Simd> Format<S> for F32 {
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
pub(crate) struct F16;

impl<S: Simd> Format<S> for F16 {
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
pub(crate) struct Bf16;

impl<S: Simd> Format<S> for Bf16 {
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
pub(crate) struct NativeBf16;

#[cfg(target_arch = "x86_64")]
impl Format<simd::Avx512> for NativeBf16 {
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

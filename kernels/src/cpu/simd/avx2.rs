//! Vector operations with AVX2, FMA and F16C.

use std::arch::x86_64::*;

use super::{Simd, SubKernel};

/// Eight lanes of AVX2 with FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

// SAFETY: all functions forward the trait's contract: instruction set and valid pointers.
impl Simd for Avx2 {
    type V = __m256;
    type I = __m256i;
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    const TILE_ROWS: usize = 6;
    const INTEGER_ROWS: usize = 4;
    const QUERIES: usize = 3;

    #[inline(always)]
    unsafe fn run_subkernel<P: SubKernel<Self>>(subkernel: P) {
        // An inlined subkernel competes for registers with the surrounding loops.
        // SAFETY: the caller's guarantees are those of `run_outlined`.
        unsafe { Self::run_outlined(subkernel) }
    }

    #[inline(always)]
    unsafe fn run_outlined<P: SubKernel<Self>>(subkernel: P) {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        unsafe fn outlined<P: SubKernel<Avx2>>(subkernel: P) {
            // SAFETY: the caller guarantees the instruction set, which the attribute enables.
            unsafe { subkernel.run() }
        }
        // SAFETY: the caller guarantees AVX2, FMA and F16C, which `outlined` enables.
        unsafe { outlined(subkernel) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: the caller guarantees AVX2 and `LANES` readable elements at `from`.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m256) {
        // SAFETY: the caller guarantees AVX2 and `LANES` writable elements at `to`.
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m256 {
        // SAFETY: the caller guarantees AVX2 and `LANES` readable elements at `from`.
        unsafe {
            let raw = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(raw))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m256 {
        // SAFETY: the caller guarantees AVX2 and `LANES` readable elements at `from`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m256 {
        // SAFETY: the caller guarantees AVX2 and `LANES` readable elements at `from`.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u32) -> (__m256, __m256) {
        // SAFETY: the caller guarantees AVX2 and `LANES` readable elements at `from`.
        unsafe {
            let raw = _mm256_loadu_si256(from.cast());
            let high = _mm256_and_si256(raw, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(raw)), _mm256_castsi256_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn round(v: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v) }
    }

    #[inline(always)]
    unsafe fn times_exp2(a: __m256, v: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
        }
    }

    #[inline(always)]
    unsafe fn if_less(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }

    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: the caller guarantees AVX2; prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn prefetch_far(at: *const u8) {
        // SAFETY: the caller guarantees AVX2; prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn largest(v: __m256) -> f32 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    unsafe fn splat_int(x: i32) -> __m256i {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_set1_epi32(x) }
    }

    #[inline(always)]
    unsafe fn load_int(from: *const u8) -> __m256i {
        // SAFETY: the caller guarantees AVX2 and `LANES` readable elements at `from`.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    unsafe fn nibbles(v: __m256i) -> (__m256i, __m256i) {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe {
            let low = _mm256_set1_epi8(15);
            (_mm256_and_si256(v, low), _mm256_and_si256(_mm256_srli_epi16::<4>(v), low))
        }
    }

    #[inline(always)]
    unsafe fn halves(v: __m256i) -> (__m256i, __m256i) {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { (_mm256_and_si256(v, _mm256_set1_epi16(255)), _mm256_srli_epi16::<8>(v)) }
    }

    #[inline(always)]
    unsafe fn dot_halves(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)) }
    }

    #[inline(always)]
    unsafe fn dot_bytes(sums: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x)) }
    }

    #[inline(always)]
    unsafe fn add_halves(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_add_epi32(a, _mm256_madd_epi16(b, _mm256_set1_epi16(1))) }
    }

    #[inline(always)]
    unsafe fn int_to_f32(v: __m256i) -> __m256 {
        // SAFETY: the caller guarantees AVX2; no memory is accessed.
        unsafe { _mm256_cvtepi32_ps(v) }
    }
}

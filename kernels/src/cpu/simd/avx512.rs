//! Vector operations with AVX-512 (F, BW, DQ, VL), and dot products with VNNI and BF16.

use std::arch::x86_64::*;

use super::{Simd, SubKernel};

/// Sixteen lanes of AVX-512 (F, BW, DQ, VL).
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// SAFETY: all functions forward the trait's contract: instruction set and valid pointers.
impl Simd for Avx512 {
    type V = __m512;
    type I = __m512i;
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    const TILE_ROWS: usize = 12;
    const INTEGER_ROWS: usize = 6;
    const QUERIES: usize = 8;

    #[inline(always)]
    unsafe fn run_subkernel<P: SubKernel<Self>>(subkernel: P) {
        // SAFETY: the caller guarantees AVX-512, as `SubKernel::run` requires.
        unsafe { subkernel.run() }
    }

    #[inline(always)]
    unsafe fn run_outlined<P: SubKernel<Self>>(subkernel: P) {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        #[inline(never)]
        unsafe fn outlined<P: SubKernel<Avx512>>(subkernel: P) {
            // SAFETY: the caller guarantees the instruction set, which the attribute enables.
            unsafe { subkernel.run() }
        }
        // SAFETY: the caller guarantees AVX-512 F, BW, DQ and VL, which `outlined` enables.
        unsafe { outlined(subkernel) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: the caller guarantees AVX-512 and `LANES` readable elements at `from`.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: the caller guarantees AVX-512 and `LANES` writable elements at `to`.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        // SAFETY: the caller guarantees AVX-512 and `LANES` readable elements at `from`.
        unsafe {
            let raw = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(raw))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        // SAFETY: the caller guarantees AVX-512 and `LANES` readable elements at `from`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        // SAFETY: the caller guarantees AVX-512 and `LANES` readable elements at `from`.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u32) -> (__m512, __m512) {
        // SAFETY: the caller guarantees AVX-512 and `LANES` readable elements at `from`.
        unsafe {
            let raw = _mm512_loadu_si512(from.cast());
            let high = _mm512_and_si512(raw, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(raw)), _mm512_castsi512_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn round(v: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v) }
    }

    #[inline(always)]
    unsafe fn times_exp2(a: __m512, v: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_scalef_ps(a, v) }
    }

    #[inline(always)]
    unsafe fn if_less(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x) }
    }

    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: the caller guarantees AVX-512; prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn prefetch_far(at: *const u8) {
        // SAFETY: the caller guarantees AVX-512; prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn largest(v: __m512) -> f32 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe {
            let eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    unsafe fn splat_int(x: i32) -> __m512i {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_set1_epi32(x) }
    }

    #[inline(always)]
    unsafe fn load_int(from: *const u8) -> __m512i {
        // SAFETY: the caller guarantees AVX-512 and `LANES` readable elements at `from`.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn nibbles(v: __m512i) -> (__m512i, __m512i) {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe {
            let low = _mm512_set1_epi8(15);
            (_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low))
        }
    }

    #[inline(always)]
    unsafe fn halves(v: __m512i) -> (__m512i, __m512i) {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { (_mm512_and_si512(v, _mm512_set1_epi16(255)), _mm512_srli_epi16::<8>(v)) }
    }

    #[inline(always)]
    unsafe fn dot_halves(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)) }
    }

    #[inline(always)]
    unsafe fn dot_bytes(sums: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_add_epi16(sums, _mm512_maddubs_epi16(w, x)) }
    }

    #[inline(always)]
    unsafe fn add_halves(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_add_epi32(a, _mm512_madd_epi16(b, _mm512_set1_epi16(1))) }
    }

    #[inline(always)]
    unsafe fn int_to_f32(v: __m512i) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe { _mm512_cvtepi32_ps(v) }
    }

    #[inline(always)]
    unsafe fn exp2(x: __m512) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; no memory is accessed.
        unsafe {
            // Fraction above the next lower integer; `scalef` applies the integer itself.
            let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
            // Minimax polynomial of 2^r on [0, 1] that is 1 at 0.
            let p = _mm512_set1_ps(1.867_142e-3);
            let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.017_005e-3));
            let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.579_993e-2));
            let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.401_644_4e-1));
            let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931_513e-1));
            let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
            _mm512_scalef_ps(p, x)
        }
    }
}

/// Returns `acc + x.0 * w.0 + x.1 * w.1` per f32 lane and bf16 pair, ordered and rounded as VDPBF16PS does.
///
/// # Safety
/// The machine supports AVX-512 with BF16.
#[inline(always)]
pub(crate) unsafe fn dot_bf16(acc: __m512, x: __m512i, w: __m512i) -> __m512 {
    // SAFETY: the caller guarantees BF16; `__m512i` and `__m512bh` have equal size and allow any bits.
    unsafe {
        _mm512_dpbf16_ps(
            acc,
            std::mem::transmute::<__m512i, __m512bh>(x),
            std::mem::transmute::<__m512i, __m512bh>(w),
        )
    }
}

/// Adds the dot products of bf16 pairs in the lanes of `mask`; the other lanes keep `acc`.
///
/// # Safety
/// The machine supports AVX-512 with BF16.
#[inline(always)]
pub(crate) unsafe fn dot_bf16_where(mask: __mmask16, acc: __m512, x: __m512i, w: __m512i) -> __m512 {
    // SAFETY: the caller guarantees BF16; `__m512i` and `__m512bh` have equal size and allow any bits.
    unsafe {
        _mm512_mask_dpbf16_ps(
            acc,
            mask,
            std::mem::transmute::<__m512i, __m512bh>(x),
            std::mem::transmute::<__m512i, __m512bh>(w),
        )
    }
}

/// Rounds up to 32 elements at `from` to pairs of bf16, and pads them with 0.
///
/// # Safety
/// The machine supports AVX-512 with BF16, and `from` is valid for `count` elements.
#[inline(always)]
pub(crate) unsafe fn bf16_pairs(from: *const f32, count: usize) -> __m512i {
    // SAFETY: masks exclude elements beyond `count`, and the caller guarantees the others and BF16.
    unsafe {
        let (low, high) = if count >= 32 {
            (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)))
        } else {
            let present = (1u32 << count) - 1;
            let high = _mm512_maskz_loadu_ps((present >> 16) as __mmask16, from.wrapping_add(16));
            (_mm512_maskz_loadu_ps(present as __mmask16, from), high)
        };
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Transposes a 16 x 16 matrix of 32-bit lanes.
///
/// # Safety
/// The machine supports AVX-512.
#[inline(always)]
pub(crate) unsafe fn transpose(mut r: [__m512i; 16]) -> [__m512i; 16] {
    let mut t = r;
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe {
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        for i in (0..16).step_by(4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        // Each 128-bit lane l of r[4 * i + c] now holds rows 4 * i to 4 * i + 3 of column 4 * l + c.
        for c in 0..4 {
            t[c] = _mm512_shuffle_i32x4::<0x88>(r[c], r[4 + c]);
            t[4 + c] = _mm512_shuffle_i32x4::<0xdd>(r[c], r[4 + c]);
            t[8 + c] = _mm512_shuffle_i32x4::<0x88>(r[8 + c], r[12 + c]);
            t[12 + c] = _mm512_shuffle_i32x4::<0xdd>(r[8 + c], r[12 + c]);
        }
        for c in 0..4 {
            r[c] = _mm512_shuffle_i32x4::<0x88>(t[c], t[8 + c]);
            r[8 + c] = _mm512_shuffle_i32x4::<0xdd>(t[c], t[8 + c]);
            r[4 + c] = _mm512_shuffle_i32x4::<0x88>(t[4 + c], t[12 + c]);
            r[12 + c] = _mm512_shuffle_i32x4::<0xdd>(t[4 + c], t[12 + c]);
        }
    }
    r
}

/// Adds to each 32-bit lane the dot product of its four bytes, unsigned in `x` and signed in `w`. Exact.
///
/// # Safety
/// The machine supports AVX-512 with VNNI.
#[inline(always)]
pub(crate) unsafe fn dot_int8(acc: __m512i, x: __m512i, w: __m512i) -> __m512i {
    // SAFETY: the caller guarantees AVX-512 VNNI; no memory is accessed.
    unsafe { _mm512_dpbusd_epi32(acc, x, w) }
}

/// Masks the high nibble of each byte in place: sixteen times its value.
///
/// # Safety
/// The machine supports AVX-512.
#[inline(always)]
pub(crate) unsafe fn high_nibbles(v: __m512i) -> __m512i {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe { _mm512_and_si512(v, _mm512_set1_epi8(0xf0_u8 as i8)) }
}

/// Returns `a + b / 16`, where 16 divides b.
///
/// # Safety
/// The machine supports AVX-512.
#[inline(always)]
pub(crate) unsafe fn add_sixteenth(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe { _mm512_add_epi32(a, _mm512_srai_epi32::<4>(b)) }
}

/// Returns the largest lane of each of eight vectors.
///
/// # Safety
/// The machine supports AVX-512.
#[inline(always)]
pub(crate) unsafe fn largest_of([a, b, c, d, e, f, g, h]: [__m512; 8]) -> __m256 {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe {
        let (a, b) = (largest_of_four(a, b, c, d), largest_of_four(e, f, g, h));
        _mm256_max_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
    }
}

/// Returns the largest lane of each of eight vectors of bits of magnitudes, as numbers. NaN is larger than any other.
///
/// # Safety
/// The machine supports AVX-512.
#[inline(always)]
pub(crate) unsafe fn largest_magnitude_of([a, b, c, d, e, f, g, h]: [__m512i; 8]) -> __m256 {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe {
        let (a, b) = (largest_magnitude_of_four(a, b, c, d), largest_magnitude_of_four(e, f, g, h));
        let (low, high) = (_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b));
        _mm256_castsi256_ps(_mm256_max_epi32(low, high))
    }
}

/// As [`largest_of_four`] for bits of magnitudes.
#[inline(always)]
unsafe fn largest_magnitude_of_four(a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> __m256i {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe {
        let a = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let b = _mm512_max_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        let all = _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti32x8_epi32::<1>(all))
    }
}

/// Reduces four vectors to two 128-bit halves whose lane-wise maximum is the largest lane of each vector.
#[inline(always)]
unsafe fn largest_of_four(a: __m512, b: __m512, c: __m512, d: __m512) -> __m256 {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe {
        let a = _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        let b = _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        let all = _mm512_max_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps::<1>(all))
    }
}

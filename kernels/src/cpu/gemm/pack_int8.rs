//! Quantisation of activations to int8 groups in tile order, with AVX-512 VNNI.

use std::arch::x86_64::*;

use super::super::matrix::GROUP_STEP;
use super::super::simd::{Avx512, Kernel, Simd, largest_magnitude_of};
use super::activations::PackActivations;

/// Elements whose bytes fill a vector.
const VECTOR_BYTES: usize = 64;
/// Maximum rows of a tile.
const ROWS: usize = 8;
const _: () = assert!(Avx512::INTEGER_ROWS <= ROWS && GROUP_STEP.is_multiple_of(8));

/// Permutations that gather the words of a tile's rows from two vectors, with four words of rows 0 to 3 and
/// of rows 4 to 7: per tile height, the first two words of all rows, then the other two.
const PAIR_ORDERS: [[[i32; 16]; 2]; ROWS + 1] = {
    let mut orders = [[[0; 16]; 2]; ROWS + 1];
    let mut height = 1;
    while height <= ROWS {
        let mut lane = 0;
        while lane < 2 * height {
            let (word, row) = (lane / height, lane % height);
            let from = 16 * (row / 4) + 4 * word + row % 4;
            orders[height][0][lane] = from as i32;
            orders[height][1][lane] = from as i32 + 8;
            lane += 1;
        }
        height += 1;
    }
    orders
};

/// Packing kernel for [`super::activations::Layout::Int8`]. Every bit equals that of the portable kernel.
pub(super) struct PackInt8<'a> {
    pub pack: PackActivations<'a>,
    pub group: usize,
    /// Offset that makes the weights unsigned.
    pub offset: i32,
}

impl Kernel for PackInt8<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { pack, group, offset } = self;
        for index in pack.range.clone() {
            let (first, height) = (pack.tiles.start(index), pack.tiles.height(index));
            let record = (2 + group / 4) * height;
            let rows = &pack.x[first * pack.k..(first + height) * pack.k];
            for (at, step) in (0..pack.k).step_by(group).zip(0..) {
                let count = group.min(pack.k - at);
                // SAFETY: runs only through `run_avx512_vnni`, whose caller guarantees VNNI; each tile is a
                // range of its own within `words`, with a record per group.
                unsafe {
                    // The hardware prefetcher does not recognise such short pieces of distant rows.
                    for row in 0..height {
                        prefetch_elements::<S>(rows, row * pack.k + at + 2 * group, group);
                    }
                    let to = pack.words.add(first * pack.row_words + step * record);
                    let part = RowSlice { rows: rows.as_ptr().add(at), stride: pack.k, count };
                    quantize(part, height, group, offset, to);
                }
            }
        }
    }
}

/// Prefetches `count` elements from index `at`, not beyond the end; elements of the next row do no harm.
///
/// # Safety
/// The machine supports `S`'s instruction set.
#[inline(always)]
unsafe fn prefetch_elements<S: Simd>(elements: &[f32], at: usize, count: usize) {
    for at in (at..elements.len().min(at + count)).step_by(16) {
        // SAFETY: the caller guarantees `S`'s instruction set; prefetching never faults.
        unsafe { S::prefetch(elements.as_ptr().wrapping_add(at).cast()) };
    }
}

/// Range of columns of some rows: `count` elements of each, `stride` apart.
///
/// Methods instead of closures, which might not be inlined and would then lack the target features.
#[derive(Clone, Copy)]
struct RowSlice {
    rows: *const f32,
    stride: usize,
    count: usize,
}

impl RowSlice {
    /// Loads sixteen elements of row `i` from column `at`; those beyond the end are 0.
    ///
    /// # Safety
    /// The machine supports AVX-512, and the rows are valid for `count` elements.
    #[inline(always)]
    unsafe fn load(self, i: usize, at: usize) -> __m512 {
        let from = self.rows.wrapping_add(i * self.stride + at);
        // SAFETY: the mask excludes elements beyond `count`; the caller guarantees the others.
        unsafe {
            if at + 16 <= self.count {
                return _mm512_loadu_ps(from);
            }
            let lanes = self.count.saturating_sub(at);
            _mm512_maskz_loadu_ps(((1u32 << lanes) - 1) as __mmask16, from)
        }
    }

    /// Quantises sixteen elements of row `i` to the low bytes of 32-bit lanes. NaN becomes 0, with a scale of NaN.
    #[inline(always)]
    unsafe fn quants(self, i: usize, at: usize, factor: __m512) -> __m512i {
        // SAFETY: the caller guarantees AVX-512 and valid rows.
        unsafe {
            let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(self.load(i, at), factor));
            _mm512_and_si512(rounded, _mm512_set1_epi32(0xff))
        }
    }

    /// Quantises [`VECTOR_BYTES`] elements to words of four neighbours, in the order 0, 4, 8, 12, 1, 5, … 15.
    #[inline(always)]
    unsafe fn words(self, i: usize, at: usize, factor: f32) -> __m512i {
        // SAFETY: the caller guarantees AVX-512 and valid rows.
        unsafe {
            let factor = _mm512_set1_ps(factor);
            let low = _mm512_packus_epi32(self.quants(i, at, factor), self.quants(i, at + 16, factor));
            if at + 32 >= self.count {
                return _mm512_packus_epi16(low, _mm512_setzero_si512());
            }
            let high = _mm512_packus_epi32(self.quants(i, at + 32, factor), self.quants(i, at + 48, factor));
            _mm512_packus_epi16(low, high)
        }
    }
}

/// Quantises `part` of `height` rows into one record.
///
/// # Safety
/// The machine supports AVX-512 with VNNI, rows are valid, `to` has room for a record, height <= [`ROWS`].
#[inline(always)]
unsafe fn quantize(part: RowSlice, height: usize, group: usize, offset: i32, to: *mut u32) {
    let all = ((1u32 << height) - 1) as __mmask8;
    // SAFETY: masks keep loads and stores within the rows and the record, which the caller guarantees.
    unsafe {
        let mut maxima = [_mm512_setzero_si512(); ROWS];
        for (i, maxima) in maxima.iter_mut().enumerate().take(height) {
            for at in (0..part.count).step_by(16) {
                // As integers: the bits of magnitudes are ordered as the magnitudes, and those of NaN come last.
                let magnitudes = _mm512_castps_si512(_mm512_abs_ps(part.load(i, at)));
                *maxima = _mm512_max_epi32(magnitudes, *maxima);
            }
        }
        let (scales, inverses) = scales(largest_magnitude_of(maxima));
        _mm256_mask_storeu_ps(to.add(height).cast(), all, scales);
        let ones = _mm512_set1_epi8(1);
        let mut sum = _mm512_setzero_si512();
        if height == 1 {
            let factor = _mm256_cvtss_f32(inverses);
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            for at in (0..group).step_by(VECTOR_BYTES) {
                let words = part.words(0, at, factor);
                sum = _mm512_dpbusd_epi32(sum, ones, words);
                let lanes = ((1u32 << (group - at).min(VECTOR_BYTES).div_ceil(4)) - 1) as __mmask16;
                let words = _mm512_permutexvar_epi32(order, words);
                _mm512_mask_storeu_epi32(to.add(2 + at / 4).cast(), lanes, words);
            }
            return to.write((-offset * _mm512_reduce_add_epi32(sum)) as u32);
        }
        let mut factors = [0.0f32; ROWS];
        _mm256_storeu_ps(factors.as_mut_ptr(), inverses);
        // Two words of all rows fill the low lanes of a vector.
        let two = ((1u32 << (2 * height)) - 1) as __mmask16;
        let first = _mm512_loadu_si512(PAIR_ORDERS[height][0].as_ptr().cast());
        let second = _mm512_loadu_si512(PAIR_ORDERS[height][1].as_ptr().cast());
        for at in (0..group).step_by(VECTOR_BYTES) {
            let mut rows = [_mm512_setzero_si512(); ROWS];
            for (i, row) in rows.iter_mut().enumerate().take(height) {
                *row = part.words(i, at, factors[i]);
            }
            let to = to.add((2 + at / 4) * height);
            // Omits words beyond the group.
            let pairs = (group - at).div_ceil(8);
            for (four, (upper, lower)) in transpose_quads(rows).into_iter().enumerate() {
                for (half, order) in [first, second].into_iter().enumerate() {
                    let pair = 2 * four + half;
                    if pair < pairs {
                        let words = _mm512_permutex2var_epi32(upper, order, lower);
                        sum = _mm512_dpbusd_epi32(sum, ones, words);
                        _mm512_mask_storeu_epi32(to.add(2 * pair * height).cast(), two, words);
                    }
                }
            }
        }
        let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let odd = _mm512_permutexvar_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(height as i32)), sum);
        let sum = _mm512_mullo_epi32(_mm512_add_epi32(sum, odd), _mm512_set1_epi32(-offset));
        _mm256_mask_storeu_epi32(to.cast(), all, _mm512_castsi512_si256(sum));
    }
}

/// Vector form of [`super::activations::scale`] for eight rows.
///
/// # Safety
/// The machine supports AVX-512.
#[inline(always)]
unsafe fn scales(largest: __m256) -> (__m256, __m256) {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe {
        let int8_max = _mm256_set1_ps(127.0);
        let is_finite = _mm256_cmp_ps_mask::<_CMP_LT_OQ>(largest, _mm256_set1_ps(f32::INFINITY));
        let is_normal = is_finite & _mm256_cmp_ps_mask::<_CMP_GT_OQ>(largest, _mm256_set1_ps(1e-30));
        let scales = _mm256_maskz_div_ps(is_normal, largest, int8_max);
        let scales = _mm256_mask_mov_ps(_mm256_set1_ps(f32::NAN), is_finite, scales);
        (scales, _mm256_maskz_div_ps(is_normal, int8_max, largest))
    }
}

/// Transposes eight rows of four quadruples of words to, per quadruple, its words for rows 0 to 3 and for
/// rows 4 to 7. Expects the word order of [`RowSlice::words`].
///
/// # Safety
/// The machine supports AVX-512.
#[inline(always)]
unsafe fn transpose_quads([a, b, c, d, e, f, g, h]: [__m512i; ROWS]) -> [(__m512i, __m512i); 4] {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe {
        let ([a, b, c, d], [e, f, g, h]) = (transpose_4x4(a, b, c, d), transpose_4x4(e, f, g, h));
        [(a, e), (b, f), (c, g), (d, h)]
    }
}

/// Transposes a 4 x 4 matrix of words within each 128-bit lane.
#[inline(always)]
unsafe fn transpose_4x4(a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> [__m512i; 4] {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe {
        let (a, b) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (c, d) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(a, c),
            _mm512_unpackhi_epi64(a, c),
            _mm512_unpacklo_epi64(b, d),
            _mm512_unpackhi_epi64(b, d),
        ]
    }
}

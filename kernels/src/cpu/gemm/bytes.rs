//! Activations as bytes by group, quantised and brought into tile order for all rows of a tile at once.

use std::arch::x86_64::*;

use super::super::matrix::GROUP_STEP;
use super::super::simd::{Avx512, Kernel, Simd, largest_of};
use super::activations::Pack;

/// Numbers whose bytes fill a vector.
const PART: usize = 64;
/// Most rows of a tile.
const ROWS: usize = 8;
const _: () = assert!(Avx512::INTEGER_ROWS <= ROWS && GROUP_STEP.is_multiple_of(8));

/// Where the words of a tile's rows come from, given two vectors with four words of rows 0 to 3 and of rows 4 to 7:
/// for each height the first two words of all rows, then the other two.
const PAIRS: [[[i32; 16]; 2]; ROWS + 1] = {
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

/// The packing of [`super::activations::Layout::Group`]. Every bit is that of the portable form.
pub(super) struct Bytes<'a> {
    pub pack: Pack<'a>,
    pub group: usize,
    /// What weights were raised by.
    pub offset: i32,
}

impl Kernel for Bytes<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { pack, group, offset } = self;
        for index in pack.range.clone() {
            let (first, height) = (pack.tiles.start(index), pack.tiles.height(index));
            let record = (2 + group / 4) * height;
            let rows = &pack.x[first * pack.k..(first + height) * pack.k];
            for (at, step) in (0..pack.k).step_by(group).zip(0..) {
                let numbers = group.min(pack.k - at);
                // SAFETY: passed on to the caller; each tile is a range of its own within `words`, with a record for each
                // group.
                unsafe {
                    // A tile takes short pieces of rows far apart, too short for the hardware to see what comes next.
                    for row in 0..height {
                        fetch::<S>(rows, row * pack.k + at + 2 * group, group);
                    }
                    let to = pack.words.add(first * pack.row_words + step * record);
                    let part = Part { rows: rows.as_ptr().add(at), stride: pack.k, numbers };
                    quantize(part, height, group, offset, to);
                }
            }
        }
    }
}

/// Asks for `count` numbers from the `at`th on; numbers of the next row do no harm, and none are asked for beyond the end.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
unsafe fn fetch<S: Simd>(numbers: &[f32], at: usize, count: usize) {
    for at in (at..numbers.len().min(at + count)).step_by(16) {
        // SAFETY: passed on to the caller; asking never faults.
        unsafe { S::prefetch(numbers.as_ptr().wrapping_add(at).cast()) };
    }
}

/// Part of some rows: `numbers` of each, `stride` apart.
///
/// Methods rather than closures, which need not be compiled into their caller, and would then lack its instructions.
#[derive(Clone, Copy)]
struct Part {
    rows: *const f32,
    stride: usize,
    numbers: usize,
}

impl Part {
    /// Sixteen numbers of row `i` from `at` on; those beyond the end are 0.
    ///
    /// # Safety
    /// The machine has AVX-512; the rows are valid.
    #[inline(always)]
    unsafe fn load(self, i: usize, at: usize) -> __m512 {
        let from = self.rows.wrapping_add(i * self.stride + at);
        // SAFETY: the mask keeps to the row.
        unsafe {
            if at + 16 <= self.numbers {
                return _mm512_loadu_ps(from);
            }
            let lanes = self.numbers.saturating_sub(at);
            _mm512_maskz_loadu_ps(((1u32 << lanes) - 1) as __mmask16, from)
        }
    }

    /// The same as integers of which the lowest byte is left. What is not a number counts as 0.
    #[inline(always)]
    unsafe fn quants(self, i: usize, at: usize, factor: __m512) -> __m512i {
        // SAFETY: passed on to the caller.
        unsafe {
            let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(self.load(i, at), factor));
            _mm512_and_si512(rounded, _mm512_set1_epi32(0xff))
        }
    }

    /// [`PART`] numbers as words of four neighbours, in the order 0, 4, 8, 12, 1, 5, … 15.
    #[inline(always)]
    unsafe fn words(self, i: usize, at: usize, factor: f32) -> __m512i {
        // SAFETY: passed on to the caller.
        unsafe {
            let factor = _mm512_set1_ps(factor);
            let low = _mm512_packus_epi32(self.quants(i, at, factor), self.quants(i, at + 16, factor));
            if at + 32 >= self.numbers {
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
/// The machine has AVX-512 with VNNI; the rows are valid, and `to` is for a record; height is at most [`ROWS`].
#[inline(always)]
unsafe fn quantize(part: Part, height: usize, group: usize, offset: i32, to: *mut u32) {
    let all = ((1u32 << height) - 1) as __mmask8;
    // SAFETY: masks keep stores within the record.
    unsafe {
        let mut most = [_mm512_setzero_ps(); ROWS];
        for (i, most) in most.iter_mut().enumerate().take(height) {
            for at in (0..part.numbers).step_by(16) {
                // The second operand is what a comparison with NaN gives.
                *most = _mm512_max_ps(_mm512_abs_ps(part.load(i, at)), *most);
            }
        }
        let (scales, inverses) = scales(largest_of(most));
        _mm256_mask_storeu_ps(to.add(height).cast(), all, scales);
        let ones = _mm512_set1_epi8(1);
        let mut sum = _mm512_setzero_si512();
        if height == 1 {
            let factor = _mm256_cvtss_f32(inverses);
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            for at in (0..group).step_by(PART) {
                let words = part.words(0, at, factor);
                sum = _mm512_dpbusd_epi32(sum, ones, words);
                let lanes = ((1u32 << (group - at).min(PART).div_ceil(4)) - 1) as __mmask16;
                let words = _mm512_permutexvar_epi32(order, words);
                _mm512_mask_storeu_epi32(to.add(2 + at / 4).cast(), lanes, words);
            }
            return to.write((-offset * _mm512_reduce_add_epi32(sum)) as u32);
        }
        let mut factors = [0.0f32; ROWS];
        _mm256_storeu_ps(factors.as_mut_ptr(), inverses);
        // Two words of all rows fill a vector from its beginning.
        let two = ((1u32 << (2 * height)) - 1) as __mmask16;
        let first = _mm512_loadu_si512(PAIRS[height][0].as_ptr().cast());
        let second = _mm512_loadu_si512(PAIRS[height][1].as_ptr().cast());
        for at in (0..group).step_by(PART) {
            let mut rows = [_mm512_setzero_si512(); ROWS];
            for (i, row) in rows.iter_mut().enumerate().take(height) {
                *row = part.words(i, at, factors[i]);
            }
            let to = to.add((2 + at / 4) * height);
            // What lies beyond the group is left out.
            let pairs = (group - at).div_ceil(8);
            for (four, (upper, lower)) in turn(rows).into_iter().enumerate() {
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

/// [`super::activations::scale`] of eight.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn scales(largest: __m256) -> (__m256, __m256) {
    // SAFETY: passed on to the caller.
    unsafe {
        let most = _mm256_set1_ps(127.0);
        let is_number = _mm256_cmp_ps_mask::<_CMP_GT_OQ>(largest, _mm256_set1_ps(1e-30))
            & _mm256_cmp_ps_mask::<_CMP_LT_OQ>(largest, _mm256_set1_ps(f32::INFINITY));
        (_mm256_maskz_div_ps(is_number, largest, most), _mm256_maskz_div_ps(is_number, most, largest))
    }
}

/// Rows of four fours of words become, for each of the fours, its words for rows 0 to 3 and for rows 4 to 7. Expects words as
/// [`Part::words`] gives them.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn turn([a, b, c, d, e, f, g, h]: [__m512i; ROWS]) -> [(__m512i, __m512i); 4] {
    // SAFETY: passed on to the caller.
    unsafe {
        let ([a, b, c, d], [e, f, g, h]) = (turn_four(a, b, c, d), turn_four(e, f, g, h));
        [(a, e), (b, f), (c, g), (d, h)]
    }
}

/// Within each 128 bits: four rows of four words become columns.
#[inline(always)]
unsafe fn turn_four(a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> [__m512i; 4] {
    // SAFETY: passed on to the caller.
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

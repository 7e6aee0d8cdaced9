//! Activations as bytes by group, quantised and brought into tile order for all rows of a tile at once.

use std::arch::x86_64::*;

use super::super::matrix::GROUP_MAX;
use super::super::simd::{Kernel, Simd};
use super::activations::{Pack, scale};
use super::pairs::transpose;

/// Numbers whose bytes fill a vector.
const PART: usize = 64;
const PARTS: usize = GROUP_MAX.div_ceil(PART);

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
                    quantize(rows.as_ptr().add(at), pack.k, height, numbers, group, offset, to);
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

/// Quantises `numbers` numbers of each row, `stride` apart, into one record.
///
/// # Safety
/// The machine has AVX-512 with VNNI; rows are valid for `numbers`, `to` for a record; height is at most 16.
#[inline(always)]
unsafe fn quantize(
    rows: *const f32,
    stride: usize,
    height: usize,
    numbers: usize,
    group: usize,
    offset: i32,
    to: *mut u32,
) {
    // SAFETY: masks keep loads within the row and stores within the record.
    unsafe {
        let mut parts = [[_mm512_setzero_si512(); 16]; PARTS];
        let count = numbers.div_ceil(PART);
        for i in 0..height {
            let row = rows.wrapping_add(i * stride);
            let load = |at: usize| {
                let lanes = numbers.saturating_sub(at).min(16);
                _mm512_maskz_loadu_ps(((1u32 << lanes) - 1) as __mmask16, row.wrapping_add(at))
            };
            let mut most = _mm512_setzero_ps();
            for at in (0..numbers).step_by(16) {
                // The second operand is what a comparison with NaN gives.
                most = _mm512_max_ps(_mm512_abs_ps(load(at)), most);
            }
            let (scale, inverse) = scale(_mm512_reduce_max_ps(most));
            let factor = _mm512_set1_ps(inverse);
            let mut sum = _mm512_setzero_si512();
            for (p, part) in parts.iter_mut().enumerate().take(count) {
                let quants = |at: usize| {
                    let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load(p * PART + at), factor));
                    _mm512_cvtepi32_epi8(rounded)
                };
                let bytes = _mm512_castsi128_si512(quants(0));
                let bytes = _mm512_inserti32x4::<1>(bytes, quants(16));
                let bytes = _mm512_inserti32x4::<2>(bytes, quants(32));
                let bytes = _mm512_inserti32x4::<3>(bytes, quants(48));
                sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), bytes);
                part[i] = bytes;
            }
            to.add(i).write((-offset * _mm512_reduce_add_epi32(sum)) as u32);
            to.add(height + i).write(scale.to_bits());
        }
        let lanes = ((1u32 << height) - 1) as __mmask16;
        for (p, part) in parts.iter().enumerate().take(group.div_ceil(PART)) {
            let words = transpose(*part);
            let from = p * PART / 4;
            for (w, word) in words.iter().enumerate().take(group / 4 - from) {
                _mm512_mask_storeu_epi32(to.add((2 + from + w) * height).cast(), lanes, *word);
            }
        }
    }
}

//! Rounding of activations to bf16 pairs in tile order, with AVX-512 BF16.

use std::arch::x86_64::*;

use super::super::simd::{Kernel, Simd, bf16_pairs, transpose};
use super::activations::PackActivations;

/// Elements of a row that are transposed at once: sixteen pairs.
const ELEMENTS: usize = 32;

/// Packing kernel for [`super::activations::Layout::Bf16Pair`], with the bf16 conversion instruction. Like
/// the dot product instruction, it flushes subnormals to zero.
pub(super) struct PackBf16Pairs<'a>(pub(super) PackActivations<'a>);

impl Kernel for PackBf16Pairs<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self(pack) = self;
        for index in pack.range.clone() {
            let (first, height) = (pack.tiles.start(index), pack.tiles.height(index));
            let rows = &pack.x[first * pack.k..(first + height) * pack.k];
            // SAFETY: runs only through `run_avx512_bf16`, whose caller guarantees BF16; each tile is a range
            // of its own within `words`, which holds `row_words` for every row.
            unsafe {
                tile(rows, pack.k, height, pack.words.add(first * pack.row_words), height * pack.row_words)
            };
        }
    }
}

/// Packs rows[height, k] into `count` words.
///
/// # Safety
/// The machine supports AVX-512 with BF16, `to` is valid for `count` = height * ceil(k / 2) words, height <=
/// 16.
#[inline(always)]
unsafe fn tile(rows: &[f32], k: usize, height: usize, to: *mut u32, count: usize) {
    let lanes = ((1u32 << height) - 1) as __mmask16;
    for at in (0..k).step_by(ELEMENTS) {
        let elements = ELEMENTS.min(k - at);
        // SAFETY: loads are within the rows; stores are masked where a vector exceeds the tile.
        unsafe {
            let row = |i: usize| rows.as_ptr().wrapping_add(i * k + at);
            if height == 1 {
                let lanes = ((1u32 << elements.div_ceil(2)) - 1) as __mmask16;
                _mm512_mask_storeu_epi32(to.add(at / 2).cast(), lanes, bf16_pairs(row(0), elements));
                continue;
            }
            let mut words = [_mm512_setzero_si512(); 16];
            for (i, words) in words.iter_mut().enumerate().take(height) {
                *words = bf16_pairs(row(i), elements);
            }
            let steps = transpose(words);
            for (s, step) in steps.iter().enumerate().take(elements.div_ceil(2)) {
                let place = (at / 2 + s) * height;
                // The excess of a whole vector is overwritten by the following steps.
                if place + 16 <= count {
                    _mm512_storeu_si512(to.add(place).cast(), *step);
                } else {
                    _mm512_mask_storeu_epi32(to.add(place).cast(), lanes, *step);
                }
            }
        }
    }
}

//! Activations as pairs of bf16, brought into tile order sixteen steps of up to sixteen rows at a time.

use std::arch::x86_64::*;

use super::super::simd::{Kernel, Simd, bf16_pairs, transpose};
use super::activations::Pack;

/// Numbers of a row that are turned at once: sixteen pairs.
const NUMBERS: usize = 32;

/// The packing of [`super::activations::Layout::Packed`], with the instruction that rounds to bf16. Like the products, it takes
/// subnormal numbers as zero.
pub(super) struct Pairs<'a>(pub(super) Pack<'a>);

impl Kernel for Pairs<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self(pack) = self;
        for index in pack.range.clone() {
            let (first, height) = (pack.tiles.start(index), pack.tiles.height(index));
            let rows = &pack.x[first * pack.k..(first + height) * pack.k];
            // SAFETY: passed on to the caller; each tile is a range of its own within `words`, which holds `row_words`
            // for every row.
            unsafe {
                tile(rows, pack.k, height, pack.words.add(first * pack.row_words), height * pack.row_words)
            };
        }
    }
}

/// Packs rows[height, k] into `count` words.
///
/// # Safety
/// The machine has AVX-512 with BF16, `to` is valid for `count` words, height * ceil(k / 2) of them, and height at most 16.
#[inline(always)]
unsafe fn tile(rows: &[f32], k: usize, height: usize, to: *mut u32, count: usize) {
    let lanes = ((1u32 << height) - 1) as __mmask16;
    for at in (0..k).step_by(NUMBERS) {
        let numbers = NUMBERS.min(k - at);
        // SAFETY: the numbers are in the rows; stores are whole where a vector fits into the tile, and of
        // `height` words elsewhere.
        unsafe {
            let row = |i: usize| rows.as_ptr().wrapping_add(i * k + at);
            if height == 1 {
                let lanes = ((1u32 << numbers.div_ceil(2)) - 1) as __mmask16;
                _mm512_mask_storeu_epi32(to.add(at / 2).cast(), lanes, bf16_pairs(row(0), numbers));
                continue;
            }
            let mut words = [_mm512_setzero_si512(); 16];
            for (i, words) in words.iter_mut().enumerate().take(height) {
                *words = bf16_pairs(row(i), numbers);
            }
            let steps = transpose(words);
            for (s, step) in steps.iter().enumerate().take(numbers.div_ceil(2)) {
                let place = (at / 2 + s) * height;
                // What a whole vector writes too much is overwritten by the next steps.
                if place + 16 <= count {
                    _mm512_storeu_si512(to.add(place).cast(), *step);
                } else {
                    _mm512_mask_storeu_epi32(to.add(place).cast(), lanes, *step);
                }
            }
        }
    }
}

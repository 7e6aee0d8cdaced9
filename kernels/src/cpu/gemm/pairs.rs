//! Activations as pairs of bf16, brought into tile order sixteen steps of up to sixteen rows at a time.

use std::arch::x86_64::*;

use super::super::simd::{Kernel, Simd};
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
        let present = (u64::MAX >> (64 - numbers)) as u32;
        // SAFETY: `present` masks the numbers beyond the row; stores are whole where a vector fits into the tile, and of
        // `height` words elsewhere.
        unsafe {
            let row = |i: usize| rows.as_ptr().wrapping_add(i * k + at);
            if height == 1 {
                let lanes = ((1u32 << numbers.div_ceil(2)) - 1) as __mmask16;
                _mm512_mask_storeu_epi32(to.add(at / 2).cast(), lanes, pairs(row(0), present));
                continue;
            }
            let mut words = [_mm512_setzero_si512(); 16];
            for (i, words) in words.iter_mut().enumerate().take(height) {
                *words = pairs(row(i), present);
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

/// [`NUMBERS`] numbers, those `present`, as pairs.
///
/// # Safety
/// The machine has AVX-512 with BF16; what is present can be read.
#[inline(always)]
unsafe fn pairs(from: *const f32, present: u32) -> __m512i {
    // SAFETY: the mask keeps to what is present.
    unsafe {
        let (low, high) = if present == u32::MAX {
            (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)))
        } else {
            let high = _mm512_maskz_loadu_ps((present >> 16) as __mmask16, from.wrapping_add(16));
            (_mm512_maskz_loadu_ps(present as __mmask16, from), high)
        };
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Rows become columns.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn transpose(mut r: [__m512i; 16]) -> [__m512i; 16] {
    let mut t = r;
    // SAFETY: passed on to the caller.
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
        // Now 128 bits of r[4 * i + c] hold, in lane l, rows 4 * i to 4 * i + 3 of column 4 * l + c.
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

//! Packing of GEMM activations into tile order, with rounding to bf16 or quantisation to 8 bits.

use std::ops::Range;

use super::super::matrix::{GROUP_MAX, PackedMatrix, SharedPtr, WeightFormat};
use super::super::pool::Pool;
use super::super::simd::{self, Kernel, Simd, load_part};
use super::Tiles;
#[cfg(target_arch = "x86_64")]
use super::{pack_bf16::PackBf16Pairs, pack_int8::PackInt8};
use crate::cpu::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::cpu::isa::IsaKind;
use crate::dtype::{bf16_bits, bf16_value};

/// Elements of a row packed at a time; even, as bf16 is packed in pairs.
const PACK_CHUNK: usize = 256;

/// Elements below which a second thread does not pay.
const SMALL: usize = 1 << 15;

/// Left-hand side of a GEMM in the order in which tiles read it; a buffer to reuse.
///
/// Rows are grouped in tiles; a tile holds, step by step, its rows' elements for that step. For bf16 weights
/// they are rounded to bf16, for integer weights quantised to 8 bits by group: then a step begins with each
/// row's initial sum and scale.
#[derive(Default)]
pub struct Activations {
    words: Vec<u32>,
}

/// Storage of packed activations.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// f32, one k per step.
    F32,
    /// Two bf16 values widened to f32.
    WidenedPair,
    /// Two bf16 values in one word, the first in the lower half.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only AVX-512 with BF16 has dot products of pairs")
    )]
    Bf16Pair,
    /// A group of signed bytes, four in a word. `offset` is what makes the weights unsigned.
    Int8 { group: usize, offset: i32 },
    /// A group of signed 16-bit integers: of four, first and third in one word, then second and fourth.
    Int16 { group: usize, offset: i32 },
}

impl Layout {
    pub(super) fn of(w: &PackedMatrix) -> Self {
        match (w.format, w.isa.0) {
            (WeightFormat::F32 | WeightFormat::F16, _) => Self::F32,
            #[cfg(target_arch = "x86_64")]
            (WeightFormat::Bf16, IsaKind::Avx512Bf16) => Self::Bf16Pair,
            (WeightFormat::Bf16, _) => Self::WidenedPair,
            #[cfg(target_arch = "x86_64")]
            (WeightFormat::Int8 { group }, path) if path.has_vnni() => Self::Int8 { group, offset: 128 },
            (WeightFormat::Int8 { group }, _) => Self::Int16 { group, offset: 128 },
            (WeightFormat::Int4 { group }, _) => Self::Int8 { group, offset: 8 },
        }
    }

    /// Returns the words per row and step.
    fn words(self) -> usize {
        match self {
            Self::F32 | Self::Bf16Pair => 1,
            Self::WidenedPair => 2,
            Self::Int8 { group, .. } => 2 + group / 4,
            Self::Int16 { group, .. } => 2 + group / 2,
        }
    }
}

impl Activations {
    /// Packs x[rows, k] for a GEMM with `w` and returns the words in tile order and the words per row.
    pub(super) fn set(
        &mut self,
        pool: &Pool,
        w: &PackedMatrix,
        x: &[f32],
        tiles: Tiles,
    ) -> (*const u32, usize) {
        let layout = Layout::of(w);
        let row_words = w.steps * layout.words();
        if self.words.len() < tiles.rows * row_words {
            self.words.resize(tiles.rows * row_words, 0);
        }
        let words = SharedPtr(self.words.as_mut_ptr());
        // Small inputs cost less to pack than to distribute.
        let grain = if tiles.rows * w.k < SMALL { tiles.count() } else { 1 };
        pool.split(tiles.count(), grain, &|range| {
            pack(w.isa, PackActivations { x, k: w.k, row_words, layout, tiles, range, words: words.get() });
        });
        (self.words.as_ptr(), row_words)
    }
}

/// Runs `pack` in the fastest kernel that `isa` has for its layout.
fn pack(isa: Isa, pack: PackActivations<'_>) {
    #[cfg(target_arch = "x86_64")]
    match pack.layout {
        Layout::Bf16Pair => {
            // SAFETY: `Layout::of` chooses this layout only for an `Isa` with BF16.
            return unsafe { simd::run_avx512_bf16(PackBf16Pairs(pack)) };
        }
        Layout::Int8 { group, offset } if isa.0.has_vnni() => {
            // SAFETY: an `Isa` with VNNI exists only where it was detected.
            return unsafe { simd::run_avx512_vnni(PackInt8 { pack, group, offset }) };
        }
        _ => {}
    }
    simd::run(isa, pack);
}

/// Kernel that packs the rows of some tiles.
pub(super) struct PackActivations<'a> {
    /// [rows, k]
    pub x: &'a [f32],
    pub k: usize,
    pub row_words: usize,
    layout: Layout,
    pub tiles: Tiles,
    /// Range of tile indices.
    pub range: Range<usize>,
    pub words: *mut u32,
}

impl Kernel for PackActivations<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for index in self.range.clone() {
            let (first, height) = (self.tiles.start(index), self.tiles.height(index));
            let (from, count) = (first * self.row_words, height * self.row_words);
            // SAFETY: each tile is a range of its own within `words`, which holds `row_words` for every row.
            let tile = unsafe { std::slice::from_raw_parts_mut(self.words.add(from), count) };
            // Rows alternate by chunks, so that the written part of the tile stays in the first-level cache.
            let chunk = match self.layout {
                Layout::Int8 { group, .. } | Layout::Int16 { group, .. } => group,
                _ => PACK_CHUNK,
            };
            for at in (0..self.k).step_by(chunk) {
                let step = match self.layout {
                    Layout::F32 => at,
                    Layout::WidenedPair | Layout::Bf16Pair => at / 2,
                    Layout::Int8 { .. } | Layout::Int16 { .. } => at / chunk,
                };
                let tile = &mut tile[step * self.layout.words() * height..];
                for i in 0..height {
                    let row = &self.x[(first + i) * self.k..(first + i + 1) * self.k];
                    let elements = &row[at..self.k.min(at + chunk)];
                    // SAFETY: the caller guarantees `S`'s instruction set.
                    unsafe {
                        match self.layout {
                            Layout::Int8 { group, offset } => {
                                quantize::<S, 1>(elements, group, offset, tile, i, height);
                            }
                            Layout::Int16 { group, offset } => {
                                quantize::<S, 2>(elements, group, offset, tile, i, height);
                            }
                            Layout::WidenedPair => scatter_pairs(elements, tile, i, height),
                            Layout::F32 => scatter(elements, tile, i, height),
                            Layout::Bf16Pair => unreachable!("bf16 pairs have a kernel of their own"),
                        }
                    }
                }
            }
        }
    }
}

/// Scatters elements of row `i` of `height` into its tile, which begins with the first of them.
#[inline(always)]
fn scatter(elements: &[f32], tile: &mut [u32], i: usize, height: usize) {
    for (step, x) in tile.chunks_exact_mut(height).zip(elements) {
        step[i] = x.to_bits();
    }
}

/// Rounds up to [`PACK_CHUNK`] elements of row `i` of `height` to bf16 and scatters the pairs into its tile.
#[inline(always)]
fn scatter_pairs(elements: &[f32], tile: &mut [u32], i: usize, height: usize) {
    // Rounded contiguously, which vectorises, and then scattered.
    let mut words = [0u32; PACK_CHUNK];
    for (word, x) in words.iter_mut().zip(elements) {
        *word = bf16_value(bf16_bits(*x)).to_bits();
    }
    let (pairs, _) = words.as_chunks::<2>();
    for (step, pair) in tile.chunks_exact_mut(2 * height).zip(&pairs[..elements.len().div_ceil(2)]) {
        step[2 * i..2 * i + 2].copy_from_slice(pair);
    }
}

/// Quantises a group of row `i` of `height` into `tile`, from the group's step on; four elements take `WORDS`
/// words.
///
/// # Safety
/// The machine supports `S`'s instruction set.
#[inline(always)]
unsafe fn quantize<S: Simd, const WORDS: usize>(
    elements: &[f32],
    group: usize,
    offset: i32,
    tile: &mut [u32],
    i: usize,
    height: usize,
) {
    let step = &mut tile[..(2 + group / 4 * WORDS) * height];
    // SAFETY: the caller guarantees `S`'s instruction set.
    let largest = unsafe { largest::<S>(elements) };
    let (scale, inverse) = scale(largest);
    // Adding 1.5 * 2^23 rounds to an integer, ties to even, whose low byte is that of the bits.
    let mut quants = [0u8; GROUP_MAX];
    let mut sum = 0i32;
    for (quant, x) in quants.iter_mut().zip(elements) {
        *quant = (x * inverse + 12_582_912.0).to_bits() as u8;
        sum += i32::from(*quant as i8);
    }
    // Quants beyond the row are 0.
    let fours = step[2 * height..].chunks_exact_mut(WORDS * height);
    for (to, quants) in fours.zip(quants.chunks_exact(4)) {
        let four = u32::from_le_bytes([quants[0], quants[1], quants[2], quants[3]]);
        if WORDS == 1 {
            to[i] = four;
        } else {
            to[2 * i] = halves(four);
            to[2 * i + 1] = halves(four >> 8);
        }
    }
    step[i] = (-offset * sum) as u32;
    step[height + i] = scale.to_bits();
}

/// Returns the largest magnitude; NaN if an element is infinite or NaN.
///
/// # Safety
/// The machine supports `S`'s instruction set.
#[inline(always)]
unsafe fn largest<S: Simd>(elements: &[f32]) -> f32 {
    // SAFETY: the caller guarantees `S`'s instruction set; whole vectors are loaded only from whole chunks.
    unsafe {
        let zero = S::splat(0.0);
        // x * 0 is NaN exactly for infinities and NaN, which a maximum may drop.
        let (mut maximum, mut broken) = (zero, zero);
        let mut vectors = elements.chunks_exact(S::LANES);
        for vector in &mut vectors {
            let x = S::load(vector.as_ptr());
            maximum = S::max(S::max(x, S::sub(zero, x)), maximum);
            broken = S::fma(x, zero, broken);
        }
        let rest = vectors.remainder();
        let x = load_part::<S>(rest.as_ptr(), rest.len(), 0.0);
        S::largest(S::max(S::max(x, S::sub(zero, x)), maximum)) + S::sum(S::fma(x, zero, broken))
    }
}

/// Sign-extends the first and third of four bytes to 16 bits each.
#[inline(always)]
fn halves(four: u32) -> u32 {
    u32::from(four as i8 as u16) | u32::from((four >> 16) as i8 as u16) << 16
}

/// Returns the int8 scale of a group whose largest magnitude is `largest`, and its inverse. If `largest` is infinite or NaN, the scale is
/// NaN, so that every result of the group is.
#[inline(always)]
pub(in crate::cpu) fn scale(largest: f32) -> (f32, f32) {
    if largest > 1e-30 && largest < f32::INFINITY {
        (largest / 127.0, 127.0 / largest)
    } else if largest < f32::INFINITY {
        (0.0, 0.0)
    } else {
        (f32::NAN, 0.0)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::Isa;

    /// Checks that every instruction set packs groups to the same words as plain Rust.
    pub(in crate::cpu::gemm) fn check_group(
        x: &[f32],
        k: usize,
        group: usize,
        offset: i32,
        tiles: Tiles,
    ) -> Result<(), TestCaseError> {
        for layout in [Layout::Int8 { group, offset }, Layout::Int16 { group, offset }] {
            let row_words = k.div_ceil(group) * layout.words();
            let words = |isa| {
                let mut words = vec![0xdead_beef; tiles.rows * row_words];
                let range = 0..tiles.count();
                pack(
                    isa,
                    PackActivations { x, k, row_words, layout, tiles, range, words: words.as_mut_ptr() },
                );
                words
            };
            let plain = words(Isa::PORTABLE);
            for isa in Isa::tested() {
                prop_assert!(words(isa) == plain, "{}", isa.name());
            }
        }
        Ok(())
    }
}

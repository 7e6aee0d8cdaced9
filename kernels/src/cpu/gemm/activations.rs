use std::ops::Range;

use super::super::matrix::{GROUP_MAX, PackedMatrix, Shared, WeightFormat};
use super::super::pool::Pool;
use super::super::simd::{self, Kernel, Simd, load_part};
use super::Tiles;
#[cfg(target_arch = "x86_64")]
use super::{bytes::Bytes, pairs::Pairs};
use crate::cpu::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::cpu::isa::Path;
use crate::dtype::{bf16_bits, bf16_value};

/// Activations brought into tile order at a time; even, as bf16 goes in pairs.
const PACK_CHUNK: usize = 256;

/// Numbers below which a second thread does not pay.
const SMALL: usize = 1 << 15;

/// The left-hand side of a product in the order in which tiles read it; a buffer to reuse.
///
/// Rows are grouped in tiles; a tile holds, step after step, the numbers of its rows for that step. For bf16
/// weights they are rounded to bf16, for integers to 8 bits by group: then a step begins with what a group's sums
/// start from and what they are multiplied with.
#[derive(Default)]
pub struct Activations {
    words: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// f32, one k to a step.
    Single,
    /// Two f32 that are bf16 numbers.
    Pair,
    /// Two bf16 in one word, the first in the lower half.
    Packed,
    /// A group of signed bytes, four in a word. `offset` is what weights were raised by to be unsigned.
    Group { group: usize, offset: i32 },
    /// The same in 16 bits each: of four the first and the third in a word, then the second and the fourth.
    Halves { group: usize, offset: i32 },
}

impl Layout {
    pub(super) fn of(w: &PackedMatrix) -> Self {
        match (w.format, w.isa.0) {
            (WeightFormat::F32 | WeightFormat::F16, _) => Self::Single,
            #[cfg(target_arch = "x86_64")]
            (WeightFormat::Bf16, Path::Avx512Bf16) => Self::Packed,
            (WeightFormat::Bf16, _) => Self::Pair,
            #[cfg(target_arch = "x86_64")]
            (WeightFormat::Int8 { group }, path) if path.has_vnni() => Self::Group { group, offset: 128 },
            (WeightFormat::Int8 { group }, _) => Self::Halves { group, offset: 128 },
            (WeightFormat::Int4 { group }, _) => Self::Group { group, offset: 8 },
        }
    }

    /// Words of one row in one step.
    fn words(self) -> usize {
        match self {
            Self::Single | Self::Packed => 1,
            Self::Pair => 2,
            Self::Group { group, .. } => 2 + group / 4,
            Self::Halves { group, .. } => 2 + group / 2,
        }
    }
}

impl Activations {
    /// Takes over x[rows, k] for a product with `w`; the words in tile order, and words of a row.
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
        let words = Shared(self.words.as_mut_ptr());
        // Below some size handing out the work costs more than doing it.
        let grain = if tiles.rows * w.k < SMALL { tiles.count() } else { 1 };
        pool.split(tiles.count(), grain, &|range| {
            pack(w.isa, Pack { x, k: w.k, row_words, layout, tiles, range, words: words.get() });
        });
        (self.words.as_ptr(), row_words)
    }
}

/// Runs `pack` in the best form that `isa` has for its layout.
fn pack(isa: Isa, pack: Pack<'_>) {
    #[cfg(target_arch = "x86_64")]
    match pack.layout {
        Layout::Packed => {
            // SAFETY: only an `Isa` with BF16 has this layout.
            return unsafe { simd::run_avx512_bf16(Pairs(pack)) };
        }
        Layout::Group { group, offset } if isa.0.has_vnni() => {
            // SAFETY: this `Isa` has VNNI.
            return unsafe { simd::run_avx512_vnni(Bytes { pack, group, offset }) };
        }
        _ => {}
    }
    simd::run(isa, pack);
}

/// Brings the rows of some tiles into tile order.
pub(super) struct Pack<'a> {
    /// [rows, k]
    pub x: &'a [f32],
    pub k: usize,
    pub row_words: usize,
    layout: Layout,
    pub tiles: Tiles,
    /// Of tiles.
    pub range: Range<usize>,
    pub words: *mut u32,
}

impl Kernel for Pack<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for index in self.range.clone() {
            let (first, height) = (self.tiles.start(index), self.tiles.height(index));
            let (from, count) = (first * self.row_words, height * self.row_words);
            // SAFETY: each tile is a range of its own within `words`, which holds `row_words` for every row.
            let tile = unsafe { std::slice::from_raw_parts_mut(self.words.add(from), count) };
            // Rows take turns, so that the part of the tile that they write stays in the first-level cache.
            let chunk = match self.layout {
                Layout::Group { group, .. } | Layout::Halves { group, .. } => group,
                _ => PACK_CHUNK,
            };
            for at in (0..self.k).step_by(chunk) {
                let step = match self.layout {
                    Layout::Single => at,
                    Layout::Pair | Layout::Packed => at / 2,
                    Layout::Group { .. } | Layout::Halves { .. } => at / chunk,
                };
                let tile = &mut tile[step * self.layout.words() * height..];
                for i in 0..height {
                    let row = &self.x[(first + i) * self.k..(first + i + 1) * self.k];
                    let numbers = &row[at..self.k.min(at + chunk)];
                    // SAFETY: passed on to the caller.
                    unsafe {
                        match self.layout {
                            Layout::Group { group, offset } => {
                                quantize::<S, 1>(numbers, group, offset, tile, i, height);
                            }
                            Layout::Halves { group, offset } => {
                                quantize::<S, 2>(numbers, group, offset, tile, i, height);
                            }
                            Layout::Pair => spread_pairs(numbers, tile, i, height),
                            Layout::Single => spread(numbers, tile, i, height),
                            Layout::Packed => unreachable!("pairs in a word have a way of their own"),
                        }
                    }
                }
            }
        }
    }
}

/// Puts numbers of a row, the `i`th of `height`, into its tile, which begins with the first of them.
#[inline(always)]
fn spread(numbers: &[f32], tile: &mut [u32], i: usize, height: usize) {
    for (step, x) in tile.chunks_exact_mut(height).zip(numbers) {
        step[i] = x.to_bits();
    }
}

/// The same as bf16 numbers, by pairs; up to [`PACK_CHUNK`] numbers.
#[inline(always)]
fn spread_pairs(numbers: &[f32], tile: &mut [u32], i: usize, height: usize) {
    // They are rounded side by side, which vectorises, and then spread.
    let mut words = [0u32; PACK_CHUNK];
    for (word, x) in words.iter_mut().zip(numbers) {
        *word = bf16_value(bf16_bits(*x)).to_bits();
    }
    let (pairs, _) = words.as_chunks::<2>();
    for (step, pair) in tile.chunks_exact_mut(2 * height).zip(&pairs[..numbers.len().div_ceil(2)]) {
        step[2 * i..2 * i + 2].copy_from_slice(pair);
    }
}

/// Quantises a group of a row, the `i`th of `height`, into its tile, which begins with the group's step; with `WORDS` words for four
/// numbers.
///
/// # Safety
/// The machine has `S`'s instruction set.
#[inline(always)]
unsafe fn quantize<S: Simd, const WORDS: usize>(
    numbers: &[f32],
    group: usize,
    offset: i32,
    tile: &mut [u32],
    i: usize,
    height: usize,
) {
    let step = &mut tile[..(2 + group / 4 * WORDS) * height];
    // SAFETY: passed on to the caller.
    let largest = unsafe { largest::<S>(numbers) };
    let (scale, inverse) = scale(largest);
    // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves its lowest byte in that of the bits.
    let mut quants = [0u8; GROUP_MAX];
    let mut sum = 0i32;
    for (quant, x) in quants.iter_mut().zip(numbers) {
        *quant = (x * inverse + 12_582_912.0).to_bits() as u8;
        sum += i32::from(*quant as i8);
    }
    // Beyond the row they are 0.
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

/// The largest magnitude; what is not a number counts as 0.
///
/// # Safety
/// The machine has `S`'s instruction set.
#[inline(always)]
unsafe fn largest<S: Simd>(numbers: &[f32]) -> f32 {
    // SAFETY: passed on to the caller; vectors are loaded where they are whole.
    unsafe {
        let zero = S::splat(0.0);
        let mut most = zero;
        let mut vectors = numbers.chunks_exact(S::LANES);
        for vector in &mut vectors {
            let x = S::load(vector.as_ptr());
            // The second operand is what a comparison with NaN gives.
            most = S::max(S::max(x, S::sub(zero, x)), most);
        }
        let rest = vectors.remainder();
        let x = load_part::<S>(rest.as_ptr(), rest.len(), 0.0);
        S::largest(S::max(S::max(x, S::sub(zero, x)), most))
    }
}

/// The first and the third of four signed bytes in 16 bits each.
#[inline(always)]
fn halves(four: u32) -> u32 {
    u32::from(four as i8 as u16) | u32::from((four >> 16) as i8 as u16) << 16
}

/// What one step of bytes that share a scale is worth if the largest of their numbers is this, and the inverse.
#[inline(always)]
pub(in crate::cpu) fn scale(largest: f32) -> (f32, f32) {
    // What is not finite has no scale; the products of such rows mean nothing anyway.
    if largest > 1e-30 && largest < f32::INFINITY { (largest / 127.0, 127.0 / largest) } else { (0.0, 0.0) }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::Isa;

    /// Every way that this machine has to pack groups gives the words that plain Rust gives.
    pub(in crate::cpu::gemm) fn check_group(
        x: &[f32],
        k: usize,
        group: usize,
        offset: i32,
        tiles: Tiles,
    ) -> Result<(), TestCaseError> {
        for layout in [Layout::Group { group, offset }, Layout::Halves { group, offset }] {
            let row_words = k.div_ceil(group) * layout.words();
            let words = |isa| {
                let mut words = vec![0xdead_beef; tiles.rows * row_words];
                let range = 0..tiles.count();
                pack(isa, Pack { x, k, row_words, layout, tiles, range, words: words.as_mut_ptr() });
                words
            };
            let plain = words(Isa::PORTABLE);
            for isa in Isa::available() {
                prop_assert!(words(isa) == plain, "{}", isa.name());
            }
        }
        Ok(())
    }
}

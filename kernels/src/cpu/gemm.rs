//! Products y[rows, n] = x[rows, k] W[n, k]^T.
//!
//! Every output element is one chain of additions in ascending k, held in an f32 lane (for bf16: in ascending pairs
//! of k). Tiles, cache blocks and threads only decide when a chain is advanced, never its order: a chain parked
//! in `y` between cache blocks loses nothing, as it is an f32 either way. Hence the same bits for any number of rows.

use std::ops::Range;

use super::isa::Path;
use super::matrix::{PackedMatrix, Shared, panel_columns};
use super::pool::Pool;
use super::simd::{self, Kernel, Simd, load_part, store_part};
use crate::dtype::{Dtype, bf16_bits, bf16_value};

mod format;

use format::{Bf16, F16, F32, Format};

/// Rows whose packed activations for one cache block stay in the second-level cache.
const ROW_BLOCK: usize = 512;
/// Bytes of a panel's cache block: within the first-level cache, beside a tile's activations.
const PANEL_BLOCK_BYTES: usize = 32 << 10;

/// Least bytes of weights, times passes over them, that are worth a unit of their own.
const UNIT_BYTES: usize = 64 << 10;

/// Activations brought into tile order at a time; even, as bf16 goes in pairs.
const PACK_CHUNK: usize = 256;

/// What a product's sums start from.
#[derive(Debug, Clone, Copy)]
pub enum Start<'a> {
    /// Nothing: `y` is overwritten.
    Zero,
    /// A bias; [n].
    Bias(&'a [f32]),
    /// What is in `y`: the product is added to it.
    Output,
}

/// The left-hand side of a product in the order in which tiles read it; a buffer to reuse.
///
/// Rows are grouped in tiles; a tile holds, step after step, the numbers of its rows for that step. For bf16
/// weights they are rounded to bf16.
#[derive(Default)]
pub struct Activations {
    words: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// f32, one k to a step.
    Single,
    /// Two f32 that are bf16 numbers.
    Pair,
    /// Two bf16 in one word, the first in the lower half.
    Packed,
}

impl Layout {
    fn of(w: &PackedMatrix) -> Self {
        match (w.dtype, w.isa.0) {
            (Dtype::F32 | Dtype::F16, _) => Self::Single,
            #[cfg(target_arch = "x86_64")]
            (Dtype::Bf16, Path::Avx512Bf16) => Self::Packed,
            (Dtype::Bf16, _) => Self::Pair,
        }
    }

    /// Words of one row in one step.
    fn words(self) -> usize {
        if self == Self::Pair { 2 } else { 1 }
    }
}

/// Computes y[rows, n] from x[rows, k] and W[n, k], see [the module](self).
///
/// # Panics
/// If `x`, `y` or a bias do not have the shapes given.
pub fn gemm(
    pool: &Pool,
    w: &PackedMatrix,
    x: &[f32],
    rows: usize,
    start: Start<'_>,
    y: &mut [f32],
    scratch: &mut Activations,
) {
    assert_eq!(x.len(), rows * w.k, "x is not [rows, k]");
    assert_eq!(y.len(), rows * w.n, "y is not [rows, n]");
    if let Start::Bias(bias) = start {
        assert_eq!(bias.len(), w.n, "the bias is not [n]");
    }
    if rows == 0 {
        return;
    }
    let layout = Layout::of(w);
    let row_words = w.steps * layout.words();
    if scratch.words.len() < rows * row_words {
        scratch.words.resize(rows * row_words, 0);
    }
    let words = Shared(scratch.words.as_mut_ptr());
    let tile_rows = tile_rows(w);
    // Below some size handing out the work costs more than doing it.
    let grain = if rows * w.k < 1 << 15 { rows } else { tile_rows };
    pool.split(rows, grain.next_multiple_of(tile_rows), &|range| {
        simd::run(
            w.isa,
            Pack { x, k: w.k, steps: w.steps, layout, rows: range, tile_rows, words: words.get() },
        );
    });
    let words = scratch.words.as_ptr();
    let y = Shared(y.as_mut_ptr());
    let x = Shared(words.cast_mut());
    // Nor is it worth while to hand out less than some microseconds of work; a few panels go together in any case,
    // as tiles of one or two rows span several.
    let panel_work = w.panel_bytes * rows.div_ceil(8);
    let grain = (UNIT_BYTES / panel_work).max(4);
    pool.split(w.n.div_ceil(panel_columns(w.isa)), grain, &|panels| {
        let job = Multiply { w, x: x.get(), row_words, rows, start, y: y.get(), panels };
        #[cfg(target_arch = "x86_64")]
        if layout == Layout::Packed {
            // SAFETY: the layout is chosen only for an `Isa` with BF16.
            return unsafe { simd::run_avx512_bf16(NativeBf16(job)) };
        }
        simd::run(w.isa, job);
    });
}

fn tile_rows(w: &PackedMatrix) -> usize {
    match w.isa.0 {
        Path::Portable => simd::Portable::TILE_ROWS,
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => simd::Avx2::TILE_ROWS,
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 | Path::Avx512Bf16 => simd::Avx512::TILE_ROWS,
    }
}

/// Brings the rows of `rows` into tile order; `rows.start` is a multiple of `tile_rows`.
struct Pack<'a> {
    x: &'a [f32],
    k: usize,
    steps: usize,
    layout: Layout,
    rows: Range<usize>,
    tile_rows: usize,
    words: *mut u32,
}

impl Kernel for Pack<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let row_words = self.steps * self.layout.words();
        for first in self.rows.clone().step_by(self.tile_rows) {
            let height = self.tile_rows.min(self.rows.end - first);
            // SAFETY: each tile is a range of its own within `words`, which holds `row_words` for every row.
            let tile = unsafe {
                std::slice::from_raw_parts_mut(self.words.add(first * row_words), height * row_words)
            };
            for i in 0..height {
                let row = &self.x[(first + i) * self.k..(first + i + 1) * self.k];
                // Numbers are brought into shape side by side, which vectorises, and then spread.
                let mut words = [0u32; PACK_CHUNK];
                let per_step = self.layout.words();
                for (chunk, numbers) in row.chunks(PACK_CHUNK).enumerate() {
                    let (steps, step) = match self.layout {
                        Layout::Single => {
                            for (word, x) in words.iter_mut().zip(numbers) {
                                *word = x.to_bits();
                            }
                            (numbers.len(), chunk * PACK_CHUNK)
                        }
                        Layout::Pair => {
                            words[numbers.len() - 1 + numbers.len() % 2] = 0;
                            for (word, x) in words.iter_mut().zip(numbers) {
                                *word = bf16_value(bf16_bits(*x)).to_bits();
                            }
                            (numbers.len().div_ceil(2), chunk * PACK_CHUNK / 2)
                        }
                        Layout::Packed => {
                            for (word, pair) in words.iter_mut().zip(numbers.chunks_exact(2)) {
                                *word = u32::from(bf16_bits(pair[0])) | u32::from(bf16_bits(pair[1])) << 16;
                            }
                            if let [last] = numbers.chunks_exact(2).remainder() {
                                words[numbers.len() / 2] = u32::from(bf16_bits(*last));
                            }
                            (numbers.len().div_ceil(2), chunk * PACK_CHUNK / 2)
                        }
                    };
                    let tile = &mut tile[(step * height + i) * per_step..];
                    if per_step == 1 {
                        for (s, word) in words[..steps].iter().enumerate() {
                            tile[s * height] = *word;
                        }
                    } else {
                        for (s, pair) in words[..2 * steps].chunks_exact(2).enumerate() {
                            tile[s * height * 2] = pair[0];
                            tile[s * height * 2 + 1] = pair[1];
                        }
                    }
                }
            }
        }
    }
}

/// The product for some panels.
struct Multiply<'a> {
    w: &'a PackedMatrix,
    x: *const u32,
    row_words: usize,
    rows: usize,
    start: Start<'a>,
    y: *mut f32,
    panels: Range<usize>,
}

impl Kernel for Multiply<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.w.dtype {
                Dtype::F32 => self.all::<S, F32>(),
                Dtype::Bf16 => self.all::<S, Bf16>(),
                Dtype::F16 => self.all::<S, F16>(),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
struct NativeBf16<'a>(Multiply<'a>);

#[cfg(target_arch = "x86_64")]
impl Kernel for NativeBf16<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on to the caller.
        unsafe { self.0.all::<simd::Avx512, format::NativeBf16>() }
    }
}

/// Where a tile lies.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    panel: usize,
    /// First step and number of steps.
    step: usize,
    steps: usize,
}

impl Multiply<'_> {
    #[inline(always)]
    unsafe fn all<S: Simd, F: Format<S>>(&self) {
        let step_bytes = F::BYTES * 2 * S::LANES;
        for row in (0..self.rows).step_by(ROW_BLOCK) {
            let rows = ROW_BLOCK.min(self.rows - row);
            // A single tile reads each panel once, so there is nothing to keep in a cache.
            let block = if rows <= S::TILE_ROWS { self.w.steps } else { PANEL_BLOCK_BYTES / step_bytes };
            for step in (0..self.w.steps).step_by(block) {
                let steps = block.min(self.w.steps - step);
                // SAFETY: rows, panels and steps are within the matrices.
                unsafe { self.block::<S, F>(row, rows, step, steps) };
            }
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd, F: Format<S>>(&self, first: usize, rows: usize, step: usize, steps: usize) {
        let mut panel = self.panels.start;
        // SAFETY: tiles are within the rows and panels given.
        unsafe {
            // With few rows the chains of one panel are too few to hide the latency of an addition.
            if rows == 1 {
                while panel + 4 <= self.panels.end {
                    self.tile::<S, F, 1, 4>(Place { row: first, panel, step, steps });
                    panel += 4;
                }
            } else if rows == 2 {
                while panel + 2 <= self.panels.end {
                    self.tile::<S, F, 2, 2>(Place { row: first, panel, step, steps });
                    panel += 2;
                }
            }
            for panel in panel..self.panels.end {
                let mut row = first;
                while row < first + rows {
                    let height = S::TILE_ROWS.min(first + rows - row);
                    let place = Place { row, panel, step, steps };
                    match height {
                        1 => self.tile::<S, F, 1, 1>(place),
                        2 => self.tile::<S, F, 2, 1>(place),
                        3 if S::TILE_ROWS >= 3 => self.tile::<S, F, 3, 1>(place),
                        4 if S::TILE_ROWS >= 4 => self.tile::<S, F, 4, 1>(place),
                        5 if S::TILE_ROWS >= 5 => self.tile::<S, F, 5, 1>(place),
                        6 if S::TILE_ROWS >= 6 => self.tile::<S, F, 6, 1>(place),
                        7 if S::TILE_ROWS >= 7 => self.tile::<S, F, 7, 1>(place),
                        8 if S::TILE_ROWS >= 8 => self.tile::<S, F, 8, 1>(place),
                        _ => unreachable!("tiles have up to 8 rows"),
                    }
                    row += height;
                }
            }
        }
    }

    /// Advances the chains of M rows and P panels by some steps.
    #[inline(always)]
    unsafe fn tile<S: Simd, F: Format<S>, const M: usize, const P: usize>(&self, place: Place) {
        let Place { row, panel, step, steps } = place;
        let columns = 2 * S::LANES;
        let vector_bytes = F::BYTES * S::LANES;
        // SAFETY: panel, step and row are within the packed operands, see `all`; `load_sums` and `store_sums` stay
        // within `y`, of which this thread alone touches its panels' columns.
        unsafe {
            let w = self.w.data.as_ptr().add(panel * self.w.panel_bytes + step * 2 * vector_bytes);
            let x = self.x.add(row * self.row_words + step * M * F::WORDS);
            let mut sums = [[[S::splat(0.0); 2]; P]; M];
            for m in 0..M {
                for p in 0..P {
                    sums[m][p] = self.load_sums::<S>(row + m, (panel + p) * columns, step);
                }
            }
            for s in 0..steps {
                for p in 0..P {
                    let at = w.add(p * self.w.panel_bytes + s * 2 * vector_bytes);
                    let (w0, w1) = (F::weights(at), F::weights(at.add(vector_bytes)));
                    for m in 0..M {
                        let xs = F::activations(x.add((s * M + m) * F::WORDS));
                        sums[m][p][0] = F::add_product(sums[m][p][0], xs, w0);
                        sums[m][p][1] = F::add_product(sums[m][p][1], xs, w1);
                    }
                }
            }
            for m in 0..M {
                for p in 0..P {
                    self.store_sums::<S>(row + m, (panel + p) * columns, sums[m][p]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn load_sums<S: Simd>(&self, row: usize, column: usize, step: usize) -> [S::V; 2] {
        // SAFETY: whole vectors are read only where all their columns exist.
        unsafe {
            let from = match self.start {
                _ if step > 0 => self.y.cast_const().add(row * self.w.n + column),
                Start::Zero => return [S::splat(0.0); 2],
                Start::Bias(bias) => bias.as_ptr().add(column),
                Start::Output => self.y.cast_const().add(row * self.w.n + column),
            };
            if column + 2 * S::LANES <= self.w.n {
                return [S::load(from), S::load(from.add(S::LANES))];
            }
            let lanes = self.w.n - column;
            let second = lanes.saturating_sub(S::LANES);
            [load_part::<S>(from, lanes, 0.0), load_part::<S>(from.add(lanes - second), second, 0.0)]
        }
    }

    #[inline(always)]
    unsafe fn store_sums<S: Simd>(&self, row: usize, column: usize, sums: [S::V; 2]) {
        // SAFETY: whole vectors are written only where all their columns exist.
        unsafe {
            let to = self.y.add(row * self.w.n + column);
            if column + 2 * S::LANES <= self.w.n {
                S::store(to, sums[0]);
                return S::store(to.add(S::LANES), sums[1]);
            }
            let lanes = self.w.n - column;
            let second = lanes.saturating_sub(S::LANES);
            store_part::<S>(to, lanes, sums[0]);
            store_part::<S>(to.add(lanes - second), second, sums[1]);
        }
    }
}

#[cfg(test)]
mod tests;

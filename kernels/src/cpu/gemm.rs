//! Products y[rows, n] = x[rows, k] W[n, k]^T.
//!
//! Every output element is one chain of additions in ascending k, held in an f32 lane (for bf16: in ascending pairs
//! of k; for integers: in ascending groups, whose own sums are exact). Tiles, cache blocks and threads only decide
//! when a chain is advanced, never its order: a chain parked in `y` between cache blocks loses nothing, as it is an
//! f32 either way. Hence the same bits for any number of rows.

use std::ops::Range;

use super::isa::Path;
use super::matrix::{PackedMatrix, Shared, WeightFormat, panel_columns};
use super::pool::Pool;
use super::simd::{self, Kernel, Simd, load_part, store_part};

mod activations;
mod floats;
mod integers;

pub use activations::Activations;
use floats::{Bf16, F16, F32, Floats};
use integers::{Integers, Widened};

/// Rows whose packed activations for one cache block stay in the second-level cache.
const ROW_BLOCK: usize = 256;
/// Most bytes of a panel's cache block: it stays in the second-level cache beside a block's activations, and long
/// enough for the cost of loading and storing a tile's sums not to show.
const PANEL_BLOCK_BYTES: usize = 64 << 10;
/// Up to so many tiles over a panel it is read whole: from memory for the first, from the second-level cache for
/// the others.
const WHOLE_TILES: usize = 4;

/// Least bytes of weights, times passes over them, that are worth a second thread.
const SHARED_BYTES: usize = 64 << 10;
/// Least bytes of weights, times passes over them, that are worth a unit of their own.
const UNIT_BYTES: usize = 256 << 10;
/// Units for each thread, with few rows and with many: enough to take over the share of one that is late, and with few
/// rows long enough to read memory in one go.
const UNITS_PER_THREAD: (usize, usize) = (4, 16);

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
    let tiles = Tiles::new(rows, tile_rows(w));
    let (x, row_words) = scratch.set(pool, w, x, tiles);
    let (x, y) = (Shared(x.cast_mut()), Shared(y.as_mut_ptr()));
    let panels = w.n.div_ceil(panel_columns(w.isa));
    // It is not worth while to hand out less than some microseconds of work.
    let work = w.panel_bytes * tiles.count() * panels;
    let threads = pool.threads().min(panels);
    let most = if tiles.count() <= WHOLE_TILES { UNITS_PER_THREAD.0 } else { UNITS_PER_THREAD.1 };
    let least = if work < SHARED_BYTES { 1 } else { threads };
    let units = (work / UNIT_BYTES).clamp(least, threads * most).min(panels);
    let units = if units > threads { units / threads * threads } else { units };
    pool.each(units, &|unit| {
        let panels = panels * unit / units..panels * (unit + 1) / units;
        let job = Multiply { w, x: x.get(), row_words, tiles, start, y: y.get(), panels };
        #[cfg(target_arch = "x86_64")]
        if w.isa.0 == Path::Avx512Bf16 && !matches!(w.format, WeightFormat::F32 | WeightFormat::F16) {
            // SAFETY: this `Isa` has BF16 and VNNI.
            return unsafe { simd::run_avx512_bf16(Native(job)) };
        }
        simd::run(w.isa, job);
    });
}

/// Rows of the tallest tile.
fn tile_rows(w: &PackedMatrix) -> usize {
    let rows = match w.isa.0 {
        Path::Portable => simd::Portable::TILE_ROWS,
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => simd::Avx2::TILE_ROWS,
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 | Path::Avx512Bf16 => simd::Avx512::TILE_ROWS,
    };
    if w.format.group().is_some() { rows / 2 } else { rows }
}

/// Rows cut into tiles of nearly the same height, as many as the tallest tile needs.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    rows: usize,
    count: usize,
}

impl Tiles {
    fn new(rows: usize, tallest: usize) -> Self {
        Self { rows, count: rows.div_ceil(tallest) }
    }

    fn count(self) -> usize {
        self.count
    }

    fn start(self, tile: usize) -> usize {
        self.rows * tile / self.count
    }

    fn height(self, tile: usize) -> usize {
        self.start(tile + 1) - self.start(tile)
    }
}

/// The product for some panels.
struct Multiply<'a> {
    w: &'a PackedMatrix,
    x: *const u32,
    row_words: usize,
    tiles: Tiles,
    start: Start<'a>,
    y: *mut f32,
    panels: Range<usize>,
}

impl Kernel for Multiply<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.w.format {
                WeightFormat::F32 => self.all::<S, Floats<F32>>(),
                WeightFormat::Bf16 => self.all::<S, Floats<Bf16>>(),
                WeightFormat::F16 => self.all::<S, Floats<F16>>(),
                WeightFormat::Int8 { .. } => self.all::<S, Integers<Widened, false>>(),
                WeightFormat::Int4 { .. } => self.all::<S, Integers<Widened, true>>(),
            }
        }
    }
}

/// With the instructions for dot products of bf16 numbers and of bytes.
#[cfg(target_arch = "x86_64")]
struct Native<'a>(Multiply<'a>);

#[cfg(target_arch = "x86_64")]
impl Kernel for Native<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.0.w.format {
                WeightFormat::F32 | WeightFormat::F16 => self.0.run::<simd::Avx512>(),
                WeightFormat::Bf16 => self.0.all::<simd::Avx512, Floats<floats::NativeBf16>>(),
                WeightFormat::Int8 { .. } => self.0.all::<simd::Avx512, Integers<integers::Vnni, false>>(),
                WeightFormat::Int4 { .. } => self.0.all::<simd::Avx512, Integers<integers::Vnni, true>>(),
            }
        }
    }
}

/// A way to store weights and to multiply them.
///
/// # Safety
/// As [`Simd`], and the place is within the operands.
trait Format<S: Simd> {
    /// Rows of the tallest tile, see [`tile_rows`].
    const ROWS: usize;

    /// Advances the chains of M rows and P panels by some steps.
    unsafe fn tile<const M: usize, const P: usize>(job: &Multiply<'_>, place: Place);
}

/// Where a tile lies.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    panel: usize,
    /// From one of the tile's panels to the next.
    gap: usize,
    /// First step and number of steps.
    step: usize,
    steps: usize,
    /// How many bytes ahead of what is read lies what will be read next and should be asked for; 0: nothing.
    ahead: usize,
}

impl Multiply<'_> {
    #[inline(always)]
    unsafe fn all<S: Simd, F: Format<S>>(&self) {
        let tiles = self.tiles.count();
        let block_tiles = ROW_BLOCK / F::ROWS;
        let step_bytes = self.w.panel_bytes / self.w.steps;
        for first in (0..tiles).step_by(block_tiles) {
            let last = tiles.min(first + block_tiles);
            let blocks = match last - first {
                ..=WHOLE_TILES => 1,
                _ => self.w.panel_bytes.div_ceil(PANEL_BLOCK_BYTES.max(step_bytes)),
            };
            let block = self.w.steps.div_ceil(blocks);
            for step in (0..self.w.steps).step_by(block) {
                let steps = block.min(self.w.steps - step);
                // SAFETY: tiles, panels and steps are within the matrices.
                unsafe { self.block::<S, F>(first..last, step, steps) };
            }
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd, F: Format<S>>(&self, tiles: Range<usize>, step: usize, steps: usize) {
        let Range { start, end } = self.panels;
        // SAFETY: tiles are within the rows and panels given.
        unsafe {
            // With few rows the chains of one panel are too few to hide the latency of an addition.
            let rows = self.tiles.start(tiles.end) - self.tiles.start(tiles.start);
            let row = self.tiles.start(tiles.start);
            let abreast = match rows {
                1 => 4,
                2 if F::ROWS >= 2 => 2,
                _ => 1,
            };
            if abreast > 1 {
                // Each of the panels abreast goes on in memory where the one before it ended, so that a thread reads as
                // many long streams.
                let long = (end - start) / abreast;
                for i in 0..long {
                    let place = Place { row, panel: start + i, gap: long, step, steps, ahead: 0 };
                    match rows {
                        1 => F::tile::<1, 4>(self, place),
                        _ => F::tile::<2, 2>(self, place),
                    }
                }
                let panel = start + long * abreast;
                let place = Place { row, panel, gap: 1, step, steps, ahead: 0 };
                match (rows, end - panel) {
                    (_, 0) => {}
                    (1, 3) => F::tile::<1, 3>(self, place),
                    (1, 2) => F::tile::<1, 2>(self, place),
                    (1, _) => F::tile::<1, 1>(self, place),
                    (_, _) => F::tile::<2, 1>(self, place),
                }
                return;
            }
            for panel in start..end {
                // While one panel is multiplied, the next one is fetched.
                let ahead = if panel + 1 < end { self.w.panel_bytes } else { 0 };
                self.column::<S, F>(tiles.clone(), Place { row, panel, gap: 1, step, steps, ahead });
            }
        }
    }

    /// All tiles over one panel.
    #[inline(always)]
    unsafe fn column<S: Simd, F: Format<S>>(&self, tiles: Range<usize>, at: Place) {
        let first = tiles.start;
        for tile in tiles {
            let ahead = if tile == first { at.ahead } else { 0 };
            let place = Place { row: self.tiles.start(tile), ahead, ..at };
            // SAFETY: passed on to the caller.
            unsafe {
                match self.tiles.height(tile) {
                    1 => F::tile::<1, 1>(self, place),
                    2 if F::ROWS >= 2 => F::tile::<2, 1>(self, place),
                    3 if F::ROWS >= 3 => F::tile::<3, 1>(self, place),
                    4 if F::ROWS >= 4 => F::tile::<4, 1>(self, place),
                    5 if F::ROWS >= 5 => F::tile::<5, 1>(self, place),
                    6 if F::ROWS >= 6 => F::tile::<6, 1>(self, place),
                    7 if F::ROWS >= 7 => F::tile::<7, 1>(self, place),
                    8 if F::ROWS >= 8 => F::tile::<8, 1>(self, place),
                    9 if F::ROWS >= 9 => F::tile::<9, 1>(self, place),
                    10 if F::ROWS >= 10 => F::tile::<10, 1>(self, place),
                    11 if F::ROWS >= 11 => F::tile::<11, 1>(self, place),
                    12 if F::ROWS >= 12 => F::tile::<12, 1>(self, place),
                    _ => unreachable!("tiles are at most as tall as the tallest"),
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

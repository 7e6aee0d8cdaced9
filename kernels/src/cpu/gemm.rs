//! Products y[rows, n] = x[rows, k] W[n, k]^T.
//!
//! Every output element is one chain of additions in ascending k, held in an f32 lane (for bf16: in ascending pairs
//! of k; for integers: in ascending groups, whose own sums are exact). Tiles, cache blocks and threads only decide
//! when a chain is advanced, never its order: a chain parked in `y` between cache blocks loses nothing, as it is an
//! f32 either way. Hence the same bits for any number of rows.

use std::hint::black_box;
use std::marker::PhantomData;
use std::ops::Range;

use super::isa::Path;
use super::matrix::{PackedMatrix, Shared, WeightFormat, panel_columns};
use super::pool::Pool;
use super::simd::{self, Kernel, Part, Simd, load_part, store_part};

mod activations;
#[cfg(target_arch = "x86_64")]
mod bytes;
mod floats;
mod gated;
mod integers;
#[cfg(target_arch = "x86_64")]
mod pairs;

pub use activations::Activations;
pub(super) use activations::scale;
use floats::{Bf16, F16, F32, Floats};
pub use gated::gemm_swiglu;
#[cfg(target_arch = "x86_64")]
use integers::Vnni;
use integers::{Halves, Integers, Nibbles};

/// Most rows that go over the panels together.
const ROW_BLOCK: usize = 256;
/// Most bytes of their packed activations: half of a second-level cache of 1 MiB, for they are read once for each panel. The fewer
/// rows, the more often weights are read; even from memory they come faster than some dozens of rows are multiplied with them.
const ACTIVATION_BYTES: usize = 512 << 10;
/// Most bytes of a panel's cache block, which tile after tile reads. With the largest ones not all fits into the second-level cache;
/// to load and store sums more often, for blocks that do, cost more (measured with 1 MiB of it and 32 MiB behind it).
const PANEL_BLOCK_BYTES: usize = 384 << 10;
/// Most tiles over a panel that ask for what is read next, each for a part.
const ASKING_TILES: usize = 8;
/// Up to so many tiles count as few rows.
const FEW_TILES: usize = 4;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Least bytes of weights, times passes over them, that are worth a second thread.
const SHARED_BYTES: usize = 64 << 10;
/// Least bytes of weights, times passes over them, that are worth a unit of their own, with few rows and with many: with few
/// rows, memory is read in long goes, of which each takes its time to begin.
const UNIT_BYTES: (usize, usize) = (1 << 20, 256 << 10);
/// Units for each thread, with few rows and with many: enough to take over the share of one that is late.
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
    multiply(pool, w, x, rows, start, y.as_mut_ptr(), Writes::Sums, scratch);
}

/// What becomes of a product's sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writes {
    /// They are written; y is [rows, n].
    Sums,
    /// Those of the first half of the columns, gated, times those of the second; y is [rows, n / 2].
    Gated,
}

/// Hands the panels out to the threads. `x` and `y` have the shapes that `writes` says.
fn multiply(
    pool: &Pool,
    w: &PackedMatrix,
    x: &[f32],
    rows: usize,
    start: Start<'_>,
    y: *mut f32,
    writes: Writes,
    scratch: &mut Activations,
) {
    let tiles = Tiles::new(rows, tile_rows(w));
    let (x, row_words) = scratch.set(pool, w, x, tiles);
    let (x, y) = (Shared(x.cast_mut()), Shared(y));
    let all = w.n.div_ceil(panel_columns(w.isa));
    let panels = if writes == Writes::Gated { all / 2 } else { all };
    // It is not worth while to hand out less than some microseconds of work.
    let work = w.panel_bytes * tiles.count() * all;
    let threads = pool.threads().min(panels);
    let (most, unit_bytes) = match tiles.count() {
        ..=FEW_TILES => (UNITS_PER_THREAD.0, UNIT_BYTES.0),
        _ => (UNITS_PER_THREAD.1, UNIT_BYTES.1),
    };
    let least = if work < SHARED_BYTES { 1 } else { threads };
    let units = (work / unit_bytes).clamp(least, threads * most).min(panels);
    let units = if units > threads { units / threads * threads } else { units };
    pool.each(units, &|unit| {
        let panels = panels * unit / units..panels * (unit + 1) / units;
        let goes_on = !(unit + 1).is_multiple_of((units / threads).max(1));
        let (x, y) = (x.get(), y.get());
        let job = Multiply { w, x, row_words, tiles, start, y, stride: w.n, panels, goes_on, writes };
        #[cfg(target_arch = "x86_64")]
        match w.format {
            WeightFormat::Bf16 if w.isa.0 == Path::Avx512Bf16 => {
                // SAFETY: this `Isa` has BF16.
                return unsafe { simd::run_avx512_bf16(NativeBf16(job)) };
            }
            WeightFormat::Int8 { .. } | WeightFormat::Int4 { .. } if w.isa.0.has_vnni() => {
                // SAFETY: this `Isa` has VNNI.
                return unsafe { simd::run_avx512_vnni(NativeBytes(job)) };
            }
            _ => {}
        }
        simd::run(w.isa, job);
    });
}

/// Rows of the tallest tile.
fn tile_rows(w: &PackedMatrix) -> usize {
    let (floats, integers) = match w.isa.0 {
        Path::Portable => (simd::Portable::TILE_ROWS, simd::Portable::INTEGER_ROWS),
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => (simd::Avx2::TILE_ROWS, simd::Avx2::INTEGER_ROWS),
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 | Path::Avx512Vnni | Path::Avx512Bf16 => {
            (simd::Avx512::TILE_ROWS, simd::Avx512::INTEGER_ROWS)
        }
    };
    if w.format.group().is_some() { integers } else { floats }
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
    /// Numbers from one row of y to the next.
    stride: usize,
    panels: Range<usize>,
    /// Whether this thread probably goes on with the panels that follow.
    goes_on: bool,
    writes: Writes,
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
                WeightFormat::Int8 { .. } => self.all::<S, Integers<Halves>>(),
                WeightFormat::Int4 { .. } => self.all::<S, Integers<Nibbles>>(),
            }
        }
    }
}

/// With the instruction for dot products of bf16 numbers.
#[cfg(target_arch = "x86_64")]
struct NativeBf16<'a>(Multiply<'a>);

#[cfg(target_arch = "x86_64")]
impl Kernel for NativeBf16<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on to the caller.
        unsafe { self.0.all::<simd::Avx512, Floats<floats::NativeBf16>>() }
    }
}

/// Integers, with the instruction for dot products of bytes.
#[cfg(target_arch = "x86_64")]
struct NativeBytes<'a>(Multiply<'a>);

#[cfg(target_arch = "x86_64")]
impl Kernel for NativeBytes<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.0.w.format {
                WeightFormat::Int4 { .. } => self.0.all::<simd::Avx512, Integers<Vnni<true>>>(),
                _ => self.0.all::<simd::Avx512, Integers<Vnni<false>>>(),
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

/// The work of [`Format::tile`].
struct Tile<'a, F, const M: usize, const P: usize> {
    job: &'a Multiply<'a>,
    place: Place,
    format: PhantomData<F>,
}

impl<S: Simd, F: Format<S>, const M: usize, const P: usize> Part<S> for Tile<'_, F, M, P> {
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: passed on to the caller.
        unsafe { F::tile::<M, P>(self.job, self.place) }
    }
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
    /// What will be read next and should be asked for meanwhile; none where streams are read that the processor foresees.
    next: Next,
}

/// Weights that are read soon.
#[derive(Clone, Copy)]
struct Next {
    from: *const u8,
    bytes: usize,
}

impl Next {
    const NONE: Self = Self { from: std::ptr::null(), bytes: 0 };

    /// The `index`th of `count` parts of nearly the same size.
    #[inline(always)]
    fn part(self, index: usize, count: usize) -> Self {
        let (start, end) = (self.bytes * index / count, self.bytes * (index + 1) / count);
        Self { from: self.from.wrapping_add(start), bytes: end - start }
    }
}

/// Some steps of one panel for all tiles of a block of rows.
#[derive(Clone, Copy)]
struct Turn {
    panel: usize,
    step: usize,
    steps: usize,
    /// 1 for a panel of ups, see [`Writes::Gated`].
    part: usize,
}

/// The order in which a block of rows goes over the panels of a job and their cache blocks.
#[derive(Clone, Copy)]
struct Turns {
    panels: usize,
    /// Steps of a cache block, and how many of them a panel has.
    block: usize,
    blocks: usize,
    gated: bool,
}

impl Turns {
    fn new(job: &Multiply<'_>) -> Self {
        let step_bytes = job.w.panel_bytes / job.w.steps;
        let block = job.w.steps.div_ceil(job.w.panel_bytes.div_ceil(PANEL_BLOCK_BYTES.max(step_bytes)));
        let blocks = job.w.steps.div_ceil(block);
        Self { panels: job.panels.len(), block, blocks, gated: job.writes == Writes::Gated }
    }

    fn count(&self) -> usize {
        self.panels * self.blocks * if self.gated { 2 } else { 1 }
    }

    /// Rows whose activations have room, see [`ACTIVATION_BYTES`].
    fn rows(&self, job: &Multiply<'_>) -> usize {
        let words = if self.gated { job.row_words } else { job.row_words.div_ceil(self.blocks) };
        (ACTIVATION_BYTES / (size_of::<u32>() * words)).clamp(1, ROW_BLOCK)
    }

    /// One cache block of all panels after the other, so that activations stay. Where gates and ups meet, all cache blocks of a
    /// pair of panels instead, so that their sums do.
    fn get(&self, job: &Multiply<'_>, index: usize) -> Turn {
        let (panel, block, part) = match self.gated {
            false => (index % self.panels, index / self.panels, 0),
            true => (index / (2 * self.blocks), index / 2 % self.blocks, index % 2),
        };
        let step = block * self.block;
        let panel = job.panels.start + panel + part * (job.w.n / 2).div_ceil(panel_columns(job.w.isa));
        Turn { panel, step, steps: self.block.min(job.w.steps - step), part }
    }

    /// The first turn of whoever goes on with the panels after those of this job.
    fn beyond(&self, job: &Multiply<'_>) -> Turn {
        Turn { panel: job.panels.end, step: 0, steps: self.block, part: 0 }
    }
}

impl Multiply<'_> {
    #[inline(always)]
    unsafe fn all<S: Simd, F: Format<S>>(&self) {
        let tiles = self.tiles.count();
        let turns = Turns::new(self);
        let row_blocks = tiles.div_ceil((turns.rows(self) / F::ROWS).max(1));
        let mut room = gated::Room::new();
        for block in 0..row_blocks {
            // Nearly as many tiles in one block of rows as in the next.
            let (first, last) = (tiles * block / row_blocks, tiles * (block + 1) / row_blocks);
            let (row, end) = (self.tiles.start(first), self.tiles.start(last));
            // SAFETY: tiles, panels and steps are within the matrices; a block has at most `ROW_BLOCK` rows.
            unsafe {
                if end - row <= F::ROWS.min(2) && self.writes == Writes::Sums {
                    self.abreast::<S, F>(row, end - row);
                    continue;
                }
                for index in 0..turns.count() {
                    let turn = turns.get(self, index);
                    let (y, stride) = match self.writes {
                        Writes::Sums => (self.y, self.w.n),
                        Writes::Gated => room.sums::<S>(turn.part, row, turn.panel),
                    };
                    // While one panel is multiplied, the next one is fetched.
                    let next = match () {
                        _ if index + 1 < turns.count() => self.weights(turns.get(self, index + 1)),
                        _ if last < tiles => self.weights(turns.get(self, 0)),
                        _ if self.goes_on => self.weights(turns.beyond(self)),
                        _ => Next::NONE,
                    };
                    let Turn { panel, step, steps, .. } = turn;
                    let job = Multiply { y, stride, panels: panel..panel + 1, ..*self };
                    let place = Place { row, panel, gap: 1, step, steps, next };
                    job.column::<S, F>(first..last, place);
                    if self.writes == Writes::Gated && turn.part == 1 && step + steps == self.w.steps {
                        room.join::<S>(self, row..end, panel);
                    }
                }
            }
        }
    }

    /// The weights of a turn.
    fn weights(&self, turn: Turn) -> Next {
        let step_bytes = self.w.panel_bytes / self.w.steps;
        let at = turn.panel * self.w.panel_bytes + turn.step * step_bytes;
        Next { from: self.w.data.as_ptr().wrapping_add(at), bytes: turn.steps * step_bytes }
    }

    /// One or two rows: the chains of one panel are too few to hide the latency of an addition. Each of the panels
    /// abreast goes on in memory where the one before it ended, so that a thread reads as many long streams.
    #[inline(always)]
    unsafe fn abreast<S: Simd, F: Format<S>>(&self, row: usize, rows: usize) {
        let Range { start, end } = self.panels;
        let abreast = 4 / rows;
        // Opaque, as the compiler would otherwise divide anew for every vector that is read.
        let long = black_box((end - start) / abreast);
        let steps = self.w.steps;
        // SAFETY: rows and panels are within the matrices.
        unsafe {
            for i in 0..long {
                let place = Place { row, panel: start + i, gap: long, step: 0, steps, next: Next::NONE };
                match rows {
                    1 => self.tile::<S, F, 1, 4>(place),
                    _ => self.tile::<S, F, 2, 2>(place),
                }
            }
            let panel = start + long * abreast;
            let place = Place { row, panel, gap: 1, step: 0, steps, next: Next::NONE };
            match (rows, end - panel) {
                (_, 0) => {}
                (1, 3) => self.tile::<S, F, 1, 3>(place),
                (1, 2) => self.tile::<S, F, 1, 2>(place),
                (1, _) => self.tile::<S, F, 1, 1>(place),
                (_, _) => self.tile::<S, F, 2, 1>(place),
            }
        }
    }

    /// All tiles over one panel.
    #[inline(always)]
    unsafe fn column<S: Simd, F: Format<S>>(&self, tiles: Range<usize>, at: Place) {
        let Range { start: first, end } = tiles;
        for tile in first..end {
            // Each tile asks for a part of what comes next, so that memory is at work all the time; of many the first ones,
            // as asking for less than a line would cost and gain nothing.
            let asking = (end - first).min(ASKING_TILES);
            let next = if tile - first < asking { at.next.part(tile - first, asking) } else { Next::NONE };
            // Sums lie far apart, and while one tile is multiplied those of the next one can come.
            if tile + 1 < end {
                // SAFETY: passed on to the caller.
                unsafe { self.prefetch_sums::<S>(tile + 1, at.panel) };
            }
            let place = Place { row: self.tiles.start(tile), next, ..at };
            // SAFETY: passed on to the caller.
            unsafe {
                match self.tiles.height(tile) {
                    1 => self.tile::<S, F, 1, 1>(place),
                    2 if F::ROWS >= 2 => self.tile::<S, F, 2, 1>(place),
                    3 if F::ROWS >= 3 => self.tile::<S, F, 3, 1>(place),
                    4 if F::ROWS >= 4 => self.tile::<S, F, 4, 1>(place),
                    5 if F::ROWS >= 5 => self.tile::<S, F, 5, 1>(place),
                    6 if F::ROWS >= 6 => self.tile::<S, F, 6, 1>(place),
                    7 if F::ROWS >= 7 => self.tile::<S, F, 7, 1>(place),
                    8 if F::ROWS >= 8 => self.tile::<S, F, 8, 1>(place),
                    9 if F::ROWS >= 9 => self.tile::<S, F, 9, 1>(place),
                    10 if F::ROWS >= 10 => self.tile::<S, F, 10, 1>(place),
                    11 if F::ROWS >= 11 => self.tile::<S, F, 11, 1>(place),
                    12 if F::ROWS >= 12 => self.tile::<S, F, 12, 1>(place),
                    _ => unreachable!("tiles are at most as tall as the tallest"),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, F: Format<S>, const M: usize, const P: usize>(&self, place: Place) {
        // SAFETY: passed on to the caller.
        unsafe { S::run_part(Tile::<F, M, P> { job: self, place, format: PhantomData }) }
    }

    #[inline(always)]
    unsafe fn prefetch_sums<S: Simd>(&self, tile: usize, panel: usize) {
        let columns = 2 * S::LANES;
        let row = self.tiles.start(tile);
        for row in row..row + self.tiles.height(tile) {
            let from = self.y.wrapping_add(row * self.stride + panel * columns).cast::<u8>().cast_const();
            for line in (0..4 * columns).step_by(LINE) {
                // SAFETY: passed on to the caller; asking never faults.
                unsafe { S::prefetch(from.wrapping_add(line)) };
            }
        }
    }

    /// What the sums of M rows and P panels, `gap` apart, are before `step`.
    #[inline(always)]
    unsafe fn load_sums<S: Simd, const M: usize, const P: usize>(
        &self,
        place: &Place,
    ) -> [[[S::V; 2]; P]; M] {
        let columns = 2 * S::LANES;
        // SAFETY: whole vectors are read only where all their columns exist.
        unsafe {
            let mut sums = [[[S::splat(0.0); 2]; P]; M];
            let (from, stride) = match self.start {
                Start::Zero if place.step == 0 => return sums,
                Start::Bias(bias) if place.step == 0 => (bias.as_ptr(), 0),
                _ => (self.y.cast_const().wrapping_add(place.row * self.stride), self.stride),
            };
            for p in 0..P {
                let column = (place.panel + p * place.gap) * columns;
                let from = from.wrapping_add(column);
                if column + columns <= self.w.n {
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let from = from.wrapping_add(m * stride);
                        sums[p] = [S::load(from), S::load(from.add(S::LANES))];
                    }
                } else {
                    let (first, second) = self.lanes::<S>(column);
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let from = from.wrapping_add(m * stride);
                        let next = from.wrapping_add(first);
                        sums[p] = [load_part::<S>(from, first, 0.0), load_part::<S>(next, second, 0.0)];
                    }
                }
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn store_sums<S: Simd, const M: usize, const P: usize>(
        &self,
        place: &Place,
        sums: &[[[S::V; 2]; P]; M],
    ) {
        let columns = 2 * S::LANES;
        // SAFETY: whole vectors are written only where all their columns exist.
        unsafe {
            for p in 0..P {
                let column = (place.panel + p * place.gap) * columns;
                let to = self.y.wrapping_add(place.row * self.stride + column);
                if column + columns <= self.w.n {
                    for (m, sums) in sums.iter().enumerate() {
                        let to = to.wrapping_add(m * self.stride);
                        S::store(to, sums[p][0]);
                        S::store(to.add(S::LANES), sums[p][1]);
                    }
                } else {
                    let (first, second) = self.lanes::<S>(column);
                    for (m, sums) in sums.iter().enumerate() {
                        let to = to.wrapping_add(m * self.stride);
                        store_part::<S>(to, first, sums[p][0]);
                        store_part::<S>(to.wrapping_add(first), second, sums[p][1]);
                    }
                }
            }
        }
    }

    /// Columns that exist of the two vectors from `column` on.
    #[inline(always)]
    fn lanes<S: Simd>(&self, column: usize) -> (usize, usize) {
        let lanes = self.w.n - column;
        let first = lanes.min(S::LANES);
        (first, (lanes - first).min(S::LANES))
    }
}

#[cfg(test)]
mod tests;

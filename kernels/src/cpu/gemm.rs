//! GEMM with packed weights: y[rows, n] = x[rows, k] W[n, k]^T.
//!
//! Every output element is one chain of additions in ascending k, held in an f32 lane (for bf16: in ascending
//! pairs of k; for integers: in ascending groups, whose own sums are exact). Tiles, cache blocks and threads
//! only decide when a chain advances, never its order: spilling an accumulator to `y` between cache blocks is
//! exact, as both are f32. Hence the same bits for any number of rows (batch invariance).

use std::hint::black_box;
use std::marker::PhantomData;
use std::ops::Range;

use super::isa::IsaKind;
use super::matrix::{PackedMatrix, SharedPtr, WeightFormat, panel_columns};
use super::pool::Pool;
use super::rows::Activation;
use super::simd::{self, Kernel, Simd, SubKernel, load_part, store_part};

mod activations;
mod floats;
mod gated;
mod integers;
#[cfg(target_arch = "x86_64")]
mod pack_bf16;
#[cfg(target_arch = "x86_64")]
mod pack_int8;

pub use activations::Activations;
pub(super) use activations::scale;
use floats::{Bf16, F16, F32, FloatKernel};
pub use gated::gemm_gated;
#[cfg(target_arch = "x86_64")]
use integers::Vnni;
use integers::{Int4Widened, Int8Widened, IntegerKernel};

/// Maximum rows that pass over the panels together.
const ROW_BLOCK: usize = 256;
/// Maximum bytes of their packed activations: half of a 1 MiB second-level cache, as they are read once per
/// panel. Fewer rows mean that weights are read more often, but even from memory these arrive faster than
/// some dozens of rows are multiplied with them.
const ACTIVATION_BYTES: usize = 512 << 10;
/// Maximum bytes of a panel's cache block, which every tile reads. The largest exceed a second-level cache,
/// but spilling accumulators more often cost more (measured with 1 MiB L2, 32 MiB L3).
const PANEL_BLOCK_BYTES: usize = 384 << 10;
/// Maximum tiles over a panel that share the prefetch of the next cache block.
const PREFETCH_TILES: usize = 8;
/// Largest number of tiles that counts as few rows.
const FEW_TILES: usize = 4;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Minimum weight bytes, times passes over them, that justify a second thread.
const SHARED_BYTES: usize = 64 << 10;
/// Minimum weight bytes, times passes over them, of a work unit, for few and for many rows: with few rows,
/// memory is read in long streams, each of which takes time to ramp up.
const UNIT_BYTES: (usize, usize) = (1 << 20, 256 << 10);
/// Work units per thread, for few and for many rows: enough to balance a late thread.
const UNITS_PER_THREAD: (usize, usize) = (4, 16);

/// Initial value of the accumulators.
#[derive(Debug, Clone, Copy)]
pub enum AccumulatorInit<'a> {
    /// Zero: `y` is overwritten.
    Zero,
    /// A bias; [n].
    Bias(&'a [f32]),
    /// The contents of `y`, to which the product is added.
    Output,
}

/// Computes y[rows, n] = x[rows, k] W[n, k]^T; see [the module](self).
///
/// # Panics
/// If `x`, `y` or the bias do not have the given shapes.
pub fn gemm(
    pool: &Pool,
    w: &PackedMatrix,
    x: &[f32],
    rows: usize,
    start: AccumulatorInit<'_>,
    y: &mut [f32],
    scratch: &mut Activations,
) {
    assert_eq!(x.len(), rows * w.k, "x is not [rows, k]");
    assert_eq!(y.len(), rows * w.n, "y is not [rows, n]");
    if let AccumulatorInit::Bias(bias) = start {
        assert_eq!(bias.len(), w.n, "the bias is not [n]");
    }
    if rows == 0 {
        return;
    }
    gemm_with_epilogue(pool, w, x, rows, start, y.as_mut_ptr(), Epilogue::Store, scratch);
}

/// Operation applied to the accumulators after the reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Epilogue {
    /// Store; y is [rows, n].
    Store,
    /// The activation of the first half of the columns (gates) times the second (ups); y is [rows, n / 2].
    Gate(Activation),
}

/// Packs the activations and distributes the panels over the threads; `epilogue` determines y's shape.
fn gemm_with_epilogue(
    pool: &Pool,
    w: &PackedMatrix,
    x: &[f32],
    rows: usize,
    start: AccumulatorInit<'_>,
    y: *mut f32,
    epilogue: Epilogue,
    scratch: &mut Activations,
) {
    let tiles = Tiles::new(rows, tile_rows(w));
    let (x, row_words) = scratch.set(pool, w, x, tiles);
    let (x, y) = (SharedPtr(x.cast_mut()), SharedPtr(y));
    let all = w.n.div_ceil(panel_columns(w.isa));
    let panels = if matches!(epilogue, Epilogue::Gate(_)) { all / 2 } else { all };
    // Less than some microseconds of work is not worth distributing.
    let work = w.panel_bytes * tiles.count() * all;
    let threads = pool.threads().min(panels);
    let (units_per_thread, unit_bytes) = match tiles.count() {
        ..=FEW_TILES => (UNITS_PER_THREAD.0, UNIT_BYTES.0),
        _ => (UNITS_PER_THREAD.1, UNIT_BYTES.1),
    };
    let units_min = if work < SHARED_BYTES { 1 } else { threads };
    let units = (work / unit_bytes).clamp(units_min, threads * units_per_thread).min(panels);
    let units = if units > threads { units / threads * threads } else { units };
    pool.each(units, &|unit| {
        let panels = panels * unit / units..panels * (unit + 1) / units;
        let prefetch_next = !(unit + 1).is_multiple_of((units / threads).max(1));
        let (x, y) = (x.get(), y.get());
        let job = GemmTask { w, x, row_words, tiles, start, y, stride: w.n, panels, prefetch_next, epilogue };
        #[cfg(target_arch = "x86_64")]
        match w.format {
            WeightFormat::Bf16 if w.isa.0 == IsaKind::Avx512Bf16 => {
                // SAFETY: an `Isa` of this kind exists only where BF16 was detected.
                return unsafe { simd::run_avx512_bf16(Bf16DotTask(job)) };
            }
            WeightFormat::Int8 { .. } | WeightFormat::Int4 { .. } if w.isa.0.has_vnni() => {
                // SAFETY: an `Isa` with VNNI exists only where it was detected.
                return unsafe { simd::run_avx512_vnni(VnniTask(job)) };
            }
            _ => {}
        }
        simd::run(w.isa, job);
    });
}

/// Returns the rows of the tallest tile.
fn tile_rows(w: &PackedMatrix) -> usize {
    let (floats, integers) = match w.isa.0 {
        IsaKind::Portable => (simd::Portable::TILE_ROWS, simd::Portable::INTEGER_ROWS),
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx2 => (simd::Avx2::TILE_ROWS, simd::Avx2::INTEGER_ROWS),
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx512 | IsaKind::Avx512Vnni | IsaKind::Avx512Bf16 => {
            (simd::Avx512::TILE_ROWS, simd::Avx512::INTEGER_ROWS)
        }
    };
    if w.format.group().is_some() { integers } else { floats }
}

/// Partition of rows into tiles of nearly equal height, as few as the tallest tile allows.
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

/// GEMM of all rows with some panels, one work unit.
struct GemmTask<'a> {
    w: &'a PackedMatrix,
    x: *const u32,
    row_words: usize,
    tiles: Tiles,
    start: AccumulatorInit<'a>,
    y: *mut f32,
    /// Elements between rows of y.
    stride: usize,
    panels: Range<usize>,
    /// Whether this thread probably continues with the following panels, which are then prefetched.
    prefetch_next: bool,
    epilogue: Epilogue,
}

impl Kernel for GemmTask<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller guarantees `S`'s instruction set; `gemm_with_epilogue` checked the shapes.
        unsafe {
            match self.w.format {
                WeightFormat::F32 => self.run_all::<S, FloatKernel<F32>>(),
                WeightFormat::Bf16 => self.run_all::<S, FloatKernel<Bf16>>(),
                WeightFormat::F16 => self.run_all::<S, FloatKernel<F16>>(),
                WeightFormat::Int8 { .. } => self.run_all::<S, IntegerKernel<Int8Widened>>(),
                WeightFormat::Int4 { .. } => self.run_all::<S, IntegerKernel<Int4Widened>>(),
            }
        }
    }
}

/// GEMM with the bf16 dot product instruction.
#[cfg(target_arch = "x86_64")]
struct Bf16DotTask<'a>(GemmTask<'a>);

#[cfg(target_arch = "x86_64")]
impl Kernel for Bf16DotTask<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: runs only through `run_avx512_bf16`, whose caller guarantees BF16.
        unsafe { self.0.run_all::<simd::Avx512, FloatKernel<floats::Bf16Dot>>() }
    }
}

/// Integer GEMM with the int8 dot product instruction.
#[cfg(target_arch = "x86_64")]
struct VnniTask<'a>(GemmTask<'a>);

#[cfg(target_arch = "x86_64")]
impl Kernel for VnniTask<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: runs only through `run_avx512_vnni`, whose caller guarantees VNNI.
        unsafe {
            match self.0.w.format {
                WeightFormat::Int4 { .. } => self.0.run_all::<simd::Avx512, IntegerKernel<Vnni<true>>>(),
                _ => self.0.run_all::<simd::Avx512, IntegerKernel<Vnni<false>>>(),
            }
        }
    }
}

/// GEMM microkernel for a weight format.
///
/// # Safety
/// The caller guarantees `S`'s instruction set, and that the tile lies within the operands.
trait MicroKernel<S: Simd> {
    /// Rows of the tallest tile, see [`tile_rows`].
    const ROWS: usize;

    /// Advances the accumulators of M rows and P panels by `position.steps` steps.
    unsafe fn tile<const M: usize, const P: usize>(job: &GemmTask<'_>, position: TilePosition);
}

/// Subkernel that runs [`MicroKernel::tile`].
struct MicroKernelCall<'a, F, const M: usize, const P: usize> {
    job: &'a GemmTask<'a>,
    position: TilePosition,
    format: PhantomData<F>,
}

impl<S: Simd, F: MicroKernel<S>, const M: usize, const P: usize> SubKernel<S>
    for MicroKernelCall<'_, F, M, P>
{
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: the caller of `GemmTask::tile` guarantees the instruction set and the tile's bounds.
        unsafe { F::tile::<M, P>(self.job, self.position) }
    }
}

/// Position of a tile within the operands.
#[derive(Clone, Copy)]
struct TilePosition {
    row: usize,
    panel: usize,
    /// Panels between neighbouring panels of the tile.
    gap: usize,
    /// First step and number of steps.
    step: usize,
    steps: usize,
    /// Weights to prefetch meanwhile; none where the hardware prefetcher recognises the streams.
    next: PrefetchRange,
}

/// Range of weights to prefetch.
#[derive(Clone, Copy)]
struct PrefetchRange {
    from: *const u8,
    bytes: usize,
}

impl PrefetchRange {
    const NONE: Self = Self { from: std::ptr::null(), bytes: 0 };

    /// Returns part `index` of `count` parts of nearly equal size.
    #[inline(always)]
    fn part(self, index: usize, count: usize) -> Self {
        let (start, end) = (self.bytes * index / count, self.bytes * (index + 1) / count);
        Self { from: self.from.wrapping_add(start), bytes: end - start }
    }
}

/// Range of steps of one panel, computed for all tiles of a row block while it stays in cache.
#[derive(Clone, Copy)]
struct CacheBlock {
    panel: usize,
    step: usize,
    steps: usize,
    /// 1 for a panel of ups, see [`Epilogue::Gate`].
    part: usize,
}

/// Order in which a row block passes over the cache blocks of a task's panels.
#[derive(Clone, Copy)]
struct CacheBlockOrder {
    panels: usize,
    /// Steps of a cache block, and cache blocks per panel.
    block: usize,
    blocks: usize,
    gated: bool,
}

impl CacheBlockOrder {
    fn new(job: &GemmTask<'_>) -> Self {
        let step_bytes = job.w.panel_bytes / job.w.steps;
        let block = job.w.steps.div_ceil(job.w.panel_bytes.div_ceil(PANEL_BLOCK_BYTES.max(step_bytes)));
        let blocks = job.w.steps.div_ceil(block);
        Self { panels: job.panels.len(), block, blocks, gated: matches!(job.epilogue, Epilogue::Gate(_)) }
    }

    fn count(&self) -> usize {
        self.panels * self.blocks * if self.gated { 2 } else { 1 }
    }

    /// Returns the rows whose activations fit, see [`ACTIVATION_BYTES`].
    fn rows(&self, job: &GemmTask<'_>) -> usize {
        let words = if self.gated { job.row_words } else { job.row_words.div_ceil(self.blocks) };
        (ACTIVATION_BYTES / (size_of::<u32>() * words)).clamp(1, ROW_BLOCK)
    }

    /// Returns cache block `index`. Panels are the inner loop, so that activations stay in cache; with SwiGLU
    /// cache blocks are, so that the accumulators of a gate and up panel stay.
    fn get(&self, job: &GemmTask<'_>, index: usize) -> CacheBlock {
        let (panel, block, part) = match self.gated {
            false => (index % self.panels, index / self.panels, 0),
            true => (index / (2 * self.blocks), index / 2 % self.blocks, index % 2),
        };
        let step = block * self.block;
        let panel = job.panels.start + panel + part * (job.w.n / 2).div_ceil(panel_columns(job.w.isa));
        CacheBlock { panel, step, steps: self.block.min(job.w.steps - step), part }
    }

    /// Returns the first cache block after this task's panels.
    fn after_task(&self, job: &GemmTask<'_>) -> CacheBlock {
        CacheBlock { panel: job.panels.end, step: 0, steps: self.block, part: 0 }
    }
}

impl GemmTask<'_> {
    #[inline(always)]
    unsafe fn run_all<S: Simd, F: MicroKernel<S>>(&self) {
        let tiles = self.tiles.count();
        let order = CacheBlockOrder::new(self);
        let row_blocks = tiles.div_ceil((order.rows(self) / F::ROWS).max(1));
        let mut gate_up = gated::GateUpSums::new();
        for block in 0..row_blocks {
            // Row blocks have nearly equal numbers of tiles.
            let (first, last) = (tiles * block / row_blocks, tiles * (block + 1) / row_blocks);
            let (row, end) = (self.tiles.start(first), self.tiles.start(last));
            // SAFETY: tiles, panels and steps are within the matrices; a block has at most `ROW_BLOCK` rows.
            unsafe {
                if end - row <= F::ROWS.min(2) && self.epilogue == Epilogue::Store {
                    self.interleave_panels::<S, F>(row, end - row);
                    continue;
                }
                for index in 0..order.count() {
                    let cache_block = order.get(self, index);
                    let (y, stride) = match self.epilogue {
                        Epilogue::Store => (self.y, self.w.n),
                        Epilogue::Gate(_) => gate_up.sums::<S>(cache_block.part, row, cache_block.panel),
                    };
                    // Prefetches the next cache block while this one is multiplied.
                    let next = match () {
                        _ if index + 1 < order.count() => self.weight_range(order.get(self, index + 1)),
                        _ if last < tiles => self.weight_range(order.get(self, 0)),
                        _ if self.prefetch_next => self.weight_range(order.after_task(self)),
                        _ => PrefetchRange::NONE,
                    };
                    let CacheBlock { panel, step, steps, .. } = cache_block;
                    let job = GemmTask { y, stride, panels: panel..panel + 1, ..*self };
                    let position = TilePosition { row, panel, gap: 1, step, steps, next };
                    job.column::<S, F>(first..last, position);
                    if let Epilogue::Gate(activation) = self.epilogue
                        && cache_block.part == 1
                        && step + steps == self.w.steps
                    {
                        gate_up.write::<S>(activation, self, row..end, panel);
                    }
                }
            }
        }
    }

    /// Returns the weights of a cache block.
    fn weight_range(&self, cache_block: CacheBlock) -> PrefetchRange {
        let step_bytes = self.w.panel_bytes / self.w.steps;
        let at = cache_block.panel * self.w.panel_bytes + cache_block.step * step_bytes;
        PrefetchRange { from: self.w.data.as_ptr().wrapping_add(at), bytes: cache_block.steps * step_bytes }
    }

    /// Multiplies one or two rows, for which the accumulators of one panel are too few to hide the latency of
    /// an addition. Interleaved panels lie far apart, so that a thread reads few long streams.
    #[inline(always)]
    unsafe fn interleave_panels<S: Simd, F: MicroKernel<S>>(&self, row: usize, rows: usize) {
        let Range { start, end } = self.panels;
        let interleaved = 4 / rows;
        // Opaque, as the compiler would otherwise repeat the division for every vector loaded.
        let long = black_box((end - start) / interleaved);
        let steps = self.w.steps;
        // SAFETY: rows and panels are within the matrices.
        unsafe {
            for i in 0..long {
                let position = TilePosition {
                    row,
                    panel: start + i,
                    gap: long,
                    step: 0,
                    steps,
                    next: PrefetchRange::NONE,
                };
                match rows {
                    1 => self.tile::<S, F, 1, 4>(position),
                    _ => self.tile::<S, F, 2, 2>(position),
                }
            }
            let panel = start + long * interleaved;
            let position = TilePosition { row, panel, gap: 1, step: 0, steps, next: PrefetchRange::NONE };
            match (rows, end - panel) {
                (_, 0) => {}
                (1, 3) => self.tile::<S, F, 1, 3>(position),
                (1, 2) => self.tile::<S, F, 1, 2>(position),
                (1, _) => self.tile::<S, F, 1, 1>(position),
                (_, _) => self.tile::<S, F, 2, 1>(position),
            }
        }
    }

    /// Multiplies all tiles with one cache block of a panel.
    #[inline(always)]
    unsafe fn column<S: Simd, F: MicroKernel<S>>(&self, tiles: Range<usize>, at: TilePosition) {
        let Range { start: first, end } = tiles;
        for tile in first..end {
            // The first tiles each prefetch a part of the next cache block, so that memory stays busy; not
            // all, as parts below a cache line gain nothing.
            let sharing = (end - first).min(PREFETCH_TILES);
            let next = if tile - first < sharing {
                at.next.part(tile - first, sharing)
            } else {
                PrefetchRange::NONE
            };
            // The next tile's accumulators are far apart in memory, so they are prefetched during this tile.
            if tile + 1 < end {
                // SAFETY: the caller guarantees the instruction set; prefetching never faults.
                unsafe { self.prefetch_sums::<S>(tile + 1, at.panel) };
            }
            let position = TilePosition { row: self.tiles.start(tile), next, ..at };
            // SAFETY: the caller guarantees the instruction set and that the tiles lie within the operands.
            unsafe {
                match self.tiles.height(tile) {
                    1 => self.tile::<S, F, 1, 1>(position),
                    2 if const { F::ROWS >= 2 } => self.tile::<S, F, 2, 1>(position),
                    3 if const { F::ROWS >= 3 } => self.tile::<S, F, 3, 1>(position),
                    4 if const { F::ROWS >= 4 } => self.tile::<S, F, 4, 1>(position),
                    5 if const { F::ROWS >= 5 } => self.tile::<S, F, 5, 1>(position),
                    6 if const { F::ROWS >= 6 } => self.tile::<S, F, 6, 1>(position),
                    7 if const { F::ROWS >= 7 } => self.tile::<S, F, 7, 1>(position),
                    8 if const { F::ROWS >= 8 } => self.tile::<S, F, 8, 1>(position),
                    9 if const { F::ROWS >= 9 } => self.tile::<S, F, 9, 1>(position),
                    10 if const { F::ROWS >= 10 } => self.tile::<S, F, 10, 1>(position),
                    11 if const { F::ROWS >= 11 } => self.tile::<S, F, 11, 1>(position),
                    12 if const { F::ROWS >= 12 } => self.tile::<S, F, 12, 1>(position),
                    _ => unreachable!("tiles are at most as tall as the tallest"),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, F: MicroKernel<S>, const M: usize, const P: usize>(
        &self,
        position: TilePosition,
    ) {
        // SAFETY: the caller guarantees the instruction set and that the tile lies within the operands.
        unsafe { S::run_subkernel(MicroKernelCall::<F, M, P> { job: self, position, format: PhantomData }) }
    }

    #[inline(always)]
    unsafe fn prefetch_sums<S: Simd>(&self, tile: usize, panel: usize) {
        let columns = 2 * S::LANES;
        let row = self.tiles.start(tile);
        for row in row..row + self.tiles.height(tile) {
            let from = self.y.wrapping_add(row * self.stride + panel * columns).cast::<u8>().cast_const();
            for line in (0..4 * columns).step_by(LINE) {
                // SAFETY: the caller guarantees the instruction set; prefetching never faults.
                unsafe { S::prefetch(from.wrapping_add(line)) };
            }
        }
    }

    /// Returns the accumulators of M rows and P panels, `gap` apart, before step `position.step`.
    #[inline(always)]
    unsafe fn load_sums<S: Simd, const M: usize, const P: usize>(
        &self,
        position: &TilePosition,
    ) -> [[[S::V; 2]; P]; M] {
        let columns = 2 * S::LANES;
        // SAFETY: rows and panels are within `y` and the bias; partial vectors are read by lanes.
        unsafe {
            let mut sums = [[[S::splat(0.0); 2]; P]; M];
            let (from, stride) = match self.start {
                AccumulatorInit::Zero if position.step == 0 => return sums,
                AccumulatorInit::Bias(bias) if position.step == 0 => (bias.as_ptr(), 0),
                _ => (self.y.cast_const().wrapping_add(position.row * self.stride), self.stride),
            };
            for p in 0..P {
                let column = (position.panel + p * position.gap) * columns;
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

    /// Writes the accumulators of M rows and P panels back to `y`.
    #[inline(always)]
    unsafe fn store_sums<S: Simd, const M: usize, const P: usize>(
        &self,
        position: &TilePosition,
        sums: &[[[S::V; 2]; P]; M],
    ) {
        let columns = 2 * S::LANES;
        // SAFETY: rows and panels are within `y`; partial vectors are written by lanes.
        unsafe {
            for p in 0..P {
                let column = (position.panel + p * position.gap) * columns;
                let to = self.y.wrapping_add(position.row * self.stride + column);
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

    /// Returns how many columns exist of each of the two vectors from `column` on.
    #[inline(always)]
    fn lanes<S: Simd>(&self, column: usize) -> (usize, usize) {
        let lanes = self.w.n - column;
        let first = lanes.min(S::LANES);
        (first, (lanes - first).min(S::LANES))
    }
}

#[cfg(test)]
mod tests;

//! Attention in f32 with online softmax, for every instruction set; elements are widened on load.
//!
//! For each tile, all queries of a block are processed in turn, several at once, so that keys and values stay
//! in cache. With many queries, a tile is widened once for all.

use std::mem::MaybeUninit;

use super::super::kv::{KvElement, TILE};
use super::super::simd::{Simd, SubKernel};
use super::{AttentionTask, HEAD_DIM_MAX, KvTile, PREFETCH_TILES, window_start};

/// Queries that pass over the keys together.
const BLOCK_QUERIES: usize = 64;
/// Minimum number of queries for which widening a tile once pays off.
const MANY_QUERIES: usize = 8;

const INDEX: [f32; TILE] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// Online softmax state of one query.
#[derive(Clone, Copy)]
struct SoftmaxState<S: Simd, const T: usize> {
    query: *const f32,
    out: *mut f32,
    /// Visible positions: `low..high`.
    low: usize,
    high: usize,
    /// Maximum score so far.
    running_max: f32,
    /// Lane-wise sums of the weights relative to `running_max`.
    total: [S::V; T],
}

/// Buffers for the queries of a block.
struct QueryBlock<S: Simd, const T: usize> {
    states: [MaybeUninit<SoftmaxState<S, T>>; BLOCK_QUERIES],
    /// Weighted sums of the values so far; [queries, value_stride].
    sums: [MaybeUninit<f32>; BLOCK_QUERIES * HEAD_DIM_MAX],
    /// Widened keys [head_dim, TILE] and values [TILE, value_stride] of a tile.
    keys: [MaybeUninit<f32>; HEAD_DIM_MAX * TILE],
    values: [MaybeUninit<f32>; HEAD_DIM_MAX * TILE],
}

/// Subkernel that runs [`AttentionTask::update_tile`].
struct TileUpdate<'a, S: Simd, N, const T: usize, const Q: usize> {
    task: &'a AttentionTask<'a>,
    states: &'a mut [SoftmaxState<S, T>],
    sums: *mut f32,
    tile: KvTile<N>,
    base: usize,
}

impl<S: Simd, N: KvElement, const T: usize, const Q: usize> SubKernel<S> for TileUpdate<'_, S, N, T, Q> {
    #[inline(always)]
    unsafe fn run(self) {
        let Self { task, states, sums, tile, base } = self;
        // SAFETY: the caller of `update_tile_outlined` guarantees the instruction set and valid operands.
        unsafe { task.update_tile::<S, N, T, Q>(states, sums, tile, base) }
    }
}

impl AttentionTask<'_> {
    /// Computes attention for all queries of the task.
    ///
    /// # Safety
    /// The machine supports `S`'s instruction set, and all operands of the task are valid.
    #[inline(always)]
    pub(super) unsafe fn online_softmax<S: Simd, N: KvElement>(&self) {
        // SAFETY: the caller guarantees instruction set and operands; a tile's scores fill 1 or 2 vectors.
        unsafe {
            if S::LANES == TILE {
                self.process_queries::<S, N, 1>()
            } else {
                self.process_queries::<S, N, 2>()
            }
        }
    }

    #[inline(always)]
    unsafe fn process_queries<S: Simd, N: KvElement, const T: usize>(&self) {
        let group = self.shape.heads / self.shape.kv_heads;
        let queries = (self.task.end - self.task.first) as usize * group;
        let mut block = QueryBlock {
            states: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            sums: [const { MaybeUninit::uninit() }; BLOCK_QUERIES * HEAD_DIM_MAX],
            keys: [const { MaybeUninit::uninit() }; HEAD_DIM_MAX * TILE],
            values: [const { MaybeUninit::uninit() }; HEAD_DIM_MAX * TILE],
        };
        for first in (0..queries).step_by(BLOCK_QUERIES) {
            // SAFETY: the caller guarantees the instruction set and operands; the queries belong to the task.
            unsafe { self.process_block::<S, N, T>(&mut block, first, BLOCK_QUERIES.min(queries - first)) };
        }
    }

    #[inline(always)]
    unsafe fn process_block<S: Simd, N: KvElement, const T: usize>(
        &self,
        block: &mut QueryBlock<S, T>,
        first: usize,
        count: usize,
    ) {
        let head_dim = self.shape.head_dim;
        let group = self.shape.heads / self.shape.kv_heads;
        let stride = self.layout.value_stride();
        let states = block.states.as_mut_ptr().cast::<SoftmaxState<S, T>>();
        let sums = block.sums.as_mut_ptr().cast::<f32>();
        let (wide_keys, wide_values) =
            (block.keys.as_mut_ptr().cast::<f32>(), block.values.as_mut_ptr().cast::<f32>());
        let mut gathered = None;
        // SAFETY: rows and heads are within qkv and out; a block has room for its queries; vectors are within
        // tiles, buffers and sums; block tables cover positions before `high`.
        unsafe {
            for i in 0..count {
                let row = self.task.first as usize + (first + i) / group;
                let head = self.kv_head * group + (first + i) % group;
                let high = self.positions[row] as usize + 1;
                states.add(i).write(SoftmaxState {
                    query: self.qkv.add(row * self.shape.width() + head * head_dim),
                    out: self.out.add((row * self.shape.heads + head) * head_dim),
                    low: window_start(high, self.window),
                    high,
                    running_max: f32::NEG_INFINITY,
                    total: [S::splat(0.0); T],
                });
                sums.add(i * stride).write_bytes(0, stride);
            }
            let states = std::slice::from_raw_parts_mut(states, count);
            // Rows ascend, so the first query has the lowest `low` and the last one the highest `high`.
            let (low, high) = (states[0].low, states[count - 1].high);
            let (mut start, mut end) = (0, 0);
            for base in (low / TILE * TILE..high).step_by(TILE) {
                while states[start].high <= base {
                    start += 1;
                }
                while end < count && states[end].low < base + TILE {
                    end += 1;
                }
                let tile = self.tile::<N>(base, high, &mut gathered);
                self.prefetch::<S, N>(base + PREFETCH_TILES * TILE, high);
                let (active, sums) = (&mut states[start..end], sums.add(start * stride));
                if size_of::<N>() < size_of::<f32>() && active.len() >= MANY_QUERIES {
                    widen::<S, N>(tile, head_dim, stride, wide_keys, wide_values);
                    let KvTile { key_scales, value_scales, .. } = tile;
                    let (keys, values) = (wide_keys.cast_const(), wide_values.cast_const());
                    let tile = KvTile { keys, key_stride: TILE, values, key_scales, value_scales };
                    self.update_all::<S, f32, T>(active, sums, tile, base);
                } else {
                    self.update_all::<S, N, T>(active, sums, tile, base);
                }
            }
            for (i, state) in states.iter().enumerate() {
                let all =
                    S::sum(if T == 1 { state.total[0] } else { S::add(state.total[0], state.total[T - 1]) });
                let scale = 1.0 / all;
                for d in 0..head_dim {
                    state.out.add(d).write(sums.add(i * stride + d).read() * scale);
                }
            }
        }
    }

    /// Updates all queries with a tile, several at once.
    #[inline(always)]
    unsafe fn update_all<S: Simd, N: KvElement, const T: usize>(
        &self,
        states: &mut [SoftmaxState<S, T>],
        sums: *mut f32,
        tile: KvTile<N>,
        base: usize,
    ) {
        let (stride, all) = (self.layout.value_stride(), states.len());
        // Batches of nearly equal size.
        let parts = all.div_ceil(S::QUERIES);
        for part in 0..parts {
            let (first, last) = (all * part / parts, all * (part + 1) / parts);
            let states = &mut states[first..last];
            // SAFETY: the caller guarantees the instruction set, and valid states, sums and tile.
            unsafe {
                let sums = sums.add(first * stride);
                match states.len() {
                    1 => self.update_tile_outlined::<S, N, T, 1>(states, sums, tile, base),
                    2 => self.update_tile_outlined::<S, N, T, 2>(states, sums, tile, base),
                    3 if const { S::QUERIES >= 3 } => {
                        self.update_tile_outlined::<S, N, T, 3>(states, sums, tile, base)
                    }
                    4 if const { S::QUERIES >= 4 } => {
                        self.update_tile_outlined::<S, N, T, 4>(states, sums, tile, base)
                    }
                    5 if const { S::QUERIES >= 5 } => {
                        self.update_tile_outlined::<S, N, T, 5>(states, sums, tile, base)
                    }
                    6 if const { S::QUERIES >= 6 } => {
                        self.update_tile_outlined::<S, N, T, 6>(states, sums, tile, base)
                    }
                    7 if const { S::QUERIES >= 7 } => {
                        self.update_tile_outlined::<S, N, T, 7>(states, sums, tile, base)
                    }
                    8 if const { S::QUERIES >= 8 } => {
                        self.update_tile_outlined::<S, N, T, 8>(states, sums, tile, base)
                    }
                    _ => unreachable!("up to 8 queries are treated at once"),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn update_tile_outlined<S: Simd, N: KvElement, const T: usize, const Q: usize>(
        &self,
        states: &mut [SoftmaxState<S, T>],
        sums: *mut f32,
        tile: KvTile<N>,
        base: usize,
    ) {
        // SAFETY: the caller guarantees the instruction set, and valid states, sums and tile.
        unsafe { S::run_outlined(TileUpdate::<S, N, T, Q> { task: self, states, sums, tile, base }) }
    }

    /// Updates the online softmax of Q queries with a tile.
    #[inline(always)]
    unsafe fn update_tile<S: Simd, N: KvElement, const T: usize, const Q: usize>(
        &self,
        states: &mut [SoftmaxState<S, T>],
        sums: *mut f32,
        tile: KvTile<N>,
        base: usize,
    ) {
        let stride = self.layout.value_stride();
        // SAFETY: the caller guarantees the instruction set, and valid states, sums and tile.
        unsafe {
            let scores = self.scores::<S, N, T, Q>(states, tile);
            let mut weights = [[0.0f32; TILE]; Q];
            let mut decay = [S::splat(1.0); Q];
            let mut visible = [(0, 0); Q];
            let mut whole = true;
            for i in 0..Q {
                let state = &mut states[i];
                let (from, to) =
                    (state.low.saturating_sub(base).min(TILE), state.high.saturating_sub(base).min(TILE));
                visible[i] = (from, to);
                whole &= visible[i] == (0, TILE);
                if from < to {
                    let (running_max, total) = (&mut state.running_max, &mut state.total);
                    decay[i] =
                        softmax_step::<S, T>(scores[i], visible[i], running_max, total, &mut weights[i]);
                    if !tile.value_scales.is_null() {
                        for j in from..to {
                            weights[i][j] *= tile.value_scales.add(j).read();
                        }
                    }
                }
            }
            if whole {
                return accumulate_values::<S, N, T, Q>(
                    tile.values,
                    stride,
                    (0, TILE),
                    &weights,
                    &decay,
                    sums,
                );
            }
            // Accumulates positions visible to all queries at once, others per query.
            let mut all = (0, TILE);
            for visible in visible {
                all = (all.0.max(visible.0), all.1.min(visible.1));
            }
            if all.0 >= all.1 {
                all = (TILE, TILE);
            }
            for phase in 0..3 {
                if phase == 1 {
                    if all.0 < all.1 {
                        accumulate_values::<S, N, T, Q>(tile.values, stride, all, &weights, &decay, sums);
                        decay = [S::splat(1.0); Q];
                    }
                    continue;
                }
                for i in 0..Q {
                    let (from, to) = visible[i];
                    let part = if phase == 0 { (from, to.min(all.0)) } else { (from.max(all.1), to) };
                    if part.0 < part.1 {
                        let (weights, sums) = ([weights[i]], sums.add(i * stride));
                        accumulate_values::<S, N, T, 1>(
                            tile.values,
                            stride,
                            part,
                            &weights,
                            &[decay[i]],
                            sums,
                        );
                        decay[i] = S::splat(1.0);
                    }
                }
            }
        }
    }

    /// Returns scaled q k^T of each query and a tile's 16 keys; even and odd components are summed apart.
    #[inline(always)]
    unsafe fn scores<S: Simd, N: KvElement, const T: usize, const Q: usize>(
        &self,
        states: &[SoftmaxState<S, T>],
        tile: KvTile<N>,
    ) -> [[S::V; T]; Q] {
        // SAFETY: components are below head_dim, which is even; vectors are within the tile.
        unsafe {
            let mut even = [[S::splat(0.0); T]; Q];
            let mut odd = [[S::splat(0.0); T]; Q];
            for d in (0..self.shape.head_dim).step_by(2) {
                for t in 0..T {
                    let at = tile.keys.add(d * tile.key_stride + t * S::LANES);
                    let (k0, k1) = (N::load::<S>(at), N::load::<S>(at.add(tile.key_stride)));
                    for i in 0..Q {
                        even[i][t] = S::fma(S::splat(states[i].query.add(d).read()), k0, even[i][t]);
                        odd[i][t] = S::fma(S::splat(states[i].query.add(d + 1).read()), k1, odd[i][t]);
                    }
                }
            }
            for i in 0..Q {
                for t in 0..T {
                    even[i][t] = S::mul(S::add(even[i][t], odd[i][t]), S::splat(self.scale));
                    if !tile.key_scales.is_null() {
                        even[i][t] = S::mul(even[i][t], S::load(tile.key_scales.add(t * S::LANES)));
                    }
                }
            }
            even
        }
    }
}

/// Widens a tile to f32. Positions visible to no query may hold anything.
#[inline(always)]
unsafe fn widen<S: Simd, N: KvElement>(
    tile: KvTile<N>,
    head_dim: usize,
    stride: usize,
    keys: *mut f32,
    values: *mut f32,
) {
    // SAFETY: the caller guarantees the instruction set, a valid tile, and buffers for a widened tile.
    unsafe {
        for d in 0..head_dim {
            for t in (0..TILE).step_by(S::LANES) {
                S::store(keys.add(d * TILE + t), N::load::<S>(tile.keys.add(d * tile.key_stride + t)));
            }
        }
        for at in (0..TILE * stride).step_by(S::LANES) {
            S::store(values.add(at), N::load::<S>(tile.values.add(at)));
        }
    }
}

/// One step of the online softmax for one query: turns the scores of the visible positions into weights
/// relative to the updated maximum, and returns the factor for earlier sums.
#[inline(always)]
unsafe fn softmax_step<S: Simd, const T: usize>(
    mut scores: [S::V; T],
    visible: (usize, usize),
    running_max: &mut f32,
    total: &mut [S::V; T],
    weights: &mut [f32; TILE],
) -> S::V {
    // SAFETY: the caller guarantees the instruction set; vectors are within the arrays.
    unsafe {
        let masked = S::splat(f32::NEG_INFINITY);
        if visible != (0, TILE) {
            let (from, to) = (S::splat(visible.0 as f32), S::splat(visible.1 as f32));
            for t in 0..T {
                // Masked scores may be anything, NaN included: they are replaced, not combined.
                let index = S::load(INDEX.as_ptr().add(t * S::LANES));
                let before = S::if_less(index, from, masked, scores[t]);
                scores[t] = S::if_less(index, to, before, masked);
            }
        }
        let mut largest = S::largest(scores[0]);
        for t in 1..T {
            largest = largest.max(S::largest(scores[t]));
        }
        let now = running_max.max(largest);
        // Most tiles do not raise the maximum: then the factor 2^0 = 1 need not be computed.
        let same = now == *running_max && now.is_finite();
        let decay = if same { S::splat(1.0) } else { S::exp2(S::splat(*running_max - now)) };
        *running_max = now;
        for t in 0..T {
            let weight = S::exp2(S::sub(scores[t], S::splat(now)));
            total[t] = S::fma(total[t], decay, weight);
            S::store(weights.as_mut_ptr().add(t * S::LANES), weight);
        }
        decay
    }
}

/// Computes sums[Q, stride] = sums * decay + weights * values over some positions of a tile, in order. T
/// vectors are interleaved, as one chain of additions per query is too short to hide their latency.
#[inline(always)]
unsafe fn accumulate_values<S: Simd, N: KvElement, const T: usize, const Q: usize>(
    values: *const N,
    stride: usize,
    visible: (usize, usize),
    weights: &[[f32; TILE]; Q],
    decay: &[S::V; Q],
    sums: *mut f32,
) {
    for d in (0..stride).step_by(T * S::LANES) {
        // SAFETY: `stride` is a multiple of [`TILE`], which is T vectors; positions are within the tile.
        unsafe {
            let mut sum = [[S::splat(0.0); T]; Q];
            for i in 0..Q {
                for t in 0..T {
                    sum[i][t] = S::mul(S::load(sums.add(i * stride + d + t * S::LANES)), decay[i]);
                }
            }
            for j in visible.0..visible.1 {
                let mut value = [S::splat(0.0); T];
                for t in 0..T {
                    value[t] = N::load::<S>(values.add(j * stride + d + t * S::LANES));
                }
                for i in 0..Q {
                    let weight = S::splat(weights[i][j]);
                    for t in 0..T {
                        sum[i][t] = S::fma(weight, value[t], sum[i][t]);
                    }
                }
            }
            for i in 0..Q {
                for t in 0..T {
                    S::store(sums.add(i * stride + d + t * S::LANES), sum[i][t]);
                }
            }
        }
    }
}

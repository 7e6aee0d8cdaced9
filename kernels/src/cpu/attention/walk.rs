//! Attention with whatever the instruction set has: numbers are widened to f32.
//!
//! For each tile, all queries of a block take their turn, some at once, so that keys and values come from the caches, and are
//! widened but once where the queries are many.

use std::mem::MaybeUninit;

use super::super::kv::{Number, TILE};
use super::super::simd::{Part, Simd};
use super::{Attend, HEAD_DIM_MAX, PREFETCH_TILES, Tile, lowest};

/// Queries that walk over the keys together.
const BLOCK_QUERIES: usize = 64;
/// Queries from which on it pays to widen a tile for all of them.
const MANY_QUERIES: usize = 8;

const INDEX: [f32; TILE] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// A query on its way over the keys.
#[derive(Clone, Copy)]
struct Walk<S: Simd, const T: usize> {
    query: *const f32,
    out: *mut f32,
    /// Positions it sees: from `low` to before `high`.
    low: usize,
    high: usize,
    /// The best score so far.
    best: f32,
    /// The sum of all weights relative to it, lane by lane.
    total: [S::V; T],
}

/// Room for the queries of a block.
struct Block<S: Simd, const T: usize> {
    walks: [MaybeUninit<Walk<S, T>>; BLOCK_QUERIES],
    /// What values come to so far; [queries, value_stride].
    sums: [MaybeUninit<f32>; BLOCK_QUERIES * HEAD_DIM_MAX],
    /// A tile's keys, [head_dim, TILE], and values, [TILE, value_stride], as f32.
    keys: [MaybeUninit<f32>; HEAD_DIM_MAX * TILE],
    values: [MaybeUninit<f32>; HEAD_DIM_MAX * TILE],
}

/// The work of [`Attend::step`].
struct Step<'a, S: Simd, N, const T: usize, const Q: usize> {
    attend: &'a Attend<'a>,
    walks: &'a mut [Walk<S, T>],
    sums: *mut f32,
    tile: Tile<N>,
    base: usize,
}

impl<S: Simd, N: Number, const T: usize, const Q: usize> Part<S> for Step<'_, S, N, T, Q> {
    #[inline(always)]
    unsafe fn run(self) {
        let Self { attend, walks, sums, tile, base } = self;
        // SAFETY: passed on to the caller.
        unsafe { attend.step::<S, N, T, Q>(walks, sums, tile, base) }
    }
}

impl Attend<'_> {
    /// # Safety
    /// The machine has `S`'s instruction set; what the task names is within its operands.
    #[inline(always)]
    pub(super) unsafe fn walk<S: Simd, N: Number>(&self) {
        // SAFETY: passed on to the caller; the scores of a tile fill that many vectors.
        unsafe { if S::LANES == TILE { self.walk_all::<S, N, 1>() } else { self.walk_all::<S, N, 2>() } }
    }

    #[inline(always)]
    unsafe fn walk_all<S: Simd, N: Number, const T: usize>(&self) {
        let group = self.shape.heads / self.shape.kv_heads;
        let queries = (self.task.end - self.task.first) as usize * group;
        let mut block = Block {
            walks: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            sums: [const { MaybeUninit::uninit() }; BLOCK_QUERIES * HEAD_DIM_MAX],
            keys: [const { MaybeUninit::uninit() }; HEAD_DIM_MAX * TILE],
            values: [const { MaybeUninit::uninit() }; HEAD_DIM_MAX * TILE],
        };
        for first in (0..queries).step_by(BLOCK_QUERIES) {
            // SAFETY: the queries are those of the task.
            unsafe { self.walk_block::<S, N, T>(&mut block, first, BLOCK_QUERIES.min(queries - first)) };
        }
    }

    #[inline(always)]
    unsafe fn walk_block<S: Simd, N: Number, const T: usize>(
        &self,
        block: &mut Block<S, T>,
        first: usize,
        count: usize,
    ) {
        let head_dim = self.shape.head_dim;
        let group = self.shape.heads / self.shape.kv_heads;
        let stride = self.layout.value_stride();
        let walks = block.walks.as_mut_ptr().cast::<Walk<S, T>>();
        let sums = block.sums.as_mut_ptr().cast::<f32>();
        let (wide_keys, wide_values) =
            (block.keys.as_mut_ptr().cast::<f32>(), block.values.as_mut_ptr().cast::<f32>());
        let mut gathered = None;
        // SAFETY: rows and heads are within qkv and out; a block has room for its queries; vectors are within tiles, rooms and
        // sums; tables cover positions before `high`.
        unsafe {
            for i in 0..count {
                let row = self.task.first as usize + (first + i) / group;
                let head = self.kv_head * group + (first + i) % group;
                let high = self.positions[row] as usize + 1;
                walks.add(i).write(Walk {
                    query: self.qkv.add(row * self.shape.width() + head * head_dim),
                    out: self.out.add((row * self.shape.heads + head) * head_dim),
                    low: lowest(high, self.window),
                    high,
                    best: f32::NEG_INFINITY,
                    total: [S::splat(0.0); T],
                });
                sums.add(i * stride).write_bytes(0, stride);
            }
            let walks = std::slice::from_raw_parts_mut(walks, count);
            // Rows ascend, so the first query sees furthest back and the last one furthest on.
            let (low, high) = (walks[0].low, walks[count - 1].high);
            let (mut start, mut end) = (0, 0);
            for base in (low / TILE * TILE..high).step_by(TILE) {
                while walks[start].high <= base {
                    start += 1;
                }
                while end < count && walks[end].low < base + TILE {
                    end += 1;
                }
                let tile = self.tile::<N>(base, high, &mut gathered);
                self.prefetch::<S, N>(base + PREFETCH_TILES * TILE, high);
                let (seeing, sums) = (&mut walks[start..end], sums.add(start * stride));
                if size_of::<N>() < size_of::<f32>() && seeing.len() >= MANY_QUERIES {
                    widen::<S, N>(tile, head_dim, stride, wide_keys, wide_values);
                    let Tile { key_scales, value_scales, .. } = tile;
                    let (keys, values) = (wide_keys.cast_const(), wide_values.cast_const());
                    let tile = Tile { keys, key_stride: TILE, values, key_scales, value_scales };
                    self.steps::<S, f32, T>(seeing, sums, tile, base);
                } else {
                    self.steps::<S, N, T>(seeing, sums, tile, base);
                }
            }
            for (i, walk) in walks.iter().enumerate() {
                let all =
                    S::sum(if T == 1 { walk.total[0] } else { S::add(walk.total[0], walk.total[T - 1]) });
                let scale = 1.0 / all;
                for d in 0..head_dim {
                    walk.out.add(d).write(sums.add(i * stride + d).read() * scale);
                }
            }
        }
    }

    /// Takes all queries over a tile, some at once.
    #[inline(always)]
    unsafe fn steps<S: Simd, N: Number, const T: usize>(
        &self,
        walks: &mut [Walk<S, T>],
        sums: *mut f32,
        tile: Tile<N>,
        base: usize,
    ) {
        let (stride, all) = (self.layout.value_stride(), walks.len());
        // Nearly as many in one part as in the next.
        let parts = all.div_ceil(S::QUERIES);
        for part in 0..parts {
            let (first, last) = (all * part / parts, all * (part + 1) / parts);
            let walks = &mut walks[first..last];
            // SAFETY: passed on to the caller.
            unsafe {
                let sums = sums.add(first * stride);
                match walks.len() {
                    1 => self.step_apart::<S, N, T, 1>(walks, sums, tile, base),
                    2 => self.step_apart::<S, N, T, 2>(walks, sums, tile, base),
                    3 if S::QUERIES >= 3 => self.step_apart::<S, N, T, 3>(walks, sums, tile, base),
                    4 if S::QUERIES >= 4 => self.step_apart::<S, N, T, 4>(walks, sums, tile, base),
                    5 if S::QUERIES >= 5 => self.step_apart::<S, N, T, 5>(walks, sums, tile, base),
                    6 if S::QUERIES >= 6 => self.step_apart::<S, N, T, 6>(walks, sums, tile, base),
                    7 if S::QUERIES >= 7 => self.step_apart::<S, N, T, 7>(walks, sums, tile, base),
                    8 if S::QUERIES >= 8 => self.step_apart::<S, N, T, 8>(walks, sums, tile, base),
                    _ => unreachable!("up to 8 queries are treated at once"),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn step_apart<S: Simd, N: Number, const T: usize, const Q: usize>(
        &self,
        walks: &mut [Walk<S, T>],
        sums: *mut f32,
        tile: Tile<N>,
        base: usize,
    ) {
        // SAFETY: passed on to the caller.
        unsafe { S::run_part(Step::<S, N, T, Q> { attend: self, walks, sums, tile, base }) }
    }

    /// Takes Q queries over a tile.
    #[inline(always)]
    unsafe fn step<S: Simd, N: Number, const T: usize, const Q: usize>(
        &self,
        walks: &mut [Walk<S, T>],
        sums: *mut f32,
        tile: Tile<N>,
        base: usize,
    ) {
        let stride = self.layout.value_stride();
        // SAFETY: passed on to the caller.
        unsafe {
            let scores = self.scores::<S, N, T, Q>(walks, tile);
            let mut weights = [[0.0f32; TILE]; Q];
            let mut decay = [S::splat(1.0); Q];
            let mut seen = [(0, 0); Q];
            let mut whole = true;
            for i in 0..Q {
                let walk = &mut walks[i];
                let (from, to) =
                    (walk.low.saturating_sub(base).min(TILE), walk.high.saturating_sub(base).min(TILE));
                seen[i] = (from, to);
                whole &= seen[i] == (0, TILE);
                if from < to {
                    let (best, total) = (&mut walk.best, &mut walk.total);
                    decay[i] = soften::<S, T>(scores[i], seen[i], best, total, &mut weights[i]);
                    if !tile.value_scales.is_null() {
                        for j in from..to {
                            weights[i][j] *= tile.value_scales.add(j).read();
                        }
                    }
                }
            }
            if whole {
                return weigh::<S, N, T, Q>(tile.values, stride, (0, TILE), &weights, &decay, sums);
            }
            // What all see is weighed for all at once, and what only some see before and after it.
            let mut all = (0, TILE);
            for seen in seen {
                all = (all.0.max(seen.0), all.1.min(seen.1));
            }
            if all.0 >= all.1 {
                all = (TILE, TILE);
            }
            for phase in 0..3 {
                if phase == 1 {
                    if all.0 < all.1 {
                        weigh::<S, N, T, Q>(tile.values, stride, all, &weights, &decay, sums);
                        decay = [S::splat(1.0); Q];
                    }
                    continue;
                }
                for i in 0..Q {
                    let (from, to) = seen[i];
                    let part = if phase == 0 { (from, to.min(all.0)) } else { (from.max(all.1), to) };
                    if part.0 < part.1 {
                        let (weights, sums) = ([weights[i]], sums.add(i * stride));
                        weigh::<S, N, T, 1>(tile.values, stride, part, &weights, &[decay[i]], sums);
                        decay[i] = S::splat(1.0);
                    }
                }
            }
        }
    }

    /// q k^T times the scale for each query and the 16 keys of a tile. Even and odd components are summed apart.
    #[inline(always)]
    unsafe fn scores<S: Simd, N: Number, const T: usize, const Q: usize>(
        &self,
        walks: &[Walk<S, T>],
        tile: Tile<N>,
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
                        even[i][t] = S::fma(S::splat(walks[i].query.add(d).read()), k0, even[i][t]);
                        odd[i][t] = S::fma(S::splat(walks[i].query.add(d + 1).read()), k1, odd[i][t]);
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

/// A tile's numbers as f32. What no query sees of it may be anything.
#[inline(always)]
unsafe fn widen<S: Simd, N: Number>(
    tile: Tile<N>,
    head_dim: usize,
    stride: usize,
    keys: *mut f32,
    values: *mut f32,
) {
    // SAFETY: passed on to the caller.
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

/// One step of the online softmax for one query: turns the scores of the positions from `seen.0` to before `seen.1`
/// into weights relative to the best score so far, and returns by what earlier sums must be multiplied.
#[inline(always)]
unsafe fn soften<S: Simd, const T: usize>(
    mut scores: [S::V; T],
    seen: (usize, usize),
    best: &mut f32,
    total: &mut [S::V; T],
    weights: &mut [f32; TILE],
) -> S::V {
    // SAFETY: vectors are within the arrays.
    unsafe {
        let hidden = S::splat(f32::NEG_INFINITY);
        if seen != (0, TILE) {
            let (from, to) = (S::splat(seen.0 as f32), S::splat(seen.1 as f32));
            for t in 0..T {
                // What is hidden may be anything, NaN included: it is replaced, not combined.
                let index = S::load(INDEX.as_ptr().add(t * S::LANES));
                let before = S::if_less(index, from, hidden, scores[t]);
                scores[t] = S::if_less(index, to, before, hidden);
            }
        }
        let mut largest = S::largest(scores[0]);
        for t in 1..T {
            largest = largest.max(S::largest(scores[t]));
        }
        let now = best.max(largest);
        // Most tiles bring nothing better: then 2^0, which is 1 exactly, need not be computed.
        let same = now == *best && now.is_finite();
        let decay = if same { S::splat(1.0) } else { S::exp2(S::splat(*best - now)) };
        *best = now;
        for t in 0..T {
            let weight = S::exp2(S::sub(scores[t], S::splat(now)));
            total[t] = S::fma(total[t], decay, weight);
            S::store(weights.as_mut_ptr().add(t * S::LANES), weight);
        }
        decay
    }
}

/// sums = sums * decay + weights * values for some positions of a tile, in their order; sums[Q, stride]. T vectors go abreast,
/// as one chain of additions for each query is too few to hide their latency.
#[inline(always)]
unsafe fn weigh<S: Simd, N: Number, const T: usize, const Q: usize>(
    values: *const N,
    stride: usize,
    seen: (usize, usize),
    weights: &[[f32; TILE]; Q],
    decay: &[S::V; Q],
    sums: *mut f32,
) {
    for d in (0..stride).step_by(T * S::LANES) {
        // SAFETY: `stride` is a multiple of [`TILE`], which are T vectors; positions are in the tile.
        unsafe {
            let mut sum = [[S::splat(0.0); T]; Q];
            for i in 0..Q {
                for t in 0..T {
                    sum[i][t] = S::mul(S::load(sums.add(i * stride + d + t * S::LANES)), decay[i]);
                }
            }
            for j in seen.0..seen.1 {
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

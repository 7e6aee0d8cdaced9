//! Attention over a bf16 or int8 KV cache with AVX-512 bf16 dot products and online softmax.
//!
//! Queries and weights are rounded to bf16; scores, maxima and sums are f32. int8 elements are exact in bf16:
//! scores are multiplied with the keys' scales, and weights with the values' scales before rounding. The
//! online softmax advances in spans at absolute multiples of 64 positions. All queries of a block are
//! processed per span, so that keys and values come from the first-level cache.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::super::kv::TILE;
use super::super::simd::{Avx512, Kernel, Simd, bf16_pairs, transpose};
use super::{AttentionTask, GatheredTile, HEAD_DIM_MAX, window_start};
use prefetch::TilePrefetch;
use shape::{BLOCK_QUERIES, QUERIES, SPAN, SPAN_TILES};
pub(super) use source::{InPlace, PairedOnce};
use source::{KvSource, PairedTile};
use span::{SpanUpdate, accumulate_span, compute_scores, update_softmax};

mod mask;
mod prefetch;
mod shape;
mod source;
mod span;

/// Maximum queries of a task that read [`InPlace`]: converting a tile once pays off from about three times
/// [`QUERIES`].
pub(super) const FEW_QUERIES: usize = 2 * QUERIES;

/// Attention kernel for KV elements read through `N`.
pub(super) struct Bf16Attention<'a, N>(AttentionTask<'a>, PhantomData<N>);

impl<'a, N> Bf16Attention<'a, N> {
    pub(super) fn new(task: AttentionTask<'a>) -> Self {
        Self(task, PhantomData)
    }
}

impl<N: KvSource> Kernel for Bf16Attention<'_, N> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: runs only through `run_avx512_bf16`, which needs BF16; `attention` checked the operands.
        unsafe { self.0.run_bf16::<N>() }
    }
}

/// Buffers for the queries of a block.
struct Bf16QueryBlock {
    /// Maximum score so far per query, and lanes that add up to the sum of its weights.
    maxima: [MaybeUninit<f32>; BLOCK_QUERIES],
    totals: [MaybeUninit<__m512>; BLOCK_QUERIES],
    /// Visible positions per query: `lows[i]..highs[i]`.
    lows: [MaybeUninit<usize>; BLOCK_QUERIES],
    highs: [MaybeUninit<usize>; BLOCK_QUERIES],
    /// Queries as bf16 pairs; [head_dim / 2, queries] for every [`QUERIES`] queries or the remaining ones.
    queries: [MaybeUninit<u32>; BLOCK_QUERIES * HEAD_DIM_MAX / 2],
    /// Accumulators [queries, width]; per 32 components those of `unpacklo`, then those of `unpackhi`.
    sums: [MaybeUninit<f32>; BLOCK_QUERIES * HEAD_DIM_MAX],
}

/// Buffers for the tiles of a span that are not read in place.
struct SpanBuffers<N: KvSource> {
    gathered: [Option<Box<GatheredTile<N::Stored>>>; SPAN_TILES],
    /// Uninitialised until written: filling it would cost more than few queries need.
    buffers: MaybeUninit<[N::Buffer; SPAN_TILES]>,
}

impl AttentionTask<'_> {
    /// Computes attention for all queries of the task.
    #[inline(always)]
    unsafe fn run_bf16<N: KvSource>(&self) {
        let queries = self.queries();
        let mut block = Bf16QueryBlock {
            maxima: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            totals: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            lows: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            highs: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            queries: [const { MaybeUninit::uninit() }; BLOCK_QUERIES * HEAD_DIM_MAX / 2],
            sums: [const { MaybeUninit::uninit() }; BLOCK_QUERIES * HEAD_DIM_MAX],
        };
        let mut buffers =
            SpanBuffers::<N> { gathered: [const { None }; SPAN_TILES], buffers: MaybeUninit::uninit() };
        // Blocks of nearly equal size: a small one would convert keys and values for few queries.
        let block_queries = queries.div_ceil(queries.div_ceil(BLOCK_QUERIES)).next_multiple_of(QUERIES);
        for first in (0..queries).step_by(block_queries) {
            // SAFETY: the queries belong to the task, and at block_queries `BLOCK_QUERIES` fit a block.
            unsafe {
                self.process_bf16_block::<N>(
                    &mut block,
                    first,
                    block_queries.min(queries - first),
                    &mut buffers,
                )
            };
        }
    }

    /// Computes attention for `count` queries from index `first`.
    #[inline(always)]
    unsafe fn process_bf16_block<N: KvSource>(
        &self,
        block: &mut Bf16QueryBlock,
        first: usize,
        count: usize,
        buffers: &mut SpanBuffers<N>,
    ) {
        let head_dim = self.shape.head_dim;
        let half = head_dim / 2;
        let group = self.shape.heads / self.shape.kv_heads;
        let width = head_dim.next_multiple_of(32);
        let maxima = block.maxima.as_mut_ptr().cast::<f32>();
        let totals = block.totals.as_mut_ptr().cast::<__m512>();
        let lows = block.lows.as_mut_ptr().cast::<usize>();
        let highs = block.highs.as_mut_ptr().cast::<usize>();
        let packed = block.queries.as_mut_ptr().cast::<u32>();
        let sums = block.sums.as_mut_ptr().cast::<f32>();
        let of = |i: usize| {
            let row = self.task.first as usize + (first + i) / group;
            (row, self.kv_head * group + (first + i) % group)
        };
        // SAFETY: rows and heads are within qkv and out; queries fit the block; block tables cover `..high`.
        unsafe {
            for at in (0..count).step_by(QUERIES) {
                let batch = QUERIES.min(count - at);
                let mut queries = [self.qkv; QUERIES];
                for (i, query) in queries.iter_mut().enumerate().take(batch) {
                    let (row, head) = of(at + i);
                    *query = self.qkv.add(row * self.shape.width() + head * head_dim);
                    let high = self.positions[row] as usize + 1;
                    lows.add(at + i).write(window_start(high, self.window));
                    highs.add(at + i).write(high);
                    totals.add(at + i).write(_mm512_setzero_ps());
                }
                // All slots, including unused ones, as they are loaded as one vector.
                _mm256_storeu_ps(maxima.add(at), _mm256_set1_ps(f32::NEG_INFINITY));
                pack_queries(&queries, batch, head_dim, packed.add(at * half));
            }
            for at in (0..count * width).step_by(16) {
                _mm512_storeu_ps(sums.add(at), _mm512_setzero_ps());
            }
            // Rows ascend, so the first query has the lowest `low` and the last one the highest `high`.
            let (low, high) = (lows.read(), highs.add(count - 1).read());
            let next_range = self.range_after(first + count);
            for base in (low / SPAN * SPAN..high).step_by(SPAN) {
                let tiles = self.prepare_span::<N>(base, low, high, buffers);
                // The first queries prefetch the next span, a line or two at each step, so that memory stays
                // busy and no prefetch waits for a free line buffer.
                let prefetch = self.span_prefetch::<N::Stored>(base + SPAN, high, next_range);
                let mut at = 0;
                while at < count {
                    let update = SpanUpdate {
                        tiles: &tiles,
                        prefetch: if at == 0 { prefetch } else { [TilePrefetch::NONE; SPAN_TILES] },
                        prefetches: at == 0,
                        base,
                        maxima: maxima.add(at),
                        totals: totals.add(at),
                        lows: lows.add(at),
                        highs: highs.add(at),
                        queries: packed.add(at * half),
                        sums: sums.add(at * width),
                        width,
                    };
                    match (count - at).min(QUERIES) {
                        1 => self.update_span::<N, 1>(update),
                        2 => self.update_span::<N, 2>(update),
                        3 => self.update_span::<N, 3>(update),
                        4 => self.update_span::<N, 4>(update),
                        5 => self.update_span::<N, 5>(update),
                        6 => self.update_span::<N, 6>(update),
                        7 => self.update_span::<N, 7>(update),
                        _ => self.update_span::<N, 8>(update),
                    }
                    at += QUERIES;
                }
            }
            for i in 0..count {
                let (row, head) = of(i);
                let out = self.out.add((row * self.shape.heads + head) * head_dim);
                let scale = 1.0 / Avx512::sum(totals.add(i).read());
                unpack_sums(sums.add(i * width), head_dim, scale, out);
            }
        }
    }

    /// Returns the span's tiles that overlap `low..high`, readable as bf16 pairs, in place or converted.
    #[inline(always)]
    unsafe fn prepare_span<N: KvSource>(
        &self,
        base: usize,
        low: usize,
        high: usize,
        buffers: &mut SpanBuffers<N>,
    ) -> [Option<PairedTile>; SPAN_TILES] {
        let mut tiles = [None; SPAN_TILES];
        let SpanBuffers { gathered, buffers } = buffers;
        let buffers = buffers.as_mut_ptr().cast::<N::Buffer>();
        for (t, (tile, gathered)) in tiles.iter_mut().zip(gathered).enumerate() {
            let at = base + t * TILE;
            if at + TILE <= low || at >= high {
                continue;
            }
            // SAFETY: the block table covers positions before `high`; each tile of a span has a buffer.
            *tile = Some(unsafe {
                let stored = self.tile::<N::Stored>(at, high, gathered);
                N::prepare(&stored, &self.layout, buffers.add(t))
            });
        }
        tiles
    }

    /// Updates Q queries with one span; dispatches on mask and prefetch.
    #[inline(always)]
    unsafe fn update_span<N: KvSource, const Q: usize>(&self, update: SpanUpdate<'_>) {
        // SAFETY: the caller guarantees BF16 and valid operands for Q queries.
        unsafe {
            // Rows ascend, so positions visible to the first and the last query are visible to all.
            let (low, high) = (update.lows.add(Q - 1).read(), update.highs.read());
            match low <= update.base && update.base + SPAN <= high {
                true if Q == QUERIES && !update.prefetches => {
                    self.update_span_masked::<N, Q, true, false>(update)
                }
                true => self.update_span_masked::<N, Q, true, true>(update),
                false => self.update_span_masked::<N, Q, false, true>(update),
            }
        }
    }

    /// Updates Q queries with one span. `ALL` means that every query sees the whole span, the common case. Not inlined, for the
    /// reason of [`Simd::run_outlined`].
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    #[inline(never)]
    unsafe fn update_span_masked<N: KvSource, const Q: usize, const ALL: bool, const PREFETCH: bool>(
        &self,
        update: SpanUpdate<'_>,
    ) {
        let SpanUpdate { base, lows, highs, .. } = update;
        let mut scores = MaybeUninit::<[[f32; SPAN]; Q]>::uninit();
        let mut weights = MaybeUninit::<[[u16; SPAN]; Q]>::uninit();
        let mut visible = [(0, SPAN); Q];
        // SAFETY: vectors are within tiles, maxima, totals, queries and sums of the given queries; scores are
        // read only at visible positions, whose tiles exist; all weights are written.
        unsafe {
            let (scores, weights) = (scores.as_mut_ptr().cast::<f32>(), weights.as_mut_ptr().cast::<u16>());
            self.compute_span_scores::<N, Q, PREFETCH>(&update, scores);
            if !ALL {
                for i in 0..Q {
                    let from = lows.add(i).read().saturating_sub(base).min(SPAN);
                    let to = highs.add(i).read().saturating_sub(base).min(SPAN);
                    visible[i] = (from, to.max(from));
                }
            }
            let decay = update_softmax::<N, Q, ALL>(&update, scores, &visible, weights);
            accumulate_span::<N, Q, ALL, PREFETCH>(&update, &visible, weights, decay);
        }
    }

    /// Computes the scores of Q queries at the span's tiles; `scores` is [Q, SPAN].
    #[inline(always)]
    unsafe fn compute_span_scores<N: KvSource, const Q: usize, const PREFETCH: bool>(
        &self,
        update: &SpanUpdate<'_>,
        scores: *mut f32,
    ) {
        let SpanUpdate { tiles, ref prefetch, queries, .. } = *update;
        let (half, scale) = (self.shape.head_dim / 2, self.scale);
        // SAFETY: the caller guarantees tiles and queries, and room for the scores of all tiles.
        unsafe {
            for t in (0..SPAN_TILES).step_by(2) {
                let next = [&prefetch[t], &prefetch[t + 1]];
                let (first, second) = (scores.add(t * TILE), scores.add((t + 1) * TILE));
                match (tiles[t], tiles[t + 1]) {
                    (Some(a), Some(b)) => {
                        compute_scores::<N, Q, 2, PREFETCH>([a, b], next, queries, half, scale, first);
                    }
                    (Some(a), None) => {
                        compute_scores::<N, Q, 1, PREFETCH>([a], next, queries, half, scale, first);
                    }
                    (None, Some(b)) => {
                        compute_scores::<N, Q, 1, PREFETCH>([b], next, queries, half, scale, second);
                    }
                    (None, None) => {}
                }
            }
        }
    }
}

/// Rounds `batch` queries of `head_dim` elements (even) to bf16 pairs; `to` is [head_dim / 2, batch].
#[inline(always)]
unsafe fn pack_queries(queries: &[*const f32; QUERIES], batch: usize, head_dim: usize, to: *mut u32) {
    // SAFETY: masks keep loads within the queries and stores within `to`.
    unsafe {
        let lanes = ((1u32 << batch) - 1) as __mmask8;
        for at in (0..head_dim).step_by(32) {
            let elements = (head_dim - at).min(32);
            let mut rows = [_mm512_setzero_si512(); 16];
            for i in 0..QUERIES {
                if i < batch {
                    rows[i] = bf16_pairs(queries[i].wrapping_add(at), elements);
                }
            }
            let columns = transpose(rows);
            for (d, column) in columns.iter().enumerate() {
                if d < elements / 2 {
                    let to = to.wrapping_add((at / 2 + d) * batch);
                    _mm256_mask_storeu_epi32(to.cast(), lanes, _mm512_castsi512_si256(*column));
                }
            }
        }
    }
}

/// Writes `count` accumulators in component order, see [`Bf16QueryBlock::sums`], times `scale`.
#[inline(always)]
unsafe fn unpack_sums(sums: *const f32, count: usize, scale: f32, to: *mut f32) {
    // SAFETY: accumulators are whole vectors in pairs; masks keep stores within `count` elements.
    unsafe {
        let scale = _mm512_set1_ps(scale);
        // Each 128-bit lane holds four components of eight.
        let first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        for at in (0..count).step_by(32) {
            let (low, high) = (_mm512_loadu_ps(sums.add(at)), _mm512_loadu_ps(sums.add(at + 16)));
            let (first, second) =
                (_mm512_permutex2var_ps(low, first, high), _mm512_permutex2var_ps(low, second, high));
            let (first, second) = (_mm512_mul_ps(first, scale), _mm512_mul_ps(second, scale));
            if at + 32 <= count {
                _mm512_storeu_ps(to.add(at), first);
                _mm512_storeu_ps(to.add(at + 16), second);
            } else {
                let present = u32::MAX >> (32 - (count - at));
                _mm512_mask_storeu_ps(to.add(at), present as __mmask16, first);
                _mm512_mask_storeu_ps(to.wrapping_add(at + 16), (present >> 16) as __mmask16, second);
            }
        }
    }
}

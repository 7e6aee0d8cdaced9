//! Attention over a bf16 or int8 KV cache with AVX-512 bf16 dot products and online softmax.
//!
//! Queries and weights are rounded to bf16; scores, maxima and sums are f32. int8 elements are exact in bf16:
//! scores are multiplied with the keys' scales, and weights with the values' scales before rounding. The
//! online softmax advances in spans at absolute multiples of 64 positions. All queries of a block are
//! processed per span, so that keys and values come from the first-level cache.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::super::kv::{KvElement, TILE};
use super::super::simd::{
    Avx512, Kernel, Simd, bf16_pairs, dot_bf16, dot_bf16_where, largest_of, opaque, transpose,
};
use super::{AttentionTask, GatheredTile, HEAD_DIM_MAX, window_start};
use mask::{PairRanges, VisibleRange, pair_ranges, visible_mask};
use prefetch::TilePrefetch;
use source::{COMPONENTS, KvSource, PairedTile};
pub(super) use source::{InPlace, PairedOnce};

mod mask;
mod prefetch;
mod source;

/// Positions of a span.
const SPAN: usize = 64;
const SPAN_TILES: usize = SPAN / TILE;
/// Queries that pass over the keys together.
const BLOCK_QUERIES: usize = 64;
const _: () = assert!(BLOCK_QUERIES.is_multiple_of(QUERIES));
/// Queries whose accumulators are in registers at once.
const QUERIES: usize = 8;
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

    /// Prepares the tiles of the span at `base` that hold positions in `low..high`.
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

    /// Updates Q queries with one span. `ALL` means that every query sees the whole span, the common case.
    #[inline(always)]
    unsafe fn update_span_masked<N: KvSource, const Q: usize, const ALL: bool, const PREFETCH: bool>(
        &self,
        update: SpanUpdate<'_>,
    ) {
        let SpanUpdate { tiles, prefetch, base, maxima, totals, lows, highs, queries, sums, width, .. } =
            update;
        let half = self.shape.head_dim / 2;
        let mut scores = MaybeUninit::<[[f32; SPAN]; Q]>::uninit();
        let mut weights = MaybeUninit::<[[u16; SPAN]; Q]>::uninit();
        // SAFETY: vectors are within tiles, maxima, totals, queries and sums of the given queries; scores are
        // read only at visible positions, whose tiles exist; all weights are written.
        unsafe {
            let (scores, weights) = (scores.as_mut_ptr().cast::<f32>(), weights.as_mut_ptr().cast::<u16>());
            for t in (0..SPAN_TILES).step_by(2) {
                let next = [&prefetch[t], &prefetch[t + 1]];
                match (tiles[t], tiles[t + 1]) {
                    (Some(a), Some(b)) => {
                        compute_scores::<N, Q, 2, PREFETCH>(
                            [a, b],
                            next,
                            queries,
                            half,
                            self.scale,
                            scores.add(t * TILE),
                        );
                    }
                    (Some(a), None) => {
                        compute_scores::<N, Q, 1, PREFETCH>(
                            [a],
                            next,
                            queries,
                            half,
                            self.scale,
                            scores.add(t * TILE),
                        );
                    }
                    (None, Some(b)) => {
                        compute_scores::<N, Q, 1, PREFETCH>(
                            [b],
                            next,
                            queries,
                            half,
                            self.scale,
                            scores.add((t + 1) * TILE),
                        );
                    }
                    (None, None) => {}
                }
            }
            let mut visible = [(0, SPAN); Q];
            let mut largest = [_mm512_set1_ps(f32::NEG_INFINITY); QUERIES];
            for i in 0..Q {
                if !ALL {
                    let from = lows.add(i).read().saturating_sub(base).min(SPAN);
                    let to = highs.add(i).read().saturating_sub(base).min(SPAN);
                    visible[i] = (from, to.max(from));
                }
                largest[i] = visible_maximum::<ALL>(scores.add(i * SPAN), visible[i]);
            }
            // Factors of earlier sums, for all queries at once.
            let before = _mm256_loadu_ps(maxima);
            let now = _mm256_max_ps(largest_of(largest), before);
            let decays = Avx512::exp2(_mm512_zextps256_ps512(_mm256_sub_ps(before, now)));
            // The maximum of a query that sees nothing is unchanged.
            _mm256_storeu_ps(maxima, now);
            let mut factors = [0.0f32; QUERIES];
            _mm256_storeu_ps(factors.as_mut_ptr(), _mm512_castps512_ps256(decays));
            let mut decay = [_mm512_set1_ps(1.0); Q];
            for i in 0..Q {
                let weights = weights.add(i * SPAN);
                if ALL || visible[i].0 < visible[i].1 {
                    decay[i] = _mm512_set1_ps(factors[i]);
                    let maximum = maxima.add(i).read();
                    let total = totals.add(i);
                    let before = _mm512_mul_ps(total.read(), decay[i]);
                    total.write(softmax_step::<N, ALL>(
                        scores.add(i * SPAN),
                        visible[i],
                        tiles,
                        maximum,
                        before,
                        weights,
                    ));
                } else {
                    weights.write_bytes(0, SPAN);
                }
            }
            let pair_ranges = if ALL { [PairRanges::ALL; SPAN_TILES] } else { pair_ranges(&visible) };
            let visible_bits = if ALL { [u64::MAX; Q] } else { visible.map(visible_mask) };
            for d in (0..width).step_by(COMPONENTS) {
                let mut sum = [[_mm512_setzero_ps(); 2]; Q];
                for i in 0..Q {
                    let at = sums.add(i * width + d);
                    sum[i][0] = _mm512_mul_ps(_mm512_loadu_ps(at), decay[i]);
                    sum[i][1] = _mm512_mul_ps(_mm512_loadu_ps(at.add(16)), decay[i]);
                }
                for (t, tile) in tiles.iter().enumerate() {
                    let Some(tile) = tile else { continue };
                    // Opaque and dependent on `d`, so that broadcast weights are not spilled.
                    let weights = opaque(weights.wrapping_add(t * TILE + d)).wrapping_sub(d);
                    let PairRanges { before, all, after } = pair_ranges[t];
                    let visible_bits = visible_bits.map(|span| span >> (t * TILE));
                    if !ALL {
                        accumulate_masked::<N, Q>(tile, d, before, weights, &visible_bits, &mut sum);
                    }
                    accumulate_values::<N, Q, PREFETCH>(
                        tile,
                        d,
                        prefetch[t].value_addresses(d),
                        all,
                        weights,
                        &mut sum,
                    );
                    if !ALL {
                        accumulate_masked::<N, Q>(tile, d, after, weights, &visible_bits, &mut sum);
                    }
                }
                for i in 0..Q {
                    let at = sums.add(i * width + d);
                    _mm512_storeu_ps(at, sum[i][0]);
                    _mm512_storeu_ps(at.add(16), sum[i][1]);
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

/// Operands of one span update for up to [`QUERIES`] queries.
struct SpanUpdate<'a> {
    tiles: &'a [Option<PairedTile>; SPAN_TILES],
    prefetch: [TilePrefetch; SPAN_TILES],
    /// Whether `prefetch` has tiles.
    prefetches: bool,
    base: usize,
    maxima: *mut f32,
    totals: *mut __m512,
    lows: *const usize,
    highs: *const usize,
    queries: *const u32,
    sums: *mut f32,
    width: usize,
}

/// Computes the scores of Q queries, `SPAN` apart, for T tiles.
#[inline(always)]
unsafe fn compute_scores<N: KvSource, const Q: usize, const T: usize, const PREFETCH: bool>(
    tiles: [PairedTile; T],
    next: [&TilePrefetch; 2],
    queries: *const u32,
    half: usize,
    scale: f32,
    scores: *mut f32,
) {
    // SAFETY: components are below head_dim, which is even; vectors are within the tiles.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); T]; Q];
        for d in 0..half {
            for next in next.into_iter().filter(|_| PREFETCH) {
                Avx512::prefetch(next.key_address(d));
            }
            let mut keys = [_mm512_setzero_si512(); T];
            for t in 0..T {
                keys[t] = N::keys(&tiles[t], d);
            }
            for i in 0..Q {
                let query = _mm512_set1_epi32(queries.add(d * Q + i).read() as i32);
                for t in 0..T {
                    sums[i][t] = dot_bf16(sums[i][t], query, keys[t]);
                }
            }
        }
        let mut scales = [_mm512_set1_ps(scale); T];
        for t in 0..T {
            if N::Stored::SCALED {
                scales[t] = _mm512_mul_ps(scales[t], _mm512_loadu_ps(tiles[t].key_scales));
            }
        }
        for i in 0..Q {
            for t in 0..T {
                let scaled = _mm512_mul_ps(sums[i][t], scales[t]);
                _mm512_storeu_ps(scores.add(i * SPAN + t * TILE), scaled);
            }
        }
    }
}

/// Loads the scores of a tile with masked ones replaced by -inf; masked scores may be anything, NaN included.
#[inline(always)]
unsafe fn visible_scores<const ALL: bool>(scores: *const f32, t: usize, visible_bits: u64) -> __m512 {
    // SAFETY: the caller guarantees AVX-512 and `SPAN` readable scores.
    unsafe {
        let scores = scores.add(t * TILE);
        if ALL {
            return _mm512_loadu_ps(scores);
        }
        let mask = (visible_bits >> (t * TILE)) as __mmask16;
        _mm512_mask_loadu_ps(_mm512_set1_ps(f32::NEG_INFINITY), mask, scores)
    }
}

/// Returns lanes whose maximum is the maximum visible score; NaN is ignored.
#[inline(always)]
unsafe fn visible_maximum<const ALL: bool>(scores: *const f32, visible: VisibleRange) -> __m512 {
    // SAFETY: vectors are within a query's `SPAN` scores.
    unsafe {
        let visible_bits = visible_mask(visible);
        let mut largest = _mm512_set1_ps(f32::NEG_INFINITY);
        for t in 0..SPAN_TILES {
            largest = Avx512::max(visible_scores::<ALL>(scores, t, visible_bits), largest);
        }
        largest
    }
}

/// One step of the online softmax: turns visible scores into weights relative to the maximum, rounded to
/// bf16, and returns lanes that add up to `total` plus the sum of the weights.
#[inline(always)]
unsafe fn softmax_step<N: KvSource, const ALL: bool>(
    scores: *const f32,
    visible: VisibleRange,
    tiles: &[Option<PairedTile>; SPAN_TILES],
    maximum: f32,
    mut total: __m512,
    weights: *mut u16,
) -> __m512 {
    // SAFETY: vectors are within a query's `SPAN` scores and weights.
    unsafe {
        let maximum = _mm512_set1_ps(maximum);
        let visible_bits = visible_mask(visible);
        for t in 0..SPAN_TILES {
            let tile_scores = visible_scores::<ALL>(scores, t, visible_bits);
            let mut weight = Avx512::exp2(_mm512_sub_ps(tile_scores, maximum));
            total = _mm512_add_ps(total, weight);
            if let Some(tile) = tiles[t].as_ref().filter(|_| N::Stored::SCALED) {
                let mask = (visible_bits >> (t * TILE)) as __mmask16;
                weight = _mm512_mul_ps(weight, _mm512_maskz_loadu_ps(mask, tile.value_scales));
            }
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(weight));
            _mm256_storeu_si256(weights.add(t * TILE).cast(), rounded);
        }
        total
    }
}

/// Computes sums += weights * values for some pairs of positions of a tile that are visible to all Q queries,
/// in order. The weights of queries are `SPAN` apart.
#[inline(always)]
unsafe fn accumulate_values<N: KvSource, const Q: usize, const PREFETCH: bool>(
    tile: &PairedTile,
    d: usize,
    (next, next_step): (*const u8, usize),
    pairs: (usize, usize),
    weights: *const u16,
    sums: &mut [[__m512; 2]; Q],
) {
    // SAFETY: components and positions are within the tile.
    unsafe {
        for pair in pairs.0..pairs.1 {
            if PREFETCH {
                let address = next.wrapping_add(pair * next_step);
                Avx512::prefetch(address);
                Avx512::prefetch(address.wrapping_add(next_step / 2));
            }
            let (low, high) = N::values(tile, d, pair);
            for i in 0..Q {
                let weight = weights.add(i * SPAN + 2 * pair).cast::<i32>().read_unaligned();
                let weight = _mm512_set1_epi32(weight);
                sums[i][0] = dot_bf16(sums[i][0], weight, low);
                sums[i][1] = dot_bf16(sums[i][1], weight, high);
            }
        }
    }
}

/// Computes sums += weights * values for pairs of positions of a tile, with a bit mask per query, lowest bit
/// first.
#[inline(always)]
unsafe fn accumulate_masked<N: KvSource, const Q: usize>(
    tile: &PairedTile,
    d: usize,
    pairs: (usize, usize),
    weights: *const u16,
    visible_bits: &[u64; Q],
    sums: &mut [[__m512; 2]; Q],
) {
    // SAFETY: components and positions are within the tile.
    unsafe {
        for pair in pairs.0..pairs.1 {
            let (low, high) = N::values(tile, d, pair);
            for i in 0..Q {
                let weight = weights.add(i * SPAN + 2 * pair).cast::<i32>().read_unaligned();
                let weight = _mm512_set1_epi32(weight);
                // A masked weight is 0, but its value may be NaN, so it is zeroed. Fully masked pairs add
                // nothing, not even 0, as the sign of a zero must not depend on other queries.
                let visible_pair = (visible_bits[i] >> (2 * pair)) as u32 & 3;
                let value_mask = visible_pair * 0x5555_5555;
                let lane_mask = ((visible_pair != 0) as __mmask16).wrapping_neg();
                let (low, high) =
                    (_mm512_maskz_mov_epi16(value_mask, low), _mm512_maskz_mov_epi16(value_mask, high));
                sums[i][0] = dot_bf16_where(lane_mask, sums[i][0], weight, low);
                sums[i][1] = dot_bf16_where(lane_mask, sums[i][1], weight, high);
            }
        }
    }
}

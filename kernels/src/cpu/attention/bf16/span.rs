//! Update of a block of queries with one span of positions: scores, online softmax, weighted sums of values.

use std::arch::x86_64::*;

use super::super::super::kv::{KvElement, TILE};
use super::super::super::simd::{Avx512, Simd, dot_bf16, dot_bf16_where, largest_of, opaque};
use super::mask::{PairRanges, VisibleRange, pair_ranges, visible_mask};
use super::prefetch::TilePrefetch;
use super::shape::{QUERIES, SPAN, SPAN_TILES};
use super::source::{COMPONENTS, KvSource, PairedTile};

/// Operands of one span update for up to [`QUERIES`] queries.
pub(super) struct SpanUpdate<'a> {
    pub(super) tiles: &'a [Option<PairedTile>; SPAN_TILES],
    pub(super) prefetch: [TilePrefetch; SPAN_TILES],
    /// Whether `prefetch` has tiles.
    pub(super) prefetches: bool,
    pub(super) base: usize,
    pub(super) maxima: *mut f32,
    pub(super) totals: *mut __m512,
    pub(super) lows: *const usize,
    pub(super) highs: *const usize,
    pub(super) queries: *const u32,
    pub(super) sums: *mut f32,
    pub(super) width: usize,
}

/// Computes the scores of Q queries, `SPAN` apart, for T tiles.
#[inline(always)]
pub(super) unsafe fn compute_scores<N: KvSource, const Q: usize, const T: usize, const PREFETCH: bool>(
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
pub(super) unsafe fn visible_maximum<const ALL: bool>(scores: *const f32, visible: VisibleRange) -> __m512 {
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

/// Advances the online softmax of Q queries by one span: updates maxima and totals, writes the weights
/// [Q, SPAN], and returns the factors of earlier sums. `visible` are positions of the span by query.
#[inline(always)]
pub(super) unsafe fn update_softmax<N: KvSource, const Q: usize, const ALL: bool>(
    update: &SpanUpdate<'_>,
    scores: *const f32,
    visible: &[(usize, usize); Q],
    weights: *mut u16,
) -> [__m512; Q] {
    let SpanUpdate { tiles, maxima, totals, .. } = *update;
    // SAFETY: the caller guarantees maxima and totals of the given queries, scores at visible positions, and
    // room for all weights.
    unsafe {
        let mut largest = [_mm512_set1_ps(f32::NEG_INFINITY); QUERIES];
        for i in 0..Q {
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
            let (scores, weights) = (scores.add(i * SPAN), weights.add(i * SPAN));
            if ALL || visible[i].0 < visible[i].1 {
                decay[i] = _mm512_set1_ps(factors[i]);
                let maximum = maxima.add(i).read();
                let total = totals.add(i);
                let before = _mm512_mul_ps(total.read(), decay[i]);
                total.write(softmax_step::<N, ALL>(scores, visible[i], tiles, maximum, before, weights));
            } else {
                weights.write_bytes(0, SPAN);
            }
        }
        decay
    }
}

/// Adds one span's values to the sums of Q queries, which are multiplied with `decay` first. `weights` is
/// [Q, SPAN].
#[inline(always)]
pub(super) unsafe fn accumulate_span<N: KvSource, const Q: usize, const ALL: bool, const PREFETCH: bool>(
    update: &SpanUpdate<'_>,
    visible: &[(usize, usize); Q],
    weights: *const u16,
    decay: [__m512; Q],
) {
    let SpanUpdate { tiles, ref prefetch, sums, width, .. } = *update;
    let pair_ranges = if ALL { [PairRanges::ALL; SPAN_TILES] } else { pair_ranges(visible) };
    let visible_bits = if ALL { [u64::MAX; Q] } else { visible.map(visible_mask) };
    // SAFETY: the caller guarantees tiles, weights and sums of the given queries.
    unsafe {
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
                let next = prefetch[t].value_addresses(d);
                accumulate_values::<N, Q, PREFETCH>(tile, d, next, all, weights, &mut sum);
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

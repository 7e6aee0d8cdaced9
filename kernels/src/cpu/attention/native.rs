//! Attention over keys and values in bf16 or in bytes, with bf16 dot products.
//!
//! Queries and weights are rounded to bf16; scores, maxima and sums are f32. Bytes are bf16 numbers too: scores are multiplied
//! with the keys' scales, and weights with those of the values before they are rounded. The online softmax steps through the
//! keys in spans at absolute multiples of 64 positions. For each span, all queries of a block take their turn, so that
//! keys and values come from the first-level cache.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::super::kv::{Number, TILE};
use super::super::simd::{
    Avx512, Kernel, Simd, bf16_pairs, dot_bf16, dot_bf16_where, largest_of, opaque, transpose,
};
use super::{Attend, Gathered, HEAD_DIM_MAX, lowest};
use coming::Coming;
use seen::{Ranges, Seen, bits, ranges};
pub(super) use source::{InPlace, Paired};
use source::{PART, Ready, Source};

mod coming;
mod seen;
mod source;

/// Positions of a span.
const SPAN: usize = 64;
const SPAN_TILES: usize = SPAN / TILE;
/// Queries that walk over the keys together.
const BLOCK_QUERIES: usize = 64;
const _: () = assert!(BLOCK_QUERIES.is_multiple_of(QUERIES));
/// Queries whose sums are in registers at once.
const QUERIES: usize = 8;
/// Up to so many queries of a task read [`InPlace`]: to make the pairs of a tile once costs about what that saves three times
/// [`QUERIES`].
pub(super) const FEW_QUERIES: usize = 2 * QUERIES;

pub(super) struct Native<'a, N>(Attend<'a>, PhantomData<N>);

impl<'a, N> Native<'a, N> {
    pub(super) fn new(attend: Attend<'a>) -> Self {
        Self(attend, PhantomData)
    }
}

impl<N: Source> Kernel for Native<'_, N> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on to the caller.
        unsafe { self.0.native::<N>() }
    }
}

/// Room for the queries of a block.
struct Block {
    /// The best score so far, and lanes that add up to the sum of the weights.
    bests: [MaybeUninit<f32>; BLOCK_QUERIES],
    totals: [MaybeUninit<__m512>; BLOCK_QUERIES],
    /// Positions that they see: from these to before those.
    lows: [MaybeUninit<usize>; BLOCK_QUERIES],
    highs: [MaybeUninit<usize>; BLOCK_QUERIES],
    /// Pairs of bf16; for each [`QUERIES`] queries, or what is left of them, [head_dim / 2, queries].
    queries: [MaybeUninit<u32>; BLOCK_QUERIES * HEAD_DIM_MAX / 2],
    /// Per 32 components those of `unpacklo`, then those of `unpackhi`; [queries, width].
    sums: [MaybeUninit<f32>; BLOCK_QUERIES * HEAD_DIM_MAX],
}

/// Room for the tiles of a span that are not read where they lie.
struct Rooms<N: Source> {
    gathered: [Option<Box<Gathered<N::Stored>>>; SPAN_TILES],
    /// Left as it is until it is written: to fill it would cost more than what few queries need.
    rooms: MaybeUninit<[N::Room; SPAN_TILES]>,
}

impl Attend<'_> {
    #[inline(always)]
    unsafe fn native<N: Source>(&self) {
        let queries = self.queries();
        let mut block = Block {
            bests: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            totals: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            lows: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            highs: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            queries: [const { MaybeUninit::uninit() }; BLOCK_QUERIES * HEAD_DIM_MAX / 2],
            sums: [const { MaybeUninit::uninit() }; BLOCK_QUERIES * HEAD_DIM_MAX],
        };
        let mut rooms = Rooms::<N> { gathered: [const { None }; SPAN_TILES], rooms: MaybeUninit::uninit() };
        // Blocks of nearly the same size: a small one would bring keys and values into order for few.
        let most = queries.div_ceil(queries.div_ceil(BLOCK_QUERIES)).next_multiple_of(QUERIES);
        for first in (0..queries).step_by(most) {
            // SAFETY: the queries are those of the task.
            unsafe { self.block::<N>(&mut block, first, most.min(queries - first), &mut rooms) };
        }
    }

    #[inline(always)]
    unsafe fn block<N: Source>(&self, block: &mut Block, first: usize, count: usize, rooms: &mut Rooms<N>) {
        let head_dim = self.shape.head_dim;
        let half = head_dim / 2;
        let group = self.shape.heads / self.shape.kv_heads;
        let width = head_dim.next_multiple_of(32);
        let bests = block.bests.as_mut_ptr().cast::<f32>();
        let totals = block.totals.as_mut_ptr().cast::<__m512>();
        let lows = block.lows.as_mut_ptr().cast::<usize>();
        let highs = block.highs.as_mut_ptr().cast::<usize>();
        let packed = block.queries.as_mut_ptr().cast::<u32>();
        let sums = block.sums.as_mut_ptr().cast::<f32>();
        let of = |i: usize| {
            let row = self.task.first as usize + (first + i) / group;
            (row, self.kv_head * group + (first + i) % group)
        };
        // SAFETY: rows and heads are within qkv and out; a block has room for its queries; tables cover positions
        // before `high`.
        unsafe {
            for at in (0..count).step_by(QUERIES) {
                let abreast = QUERIES.min(count - at);
                let mut queries = [self.qkv; QUERIES];
                for (i, query) in queries.iter_mut().enumerate().take(abreast) {
                    let (row, head) = of(at + i);
                    *query = self.qkv.add(row * self.shape.width() + head * head_dim);
                    let high = self.positions[row] as usize + 1;
                    lows.add(at + i).write(lowest(high, self.window));
                    highs.add(at + i).write(high);
                    totals.add(at + i).write(_mm512_setzero_ps());
                }
                // Of all that there is room for, as they are read together.
                _mm256_storeu_ps(bests.add(at), _mm256_set1_ps(f32::NEG_INFINITY));
                pack(&queries, abreast, head_dim, packed.add(at * half));
            }
            for at in (0..count * width).step_by(16) {
                _mm512_storeu_ps(sums.add(at), _mm512_setzero_ps());
            }
            // Rows ascend, so the first query sees furthest back and the last one furthest on.
            let (low, high) = (lows.read(), highs.add(count - 1).read());
            let then = self.after(first + count);
            for base in (low / SPAN * SPAN..high).step_by(SPAN) {
                let tiles = self.span::<N>(base, low, high, rooms);
                // What comes next is asked for by the first queries, a line or two at each step: memory is at work all
                // the time, and nothing waits for room to ask.
                let coming = self.coming::<N::Stored>(base + SPAN, high, then);
                let mut at = 0;
                while at < count {
                    let part = Part {
                        tiles: &tiles,
                        coming: if at == 0 { coming } else { [Coming::NONE; SPAN_TILES] },
                        asks: at == 0,
                        base,
                        bests: bests.add(at),
                        totals: totals.add(at),
                        lows: lows.add(at),
                        highs: highs.add(at),
                        queries: packed.add(at * half),
                        sums: sums.add(at * width),
                        width,
                    };
                    match (count - at).min(QUERIES) {
                        1 => self.part::<N, 1>(part),
                        2 => self.part::<N, 2>(part),
                        3 => self.part::<N, 3>(part),
                        4 => self.part::<N, 4>(part),
                        5 => self.part::<N, 5>(part),
                        6 => self.part::<N, 6>(part),
                        7 => self.part::<N, 7>(part),
                        _ => self.part::<N, 8>(part),
                    }
                    at += QUERIES;
                }
            }
            for i in 0..count {
                let (row, head) = of(i);
                let out = self.out.add((row * self.shape.heads + head) * head_dim);
                let scale = 1.0 / Avx512::sum(totals.add(i).read());
                unpack(sums.add(i * width), head_dim, scale, out);
            }
        }
    }

    /// The tiles of the span at `base` that hold positions from `low` to before `high`.
    #[inline(always)]
    unsafe fn span<N: Source>(
        &self,
        base: usize,
        low: usize,
        high: usize,
        rooms: &mut Rooms<N>,
    ) -> [Option<Ready>; SPAN_TILES] {
        let mut tiles = [None; SPAN_TILES];
        let Rooms { gathered, rooms } = rooms;
        let rooms = rooms.as_mut_ptr().cast::<N::Room>();
        for (t, (tile, gathered)) in tiles.iter_mut().zip(gathered).enumerate() {
            let at = base + t * TILE;
            if at + TILE <= low || at >= high {
                continue;
            }
            // SAFETY: the table covers positions before `high`; each tile of a span has a room.
            *tile = Some(unsafe {
                let stored = self.tile::<N::Stored>(at, high, gathered);
                N::ready(&stored, &self.layout, rooms.add(t))
            });
        }
        tiles
    }

    /// One span for Q queries.
    #[inline(always)]
    unsafe fn part<N: Source, const Q: usize>(&self, part: Part<'_>) {
        // SAFETY: passed on to the caller.
        unsafe {
            // Rows ascend, so what the first query and the last one see, all see.
            let (low, high) = (part.lows.add(Q - 1).read(), part.highs.read());
            match low <= part.base && part.base + SPAN <= high {
                true if Q == QUERIES && !part.asks => self.part_of::<N, Q, true, false>(part),
                true => self.part_of::<N, Q, true, true>(part),
                false => self.part_of::<N, Q, false, true>(part),
            }
        }
    }

    /// The same; `ALL` if every query sees the whole span, as mostly. Without `ASKS` nothing is asked for.
    #[inline(always)]
    unsafe fn part_of<N: Source, const Q: usize, const ALL: bool, const ASKS: bool>(&self, part: Part<'_>) {
        let Part { tiles, coming, base, bests, totals, lows, highs, queries, sums, width, .. } = part;
        let half = self.shape.head_dim / 2;
        let mut scores = MaybeUninit::<[[f32; SPAN]; Q]>::uninit();
        let mut weights = MaybeUninit::<[[u16; SPAN]; Q]>::uninit();
        // SAFETY: vectors are within tiles, bests, totals, queries and sums of the queries given; scores are read of positions that
        // are seen, whose tiles are there; weights are all written, with 0 where a query sees nothing.
        unsafe {
            let (scores, weights) = (scores.as_mut_ptr().cast::<f32>(), weights.as_mut_ptr().cast::<u16>());
            for t in (0..SPAN_TILES).step_by(2) {
                let next = [&coming[t], &coming[t + 1]];
                match (tiles[t], tiles[t + 1]) {
                    (Some(a), Some(b)) => {
                        score::<N, Q, 2, ASKS>([a, b], next, queries, half, self.scale, scores.add(t * TILE));
                    }
                    (Some(a), None) => {
                        score::<N, Q, 1, ASKS>([a], next, queries, half, self.scale, scores.add(t * TILE));
                    }
                    (None, Some(b)) => {
                        score::<N, Q, 1, ASKS>(
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
            let mut seen = [(0, SPAN); Q];
            let mut largest = [_mm512_set1_ps(f32::NEG_INFINITY); QUERIES];
            for i in 0..Q {
                if !ALL {
                    let from = lows.add(i).read().saturating_sub(base).min(SPAN);
                    let to = highs.add(i).read().saturating_sub(base).min(SPAN);
                    seen[i] = (from, to.max(from));
                }
                largest[i] = largest_seen::<ALL>(scores.add(i * SPAN), seen[i]);
            }
            // What earlier sums are multiplied by, for all queries at once.
            let before = _mm256_loadu_ps(bests);
            let now = _mm256_max_ps(largest_of(largest), before);
            let decays = Avx512::exp2(_mm512_zextps256_ps512(_mm256_sub_ps(before, now)));
            // That of a query that sees nothing stays as it is.
            _mm256_storeu_ps(bests, now);
            let mut factors = [0.0f32; QUERIES];
            _mm256_storeu_ps(factors.as_mut_ptr(), _mm512_castps512_ps256(decays));
            let mut decay = [_mm512_set1_ps(1.0); Q];
            for i in 0..Q {
                let weights = weights.add(i * SPAN);
                if ALL || seen[i].0 < seen[i].1 {
                    decay[i] = _mm512_set1_ps(factors[i]);
                    let best = bests.add(i).read();
                    let total = totals.add(i);
                    let before = _mm512_mul_ps(total.read(), decay[i]);
                    total.write(soften::<N, ALL>(
                        scores.add(i * SPAN),
                        seen[i],
                        tiles,
                        best,
                        before,
                        weights,
                    ));
                } else {
                    weights.write_bytes(0, SPAN);
                }
            }
            let ranges = if ALL { [Ranges::ALL; SPAN_TILES] } else { ranges(&seen) };
            let visible = if ALL { [u64::MAX; Q] } else { seen.map(bits) };
            for d in (0..width).step_by(PART) {
                let mut sum = [[_mm512_setzero_ps(); 2]; Q];
                for i in 0..Q {
                    let at = sums.add(i * width + d);
                    sum[i][0] = _mm512_mul_ps(_mm512_loadu_ps(at), decay[i]);
                    sum[i][1] = _mm512_mul_ps(_mm512_loadu_ps(at.add(16)), decay[i]);
                }
                for (t, tile) in tiles.iter().enumerate() {
                    let Some(tile) = tile else { continue };
                    // Opaque, and another address for other components: they would otherwise be kept in all lanes, in memory.
                    let weights = opaque(weights.wrapping_add(t * TILE + d)).wrapping_sub(d);
                    let Ranges { before, all, behind } = ranges[t];
                    let visible = visible.map(|span| span >> (t * TILE));
                    if !ALL {
                        weigh_seen::<N, Q>(tile, d, before, weights, &visible, &mut sum);
                    }
                    weigh::<N, Q, ASKS>(tile, d, coming[t].values_of(d), all, weights, &mut sum);
                    if !ALL {
                        weigh_seen::<N, Q>(tile, d, behind, weights, &visible, &mut sum);
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

/// Rounds `abreast` queries of `head_dim` numbers, which is even, to pairs of bf16; `to` is [head_dim / 2, abreast].
#[inline(always)]
unsafe fn pack(queries: &[*const f32; QUERIES], abreast: usize, head_dim: usize, to: *mut u32) {
    // SAFETY: masks keep to the numbers that there are, and to the queries.
    unsafe {
        let lanes = ((1u32 << abreast) - 1) as __mmask8;
        for at in (0..head_dim).step_by(32) {
            let numbers = (head_dim - at).min(32);
            let mut rows = [_mm512_setzero_si512(); 16];
            for i in 0..QUERIES {
                if i < abreast {
                    rows[i] = bf16_pairs(queries[i].wrapping_add(at), numbers);
                }
            }
            let columns = transpose(rows);
            for (d, column) in columns.iter().enumerate() {
                if d < numbers / 2 {
                    let to = to.wrapping_add((at / 2 + d) * abreast);
                    _mm256_mask_storeu_epi32(to.cast(), lanes, _mm512_castsi512_si256(*column));
                }
            }
        }
    }
}

/// Brings `count` sums into their order, see [`Block::sums`], times `scale`.
#[inline(always)]
unsafe fn unpack(sums: *const f32, count: usize, scale: f32, to: *mut f32) {
    // SAFETY: sums are whole vectors by twos; masks keep to what is asked for.
    unsafe {
        let scale = _mm512_set1_ps(scale);
        // Each 128 bits of a vector hold four components of eight.
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

/// One span, and the queries that go through it together.
struct Part<'a> {
    tiles: &'a [Option<Ready>; SPAN_TILES],
    coming: [Coming; SPAN_TILES],
    /// Whether something may come.
    asks: bool,
    base: usize,
    bests: *mut f32,
    totals: *mut __m512,
    lows: *const usize,
    highs: *const usize,
    queries: *const u32,
    sums: *mut f32,
    width: usize,
}

/// Scores of Q queries, `SPAN` apart, and T tiles.
#[inline(always)]
unsafe fn score<N: Source, const Q: usize, const T: usize, const ASKS: bool>(
    tiles: [Ready; T],
    next: [&Coming; 2],
    queries: *const u32,
    half: usize,
    scale: f32,
    scores: *mut f32,
) {
    // SAFETY: components are below head_dim, which is even; vectors are within the tiles.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); T]; Q];
        for d in 0..half {
            for next in next.into_iter().filter(|_| ASKS) {
                Avx512::prefetch(next.keys_of(d));
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

/// The scores of a tile that are seen, and -inf for the others: what is hidden may be anything, NaN included.
#[inline(always)]
unsafe fn scores_seen<const ALL: bool>(scores: *const f32, t: usize, visible: u64) -> __m512 {
    // SAFETY: passed on to the caller.
    unsafe {
        let scores = scores.add(t * TILE);
        if ALL {
            return _mm512_loadu_ps(scores);
        }
        let mask = (visible >> (t * TILE)) as __mmask16;
        _mm512_mask_loadu_ps(_mm512_set1_ps(f32::NEG_INFINITY), mask, scores)
    }
}

/// Lanes of which the largest is the best score of what is `seen`; scores that are no numbers do not count.
#[inline(always)]
unsafe fn largest_seen<const ALL: bool>(scores: *const f32, seen: Seen) -> __m512 {
    // SAFETY: vectors are within a query's scores.
    unsafe {
        let visible = bits(seen);
        let mut largest = _mm512_set1_ps(f32::NEG_INFINITY);
        for t in 0..SPAN_TILES {
            largest = Avx512::max(scores_seen::<ALL>(scores, t, visible), largest);
        }
        largest
    }
}

/// One step of the online softmax: turns the scores of what is `seen` into weights, rounded to bf16, relative to the
/// best score so far; lanes that add up to `total` and the sum of the weights.
#[inline(always)]
unsafe fn soften<N: Source, const ALL: bool>(
    scores: *const f32,
    seen: Seen,
    tiles: &[Option<Ready>; SPAN_TILES],
    best: f32,
    mut total: __m512,
    weights: *mut u16,
) -> __m512 {
    // SAFETY: vectors are within a query's scores and weights.
    unsafe {
        let best = _mm512_set1_ps(best);
        let visible = bits(seen);
        for t in 0..SPAN_TILES {
            let part = scores_seen::<ALL>(scores, t, visible);
            let mut weight = Avx512::exp2(_mm512_sub_ps(part, best));
            total = _mm512_add_ps(total, weight);
            if let Some(tile) = tiles[t].as_ref().filter(|_| N::Stored::SCALED) {
                let mask = (visible >> (t * TILE)) as __mmask16;
                weight = _mm512_mul_ps(weight, _mm512_maskz_loadu_ps(mask, tile.value_scales));
            }
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(weight));
            _mm256_storeu_si256(weights.add(t * TILE).cast(), rounded);
        }
        total
    }
}

/// sums += weights * values for some pairs of positions of a tile, which all of Q queries see, in their order; the weights of queries
/// are `SPAN` apart.
#[inline(always)]
unsafe fn weigh<N: Source, const Q: usize, const ASKS: bool>(
    tile: &Ready,
    d: usize,
    (next, next_step): (*const u8, usize),
    pairs: (usize, usize),
    weights: *const u16,
    sums: &mut [[__m512; 2]; Q],
) {
    // SAFETY: components and positions are in the tile.
    unsafe {
        for pair in pairs.0..pairs.1 {
            if ASKS {
                let ask = next.wrapping_add(pair * next_step);
                Avx512::prefetch(ask);
                Avx512::prefetch(ask.wrapping_add(next_step / 2));
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

/// The same for pairs, if any, of which each query sees what is `visible` to it: a bit for each position, the lowest one for the tile's
/// first.
#[inline(always)]
unsafe fn weigh_seen<N: Source, const Q: usize>(
    tile: &Ready,
    d: usize,
    pairs: (usize, usize),
    weights: *const u16,
    visible: &[u64; Q],
    sums: &mut [[__m512; 2]; Q],
) {
    // SAFETY: components and positions are in the tile.
    unsafe {
        for pair in pairs.0..pairs.1 {
            let (low, high) = N::values(tile, d, pair);
            for i in 0..Q {
                let weight = weights.add(i * SPAN + 2 * pair).cast::<i32>().read_unaligned();
                let weight = _mm512_set1_epi32(weight);
                // The weight of what is hidden is 0, but its value may be no number. And where all is hidden nothing is added, not even 0,
                // as the sign of a zero must not depend on what others see.
                let sees = (visible[i] >> (2 * pair)) as u32 & 3;
                let shown = sees * 0x5555_5555;
                let some = ((sees != 0) as __mmask16).wrapping_neg();
                let (low, high) = (_mm512_maskz_mov_epi16(shown, low), _mm512_maskz_mov_epi16(shown, high));
                sums[i][0] = dot_bf16_where(some, sums[i][0], weight, low);
                sums[i][1] = dot_bf16_where(some, sums[i][1], weight, high);
            }
        }
    }
}

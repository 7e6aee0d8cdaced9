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
use super::super::simd::{Avx512, Kernel, Simd, dot_bf16, largest_of};
use super::{Attend, HEAD_DIM_MAX, Then, lowest};
use source::{PART, Ready, Source};

mod source;

/// Positions of a span.
const SPAN: usize = 64;
const SPAN_TILES: usize = SPAN / TILE;
/// Queries that walk over the keys together.
const BLOCK_QUERIES: usize = 64;
/// Queries whose sums are in registers at once.
const QUERIES: usize = 8;

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

/// What a query has seen so far.
#[derive(Clone, Copy)]
struct State {
    best: f32,
    /// Positions it sees: from `low` to before `high`.
    low: usize,
    high: usize,
    total: [f32; 16],
}

/// Room for the queries of a block.
struct Block {
    states: [MaybeUninit<State>; BLOCK_QUERIES],
    /// Pairs of bf16; for each [`QUERIES`] queries, or what is left of them, [head_dim / 2, queries].
    queries: [MaybeUninit<u32>; BLOCK_QUERIES * HEAD_DIM_MAX / 2],
    /// Per 32 components those of `unpacklo`, then those of `unpackhi`; [queries, width].
    sums: [MaybeUninit<f32>; BLOCK_QUERIES * HEAD_DIM_MAX],
}

/// The visible part of a span or of a tile, from and to.
type Seen = (usize, usize);

impl Attend<'_> {
    #[inline(always)]
    unsafe fn native<N: Source>(&self) {
        let group = self.shape.heads / self.shape.kv_heads;
        let queries = (self.task.end - self.task.first) as usize * group;
        let mut block = Block {
            states: [const { MaybeUninit::uninit() }; BLOCK_QUERIES],
            queries: [const { MaybeUninit::uninit() }; BLOCK_QUERIES * HEAD_DIM_MAX / 2],
            sums: [const { MaybeUninit::uninit() }; BLOCK_QUERIES * HEAD_DIM_MAX],
        };
        let mut rooms: [N::Room; SPAN_TILES] = [N::room(), N::room(), N::room(), N::room()];
        for first in (0..queries).step_by(BLOCK_QUERIES) {
            // SAFETY: the queries are those of the task.
            unsafe { self.block::<N>(&mut block, first, BLOCK_QUERIES.min(queries - first), &mut rooms) };
        }
    }

    #[inline(always)]
    unsafe fn block<N: Source>(
        &self,
        block: &mut Block,
        first: usize,
        count: usize,
        rooms: &mut [N::Room; SPAN_TILES],
    ) {
        let head_dim = self.shape.head_dim;
        let half = head_dim / 2;
        let group = self.shape.heads / self.shape.kv_heads;
        let width = head_dim.next_multiple_of(32);
        let states = block.states.as_mut_ptr().cast::<State>();
        let packed = block.queries.as_mut_ptr().cast::<u32>();
        let sums = block.sums.as_mut_ptr().cast::<f32>();
        let mut pairs = [MaybeUninit::<u32>::uninit(); HEAD_DIM_MAX / 2];
        let of = |i: usize| {
            let row = self.task.first as usize + (first + i) / group;
            (row, self.kv_head * group + (first + i) % group)
        };
        // SAFETY: rows and heads are within qkv and out; a block has room for its queries; tables cover positions
        // before `high`.
        unsafe {
            for i in 0..count {
                let (row, head) = of(i);
                let query = self.qkv.add(row * self.shape.width() + head * head_dim);
                pack(query, head_dim, pairs.as_mut_ptr().cast());
                let part = i / QUERIES * QUERIES;
                let abreast = QUERIES.min(count - part);
                for d in 0..half {
                    packed.add(part * half + d * abreast + i - part).write(pairs[d].assume_init());
                }
                let high = self.positions[row] as usize + 1;
                let low = lowest(high, self.window);
                states.add(i).write(State { best: f32::NEG_INFINITY, low, high, total: [0.0; 16] });
                sums.add(i * width).write_bytes(0, width);
            }
            // Rows ascend, so the first query sees furthest back and the last one furthest on.
            let (low, high) = ((*states).low, (*states.add(count - 1)).high);
            let then = self.after(first + count);
            for base in (low / SPAN * SPAN..high).step_by(SPAN) {
                let tiles = self.span::<N>(base, low, high, rooms);
                // What comes next is asked for by the first queries, a line or two at each step: memory is at work all
                // the time, and nothing waits for room to ask.
                let mut coming = self.coming::<N>(base + SPAN, high, then);
                let mut at = 0;
                while at < count {
                    let part = Part {
                        tiles: &tiles,
                        coming,
                        base,
                        states: states.add(at),
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
                    coming = [Coming::NONE; SPAN_TILES];
                }
            }
            for i in 0..count {
                let (row, head) = of(i);
                let out = self.out.add((row * self.shape.heads + head) * head_dim);
                let scale = 1.0 / Avx512::sum(Avx512::load((*states.add(i)).total.as_ptr()));
                unpack(sums.add(i * width), head_dim, scale, out);
            }
        }
    }

    /// What is read after the queries before `first`: what the task's next ones see, or what comes after the task.
    fn after(&self, first: usize) -> Option<Then<'_>> {
        let group = self.shape.heads / self.shape.kv_heads;
        let all = (self.task.end - self.task.first) as usize * group;
        if first >= all {
            return self.then;
        }
        let sees = |i: usize| self.positions[self.task.first as usize + i / group] as usize + 1;
        let (low, high) = (lowest(sees(first), self.window), sees(all.min(first + BLOCK_QUERIES) - 1));
        Some(Then { kv_head: self.kv_head, table: self.table, low, high })
    }

    /// The tiles of the span at `base` that hold positions from `low` to before `high`.
    #[inline(always)]
    unsafe fn span<N: Source>(
        &self,
        base: usize,
        low: usize,
        high: usize,
        rooms: &mut [N::Room; SPAN_TILES],
    ) -> [Option<Ready>; SPAN_TILES] {
        let mut tiles = [None; SPAN_TILES];
        for (t, (tile, room)) in tiles.iter_mut().zip(rooms).enumerate() {
            let at = base + t * TILE;
            if at + TILE <= low || at >= high {
                continue;
            }
            // SAFETY: the table covers positions before `high`.
            *tile = Some(unsafe { N::ready(self, at, high, room) });
        }
        tiles
    }

    /// The tiles of the span at `base`, if that is before `high`, and else the first ones of what is read `then`.
    #[inline(always)]
    unsafe fn coming<N: Number>(
        &self,
        base: usize,
        high: usize,
        then: Option<Then<'_>>,
    ) -> [Coming; SPAN_TILES] {
        let (kv_head, table) = (self.kv_head, self.table);
        let (then, base) = match then {
            _ if base < high => (Then { kv_head, table, low: base, high }, base),
            Some(then) => (then, then.low / SPAN * SPAN),
            None => return [Coming::NONE; SPAN_TILES],
        };
        let (layout, tokens) = (&self.layout, self.layout.block_tokens);
        let mut coming = [Coming::NONE; SPAN_TILES];
        for (t, coming) in coming.iter_mut().enumerate() {
            let at = base + t * TILE;
            if tokens < TILE || at + TILE <= then.low || at >= then.high {
                continue;
            }
            let offset = at % tokens;
            // SAFETY: asking reads nothing.
            unsafe {
                let head = layout.keys(then.table[at / tokens], self.layer, then.kv_head);
                let head = self.kv.cast::<N>().wrapping_add(head);
                // Where blocks are larger than tiles, tiles share lines: one asks for the even rows of keys, the next for the odd ones.
                let keys = head.wrapping_add(offset / TILE % 2 * tokens + offset);
                let values = head.wrapping_add(layout.values_after_keys() + offset * layout.value_stride());
                *coming = Coming {
                    keys: keys.cast(),
                    keys_step: 2 * tokens * size_of::<N>(),
                    values: values.cast(),
                    values_step: 64 * size_of::<N>(),
                };
                if N::SCALED {
                    let scales = head.wrapping_add(layout.scales_after_keys()).cast::<f32>();
                    Avx512::prefetch(scales.wrapping_add(offset).cast());
                    Avx512::prefetch(scales.wrapping_add(tokens + offset).cast());
                }
            }
        }
        coming
    }

    /// One span for Q queries.
    #[inline(always)]
    unsafe fn part<N: Source, const Q: usize>(&self, part: Part<'_>) {
        // SAFETY: passed on to the caller.
        unsafe {
            // Rows ascend, so what the first query and the last one see, all see.
            let (low, high) = ((*part.states.add(Q - 1)).low, (*part.states).high);
            if low <= part.base && part.base + SPAN <= high {
                self.part_of::<N, Q, true>(part);
            } else {
                self.part_of::<N, Q, false>(part);
            }
        }
    }

    /// The same; `ALL` where every query sees the whole span, as mostly.
    #[inline(always)]
    unsafe fn part_of<N: Source, const Q: usize, const ALL: bool>(&self, part: Part<'_>) {
        let Part { tiles, coming, base, states, queries, sums, width } = part;
        let half = self.shape.head_dim / 2;
        let mut scores = MaybeUninit::<[[f32; SPAN]; Q]>::uninit();
        let mut weights = MaybeUninit::<[[u16; SPAN]; Q]>::uninit();
        // SAFETY: vectors are within tiles, states, queries and sums of the queries given; scores are read of tiles that are there, or
        // were filled before, and weights where a query sees something, for which all of them are written.
        unsafe {
            let states = std::slice::from_raw_parts_mut(states, Q);
            let (scores, weights) = (scores.as_mut_ptr().cast::<f32>(), weights.as_mut_ptr().cast::<u16>());
            if !ALL {
                for at in (0..Q * SPAN).step_by(16) {
                    _mm512_storeu_ps(scores.add(at), _mm512_set1_ps(f32::NEG_INFINITY));
                }
            }
            for t in (0..SPAN_TILES).step_by(2) {
                let next = [&coming[t], &coming[t + 1]];
                match (tiles[t], tiles[t + 1]) {
                    (Some(a), Some(b)) => {
                        score::<N, Q, 2>([a, b], next, queries, half, self.scale, scores.add(t * TILE));
                    }
                    (Some(a), None) => {
                        score::<N, Q, 1>([a], next, queries, half, self.scale, scores.add(t * TILE));
                    }
                    (None, Some(b)) => {
                        score::<N, Q, 1>([b], next, queries, half, self.scale, scores.add((t + 1) * TILE));
                    }
                    (None, None) => {}
                }
            }
            let mut seen = [(0, SPAN); Q];
            let mut largest = [_mm512_set1_ps(f32::NEG_INFINITY); QUERIES];
            let mut best = [f32::NEG_INFINITY; QUERIES];
            for i in 0..Q {
                if !ALL {
                    let from = states[i].low.saturating_sub(base).min(SPAN);
                    let to = states[i].high.saturating_sub(base).min(SPAN);
                    seen[i] = (from, to.max(from));
                }
                largest[i] = largest_seen::<ALL>(scores.add(i * SPAN), seen[i]);
                best[i] = states[i].best;
            }
            // What earlier sums are multiplied by, for all queries at once.
            let before = _mm256_loadu_ps(best.as_ptr());
            let now = _mm256_max_ps(largest_of(largest), before);
            let decays = Avx512::exp2(_mm512_zextps256_ps512(_mm256_sub_ps(before, now)));
            _mm256_storeu_ps(best.as_mut_ptr(), now);
            let mut factors = [0.0f32; QUERIES];
            _mm256_storeu_ps(factors.as_mut_ptr(), _mm512_castps512_ps256(decays));
            let mut decay = [_mm512_set1_ps(1.0); Q];
            for i in 0..Q {
                if ALL || seen[i].0 < seen[i].1 {
                    decay[i] = _mm512_set1_ps(factors[i]);
                    states[i].best = best[i];
                    let (scores, weights) = (scores.add(i * SPAN), weights.add(i * SPAN));
                    soften::<ALL>(scores, seen[i], tiles, decay[i], &mut states[i], weights);
                }
            }
            let common = if ALL { [Common::ALL; SPAN_TILES] } else { common(&seen) };
            for d in (0..width).step_by(PART) {
                let mut sum = [[_mm512_setzero_ps(); 2]; Q];
                for i in 0..Q {
                    let at = sums.add(i * width + d);
                    sum[i][0] = _mm512_mul_ps(_mm512_loadu_ps(at), decay[i]);
                    sum[i][1] = _mm512_mul_ps(_mm512_loadu_ps(at.add(16)), decay[i]);
                }
                for (t, tile) in tiles.iter().enumerate() {
                    let Some(tile) = tile else { continue };
                    let weights = weights.add(t * TILE);
                    // What all see is weighed for all at once, and what only some see before and after it.
                    if !ALL && common[t].before {
                        for i in 0..Q {
                            let (from, to) = within(seen[i], t);
                            let seen = (from, to.min(common[t].pairs.0 * 2));
                            weigh_one::<N>(tile, d, seen, weights.add(i * SPAN), &mut sum[i]);
                        }
                    }
                    let pairs = if ALL { (0, TILE / 2) } else { common[t].pairs };
                    weigh::<N, Q>(tile, d, coming[t].values_of(d), pairs, weights, &mut sum);
                    if !ALL && common[t].after {
                        for i in 0..Q {
                            let (from, to) = within(seen[i], t);
                            let seen = (from.max(common[t].pairs.1 * 2), to);
                            weigh_one::<N>(tile, d, seen, weights.add(i * SPAN), &mut sum[i]);
                        }
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

/// The part of what is `seen` of a span that is in its tile `t`.
#[inline(always)]
fn within(seen: Seen, t: usize) -> Seen {
    let upto = |end: usize| end.saturating_sub(t * TILE).min(TILE);
    (upto(seen.0), upto(seen.1))
}

/// What of a tile all queries see.
#[derive(Clone, Copy)]
struct Common {
    /// Pairs of positions, from and to.
    pairs: (usize, usize),
    /// Whether some see something before these, or after them.
    before: bool,
    after: bool,
}

impl Common {
    const ALL: Self = Self { pairs: (0, TILE / 2), before: false, after: false };
}

/// What all queries see of each tile of a span.
#[inline(always)]
fn common<const Q: usize>(seen: &[Seen; Q]) -> [Common; SPAN_TILES] {
    let mut common = [Common::ALL; SPAN_TILES];
    for (t, common) in common.iter_mut().enumerate() {
        let (mut all, mut any) = ((0, TILE), (TILE, 0));
        for seen in seen {
            let seen = within(*seen, t);
            all = (all.0.max(seen.0), all.1.min(seen.1));
            if seen.0 < seen.1 {
                any = (any.0.min(seen.0), any.1.max(seen.1));
            }
        }
        let (from, to) = (all.0.div_ceil(2), all.1 / 2);
        // Where they share nothing, everything is before the end.
        let pairs = if from < to { (from, to) } else { (TILE / 2, TILE / 2) };
        *common = Common { pairs, before: any.0 < 2 * pairs.0, after: 2 * pairs.1 < any.1 };
    }
    common
}

/// Rounds `count` numbers, an even count, to pairs of bf16.
#[inline(always)]
unsafe fn pack(from: *const f32, count: usize, to: *mut u32) {
    // SAFETY: masks keep to what there is.
    unsafe {
        for at in (0..count).step_by(32) {
            let present = (u64::MAX >> (64 - (count - at).min(32))) as u32;
            let low = _mm512_maskz_loadu_ps(present as __mmask16, from.wrapping_add(at));
            let high = _mm512_maskz_loadu_ps((present >> 16) as __mmask16, from.wrapping_add(at + 16));
            let pairs = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            let lanes = (u32::MAX >> (32 - (count - at).min(32) / 2)) as __mmask16;
            _mm512_mask_storeu_epi32(to.wrapping_add(at / 2).cast(), lanes, pairs);
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
            let present = (u64::MAX >> (64 - (count - at).min(32))) as u32;
            let halves = [
                (_mm512_permutex2var_ps(low, first, high), present as __mmask16, at),
                (_mm512_permutex2var_ps(low, second, high), (present >> 16) as __mmask16, at + 16),
            ];
            for (half, mask, at) in halves {
                _mm512_mask_storeu_ps(to.wrapping_add(at), mask, _mm512_mul_ps(half, scale));
            }
        }
    }
}

/// A tile that is read soon. Each step of the scores asks for a line of its keys, and each pair of values weighed for two lines of its
/// values, or for the same one twice where numbers are bytes.
#[derive(Clone, Copy)]
struct Coming {
    keys: *const u8,
    /// Bytes from one step to the next; 0 where nothing comes.
    keys_step: usize,
    values: *const u8,
    values_step: usize,
}

impl Coming {
    /// A line that is there.
    const NONE: Self = Self {
        keys: (&raw const NOTHING).cast(),
        keys_step: 0,
        values: (&raw const NOTHING).cast(),
        values_step: 0,
    };

    /// What the pairs of positions ask for that are weighed with components from `d` on.
    #[inline(always)]
    fn values_of(&self, d: usize) -> (*const u8, usize) {
        (self.values.wrapping_add(d / PART * (TILE / 2) * self.values_step), self.values_step)
    }
}

static NOTHING: u64 = 0;

/// One span, and the queries that go through it together.
struct Part<'a> {
    tiles: &'a [Option<Ready>; SPAN_TILES],
    coming: [Coming; SPAN_TILES],
    base: usize,
    states: *mut State,
    queries: *const u32,
    sums: *mut f32,
    width: usize,
}

/// Scores of Q queries, `SPAN` apart, and T tiles.
#[inline(always)]
unsafe fn score<N: Source, const Q: usize, const T: usize>(
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
            for next in next {
                Avx512::prefetch(next.keys.wrapping_add(d * next.keys_step));
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
            if !tiles[t].key_scales.is_null() {
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
        let visible = visible(seen);
        let mut largest = _mm512_set1_ps(f32::NEG_INFINITY);
        for t in 0..SPAN_TILES {
            largest = Avx512::max(scores_seen::<ALL>(scores, t, visible), largest);
        }
        largest
    }
}

/// A bit for each position of a span that is seen.
#[inline(always)]
fn visible(seen: Seen) -> u64 {
    let upto = |end: usize| if end == SPAN { u64::MAX } else { (1 << end) - 1 };
    upto(seen.1) & !upto(seen.0)
}

/// One step of the online softmax: turns the scores of what is `seen` into weights, rounded to bf16, relative to the
/// best score so far, and adds them up.
#[inline(always)]
unsafe fn soften<const ALL: bool>(
    scores: *const f32,
    seen: Seen,
    tiles: &[Option<Ready>; SPAN_TILES],
    decay: __m512,
    state: &mut State,
    weights: *mut u16,
) {
    // SAFETY: vectors are within a query's scores and weights.
    unsafe {
        let best = _mm512_set1_ps(state.best);
        let visible = visible(seen);
        let mut total = _mm512_mul_ps(_mm512_loadu_ps(state.total.as_ptr()), decay);
        for t in 0..SPAN_TILES {
            let part = scores_seen::<ALL>(scores, t, visible);
            let mut weight = Avx512::exp2(_mm512_sub_ps(part, best));
            total = _mm512_add_ps(total, weight);
            let scales = tiles[t].as_ref().map_or(std::ptr::null(), |tile| tile.value_scales);
            if !scales.is_null() {
                let mask = (visible >> (t * TILE)) as __mmask16;
                weight = _mm512_mul_ps(weight, _mm512_maskz_loadu_ps(mask, scales));
            }
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(weight));
            _mm256_storeu_si256(weights.add(t * TILE).cast(), rounded);
        }
        _mm512_storeu_ps(state.total.as_mut_ptr(), total);
    }
}

/// sums += weights * values for some pairs of positions of a tile, which all of Q queries see, in their order; the weights of queries
/// are `SPAN` apart.
#[inline(always)]
unsafe fn weigh<N: Source, const Q: usize>(
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
            let ask = next.wrapping_add(pair * next_step);
            Avx512::prefetch(ask);
            Avx512::prefetch(ask.wrapping_add(next_step / 2));
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

/// The same for one query and the positions `seen`, if any.
#[inline(always)]
unsafe fn weigh_one<N: Source>(
    tile: &Ready,
    d: usize,
    seen: Seen,
    weights: *const u16,
    sum: &mut [__m512; 2],
) {
    if seen.0 >= seen.1 {
        return;
    }
    // SAFETY: components and positions are in the tile.
    unsafe {
        for pair in seen.0 / 2..seen.1.div_ceil(2) {
            let (low, high) = N::values_seen(tile, d, pair, seen);
            let weight = _mm512_set1_epi32(weights.add(2 * pair).cast::<i32>().read_unaligned());
            sum[0] = dot_bf16(sum[0], weight, low);
            sum[1] = dot_bf16(sum[1], weight, high);
        }
    }
}

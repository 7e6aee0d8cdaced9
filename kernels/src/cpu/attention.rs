//! Attention of a ragged batch over keys and values in blocks.
//!
//! Each query goes through its keys in tiles at absolute multiples of 16 positions, first to last, with an online
//! softmax (Milakov and Gimelshein, 2018); with bf16 dot products in spans of four tiles, see `native`. What a query computes depends on its position and on the keys and values before it alone, so decode, any
//! chunk of a prefill, any block size and any block table give the same bits. Queries are grouped only to share
//! what is loaded.

use super::isa::Isa;
use super::kv::{Bf16, F16, Int8, KvDtype, KvLayout, KvPool, Number, TILE};
use super::matrix::Shared;
use super::pool::Pool;
use super::rope::QkvShape;
use super::simd::{self, Kernel, Simd};
use crate::dtype::Dtype;

#[cfg(target_arch = "x86_64")]
mod native;
mod walk;

/// Most numbers of a head.
pub const HEAD_DIM_MAX: usize = 256;

const LINE_BYTES: usize = 64;
/// How far ahead tiles are asked for: computing one takes less time than fetching it.
const PREFETCH_TILES: usize = 2;

/// Rows of one task: enough to share keys, few enough to spread over threads.
const TASK_ROWS: u32 = 16;

/// Sequences of a batch, without padding. See `tasks` for how it is cut up.
#[derive(Debug, Default, Clone)]
pub struct Ragged {
    tasks: Vec<Task>,
    blocks: Vec<u32>,
    positions: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Task {
    /// Range of rows.
    first: u32,
    end: u32,
    /// Where the sequence's block table begins in `blocks`.
    table: u32,
}

impl Ragged {
    /// Takes over a batch: rows `starts[s]..starts[s + 1]` belong to sequence `s`, whose block table is
    /// `blocks[block_starts[s]..block_starts[s + 1]]`. Keeps its buffers.
    ///
    /// # Panics
    /// If a table does not cover the positions of its rows, positions of a sequence do not ascend, or a block is not below `pool_blocks`.
    pub fn set(
        &mut self,
        starts: &[u32],
        positions: &[u32],
        block_starts: &[u32],
        blocks: &[u32],
        block_tokens: usize,
        pool_blocks: usize,
    ) {
        self.tasks.clear();
        self.blocks.clear();
        self.positions.clear();
        assert!(blocks.iter().all(|block| (*block as usize) < pool_blocks), "a block is out of the pool");
        for s in 0..starts.len() - 1 {
            let table = block_starts[s + 1] - block_starts[s];
            let rows = &positions[starts[s] as usize..starts[s + 1] as usize];
            let covered = table as usize * block_tokens;
            assert!(rows.iter().all(|position| (*position as usize) < covered), "a block table is too short");
            assert!(rows.is_sorted(), "positions do not ascend");
            for first in (starts[s]..starts[s + 1]).step_by(TASK_ROWS as usize) {
                let end = (first + TASK_ROWS).min(starts[s + 1]);
                self.tasks.push(Task { first, end, table: block_starts[s] });
            }
        }
        self.blocks.extend_from_slice(blocks);
        self.positions.extend_from_slice(positions);
    }
}

/// out[rows, heads * head_dim] = softmax(q k^T / sqrt(head_dim)) v for every row and head, over the keys up to the
/// row's own position, of those only the last `window` if given.
///
/// `qkv` are the rows that [`super::finish_qkv`] finished; their keys and values are read from the pool like any other.
///
/// # Panics
/// If shapes do not match, or `head_dim` is above [`HEAD_DIM_MAX`].
pub fn attention(
    pool: &Pool,
    isa: Isa,
    shape: QkvShape,
    qkv: &[f32],
    batch: &Ragged,
    kv: &KvPool,
    layer: usize,
    window: Option<u32>,
    out: &mut [f32],
) {
    let rows = batch.positions.len();
    let layout = *kv.layout();
    assert!(qkv.len() == rows * shape.width(), "qkv is not [rows, width]");
    assert!(out.len() == rows * shape.heads * shape.head_dim, "out is not [rows, heads * head_dim]");
    assert!(
        (layout.kv_heads, layout.head_dim) == (shape.kv_heads, shape.head_dim),
        "the KV pool differs in shape"
    );
    assert!(shape.heads.is_multiple_of(shape.kv_heads) && shape.head_dim <= HEAD_DIM_MAX, "heads do not fit");
    assert!(batch.blocks.iter().all(|block| (*block as usize) < kv.blocks()), "a block is out of the pool");
    assert!(layer < layout.layers, "the layer is out of the KV pool");
    let out = Shared(out.as_mut_ptr());
    let scale = (std::f64::consts::LOG2_E / (shape.head_dim as f64).sqrt()) as f32;
    let of = |index: usize| {
        let task = *batch.tasks.get(index / shape.kv_heads)?;
        Some((task, index % shape.kv_heads, &batch.blocks[task.table as usize..]))
    };
    pool.each(batch.tasks.len() * shape.kv_heads, &|index| {
        let Some((task, kv_head, table)) = of(index) else { return };
        let then = of(index + 1).map(|(task, kv_head, table)| {
            let [first, last] = [task.first, task.end - 1].map(|row| batch.positions[row as usize] as usize);
            Then { kv_head, table, low: lowest(first + 1, window), high: last + 1 }
        });
        let job = Attend {
            shape,
            qkv: qkv.as_ptr(),
            task,
            kv_head,
            table,
            then,
            positions: &batch.positions,
            kv: kv.as_ptr(),
            layout,
            layer,
            window,
            scale,
            out: out.get(),
        };
        #[cfg(target_arch = "x86_64")]
        if isa.0 == super::isa::Path::Avx512Bf16 {
            match layout.dtype {
                KvDtype::Plain(Dtype::Bf16) if job.queries() <= native::FEW_QUERIES => {
                    // SAFETY: this `Isa` has BF16.
                    return unsafe { simd::run_avx512_bf16(native::Native::<native::InPlace>::new(job)) };
                }
                KvDtype::Plain(Dtype::Bf16) => {
                    // SAFETY: as above.
                    return unsafe {
                        simd::run_avx512_bf16(native::Native::<native::Paired<Bf16>>::new(job))
                    };
                }
                KvDtype::Int8 => {
                    // SAFETY: as above.
                    return unsafe {
                        simd::run_avx512_bf16(native::Native::<native::Paired<Int8>>::new(job))
                    };
                }
                KvDtype::Plain(Dtype::F32 | Dtype::F16) => {}
            }
        }
        simd::run(isa, job);
    });
}

/// The first position that is seen by a query that sees those before `high`.
#[inline(always)]
fn lowest(high: usize, window: Option<u32>) -> usize {
    window.map_or(0, |window| high.saturating_sub(window as usize))
}

/// The queries of some rows of one sequence that read one key head.
struct Attend<'a> {
    shape: QkvShape,
    qkv: *const f32,
    task: Task,
    kv_head: usize,
    table: &'a [u32],
    /// What this thread probably does next.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only `native` asks for it"))]
    then: Option<Then<'a>>,
    positions: &'a [u32],
    kv: *const u8,
    layout: KvLayout,
    layer: usize,
    window: Option<u32>,
    /// What products of queries and keys are multiplied with: log2(e) / sqrt(head_dim), as weights are powers of 2, which cost less than
    /// those of e.
    scale: f32,
    out: *mut f32,
}

/// Keys and values that other queries read: of one head, from position `low` to before `high`.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only `native` asks for them"))]
struct Then<'a> {
    kv_head: usize,
    table: &'a [u32],
    low: usize,
    high: usize,
}

impl Kernel for Attend<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.layout.dtype {
                KvDtype::Plain(Dtype::F32) => self.walk::<S, f32>(),
                KvDtype::Plain(Dtype::Bf16) => self.walk::<S, Bf16>(),
                KvDtype::Plain(Dtype::F16) => self.walk::<S, F16>(),
                KvDtype::Int8 => self.walk::<S, Int8>(),
            }
        }
    }
}

/// Keys and values of one tile.
#[derive(Clone, Copy)]
struct Tile<N> {
    keys: *const N,
    /// Numbers from one component of the keys to the next.
    key_stride: usize,
    values: *const N,
    /// What keys and values are to be multiplied with, one number a position; null where they are plain numbers.
    key_scales: *const f32,
    value_scales: *const f32,
}

/// Room for a tile that is put together from blocks smaller than it.
struct Gathered<N> {
    keys: [N; HEAD_DIM_MAX * TILE],
    values: [N; HEAD_DIM_MAX * TILE],
    key_scales: [f32; TILE],
    value_scales: [f32; TILE],
}

impl<N: Number> Gathered<N> {
    const EMPTY: Self = Self {
        keys: [N::ZERO; HEAD_DIM_MAX * TILE],
        values: [N::ZERO; HEAD_DIM_MAX * TILE],
        key_scales: [0.0; TILE],
        value_scales: [0.0; TILE],
    };

    /// What was put together, with scales if there are any.
    fn tile(&self, scaled: bool) -> Tile<N> {
        let scales = |of: &[f32; TILE]| if scaled { of.as_ptr() } else { std::ptr::null() };
        Tile {
            keys: self.keys.as_ptr(),
            key_stride: TILE,
            values: self.values.as_ptr(),
            key_scales: scales(&self.key_scales),
            value_scales: scales(&self.value_scales),
        }
    }
}

impl Attend<'_> {
    /// Queries of the task.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only `native` asks for it"))]
    fn queries(&self) -> usize {
        (self.task.end - self.task.first) as usize * (self.shape.heads / self.shape.kv_heads)
    }

    /// The tile from position `base` on. Positions from `end` on need not exist.
    #[inline(always)]
    unsafe fn tile<N: Number>(
        &self,
        base: usize,
        end: usize,
        room: &mut Option<Box<Gathered<N>>>,
    ) -> Tile<N> {
        let layout = &self.layout;
        let (pool, stride) = (self.kv.cast::<N>(), layout.value_stride());
        let tokens = layout.block_tokens;
        // SAFETY: the table covers positions before `end`, and its blocks are in the pool.
        unsafe {
            if tokens >= TILE {
                let offset = base % tokens;
                let keys = pool.add(layout.keys(self.table[base / tokens], self.layer, self.kv_head));
                let values = keys.add(layout.values_after_keys() + offset * stride);
                let (mut key_scales, mut value_scales) = (std::ptr::null(), std::ptr::null());
                if N::SCALED {
                    key_scales = keys.add(layout.scales_after_keys()).cast::<f32>().add(offset);
                    value_scales = key_scales.add(tokens);
                }
                let keys = keys.add(offset);
                return Tile { keys, key_stride: tokens, values, key_scales, value_scales };
            }
            self.gather(base, end, room.get_or_insert_with(|| Box::new(Gathered::EMPTY)))
        }
    }

    /// The same from blocks smaller than a tile.
    #[inline(always)]
    unsafe fn gather<N: Number>(&self, base: usize, end: usize, room: &mut Gathered<N>) -> Tile<N> {
        let layout = &self.layout;
        let (pool, stride, tokens) = (self.kv.cast::<N>(), layout.value_stride(), layout.block_tokens);
        // SAFETY: the table covers positions before `end`, and its blocks are in the pool.
        unsafe {
            for position in base..end.min(base + TILE) {
                let (j, offset) = (position - base, position % tokens);
                let keys = pool.add(layout.keys(self.table[position / tokens], self.layer, self.kv_head));
                let values = keys.add(layout.values_after_keys() + offset * stride);
                for d in 0..layout.head_dim {
                    room.keys[d * TILE + j] = keys.add(d * tokens + offset).read();
                    room.values[j * stride + d] = values.add(d).read();
                }
                if N::SCALED {
                    let scales = keys.add(layout.scales_after_keys()).cast::<f32>().add(offset);
                    room.key_scales[j] = scales.read();
                    room.value_scales[j] = scales.add(tokens).read();
                }
            }
            room.tile(N::SCALED)
        }
    }

    /// Asks for the tile from position `base` on, whose block may be far from the one at work.
    #[inline(always)]
    unsafe fn prefetch<S: Simd, N: Number>(&self, base: usize, end: usize) {
        let layout = &self.layout;
        let tokens = layout.block_tokens;
        if base >= end || tokens < TILE {
            return;
        }
        let line = LINE_BYTES / size_of::<N>();
        // SAFETY: the table covers positions before `end`; prefetching reads nothing.
        unsafe {
            let head = layout.keys(self.table[base / tokens], self.layer, self.kv_head);
            let keys = self.kv.cast::<N>().add(head);
            let values = keys.add(layout.values_after_keys() + base % tokens * layout.value_stride());
            if tokens == TILE {
                // Keys are one range only where a tile is the whole block.
                for at in (0..layout.head_dim * TILE).step_by(line) {
                    S::prefetch(keys.add(at).cast());
                }
            }
            for at in (0..layout.value_stride() * TILE).step_by(line) {
                S::prefetch(values.add(at).cast());
            }
            if N::SCALED {
                let scales = self.kv.cast::<N>().add(head + layout.scales_after_keys()).cast::<f32>();
                S::prefetch(scales.add(base % tokens).cast());
                S::prefetch(scales.add(tokens + base % tokens).cast());
            }
        }
    }
}

#[cfg(test)]
mod tests;

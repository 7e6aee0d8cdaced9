//! Paged attention of a ragged batch, with online softmax (Milakov and Gimelshein, 2018).
//!
//! Each query passes over its keys in tiles at absolute multiples of 16 positions, first to last; with bf16
//! dot products in spans of four tiles, see [`bf16`]. A query's result depends only on its position and on
//! the keys and values up to it, so decode, any prefill chunking, any block size and any block table give the
//! same bits. Queries are grouped only to share loads.

use super::isa::Isa;
use super::kv::{Bf16, F16, Int8, KvDtype, KvElement, KvLayout, KvPool, TILE};
use super::matrix::SharedPtr;
use super::pool::Pool;
use super::rope::QkvShape;
use super::simd::{self, Kernel, Simd};
use crate::dtype::Dtype;

#[cfg(target_arch = "x86_64")]
mod bf16;
mod online_softmax;

/// Maximum elements per head.
pub const HEAD_DIM_MAX: usize = 256;

const LINE_BYTES: usize = 64;
/// Prefetch distance in tiles: computing a tile takes less time than fetching one.
const PREFETCH_TILES: usize = 2;

/// Rows per task: enough to share keys, few enough to spread over threads.
const TASK_ROWS: u32 = 16;

/// Ragged batch: rows of all sequences without padding, divided into tasks.
#[derive(Debug, Default, Clone)]
pub struct Ragged {
    tasks: Vec<TaskRows>,
    blocks: Vec<u32>,
    positions: Vec<u32>,
    /// Positions that each row sees, its own included; `None`: all up to its own.
    window: Option<u32>,
}

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy)]
struct TaskRows {
    /// Index of the first row; `end` is exclusive.
    first: u32,
    end: u32,
    /// Offset of the sequence's block table in `blocks`, and the index in its sequence of the first block there.
    table: u32,
    first_block: u32,
}

impl Ragged {
    /// Empties the batch and keeps its buffers. All its sequences see `window` positions, or all.
    pub fn clear(&mut self, window: Option<u32>) {
        self.tasks.clear();
        self.blocks.clear();
        self.positions.clear();
        self.window = window;
    }

    /// Appends a sequence: the positions of its rows, and its block table from block `first_block` on.
    ///
    /// # Panics
    /// If the table lacks a block that a row sees, or positions do not ascend.
    pub fn push(
        &mut self,
        positions: &[u32],
        first_block: u32,
        blocks: impl Iterator<Item = u32>,
        block_tokens: usize,
    ) {
        let (table, row) = (self.blocks.len() as u32, self.positions.len() as u32);
        self.blocks.extend(blocks);
        let held = first_block as usize..first_block as usize + (self.blocks.len() - table as usize);
        assert!(positions.is_sorted(), "positions do not ascend");
        if let [low, ..] = positions
            && let Some(high) = positions.last()
        {
            let low = window_start(*low as usize + 1, self.window);
            let seen = low / block_tokens..*high as usize / block_tokens + 1;
            assert!(held.start <= seen.start && seen.end <= held.end, "a block table is too short");
        }
        self.positions.extend_from_slice(positions);
        let end = self.positions.len() as u32;
        for first in (row..end).step_by(TASK_ROWS as usize) {
            self.tasks.push(TaskRows { first, end: (first + TASK_ROWS).min(end), table, first_block });
        }
    }
}

/// Computes out[rows, heads * head_dim] = softmax(q k^T / sqrt(score_size)) v for every row and head, with a
/// causal mask and the batch's sliding window.
///
/// `qkv` holds rows finished by [`super::finish_qkv`]; keys and values are read from the pool only, at `layout`.
///
/// # Panics
/// If shapes do not match, or `head_dim` exceeds [`HEAD_DIM_MAX`].
pub fn attention(
    pool: &Pool,
    isa: Isa,
    shape: QkvShape,
    qkv: &[f32],
    batch: &Ragged,
    kv: &KvPool,
    layout: &KvLayout,
    score_size: f64,
    out: &mut [f32],
) {
    let (rows, window) = (batch.positions.len(), batch.window);
    layout.check(kv);
    let layout = *layout;
    assert!(qkv.len() == rows * shape.width(), "qkv is not [rows, width]");
    assert!(out.len() == rows * shape.heads * shape.head_dim, "out is not [rows, heads * head_dim]");
    assert!(
        (layout.kv_heads, layout.head_dim) == (shape.kv_heads, shape.head_dim),
        "the layer's KV differs in shape"
    );
    assert!(shape.heads.is_multiple_of(shape.kv_heads) && shape.head_dim <= HEAD_DIM_MAX, "heads do not fit");
    assert!(batch.blocks.iter().all(|block| (*block as usize) < kv.blocks()), "a block is out of the pool");
    let out = SharedPtr(out.as_mut_ptr());
    let scale = (std::f64::consts::LOG2_E / score_size.sqrt()) as f32;
    let operands = |index: usize| {
        let task = *batch.tasks.get(index / shape.kv_heads)?;
        let table = BlockTable { blocks: &batch.blocks[task.table as usize..], first: task.first_block };
        Some((task, index % shape.kv_heads, table))
    };
    pool.each(batch.tasks.len() * shape.kv_heads, &|index| {
        let Some((task, kv_head, table)) = operands(index) else { return };
        let next_range = operands(index + 1).map(|(task, kv_head, table)| {
            let [first, last] = [task.first, task.end - 1].map(|row| batch.positions[row as usize] as usize);
            NextRange { kv_head, table, low: window_start(first + 1, window), high: last + 1 }
        });
        let job = AttentionTask {
            shape,
            qkv: qkv.as_ptr(),
            task,
            kv_head,
            table,
            next_range,
            positions: &batch.positions,
            kv: kv.as_ptr(),
            layout,
            window,
            scale,
            out: out.get(),
        };
        #[cfg(target_arch = "x86_64")]
        if isa.0 == super::isa::IsaKind::Avx512Bf16 {
            match layout.dtype {
                KvDtype::Plain(Dtype::Bf16) if job.queries() <= bf16::FEW_QUERIES => {
                    // SAFETY: an `Isa` of this kind exists only where BF16 was detected.
                    return unsafe { simd::run_avx512_bf16(bf16::Bf16Attention::<bf16::InPlace>::new(job)) };
                }
                KvDtype::Plain(Dtype::Bf16) => {
                    // SAFETY: an `Isa` of this kind exists only where BF16 was detected.
                    return unsafe {
                        simd::run_avx512_bf16(bf16::Bf16Attention::<bf16::PairedOnce<Bf16>>::new(job))
                    };
                }
                KvDtype::Int8 => {
                    // SAFETY: an `Isa` of this kind exists only where BF16 was detected.
                    return unsafe {
                        simd::run_avx512_bf16(bf16::Bf16Attention::<bf16::PairedOnce<Int8>>::new(job))
                    };
                }
                KvDtype::Plain(Dtype::F32 | Dtype::F16) => {}
            }
        }
        simd::run(isa, job);
    });
}

/// Returns the first position visible to a query whose visible positions end before `high`.
#[inline(always)]
fn window_start(high: usize, window: Option<u32>) -> usize {
    window.map_or(0, |window| high.saturating_sub(window as usize))
}

/// Attention of some rows of one sequence with one key head.
struct AttentionTask<'a> {
    shape: QkvShape,
    qkv: *const f32,
    task: TaskRows,
    kv_head: usize,
    table: BlockTable<'a>,
    /// Range that this thread probably reads next, for prefetching.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only `bf16` prefetches it"))]
    next_range: Option<NextRange<'a>>,
    positions: &'a [u32],
    kv: *const u8,
    layout: KvLayout,
    window: Option<u32>,
    /// Factor of scores: log2(e) / sqrt(score_size), as powers of 2 are cheaper than powers of e.
    scale: f32,
    out: *mut f32,
}

/// Block table of a sequence, from a block on.
#[derive(Clone, Copy)]
struct BlockTable<'a> {
    blocks: &'a [u32],
    /// Index of the first block in its sequence.
    first: u32,
}

impl BlockTable<'_> {
    /// Returns the block with this index in its sequence.
    #[inline(always)]
    fn at(&self, index: usize) -> u32 {
        self.blocks[index - self.first as usize]
    }
}

/// Range of keys and values to prefetch: of one head, positions `low..high`.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only `bf16` prefetches them"))]
struct NextRange<'a> {
    kv_head: usize,
    table: BlockTable<'a>,
    low: usize,
    high: usize,
}

impl Kernel for AttentionTask<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller guarantees `S`'s instruction set; `attention` checked all operands.
        unsafe {
            match self.layout.dtype {
                KvDtype::Plain(Dtype::F32) => self.online_softmax::<S, f32>(),
                KvDtype::Plain(Dtype::Bf16) => self.online_softmax::<S, Bf16>(),
                KvDtype::Plain(Dtype::F16) => self.online_softmax::<S, F16>(),
                KvDtype::Int8 => self.online_softmax::<S, Int8>(),
            }
        }
    }
}

/// Keys and values of one tile.
#[derive(Clone, Copy)]
struct KvTile<N> {
    keys: *const N,
    /// Elements between components of the keys.
    key_stride: usize,
    values: *const N,
    /// Scales per position; null for unscaled dtypes.
    key_scales: *const f32,
    value_scales: *const f32,
}

/// Buffer for a tile assembled from blocks smaller than a tile.
struct GatheredTile<N> {
    keys: [N; HEAD_DIM_MAX * TILE],
    values: [N; HEAD_DIM_MAX * TILE],
    key_scales: [f32; TILE],
    value_scales: [f32; TILE],
}

impl<N: KvElement> GatheredTile<N> {
    const EMPTY: Self = Self {
        keys: [N::ZERO; HEAD_DIM_MAX * TILE],
        values: [N::ZERO; HEAD_DIM_MAX * TILE],
        key_scales: [0.0; TILE],
        value_scales: [0.0; TILE],
    };

    /// Returns the assembled tile, with scales if `scaled`.
    fn tile(&self, scaled: bool) -> KvTile<N> {
        let scales = |of: &[f32; TILE]| if scaled { of.as_ptr() } else { std::ptr::null() };
        KvTile {
            keys: self.keys.as_ptr(),
            key_stride: TILE,
            values: self.values.as_ptr(),
            key_scales: scales(&self.key_scales),
            value_scales: scales(&self.value_scales),
        }
    }
}

impl AttentionTask<'_> {
    /// Returns the number of queries of the task.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only `bf16` uses it"))]
    fn queries(&self) -> usize {
        (self.task.end - self.task.first) as usize * (self.shape.heads / self.shape.kv_heads)
    }

    /// Returns the tile at position `base`. Positions from `end` on need not exist.
    #[inline(always)]
    unsafe fn tile<N: KvElement>(
        &self,
        base: usize,
        end: usize,
        buffer: &mut Option<Box<GatheredTile<N>>>,
    ) -> KvTile<N> {
        let layout = &self.layout;
        let stride = layout.value_stride();
        let tokens = layout.block_tokens;
        // SAFETY: the block table covers positions before `end`, and its blocks are in the pool.
        unsafe {
            if tokens >= TILE {
                let offset = base % tokens;
                let keys = self.kv.add(layout.keys(self.table.at(base / tokens), self.kv_head)).cast::<N>();
                let values = keys.add(layout.values_after_keys() + offset * stride);
                let (mut key_scales, mut value_scales) = (std::ptr::null(), std::ptr::null());
                if N::SCALED {
                    key_scales = keys.add(layout.scales_after_keys()).cast::<f32>().add(offset);
                    value_scales = key_scales.add(tokens);
                }
                let keys = keys.add(offset);
                return KvTile { keys, key_stride: tokens, values, key_scales, value_scales };
            }
            self.gather(base, end, buffer.get_or_insert_with(|| Box::new(GatheredTile::EMPTY)))
        }
    }

    /// Assembles the tile at position `base` from blocks smaller than a tile.
    #[inline(always)]
    unsafe fn gather<N: KvElement>(
        &self,
        base: usize,
        end: usize,
        buffer: &mut GatheredTile<N>,
    ) -> KvTile<N> {
        let layout = &self.layout;
        let (stride, tokens) = (layout.value_stride(), layout.block_tokens);
        // SAFETY: the block table covers positions before `end`, and its blocks are in the pool.
        unsafe {
            // Blocks before the first one hold positions that no query of the batch sees.
            for position in base.max(self.table.first as usize * tokens)..end.min(base + TILE) {
                let (j, offset) = (position - base, position % tokens);
                let head = layout.keys(self.table.at(position / tokens), self.kv_head);
                let keys = self.kv.add(head).cast::<N>();
                let values = keys.add(layout.values_after_keys() + offset * stride);
                for d in 0..layout.head_dim {
                    buffer.keys[d * TILE + j] = keys.add(d * tokens + offset).read();
                    buffer.values[j * stride + d] = values.add(d).read();
                }
                if N::SCALED {
                    let scales = keys.add(layout.scales_after_keys()).cast::<f32>().add(offset);
                    buffer.key_scales[j] = scales.read();
                    buffer.value_scales[j] = scales.add(tokens).read();
                }
            }
            buffer.tile(N::SCALED)
        }
    }

    /// Prefetches the tile at position `base`, whose KV block may not be adjacent.
    #[inline(always)]
    unsafe fn prefetch<S: Simd, N: KvElement>(&self, base: usize, end: usize) {
        let layout = &self.layout;
        let tokens = layout.block_tokens;
        if base >= end || tokens < TILE {
            return;
        }
        let line = LINE_BYTES / size_of::<N>();
        // SAFETY: the block table covers positions before `end`; prefetching never faults.
        unsafe {
            let head = layout.keys(self.table.at(base / tokens), self.kv_head);
            let keys = self.kv.add(head).cast::<N>();
            let values = keys.add(layout.values_after_keys() + base % tokens * layout.value_stride());
            if tokens == TILE {
                // Keys are contiguous only where a tile is the whole block.
                for at in (0..layout.head_dim * TILE).step_by(line) {
                    S::prefetch(keys.add(at).cast());
                }
            }
            for at in (0..layout.value_stride() * TILE).step_by(line) {
                S::prefetch(values.add(at).cast());
            }
            if N::SCALED {
                let scales = keys.add(layout.scales_after_keys()).cast::<f32>();
                S::prefetch(scales.add(base % tokens).cast());
                S::prefetch(scales.add(tokens + base % tokens).cast());
            }
        }
    }
}

#[cfg(test)]
mod tests;

use half::f16;

use super::simd::Simd;
use crate::dtype::{Dtype, bf16_bits};

/// Positions that attention treats at once, at absolute multiples of it.
pub(crate) const TILE: usize = 16;

/// The shape of a KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// How keys and values are stored.
    pub dtype: Dtype,
    /// Layers of the model.
    pub layers: usize,
    /// Key and value heads of a layer.
    pub kv_heads: usize,
    /// Numbers of a key or a value.
    pub head_dim: usize,
    /// Tokens of a block; a power of two.
    pub block_tokens: usize,
}

impl KvLayout {
    /// Numbers between one token's value and the next one's: `head_dim`, padded to whole vectors.
    pub(crate) fn value_stride(&self) -> usize {
        self.head_dim.next_multiple_of(TILE)
    }

    fn head_numbers(&self) -> usize {
        (self.head_dim + self.value_stride()) * self.block_tokens
    }

    fn block_numbers(&self) -> usize {
        self.layers * self.kv_heads * self.head_numbers()
    }

    /// Bytes of one block, all layers together.
    pub fn block_bytes(&self) -> usize {
        self.block_numbers() * self.dtype.bytes()
    }

    /// Where the keys of a head begin, in numbers from the start of the pool.
    #[inline(always)]
    pub(crate) fn keys(&self, block: u32, layer: usize, head: usize) -> usize {
        block as usize * self.block_numbers() + (layer * self.kv_heads + head) * self.head_numbers()
    }

    /// From a head's keys to its values.
    #[inline(always)]
    pub(crate) fn values_after_keys(&self) -> usize {
        self.head_dim * self.block_tokens
    }
}

/// Where a token's key and value go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPlace {
    /// Block of the pool.
    pub block: u32,
    /// Token within the block.
    pub offset: u32,
}

/// Keys and values of all sequences, in blocks.
///
/// A block is one contiguous range across all layers, [layers, kv_heads, (keys, values)], so that copying it is one
/// copy. Keys lie [head_dim, block_tokens], so that a vector holds one component of neighbouring positions
/// and scores need no horizontal sums; values lie [block_tokens, head_dim].
///
/// Fresh pages are the operating system's zero pages: blocks never used cost no memory.
pub struct KvPool {
    layout: KvLayout,
    blocks: usize,
    words: Vec<u32>,
}

impl KvPool {
    /// A pool of `blocks` blocks.
    ///
    /// # Panics
    /// If `block_tokens` is not a power of two.
    pub fn new(layout: KvLayout, blocks: usize) -> Self {
        assert!(layout.block_tokens.is_power_of_two(), "block_tokens is not a power of two");
        Self { layout, blocks, words: vec![0; (blocks * layout.block_bytes()).div_ceil(4)] }
    }

    /// Its shape.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Copies a whole block over another.
    ///
    /// # Panics
    /// If a block is out of the pool.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        let (from, to) = (from as usize, to as usize);
        assert!(from < self.blocks && to < self.blocks, "a block is out of the pool");
        let bytes = self.layout.block_bytes();
        // SAFETY: both ranges are within the pool; `copy` allows them to be the same.
        unsafe {
            let start = self.words.as_mut_ptr().cast::<u8>();
            std::ptr::copy(start.add(from * bytes), start.add(to * bytes), bytes);
        }
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast()
    }
}

/// A number as the pool stores it.
///
/// # Safety
/// As [`Simd`] for pointers and instruction set.
pub(crate) trait Number: Copy {
    const ZERO: Self;

    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    fn round(x: f32) -> Self;
}

impl Number for f32 {
    const ZERO: f32 = 0.0;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    fn round(x: f32) -> f32 {
        x
    }
}

/// bf16 bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(u16);

impl Number for Bf16 {
    const ZERO: Bf16 = Bf16(0);

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Bf16) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load_bf16(from.cast()) }
    }

    #[inline(always)]
    fn round(x: f32) -> Bf16 {
        Bf16(bf16_bits(x))
    }
}

/// f16 bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(u16);

impl Number for F16 {
    const ZERO: F16 = F16(0);

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const F16) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load_f16(from.cast()) }
    }

    #[inline(always)]
    fn round(x: f32) -> F16 {
        // Values beyond the range of f16 are held at its end: an infinite key would make every score NaN.
        F16(f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits())
    }
}

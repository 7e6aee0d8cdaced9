use std::io;
use std::sync::Arc;

use half::f16;

use super::buffer::{Buffer, Pages};
use super::simd::Simd;
use crate::dtype::{Dtype, bf16_bits};

/// Positions that attention treats at once, at absolute multiples of it.
pub(crate) const TILE: usize = 16;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// As numbers.
    Plain(Dtype),
    /// As integers from -127 to 127 that share an f32 scale, by token and head, keys and values apart. A token's numbers
    /// are rounded among themselves alone, so that they do not depend on what else is in the pool.
    Int8,
}

impl KvDtype {
    /// A stable, lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Int8 => "int8",
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.bytes(),
            Self::Int8 => 1,
        }
    }
}

impl From<Dtype> for KvDtype {
    fn from(dtype: Dtype) -> Self {
        Self::Plain(dtype)
    }
}

/// The shape of a KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// How keys and values are stored.
    pub dtype: KvDtype,
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
        let scales = match self.dtype {
            KvDtype::Plain(_) => 0,
            KvDtype::Int8 => 2 * size_of::<f32>() * self.block_tokens,
        };
        self.scales_after_keys() + scales
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

    /// From a head's keys to its values. Whole words, so that scales are aligned.
    #[inline(always)]
    pub(crate) fn values_after_keys(&self) -> usize {
        (self.head_dim * self.block_tokens).next_multiple_of(size_of::<f32>())
    }

    /// From a head's keys to their scales, one f32 a token, which those of the values follow; where there are any.
    #[inline(always)]
    pub(crate) fn scales_after_keys(&self) -> usize {
        self.values_after_keys() + self.value_stride() * self.block_tokens
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
/// A block is one contiguous range across all layers, [layers, kv_heads, (keys, values, scales)], so that copying it is one
/// copy. Keys lie [head_dim, block_tokens], so that a vector holds one component of neighbouring positions
/// and scores need no horizontal sums; values lie [block_tokens, head_dim].
///
/// Fresh pages are the operating system's zero pages, huge ones where it grants them: blocks never used cost no
/// memory but for what shares such a page.
pub struct KvPool {
    layout: KvLayout,
    blocks: usize,
    memory: Arc<Memory>,
}

/// Memory that the kernels and a [`KvCopier`] write to at once, never to the same block: kernels reach it by
/// `&mut KvPool`, copiers by the contract of `KvCopier::copy`.
struct Memory(Buffer);

impl Memory {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_shared_ptr()
    }
}

fn memory(blocks: usize, block_bytes: usize) -> io::Result<Memory> {
    // Where the product does not fit a number, neither does it fit an address space.
    Buffer::zeroed(blocks.saturating_mul(block_bytes), Pages::Huge).map(Memory)
}

/// Which way blocks go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDirection {
    /// From the pool to the host's.
    Out,
    /// From the host's pool to the pool.
    In,
}

/// Copies blocks between a pool and the host pool behind it, from another thread than the one that computes.
///
/// On CPUs both are the same kind of memory; what moves is what would move from and to a GPU.
pub struct KvCopier {
    block_bytes: usize,
    device_blocks: usize,
    host_blocks: usize,
    device: Arc<Memory>,
    host: Memory,
}

impl KvCopier {
    /// A host pool of `host_blocks` blocks behind `pool`. Blocks never used cost no memory.
    ///
    /// # Errors
    /// There is no such amount of memory.
    pub fn new(pool: &KvPool, host_blocks: usize) -> io::Result<Self> {
        let block_bytes = pool.layout.block_bytes();
        Ok(Self {
            block_bytes,
            device_blocks: pool.blocks,
            host_blocks,
            device: Arc::clone(&pool.memory),
            host: memory(host_blocks, block_bytes)?,
        })
    }

    /// Copies whole blocks, (device, host) each.
    ///
    /// # Panics
    /// If a block is out of its pool.
    ///
    /// # Safety
    /// Until it returns, no kernel reads or writes the device blocks that are written, or writes those that are
    /// read, and no other copier touches any of the blocks.
    pub unsafe fn copy(&mut self, direction: KvDirection, blocks: &[(u32, u32)]) {
        for &(device, host) in blocks {
            let (device, host) = (device as usize, host as usize);
            assert!(device < self.device_blocks && host < self.host_blocks, "a block is out of its pool");
            // SAFETY: the offsets are within the pools, and the caller keeps others away from the blocks.
            unsafe {
                let device = self.device.as_ptr().add(device * self.block_bytes);
                let host = self.host.as_ptr().add(host * self.block_bytes);
                match direction {
                    KvDirection::Out => std::ptr::copy_nonoverlapping(device, host, self.block_bytes),
                    KvDirection::In => std::ptr::copy_nonoverlapping(host, device, self.block_bytes),
                }
            }
        }
    }
}

impl KvPool {
    /// A pool of `blocks` blocks.
    ///
    /// # Errors
    /// There is no such amount of memory.
    ///
    /// # Panics
    /// If `block_tokens` is not a power of two.
    pub fn new(layout: KvLayout, blocks: usize) -> io::Result<Self> {
        assert!(layout.block_tokens.is_power_of_two(), "block_tokens is not a power of two");
        Ok(Self { layout, blocks, memory: Arc::new(memory(blocks, layout.block_bytes())?) })
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
            let start = self.memory.as_ptr();
            std::ptr::copy(start.add(from * bytes), start.add(to * bytes), bytes);
        }
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.memory.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.memory.as_ptr()
    }
}

/// A number as the pool stores it.
///
/// # Safety
/// As [`Simd`] for pointers and instruction set.
pub(crate) trait Number: Copy {
    const ZERO: Self;
    /// Whether numbers must be multiplied with their token's scale.
    const SCALED: bool = false;

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

/// A signed byte, to be multiplied with a scale.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Int8(pub(crate) i8);

impl Number for Int8 {
    const ZERO: Int8 = Int8(0);
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Int8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load_i8(from.cast()) }
    }

    #[inline(always)]
    fn round(x: f32) -> Int8 {
        // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves its lowest byte in that of the bits.
        Int8((x + 12_582_912.0).to_bits() as i8)
    }
}

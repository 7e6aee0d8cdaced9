//! Paged KV cache in host memory: layout, block pool and copies to and from the host pool.

use std::io;
use std::sync::Arc;

use half::f16;

use super::buffer::{Buffer, Pages};
use super::matrix::SharedPtr;
use super::pool::Pool;
use super::simd::Simd;
use crate::dtype::{Dtype, bf16_bits};

/// Positions that attention processes at once; tiles start at absolute multiples of it.
pub(crate) const TILE: usize = 16;

/// Minimum bytes of a block that one thread copies.
const COPY_BYTES: usize = 4096;

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// Unquantised elements.
    Plain(Dtype),
    /// Integers from -127 to 127 with an f32 scale per token and head, separate for keys and values. A token
    /// is quantised on its own, so that its bits do not depend on other contents of the pool.
    Int8,
}

impl KvDtype {
    /// Returns the stable, lower-case name.
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

/// Keys and values of a layer in the blocks of a KV pool: [kv_heads, (keys, values, scales)] at an offset in each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    pub(crate) dtype: KvDtype,
    /// Key and value heads.
    pub(crate) kv_heads: usize,
    /// Elements per key or value.
    pub(crate) head_dim: usize,
    /// Tokens per block; a power of two.
    pub(crate) block_tokens: usize,
    /// Bytes of a head in a block.
    head_bytes: usize,
    /// Bytes of a block, over all layers in it.
    block_bytes: usize,
    /// Bytes from the start of a block to the layer's first head.
    offset: usize,
}

impl KvLayout {
    /// Creates the layout of the only layer in a block.
    ///
    /// # Panics
    /// If `block_tokens` is not a power of two.
    pub fn new(dtype: KvDtype, kv_heads: usize, head_dim: usize, block_tokens: usize) -> Self {
        assert!(block_tokens.is_power_of_two(), "block_tokens is not a power of two");
        let mut layout =
            Self { dtype, kv_heads, head_dim, block_tokens, head_bytes: 0, block_bytes: 0, offset: 0 };
        layout.head_bytes = (layout.head_elements() * dtype.bytes()).next_multiple_of(size_of::<f32>());
        layout.block_bytes = layout.layer_bytes();
        layout
    }

    /// Returns the layout of the layer at `offset` in blocks of `block_bytes`, both in bytes.
    ///
    /// # Panics
    /// If the layer is not within the block, or not aligned to 4 bytes.
    #[must_use]
    pub fn within(self, block_bytes: usize, offset: usize) -> Self {
        assert!(offset + self.layer_bytes() <= block_bytes, "a layer is beyond the end of its block");
        let align = size_of::<f32>();
        let aligned = offset.is_multiple_of(align) && block_bytes.is_multiple_of(align);
        assert!(aligned, "a layer's rows are not aligned");
        Self { block_bytes, offset, ..self }
    }

    /// Returns the bytes of the layer in a block.
    pub fn layer_bytes(&self) -> usize {
        self.kv_heads * self.head_bytes
    }

    /// Checks that the pool has such blocks.
    ///
    /// # Panics
    /// If it has others.
    pub(crate) fn check(&self, pool: &KvPool) {
        assert_eq!(self.block_bytes, pool.block_bytes, "the KV pool has blocks of another size");
    }

    /// Returns the elements between consecutive tokens' values: `head_dim`, padded to whole vectors.
    pub(crate) fn value_stride(&self) -> usize {
        self.head_dim.next_multiple_of(TILE)
    }

    fn head_elements(&self) -> usize {
        let scales = match self.dtype {
            KvDtype::Plain(_) => 0,
            KvDtype::Int8 => 2 * size_of::<f32>() * self.block_tokens,
        };
        self.scales_after_keys() + scales
    }

    /// Returns the offset of a head's keys, in bytes from the start of the pool.
    #[inline(always)]
    pub(crate) fn keys(&self, block: u32, head: usize) -> usize {
        block as usize * self.block_bytes + self.offset + head * self.head_bytes
    }

    /// Returns the offset from a head's keys to its values in elements; a multiple of 4 to align scales.
    #[inline(always)]
    pub(crate) fn values_after_keys(&self) -> usize {
        (self.head_dim * self.block_tokens).next_multiple_of(size_of::<f32>())
    }

    /// Returns the offset from a head's keys to their scales, in elements. There is one f32 per token; the
    /// values' scales follow. Only for scaled dtypes.
    #[inline(always)]
    pub(crate) fn scales_after_keys(&self) -> usize {
        self.values_after_keys() + self.value_stride() * self.block_tokens
    }
}

/// Location of a token's key and value in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSlot {
    /// Index of the block in the pool.
    pub block: u32,
    /// Index of the token within the block.
    pub offset: u32,
}

/// Keys and values of all sequences, in blocks.
///
/// A block is contiguous over the layers in it, each [kv_heads, (keys, values, scales)], so that copying it is
/// one copy. Keys are [head_dim, block_tokens], so that a vector holds one component of neighbouring
/// positions and scores need no horizontal sums; values are [block_tokens, head_dim].
///
/// Fresh pages are the operating system's zero pages, huge ones where available: unused blocks cost no
/// memory, except those that share a huge page with used ones.
pub struct KvPool {
    block_bytes: usize,
    blocks: usize,
    memory: Arc<PoolMemory>,
}

/// Memory that kernels and a [`KvCopier`] write concurrently, never to the same block: kernels access it
/// through `&mut KvPool`, copiers under the contract of `KvCopier::copy`.
struct PoolMemory(Buffer);

impl PoolMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_shared_ptr()
    }
}

fn memory(blocks: usize, block_bytes: usize) -> io::Result<PoolMemory> {
    // A saturated product exceeds the address space, so the allocation fails.
    Buffer::zeroed(blocks.saturating_mul(block_bytes), Pages::Huge).map(PoolMemory)
}

/// Direction of block copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDirection {
    /// From the device pool to the host pool.
    Out,
    /// From the host pool to the device pool.
    In,
}

/// Copies blocks between a pool and its host pool, from another thread than the one that computes.
///
/// On CPUs both are host memory; the copies are those that a GPU would need.
pub struct KvCopier {
    block_bytes: usize,
    device_blocks: usize,
    host_blocks: usize,
    device: Arc<PoolMemory>,
    host: PoolMemory,
}

impl KvCopier {
    /// Creates a host pool of `host_blocks` blocks for `pool`. Unused blocks cost no memory.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub fn new(pool: &KvPool, host_blocks: usize) -> io::Result<Self> {
        let block_bytes = pool.block_bytes;
        Ok(Self {
            block_bytes,
            device_blocks: pool.blocks,
            host_blocks,
            device: Arc::clone(&pool.memory),
            host: memory(host_blocks, block_bytes)?,
        })
    }

    /// Copies whole blocks, given as (device, host) pairs.
    ///
    /// # Panics
    /// If a block index exceeds its pool.
    ///
    /// # Safety
    /// Until it returns, no kernel reads or writes device blocks that are written, or writes those that are
    /// read, and no other copier accesses any of the blocks.
    pub unsafe fn copy(&mut self, direction: KvDirection, blocks: &[(u32, u32)]) {
        for &(device, host) in blocks {
            let (device, host) = (device as usize, host as usize);
            assert!(device < self.device_blocks && host < self.host_blocks, "a block is out of its pool");
            // SAFETY: the assertion bounds the offsets; the caller excludes concurrent access.
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
    /// Creates a pool of `blocks` blocks of `block_bytes` bytes.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub fn new(block_bytes: usize, blocks: usize) -> io::Result<Self> {
        Ok(Self { block_bytes, blocks, memory: Arc::new(memory(blocks, block_bytes)?) })
    }

    /// Returns the bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Copies whole blocks over others, (from, to) each, one pair after the other. Each thread copies a part of every block, so a pair may
    /// read what the one before has written.
    ///
    /// # Panics
    /// If a block index exceeds the pool.
    pub fn copy_blocks(&mut self, pool: &Pool, copies: &[(u32, u32)]) {
        let within = |block: u32| (block as usize) < self.blocks;
        assert!(copies.iter().all(|(from, to)| within(*from) && within(*to)), "a block is out of the pool");
        let (bytes, start) = (self.block_bytes, SharedPtr(self.memory.as_ptr()));
        if copies.is_empty() {
            return;
        }
        pool.split(bytes.div_ceil(COPY_BYTES), 1, &|parts| {
            let part = parts.start * COPY_BYTES..(parts.end * COPY_BYTES).min(bytes);
            for (from, to) in copies {
                let [from, to] = [*from, *to].map(|block| block as usize * bytes + part.start);
                // SAFETY: the assertion bounds both ranges, and no other thread touches this part of a block; `copy` allows overlap.
                unsafe { std::ptr::copy(start.get().add(from), start.get().add(to), part.len()) };
            }
        });
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.memory.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.memory.as_ptr()
    }
}

/// Element type in the pool.
///
/// # Safety
/// As for [`Simd`]: the instruction set is available and pointers are valid for `LANES` elements.
pub(crate) trait KvElement: Copy {
    const ZERO: Self;
    /// Whether elements must be multiplied with their token's scale.
    const SCALED: bool = false;

    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    fn round(x: f32) -> Self;
}

impl KvElement for f32 {
    const ZERO: f32 = 0.0;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and `LANES` readable elements.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    fn round(x: f32) -> f32 {
        x
    }
}

/// bf16 element, as bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(u16);

impl KvElement for Bf16 {
    const ZERO: Bf16 = Bf16(0);

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Bf16) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and `LANES` readable elements.
        unsafe { S::load_bf16(from.cast()) }
    }

    #[inline(always)]
    fn round(x: f32) -> Bf16 {
        Bf16(bf16_bits(x))
    }
}

/// f16 element, as bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(u16);

impl KvElement for F16 {
    const ZERO: F16 = F16(0);

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const F16) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and `LANES` readable elements.
        unsafe { S::load_f16(from.cast()) }
    }

    #[inline(always)]
    fn round(x: f32) -> F16 {
        // Saturates at the largest finite f16: an infinite key would make every score NaN.
        F16(f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits())
    }
}

/// int8 element, to be multiplied with its token's scale.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Int8(pub(crate) i8);

impl KvElement for Int8 {
    const ZERO: Int8 = Int8(0);
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Int8) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set and `LANES` readable elements.
        unsafe { S::load_i8(from.cast()) }
    }

    #[inline(always)]
    fn round(x: f32) -> Int8 {
        // Adding 1.5 * 2^23 rounds to an integer, ties to even, whose low byte is that of the bits.
        Int8((x + 12_582_912.0).to_bits() as i8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(crate::test_size::cases(24))]

        #[test]
        fn blocks_are_copied_one_pair_after_the_other_whatever_the_threads(
            bytes in prop_oneof![1usize..200, 4000usize..20_000], threads in 1usize..4,
            copies in prop::collection::vec((0u32..9, 0u32..9), 0..30),
        ) {
            let mut pool = KvPool::new(bytes, 9).unwrap();
            let byte = |at: usize| (at * 31 + at / bytes * 7 + at / 251) as u8;
            let mut expected: Vec<u8> = (0..9 * bytes).map(byte).collect();
            // SAFETY: the pool has so many bytes.
            unsafe { std::ptr::copy_nonoverlapping(expected.as_ptr(), pool.as_mut_ptr(), expected.len()) };
            for (from, to) in &copies {
                let from = *from as usize * bytes;
                expected.copy_within(from..from + bytes, *to as usize * bytes);
            }
            pool.copy_blocks(&Pool::new(threads).unwrap(), &copies);
            // SAFETY: as above, and all of it was written.
            let got = unsafe { std::slice::from_raw_parts(pool.as_ptr(), expected.len()) };
            prop_assert!(got == expected, "blocks differ");
        }
    }
}

//! Memory that a runtime takes with a model, known before anything is loaded.

use inflight_contract::MemoryShape;

/// Memory of a runtime with a model: of the whole runtime on CPUs, of the rank that takes the most on GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Bytes of the weights as they are in memory.
    pub weight_bytes: u64,
    /// Bytes of the buffers beside weights and KV block pool, as far as they are planned: on GPUs.
    pub buffer_bytes: u64,
    /// Bytes of a KV block.
    pub block_bytes: u64,
    /// Groups of layers, and tokens of a span.
    pub shape: MemoryShape,
    /// Maximum tokens per sequence.
    pub context_tokens: u32,
}

impl MemoryNeeds {
    /// Returns the tokens that a KV block pool of `bytes` holds, of sequences of the maximum length.
    pub fn tokens(&self, bytes: u64) -> u64 {
        self.shape.pool_tokens(bytes / self.block_bytes.max(1), self.context_tokens)
    }

    /// Returns the bytes of the smallest KV block pool: it holds a span, and the state of recurrent layers.
    pub fn least_pool(&self) -> u64 {
        self.block_bytes.saturating_mul(self.shape.blocks(1, 1).into())
    }
}

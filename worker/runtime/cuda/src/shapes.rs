//! What the sizes of device buffers depend on: shapes of the model's shard, and limits of batches.

use inflight_models::ModelConfig;
use inflight_runtime::sharding::Shard;

use super::step_graph::StepGraphs;

/// Maximum number of steps launched and not completed, each with metadata and results of its own.
pub(super) const DEPTH: u32 = 2;
/// Maximum number of split-attention partial results.
pub(super) const PARTIALS: u32 = 1024;
/// Bytes of the maximum and the sum of a partial result row, beside its elements.
const PARTIAL_TOPS_BYTES: u64 = 8;
/// Rows of a partial result.
const SPLIT_ROWS: u64 = 16;
/// Model shapes of a rank's shard, as far as memory depends on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ModelShapes {
    pub(super) hidden: u64,
    pub(super) inner: u64,
    /// Rotary embeddings.
    pub(super) ropes: u64,
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
    /// Elements between the starts of two rows of logits.
    pub(super) logits: u64,
    /// Elements of a row of all ranks' gathered logits; 0 without collectives.
    pub(super) gathered: u64,
}

/// Returns the elements between the starts of two rows of logits.
fn logits_stride(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(8)
}

/// Returns the elements of a row of all ranks' logits, each rank's part padded to the largest.
fn gathered_stride(shards: &[Shard]) -> usize {
    let widest = shards.iter().map(|shard| shard.vocabulary.len()).max().unwrap_or(0);
    match shards.len() {
        // In a group of one, the head's GEMM has the same shape as without a group, so the same algorithm.
        1 => logits_stride(widest),
        // Every part is aligned for GEMM outputs.
        ranks => ranks * widest.next_multiple_of(64),
    }
}

impl ModelShapes {
    /// Returns the shapes of a shard's `config`; `shards`: those of all ranks, if they run collectives.
    pub(super) fn new(config: &ModelConfig, shards: Option<&[Shard]>) -> Self {
        Self {
            gathered: shards.map_or(0, |shards| gathered_stride(shards) as u64),
            hidden: config.hidden_size as u64,
            inner: config.intermediate_size as u64,
            ropes: config.ropes.len() as u64,
            heads: config.heads as u64,
            kv_heads: config.kv_heads as u64,
            head_dim: config.head_dim as u64,
            logits: logits_stride(config.vocab_size) as u64,
        }
    }

    /// Returns the output columns of the QKV GEMM.
    pub(super) fn qkv(&self) -> u64 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns the bytes of attention's partial results: of elements, and of maxima and sums.
    pub(super) fn partial_bytes(&self) -> (u64, u64) {
        let rows = u64::from(PARTIALS) * self.kv_heads * SPLIT_ROWS;
        (rows * self.head_dim * 4, rows * PARTIAL_TOPS_BYTES)
    }
}

/// Batch limits that buffer sizes depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BufferLimits {
    /// Rows of the largest batch.
    pub(super) rows: u64,
    /// Rows of logits: those of the slots, and those of drafts.
    pub(super) samples: u64,
    /// Attached sequences.
    pub(super) slots: u64,
    /// Maximum tokens of a sequence.
    pub(super) context: u64,
    /// Bytes of a step's metadata.
    pub(super) metadata: u64,
}

impl BufferLimits {
    /// Returns the limits of steps that are padded for `graphs`.
    pub(super) fn new(graphs: StepGraphs, slots: u32, context: u32, metadata: usize) -> Self {
        Self {
            rows: graphs.rows_max().into(),
            samples: graphs.logits_rows_max().into(),
            slots: slots.into(),
            context: context.into(),
            metadata: metadata as u64,
        }
    }
}

//! What the sizes of device buffers depend on: shapes of the model's shard, and limits of batches.

use inflight_kernels::cpu::DeltaShape;
use inflight_kernels::cuda::DeltaPlace;
use inflight_models::ModelConfig;
use inflight_runtime::recurrent::RecurrentLayers;
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
    /// Whether the outputs of attention are gated.
    pub(super) output_gate: bool,
    /// Recurrent layers, if there are some.
    pub(super) recurrent: Option<RecurrentLayers>,
}

/// Returns the elements between the starts of two rows of the output of a GEMM with `n` columns.
pub(super) fn output_stride(n: u64) -> u64 {
    n.next_multiple_of(8)
}

/// Returns the elements between the starts of two rows of logits.
fn logits_stride(vocabulary: usize) -> usize {
    output_stride(vocabulary as u64) as usize
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
            output_gate: config.arithmetic.output_gate,
            recurrent: RecurrentLayers::of(config),
        }
    }

    /// Returns the output columns of the QKV GEMM.
    pub(super) fn qkv(&self) -> u64 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns the elements of the outputs of attention.
    pub(super) fn queries(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// Returns the output columns of the GEMM of the gates of attention; 0 without gates.
    pub(super) fn gates(&self) -> u64 {
        if self.output_gate { self.queries() } else { 0 }
    }

    /// Shape of a recurrent layer; of no elements without those.
    fn delta(&self) -> DeltaShape {
        self.recurrent.map(|layers| layers.shape()).unwrap_or_default()
    }

    /// Returns the elements of an output row of the first GEMM of a recurrent layer: inputs of the convolution, gates, inputs of betas and of
    /// decays.
    pub(super) fn projected(&self) -> u64 {
        output_stride(self.delta_channels() + self.delta_values() + self.delta_factors())
    }

    /// Returns the channels of the convolution of a recurrent layer.
    pub(super) fn delta_channels(&self) -> u64 {
        self.delta().channels() as u64
    }

    /// Returns the elements of the outputs of a recurrent layer, before their projection.
    pub(super) fn delta_values(&self) -> u64 {
        self.delta().values() as u64
    }

    /// Returns the number of betas and decays of a row.
    pub(super) fn delta_factors(&self) -> u64 {
        2 * self.delta().value_heads as u64
    }

    /// Returns the bytes of the places of all recurrent layers' pieces.
    pub(super) fn state_place_bytes(&self) -> u64 {
        let of_layer = |shape: DeltaShape| shape.state_pieces().len() + shape.log_pieces().len();
        let pieces = self.recurrent.map_or(0, |layers| layers.count() * of_layer(layers.shape()));
        (pieces * size_of::<DeltaPlace>()) as u64
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

//! Matrices of a rank's shard as slices of a checkpoint's tensors.

use std::ops::Range;

use inflight_models::{self as models, CheckpointLayer, MixerWeights, StackedLinear, Tensor};
use inflight_runtime::sharding::{Partition, Shard};

use super::head_order::HeadOrder;

/// Row and column range of a tensor.
pub(super) struct TensorSlice<'a> {
    pub(super) tensor: &'a Tensor,
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl<'a> TensorSlice<'a> {
    pub(super) fn rows(tensor: &'a Tensor, rows: Range<usize>) -> Self {
        Self { tensor, rows, columns: 0..tensor.shape[1] }
    }

    pub(super) fn whole(tensor: &'a Tensor) -> Self {
        Self::rows(tensor, 0..tensor.shape[0])
    }

    pub(super) fn elements(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Returns whether its rows are as in the file.
    pub(super) fn contiguous(&self) -> bool {
        self.tensor.in_order() && self.columns.len() == self.tensor.shape[1]
    }
}

/// Matrix [n, k] of a linear layer: slices concatenated by rows.
pub(super) struct SourceMatrix<'a> {
    pub(super) slices: Vec<TensorSlice<'a>>,
    /// Ranges of tensors that make the bias; empty if this rank adds none.
    bias: Vec<(&'a Tensor, Range<usize>)>,
}

impl<'a> SourceMatrix<'a> {
    /// Returns a shard's partition of a linear layer.
    pub(super) fn of(linear: &'a StackedLinear, shard: &Shard) -> Self {
        match shard.partition(linear.matrix) {
            Partition::Outputs(rows) => Self::of_rows(linear, rows),
            Partition::Inputs(inputs) => {
                let slice = |tensor| TensorSlice { columns: inputs.clone(), ..TensorSlice::whole(tensor) };
                // Rank 0 alone adds it, since outputs are summed over ranks.
                let biases = linear.biases.iter().filter(|_| shard.rank == 0);
                Self {
                    slices: linear.matrices.iter().map(slice).collect(),
                    bias: biases.map(|bias| (bias, 0..bias.shape[0])).collect(),
                }
            }
        }
    }

    /// Returns these rows of each of the first matrices of a linear layer.
    fn of_rows(linear: &'a StackedLinear, rows: Vec<Vec<Range<usize>>>) -> Self {
        let rows: Vec<Vec<Range<usize>>> = rows.into_iter().map(merged).collect();
        let slices = linear.matrices.iter().zip(&rows);
        let slices = slices
            .flat_map(|(tensor, rows)| rows.iter().map(move |rows| TensorSlice::rows(tensor, rows.clone())));
        let bias = linear.biases.iter().zip(&rows);
        let bias = bias.flat_map(|(bias, rows)| rows.iter().map(move |rows| (bias, rows.clone())));
        Self { slices: slices.collect(), bias: bias.collect() }
    }

    /// Returns a shard's projection to queries, keys and values, whose elements are in the device's order.
    pub(super) fn qkv(qkv: &'a StackedLinear, shard: &Shard, order: HeadOrder) -> Self {
        let (head_dim, query_rows) = (order.head_dim(), shard.query_rows);
        let queries = shard.heads.clone().flat_map(|head| order.elements(head * head_dim * query_rows));
        let keys = shard.kv_heads.clone().flat_map(|head| order.elements(head * head_dim));
        let values = shard.kv_heads.start * head_dim..shard.kv_heads.end * head_dim;
        Self::of_rows(qkv, vec![queries.collect(), keys.collect(), vec![values]])
    }

    /// Returns a shard's projection to the gates of attention: in the checkpoint, those of a head are behind its queries.
    pub(super) fn gates(qkv: &'a StackedLinear, shard: &Shard, order: HeadOrder) -> Option<Self> {
        let head_dim = order.head_dim();
        let gates = |head: usize| (2 * head + 1) * head_dim..(2 * head + 2) * head_dim;
        let gates = shard.heads.clone().map(gates).collect();
        (shard.query_rows > 1).then(|| Self::of_rows(qkv, vec![gates]))
    }

    /// Returns several matrices with the same inputs as one.
    pub(super) fn stacked(matrices: impl IntoIterator<Item = Self>) -> Self {
        let (mut slices, mut bias) = (Vec::new(), Vec::new());
        for matrix in matrices {
            slices.extend(matrix.slices);
            bias.extend(matrix.bias);
        }
        Self { slices, bias }
    }

    /// Returns the matrices of a layer.
    pub(super) fn of_layer(layer: &'a CheckpointLayer, shard: &Shard, order: HeadOrder) -> Vec<Self> {
        let of = |linear| Self::of(linear, shard);
        let mut matrices = match &layer.mixer {
            MixerWeights::Attention(attention) => {
                let qkv = std::iter::once(Self::qkv(&attention.qkv, shard, order));
                let gates = Self::gates(&attention.qkv, shard, order);
                qkv.chain(gates).chain([of(&attention.output)]).collect()
            }
            MixerWeights::Delta(delta) => {
                let inputs = [&delta.inputs, &delta.gates, &delta.scalars].map(of);
                vec![Self::stacked(inputs), of(&delta.output)]
            }
        };
        matrices.extend([of(&layer.gate_up), of(&layer.down)]);
        matrices
    }

    /// Number of elements.
    pub(super) fn elements(&self) -> usize {
        self.slices.iter().map(TensorSlice::elements).sum()
    }

    /// Returns outputs and inputs.
    pub(super) fn shape(&self) -> (usize, usize) {
        let inputs = self.slices.first().map_or(0, |slice| slice.columns.len());
        (self.slices.iter().map(|slice| slice.rows.len()).sum(), inputs)
    }

    /// Reads the bias; empty if this rank adds none.
    ///
    /// # Errors
    /// A weight file can't be read, or has changed.
    pub(super) fn load_bias(&self) -> Result<Vec<f32>, models::Error> {
        let mut bias = Vec::new();
        for (tensor, range) in &self.bias {
            bias.extend_from_slice(&tensor.to_f32()?[range.clone()]);
        }
        Ok(bias)
    }
}

/// Returns ranges with neighbouring ones made one.
fn merged(ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match merged.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => merged.push(range),
        }
    }
    merged
}

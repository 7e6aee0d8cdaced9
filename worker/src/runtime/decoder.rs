//! Structure of a decoder layer, common to checkpoints and devices.

/// Weights of a decoder layer, generic over vectors (`V`) and linear layers (`P`): tensors in files, or
/// weights on a device.
pub(super) struct DecoderLayer<V, P> {
    /// RMSNorm before attention.
    pub(super) attention_norm: V,
    /// Stacked query, key and value projections.
    pub(super) qkv: P,
    /// RMSNorm of query heads and of key heads (QK-norm), if the model has it.
    pub(super) qk_norm: Option<(V, V)>,
    /// Output projection of attention.
    pub(super) output: P,
    /// RMSNorm before the MLP.
    pub(super) mlp_norm: V,
    /// Stacked gate and up projections.
    pub(super) gate_up: P,
    /// Down projection.
    pub(super) down: P,
}

impl<V, P> DecoderLayer<V, P> {
    /// Linear layers in the order of the forward pass.
    pub(super) fn products(&self) -> [&P; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }
}

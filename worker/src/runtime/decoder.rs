/// What a decoder layer consists of, whatever its vectors (`V`) and its products (`P`) are: tensors in files, or weights on a
/// device.
pub(super) struct DecoderLayer<V, P> {
    /// Before attention.
    pub(super) attention_norm: V,
    /// Queries, keys and values, stacked.
    pub(super) qkv: P,
    /// Of each query's and each key's head, if the model has them.
    pub(super) qk_norm: Option<(V, V)>,
    /// Of what attention makes.
    pub(super) output: P,
    /// Before the MLP.
    pub(super) mlp_norm: V,
    /// Gates and ups, stacked.
    pub(super) gate_up: P,
    /// Back to the hidden size.
    pub(super) down: P,
}

impl<V, P> DecoderLayer<V, P> {
    /// Its products.
    pub(super) fn products(&self) -> [&P; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }
}

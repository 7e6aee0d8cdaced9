//! Recurrent layers of a forward pass: their buffers, and the places of their states.

use inflight_kernels::cpu::{
    Activations, DeltaInputs, DeltaPlace, DeltaSequence, DeltaShape, DeltaWeights, Isa, KvPool, Pool,
    delta_rule,
};
use inflight_models::DeltaSpec;
use inflight_runtime::{Batch, KvPlan};

use super::weights::Delta;

/// Maximum drafts of a sequence in a step: the states keep so many positions more.
pub(super) const DRAFTS_MAX: u32 = 8;

/// Returns the shape of the recurrent layers.
pub(super) fn shape(spec: &DeltaSpec, drafts: u32) -> DeltaShape {
    let DeltaSpec { key_heads, value_heads, key_dim, value_dim, taps } = *spec;
    DeltaShape { key_heads, value_heads, key_dim, value_dim, taps, drafts: drafts as usize }
}

/// Recurrent layers of a rank.
pub(super) struct DeltaLayers {
    shape: DeltaShape,
    /// Pieces of each recurrent layer.
    places: Vec<Vec<DeltaPlace>>,
    state_blocks: usize,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    scalars: Vec<f32>,
    outputs: Vec<f32>,
}

impl DeltaLayers {
    /// Creates buffers for batches of `rows` rows.
    pub(super) fn new(spec: &DeltaSpec, kv: &KvPlan, rows: usize) -> Self {
        let shape = shape(spec, DRAFTS_MAX);
        let place = |place: &inflight_runtime::StatePlace| DeltaPlace {
            part: place.part,
            offset: place.offset as usize,
        };
        let layers = kv.state_places().chunks(shape.pieces().len());
        Self {
            places: layers.map(|layer| layer.iter().map(place).collect()).collect(),
            state_blocks: kv.shape().state_blocks() as usize,
            qkv: vec![0.0; rows * shape.channels()],
            gates: vec![0.0; rows * shape.values()],
            scalars: vec![0.0; rows * 2 * shape.value_heads],
            outputs: vec![0.0; rows * shape.values()],
            shape,
        }
    }

    /// Computes the recurrent layer `index`, counted among those, of `normed`, the normalized hidden states, up to the inputs of its
    /// output projection.
    pub(super) fn run(
        &mut self,
        index: usize,
        layer: &Delta,
        norm_eps: f32,
        (batch, normed): (&Batch, &[f32]),
        states: &mut KvPool,
        (pool, isa, activations): (&Pool, Isa, &mut Activations),
    ) -> &[f32] {
        let (rows, shape) = (batch.rows(), &self.shape);
        let qkv = &mut self.qkv[..rows * shape.channels()];
        let gates = &mut self.gates[..rows * shape.values()];
        let scalars = &mut self.scalars[..rows * 2 * shape.value_heads];
        let outputs = &mut self.outputs[..rows * shape.values()];
        layer.inputs.apply(pool, normed, rows, qkv, activations);
        layer.gates.apply(pool, normed, rows, gates, activations);
        layer.scalars.apply(pool, normed, rows, scalars, activations);
        let sequence = |s: usize| DeltaSequence {
            rows: batch.starts[s] as usize..batch.starts[s + 1] as usize,
            position: batch.positions[batch.starts[s] as usize] as usize,
            drafts: batch.drafts[s] as usize,
            blocks: batch.state(s, self.state_blocks),
        };
        let sequences: Vec<DeltaSequence<'_>> = (0..batch.sequences()).map(sequence).collect();
        let weights = DeltaWeights {
            convolution: &layer.convolution,
            decay: &layer.decay,
            decay_bias: &layer.decay_bias,
            norm: &layer.norm,
            norm_eps,
        };
        let mut inputs = DeltaInputs { qkv, gates, scalars };
        let places = &self.places[index];
        delta_rule(pool, isa, shape, &weights, &mut inputs, &sequences, states, places, outputs);
        outputs
    }
}

#[cfg(test)]
mod tests {
    use inflight_runtime::LayerRows;

    use super::*;

    /// The dense 9B of Qwen3.5: 8 layers of attention with 4 heads of 256, 24 recurrent ones; keys and values in bf16.
    #[test]
    fn a_sequence_of_qwen_9b_takes_its_state_once() {
        let spec = DeltaSpec { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, taps: 4 };
        let pieces = shape(&spec, DRAFTS_MAX).pieces().repeat(24);
        let rows = [LayerRows { window: None, bytes: 16 * 4 * 256 * 2 * 2 }; 8];
        let plan = KvPlan::with_states(16, 32_768, &rows, &pieces).unwrap();
        assert_eq!(
            plan.to_string(),
            "8 layers with full attention, 1 block; a state of 146 blocks a sequence (4 % unused)"
        );
        // Of it 48 MiB are the matrices; the rest is what positions since the last one and drafts need.
        let state: u64 = pieces.iter().sum();
        assert_eq!(state >> 20, 69);
        let mib = |tokens| (plan.sequence_bytes(tokens) as f64 / f64::from(1 << 20)).round();
        assert_eq!([1024, 8192, 32_768].map(mib), [105.0, 329.0, 1097.0]);
    }
}

//! Recurrent layers of a forward pass: their buffers, and the places of their states.

use inflight_kernels::cpu::{
    Activations, CELL, DeltaInputs, DeltaPlace, DeltaSequence, DeltaShape, DeltaWeights, Isa, KvPool, Pool,
    delta_rule,
};
use inflight_models::{DeltaForm, DeltaSpec};
use inflight_runtime::{Batch, KvPlan};
use inflight_worker_core::SnapshotShape;

use super::weights::Delta;

/// Maximum drafts of a sequence in a step: the states keep so many positions more.
pub(super) const DRAFTS_MAX: u32 = 8;

/// Returns the shape of the recurrent layers.
pub(super) fn shape(spec: &DeltaSpec, drafts: u32) -> DeltaShape {
    let DeltaSpec { key_heads, value_heads, key_dim, value_dim, taps, form } = *spec;
    let tiled = form == DeltaForm::Gguf;
    DeltaShape { key_heads, value_heads, tiled, key_dim, value_dim, taps, drafts: drafts as usize }
}

/// Returns what of a state can be kept to resume from, if the model has recurrent layers.
pub(super) fn snapshot(kv: &KvPlan) -> Option<SnapshotShape> {
    let shape = SnapshotShape { blocks: kv.snapshot_blocks(), every: CELL as u32 };
    (shape.blocks > 0).then_some(shape)
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
        let places: Vec<DeltaPlace> = kv.state_places().iter().map(place).collect();
        // The states of all layers, then their logs.
        let [of_state, of_log] = [shape.state_pieces().len(), shape.log_pieces().len()];
        let (states, logs) = places.split_at(places.len() / (of_state + of_log) * of_state);
        let layers = states.chunks(of_state).zip(logs.chunks(of_log));
        Self {
            places: layers.map(|(state, log)| [state, log].concat()).collect(),
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
        let form = DeltaForm::Checkpoint;
        let spec = DeltaSpec { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, taps: 4, form };
        let [states, logs] = [DeltaShape::state_pieces, DeltaShape::log_pieces]
            .map(|of| of(&shape(&spec, DRAFTS_MAX)).repeat(24));
        let rows = [LayerRows { window: None, bytes: 16 * 4 * 256 * 2 * 2 }; 8];
        let plan = KvPlan::with_states(16, 32_768, &rows, &states, &logs).unwrap();
        assert_eq!(
            plan.to_string(),
            "8 layers with full attention, 1 block; a state of 145 blocks a sequence (0 % unused)"
        );
        // Of it 48 MiB are the matrices; the rest is what positions since the last one and drafts need.
        let bytes = |pieces: &[u64]| pieces.iter().sum::<u64>() >> 20;
        assert_eq!((bytes(&states), bytes(&logs), plan.snapshot_blocks()), (50, 21, 101));
        let mib = |tokens| (plan.sequence_bytes(tokens) as f64 / f64::from(1 << 20)).round();
        assert_eq!([1024, 8192, 32_768].map(mib), [105.0, 329.0, 1097.0]);
    }
}

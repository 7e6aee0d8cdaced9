//! Recurrent layers of a forward pass: their buffers, and the places of their states.

use inflight_kernels::cpu::{
    Activations, DeltaInputs, DeltaPlace, DeltaSequence, DeltaShape, DeltaWeights, Isa, KvPool, Pool,
    delta_rule,
};
use inflight_runtime::recurrent::RecurrentLayers;
use inflight_runtime::{Batch, KvPlan, StatePlace};

use super::weights::Delta;

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
    pub(super) fn new(layers: RecurrentLayers, kv: &KvPlan, rows: usize) -> Self {
        let shape = layers.shape();
        let place = |place: &StatePlace| DeltaPlace { part: place.part, offset: place.offset as usize };
        let of_layer = |places: Vec<StatePlace>| places.iter().map(place).collect();
        Self {
            places: layers.places(kv).into_iter().map(of_layer).collect(),
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

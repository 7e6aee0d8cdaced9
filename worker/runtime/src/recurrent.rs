//! Recurrent layers, as far as all devices treat them alike: the shape of their states, and where each of its pieces is.

use inflight_kernels::cpu::{CELL, DeltaShape, decay_rates};
use inflight_models::{DeltaForm, DeltaSpec, LayerSpec, Mixer, ModelConfig};
use inflight_worker_core::SnapshotShape;

use super::sharding::Shard;
use super::{KvPlan, KvPlanError, LayerRows, StatePlace};

/// Maximum drafts of a sequence in a batch, if the model has recurrent layers: the log of a state has a row for each.
pub const STATE_DRAFTS: u32 = 8;

/// Recurrent layers of a model, or of a rank's part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentLayers {
    shape: DeltaShape,
    count: usize,
}

impl RecurrentLayers {
    /// Returns those of a configuration, which may be of a rank; `None` if it has none.
    pub fn of(config: &ModelConfig) -> Option<Self> {
        let is_recurrent = |layer: &&LayerSpec| layer.mixer == Mixer::Delta;
        Some(Self::new(&config.delta?, config.layers.iter().filter(is_recurrent).count()))
    }

    /// Returns `count` layers of this rule.
    pub fn new(spec: &DeltaSpec, count: usize) -> Self {
        let DeltaSpec { key_heads, value_heads, key_dim, value_dim, taps, form } = *spec;
        let (tiled, drafts) = (form == DeltaForm::Gguf, STATE_DRAFTS as usize);
        Self { shape: DeltaShape { key_heads, value_heads, tiled, key_dim, value_dim, taps, drafts }, count }
    }

    /// Shape of a layer.
    pub fn shape(&self) -> DeltaShape {
        self.shape
    }

    /// Number of layers.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Plans the memory of layers as [`KvPlan::new`], beside the states of the recurrent ones.
    ///
    /// # Errors
    /// Those of [`KvPlan::with_states`].
    pub fn plan(
        layers: Option<Self>,
        block_tokens: u32,
        context_tokens: u32,
        rows: &[LayerRows],
    ) -> Result<KvPlan, KvPlanError> {
        let pieces = |of: fn(&DeltaShape) -> Vec<u64>| {
            layers.map_or_else(Vec::new, |layers| of(&layers.shape).repeat(layers.count))
        };
        let (states, logs) = (pieces(DeltaShape::state_pieces), pieces(DeltaShape::log_pieces));
        KvPlan::with_states(block_tokens, context_tokens, rows, &states, &logs)
    }

    /// Returns the places of the pieces of each layer: those of [`DeltaShape::state_pieces`], then those of [`DeltaShape::log_pieces`].
    pub fn places(&self, plan: &KvPlan) -> Vec<Vec<StatePlace>> {
        let [of_state, of_log] = [self.shape.state_pieces().len(), self.shape.log_pieces().len()];
        // The states of all layers, then their logs.
        let (states, logs) = plan.state_places().split_at(self.count * of_state);
        let layers = states.chunks(of_state).zip(logs.chunks(of_log));
        layers.map(|(state, log)| [state, log].concat()).collect()
    }
}

/// Vectors of a recurrent layer.
#[derive(Debug, Clone)]
pub struct RecurrentVectors {
    /// Weights of the convolution; in a checkpoint [channels, taps].
    pub convolution: Vec<f32>,
    /// Rates of the decays, in a checkpoint as their logarithms or negated; [value_heads].
    pub decay: Vec<f32>,
    /// What is added to the inputs of the decays; [value_heads].
    pub decay_bias: Vec<f32>,
}

impl RecurrentVectors {
    /// Returns a rank's part of those of a checkpoint as kernels take them: weights of the convolution as [taps, channels], rates above 0.
    ///
    /// # Panics
    /// If the vectors are not of the shard's model.
    #[must_use]
    pub fn of_rank(self, spec: &DeltaSpec, shard: &Shard) -> Self {
        let taps = spec.taps;
        let channels: Vec<usize> = shard.delta_channels().into_iter().flatten().collect();
        let of_tap = |tap: usize| channels.iter().map(move |channel| channel * taps + tap);
        let heads = shard.delta_heads();
        let decay = self.decay[heads.clone()].to_vec();
        Self {
            convolution: (0..taps).flat_map(of_tap).map(|at| self.convolution[at]).collect(),
            decay: match spec.form {
                DeltaForm::Checkpoint | DeltaForm::Fused => decay_rates(decay),
                DeltaForm::Gguf => decay.into_iter().map(|rate| -rate).collect(),
            },
            decay_bias: self.decay_bias[heads].to_vec(),
        }
    }
}

/// Returns what of a state can be kept to resume from; `None` if the model has no recurrent layers.
pub fn snapshot(plan: &KvPlan) -> Option<SnapshotShape> {
    let shape = SnapshotShape { blocks: plan.snapshot_blocks(), every: CELL as u32 };
    (shape.blocks > 0).then_some(shape)
}

/// Returns the maximum drafts of a sequence in a batch.
pub fn sequence_drafts(plan: &KvPlan) -> u32 {
    if plan.snapshot_blocks() > 0 { STATE_DRAFTS } else { u32::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The dense 9B of Qwen3.5: 8 layers of attention with 4 heads of 256, 24 recurrent ones; keys and values in bf16.
    #[test]
    fn a_sequence_of_qwen_9b_takes_its_state_once() {
        let form = DeltaForm::Checkpoint;
        let spec = DeltaSpec { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, taps: 4, form };
        let layers = RecurrentLayers::new(&spec, 24);
        let rows = [LayerRows { window: None, bytes: 16 * 4 * 256 * 2 * 2 }; 8];
        let plan = RecurrentLayers::plan(Some(layers), 16, 32_768, &rows).unwrap();
        assert_eq!(
            plan.to_string(),
            "8 layers with full attention, 1 block; a state of 145 blocks a sequence (0 % unused)"
        );
        // 48 MiB of the states are matrices, the rest inputs of the convolution; the logs are for the positions behind the state and for drafts.
        let bytes = |of: fn(&DeltaShape) -> Vec<u64>| (24 * of(&layers.shape()).iter().sum::<u64>()) >> 20;
        assert_eq!([bytes(DeltaShape::state_pieces), bytes(DeltaShape::log_pieces)], [50, 21]);
        assert_eq!(snapshot(&plan), Some(SnapshotShape { blocks: 101, every: 16 }));
        let mib = |tokens| (plan.sequence_bytes(tokens) as f64 / f64::from(1 << 20)).round();
        assert_eq!([1024, 8192, 32_768].map(mib), [105.0, 329.0, 1097.0]);
        // Each layer has all its pieces, those of the log behind those of the states of all layers.
        let places = layers.places(&plan);
        assert!(places.len() == 24 && places.iter().all(|layer| layer.len() == 16 + 2 * 32 + 16 + 32));
        assert!(places.iter().all(|layer| layer[..80].iter().all(|place| place.part < 101)));
        assert!(places.iter().all(|layer| layer[80..].iter().all(|place| place.part >= 101)));
    }
}

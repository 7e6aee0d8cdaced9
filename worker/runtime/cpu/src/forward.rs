//! Forward pass of one rank: embedding, decoder layers, LM head.

use inflight_kernels::cpu::{
    AccumulatorInit, Activation, Activations, Isa, KvLayout, KvPool, Pool, gemm, gemm_gated, rms_norm,
};
use inflight_models::{MixerWeights, ModelConfig, NormPlaces};
use inflight_runtime::collective::{Collective, GroupFailed};
use inflight_runtime::recurrent::RecurrentLayers;
use inflight_runtime::sharding::Shard;
use inflight_runtime::{Batch, Capabilities, Error, KvPlan, PromptLogprobs, Slot};

use super::attention_layers::AttentionLayers;
use super::delta::DeltaLayers;
use super::mtp::{MtpDrafter, PredictedRow};
use super::scorer::{SCORE_ROWS, Scorer};
use super::weights::{Layer, Linear, Weights};

/// Rows per pass through the MLP.
const MLP_ROWS: usize = 256;

/// What a rank computes on, and its connection to the others.
#[derive(Clone, Copy)]
pub(super) struct RankDevice<'a> {
    pub(super) pool: &'a Pool,
    pub(super) isa: Isa,
    pub(super) collective: &'a dyn Collective,
}

/// Hidden states and the buffers of a layer behind its mixer.
///
/// The hidden state is replicated. For a residual addition, rank 0 adds its partial sum to the state and the
/// others replace the state by theirs; the all-reduce then yields the new state on every rank.
pub(super) struct LayerBuffers {
    /// Rank 0, which keeps the residual, adds biases and gathers the logits.
    leads: bool,
    /// Elements of a hidden state, and this rank's columns of the intermediate state.
    width: usize,
    inner: usize,
    norm_eps: f32,
    activation: Activation,
    pub(super) activations: Activations,
    /// Hidden states; [rows, width].
    pub(super) hidden: Vec<f32>,
    /// Normalized hidden states; [rows, width].
    pub(super) normed: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    /// Outputs of attention or MLP before their norm; empty if the model has none.
    delta: Vec<f32>,
}

impl LayerBuffers {
    fn new(config: &ModelConfig, shard: &Shard, rows: usize) -> Self {
        let (width, inner) = (config.hidden_size, shard.intermediate.len());
        Self {
            leads: shard.rank == 0,
            width,
            inner,
            norm_eps: config.norm_eps,
            activation: config.arithmetic.activation,
            activations: Activations::default(),
            hidden: vec![0.0; rows * width],
            normed: vec![0.0; rows * width],
            gate_up: vec![0.0; rows.min(MLP_ROWS) * 2 * inner],
            gated: vec![0.0; rows.min(MLP_ROWS) * inner],
            delta: match config.arithmetic.norms {
                NormPlaces::Before => Vec::new(),
                NormPlaces::Around => vec![0.0; rows * width],
            },
        }
    }

    /// Normalizes the hidden states of the first `rows` rows.
    pub(super) fn normalize(&mut self, weight: &[f32], rows: usize, on: RankDevice<'_>) {
        let (hidden, normed) = (&self.hidden[..rows * self.width], &mut self.normed[..rows * self.width]);
        rms_norm(on.pool, on.isa, hidden, weight, self.norm_eps, normed);
    }

    /// Adds the outputs of a layer's mixer, of which `mixed` are the inputs of the output projection, and those of its MLP to the hidden
    /// states.
    ///
    /// # Errors
    /// Another rank failed.
    pub(super) fn finish(
        &mut self,
        layer: &Layer,
        mixed: &[f32],
        rows: usize,
        on: RankDevice<'_>,
    ) -> Result<(), GroupFailed> {
        let Self { leads, width, inner, norm_eps: eps, activation, .. } = *self;
        let RankDevice { pool, isa, collective } = on;
        let Self { activations, hidden, normed, gate_up, gated, delta, .. } = self;
        let (hidden, normed) = (&mut hidden[..rows * width], &mut normed[..rows * width]);
        let output = match &layer.mixer {
            MixerWeights::Attention(weights) => &weights.output,
            MixerWeights::Delta(weights) => &weights.output,
        };
        let post_norms = layer.post_norms.as_ref().map(|(attention, mlp)| (&attention[..], &mlp[..]));
        match post_norms {
            None => {
                linear_residual(pool, output, mixed, rows, hidden, leads, activations);
                collective.all_reduce(hidden)?;
            }
            Some((weight, _)) => {
                let delta = &mut delta[..rows * width];
                output.apply(pool, mixed, rows, delta, activations);
                collective.all_reduce(delta)?;
                add_normed(pool, isa, delta, weight, eps, normed, hidden);
            }
        }
        rms_norm(pool, isa, hidden, &layer.mlp_norm, eps, normed);
        // In tiles of rows whose intermediate states stay in the last-level cache.
        for first in (0..rows).step_by(MLP_ROWS) {
            let count = MLP_ROWS.min(rows - first);
            let normed = &normed[first * width..(first + count) * width];
            let gate_up = &mut gate_up[..count * 2 * inner];
            let gated = &mut gated[..count * inner];
            let (gates, bias) = (&layer.gate_up.matrix, layer.gate_up.bias.as_deref());
            gemm_gated(pool, activation, gates, normed, count, bias, gate_up, gated, activations);
            let part = first * width..(first + count) * width;
            if post_norms.is_some() {
                layer.down.apply(pool, gated, count, &mut delta[part], activations);
            } else {
                let hidden = &mut hidden[part];
                linear_residual(pool, &layer.down, gated, count, hidden, leads, activations);
            }
        }
        match post_norms {
            None => collective.all_reduce(hidden)?,
            Some((_, weight)) => {
                let delta = &mut delta[..rows * width];
                collective.all_reduce(delta)?;
                add_normed(pool, isa, delta, weight, eps, normed, hidden);
            }
        }
        Ok(())
    }
}

/// LM head of a rank.
pub(super) struct Head {
    leads: bool,
    /// Columns of the logits: all, and this rank's.
    vocab: usize,
    own: usize,
    /// This rank's columns of the logits, if the group has several ranks.
    own_logits: Vec<f32>,
}

impl Head {
    /// Computes the logits of normalized hidden states, on rank 0.
    ///
    /// # Errors
    /// Another rank failed.
    pub(super) fn run(
        &mut self,
        (normed, count): (&[f32], usize),
        weights: &Weights,
        on: RankDevice<'_>,
        activations: &mut Activations,
        logits: &mut Vec<f32>,
    ) -> Result<(), GroupFailed> {
        let Self { leads, vocab, own, .. } = *self;
        if count == 0 {
            return Ok(());
        }
        if leads && logits.len() < count * vocab {
            logits.resize(count * vocab, 0.0);
        }
        if own == vocab {
            let logits = &mut logits[..count * vocab];
            gemm(on.pool, &weights.head, normed, count, AccumulatorInit::Zero, logits, activations);
            return Ok(());
        }
        if self.own_logits.len() < count * own {
            self.own_logits.resize(count * own, 0.0);
        }
        let part = &mut self.own_logits[..count * own];
        gemm(on.pool, &weights.head, normed, count, AccumulatorInit::Zero, part, activations);
        let whole = if leads { Some(&mut logits[..count * vocab]) } else { None };
        on.collective.gather(part, count, whole)
    }
}

/// Forward pass of one rank, with its buffers.
pub(super) struct Forward {
    config: ModelConfig,
    /// Factor of embeddings, if they are scaled.
    embedding_scale: Option<f32>,
    attention_layers: AttentionLayers,
    delta_layers: Option<DeltaLayers>,
    /// MTP layer, if it is loaded.
    mtp: Option<MtpDrafter>,
    /// Last step that wrote to each block.
    written: Vec<u64>,
    step: u64,
    layers: LayerBuffers,
    head: Head,
    logits: Vec<f32>,
    samples: usize,
    scorer: Scorer,
    /// Scores of the last step, on rank 0.
    pub(super) scores: Vec<PromptLogprobs>,
    /// Places in `scores` of rows whose logits are not all finite.
    pub(super) non_finite: Vec<u32>,
}

impl Forward {
    /// Allocates buffers for the largest batch; they take memory at first use.
    pub(super) fn new(
        config: &ModelConfig,
        shard: &Shard,
        embedding_scale: Option<f32>,
        bounds: &Capabilities,
        kv: &KvPlan,
        layout: KvLayout,
    ) -> Self {
        let rows = bounds.batch_tokens as usize;
        let (vocab, own) = (config.vocab_size, shard.vocabulary.len());
        Self {
            embedding_scale,
            attention_layers: AttentionLayers::new(config, shard, kv, layout, rows),
            delta_layers: RecurrentLayers::of(&shard.config(config))
                .map(|layers| DeltaLayers::new(layers, kv, rows)),
            mtp: (bounds.predicted_drafts > 0).then(|| MtpDrafter::new(config, bounds)),
            written: vec![0; bounds.blocks as usize],
            step: 0,
            layers: LayerBuffers::new(config, shard, rows),
            head: Head { leads: shard.rank == 0, vocab, own, own_logits: Vec::new() },
            logits: Vec::new(),
            samples: 0,
            scorer: Scorer::default(),
            scores: Vec::new(),
            non_finite: Vec::new(),
            config: config.clone(),
        }
    }

    /// Whether this is rank 0.
    pub(super) fn leads(&self) -> bool {
        self.layers.leads
    }

    /// Logits of the last step, on rank 0; [samples, vocab_size].
    pub(super) fn logits(&self) -> &[f32] {
        &self.logits[..self.samples * self.config.vocab_size]
    }

    /// Logits of the rows that the MTP layer predicted last, on rank 0; [rows, vocab_size].
    pub(super) fn predicted_logits(&self) -> &[f32] {
        self.mtp.as_ref().map_or(&[], MtpDrafter::logits)
    }

    /// Forgets what the MTP layer keeps of a slot's sequence.
    pub(super) fn forget(&mut self, slot: Slot) {
        self.mtp.iter_mut().for_each(|mtp| mtp.forget(slot));
    }

    /// Computes block and offset of each row's key and value.
    ///
    /// # Errors
    /// [`Error::Malformed`] if two sequences write to one block.
    pub(super) fn place(&mut self, batch: &Batch, bounds: &Capabilities) -> Result<(), Error> {
        self.step += 1;
        let (written, step) = (&mut self.written, self.step);
        let mut writes = |block: u32| std::mem::replace(&mut written[block as usize], step) == step;
        self.attention_layers.place(batch, bounds, &mut writes)?;
        if let Some(block) = batch.states.iter().find(|block| writes(**block)) {
            return Err(Error::Malformed(format!("block {block} of a state is written from two places")));
        }
        Ok(())
    }

    /// Computes the scores, then the logits of the sample rows, and writes keys and values of all rows. Requires
    /// [`Batch::check`] and [`Forward::place`].
    ///
    /// # Errors
    /// Another rank failed.
    pub(super) fn run(
        &mut self,
        batch: &Batch,
        weights: &Weights,
        kv: &mut KvPool,
        on: RankDevice<'_>,
    ) -> Result<(), GroupFailed> {
        let Self { config, attention_layers, layers, .. } = self;
        let (rows, eps, width) = (batch.rows(), config.norm_eps, config.hidden_size);
        attention_layers.ensure(&batch.positions);
        for (token, out) in batch.tokens.iter().zip(layers.hidden.chunks_exact_mut(width)) {
            weights.embed(*token, self.embedding_scale, out);
        }
        // Layers of each kind are counted by themselves.
        let (mut attentive, mut recurrent) = (0.., 0..);
        for (layer, spec) in weights.layers.iter().zip(&config.layers) {
            layers.normalize(&layer.mixer_norm, rows, on);
            let normed = &layers.normed[..rows * width];
            let threads = (on.pool, on.isa, &mut layers.activations);
            let mixed = match (&layer.mixer, spec.attention(), &mut self.delta_layers) {
                (MixerWeights::Attention(weights), Some(spec), _) => {
                    let index = attentive.next().unwrap_or_default();
                    attention_layers.run(index, (weights, spec), (&batch.positions, normed), kv, threads)
                }
                (MixerWeights::Delta(weights), _, Some(layers)) => {
                    let index = recurrent.next().unwrap_or_default();
                    layers.run(index, weights, eps, (batch, normed), kv, threads)
                }
                _ => unreachable!("weights and buffers are of the layers of one configuration"),
            };
            layers.finish(layer, mixed, rows, on)?;
        }
        if let (Some(mtp), Some(own)) = (&mut self.mtp, &weights.mtp) {
            layers.normalize(&weights.norm, rows, on);
            let scale = self.embedding_scale;
            mtp.see(batch, (weights, own, scale), layers, attention_layers, kv, on);
        }

        // Only scored and sampled rows go through the LM head.
        self.scores.clear();
        self.non_finite.clear();
        for rows in batch.scores.chunks(SCORE_ROWS) {
            let picked: Vec<u32> = rows.iter().map(|score| score.row).collect();
            self.head(&picked, weights, on)?;
            if self.layers.leads {
                let logits = &self.logits[..rows.len() * self.config.vocab_size];
                self.scorer.run(on.pool, on.isa, rows, logits, &mut self.scores, &mut self.non_finite);
            }
        }
        let picked: Vec<u32> = batch.samples.iter().map(|sample| sample.row).collect();
        self.samples = picked.len();
        self.head(&picked, weights, on)
    }

    /// Computes the logits of these rows of the hidden state, on rank 0.
    ///
    /// # Errors
    /// Another rank failed.
    fn head(&mut self, rows: &[u32], weights: &Weights, on: RankDevice<'_>) -> Result<(), GroupFailed> {
        let LayerBuffers { width, norm_eps, hidden, normed, activations, .. } = &mut self.layers;
        let (count, width) = (rows.len(), *width);
        if normed.len() < count * width {
            normed.resize(count * width, 0.0);
        }
        for (row, normed) in rows.iter().zip(normed.chunks_exact_mut(width)) {
            let row = &hidden[*row as usize * width..][..width];
            rms_norm(on.pool, on.isa, row, &weights.norm, *norm_eps, normed);
        }
        let picked = (&normed[..count * width], count);
        self.head.run(picked, weights, on, activations, &mut self.logits)
    }

    /// Lets the MTP layer predict the token behind each of these rows; no-op without one. They are of sequences of the batch computed last.
    ///
    /// # Errors
    /// Another rank failed.
    pub(super) fn predict(
        &mut self,
        batch: &Batch,
        rows: &[PredictedRow],
        bounds: &Capabilities,
        weights: &Weights,
        kv: &mut KvPool,
        on: RankDevice<'_>,
    ) -> Result<(), GroupFailed> {
        let (Some(mtp), Some(own)) = (&mut self.mtp, &weights.mtp) else { return Ok(()) };
        let Self { layers, attention_layers, head, embedding_scale, .. } = self;
        mtp.place(batch, rows, attention_layers, bounds);
        mtp.predict(batch, rows, (weights, own, *embedding_scale), layers, attention_layers, kv, head, on)
    }
}

/// hidden += norm(delta); `normed` is scratch.
fn add_normed(
    pool: &Pool,
    isa: Isa,
    delta: &[f32],
    weight: &[f32],
    eps: f32,
    normed: &mut [f32],
    hidden: &mut [f32],
) {
    rms_norm(pool, isa, delta, weight, eps, normed);
    hidden.iter_mut().zip(normed).for_each(|(hidden, normed)| *hidden += *normed);
}

/// y += x W^T + bias on rank 0; y = x W^T, a partial sum, on the others.
fn linear_residual(
    pool: &Pool,
    linear: &Linear,
    x: &[f32],
    rows: usize,
    y: &mut [f32],
    leads: bool,
    scratch: &mut Activations,
) {
    if let Some(bias) = &linear.bias {
        for row in y.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }
    let start = if leads { AccumulatorInit::Output } else { AccumulatorInit::Zero };
    gemm(pool, &linear.matrix, x, rows, start, y, scratch);
}

//! Forward pass of one rank: embedding, decoder layers, LM head.

use inflight_kernels::cpu::{
    AccumulatorInit, Activations, Isa, KvLayout, KvPool, Pool, gemm, gemm_gated, rms_norm,
};
use inflight_models::{MixerWeights, ModelConfig, NormPlaces};
use inflight_runtime::collective::{Collective, GroupFailed};
use inflight_runtime::sharding::Shard;
use inflight_runtime::{Batch, Capabilities, Error, KvPlan, PromptLogprobs};

use super::attention_layers::AttentionLayers;
use super::delta::DeltaLayers;
use super::scorer::{SCORE_ROWS, Scorer};
use super::weights::{Linear, Weights};

/// Rows per pass through the MLP.
const MLP_ROWS: usize = 256;

/// Forward pass of one rank, with its buffers.
///
/// The hidden state is replicated. For a residual addition, rank 0 adds its partial sum to the state and the
/// others replace the state by theirs; the all-reduce then yields the new state on every rank.
pub(super) struct Forward {
    config: ModelConfig,
    /// Rank 0, which keeps the residual, adds biases and gathers the logits.
    leads: bool,
    /// This rank's columns of the intermediate state.
    inner: usize,
    /// This rank's columns of the logits.
    vocabulary: usize,
    /// Factor of embeddings, if they are scaled.
    embedding_scale: Option<f32>,
    attention_layers: AttentionLayers,
    delta_layers: Option<DeltaLayers>,
    /// Last step that wrote to each block.
    written: Vec<u64>,
    step: u64,
    activations: Activations,
    hidden: Vec<f32>,
    normed: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    /// Outputs of attention or MLP before their norm; empty if the model has none.
    delta: Vec<f32>,
    logits: Vec<f32>,
    /// This rank's columns of the logits, if the group has several ranks.
    own_logits: Vec<f32>,
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
        let inner = shard.intermediate.len();
        let rows = bounds.batch_tokens as usize;
        let buffer = |width: usize| vec![0.0; rows * width];
        Self {
            leads: shard.rank == 0,
            inner,
            vocabulary: shard.vocabulary.len(),
            embedding_scale,
            attention_layers: AttentionLayers::new(config, shard, kv, layout, rows),
            delta_layers: shard.delta.as_ref().map(|spec| DeltaLayers::new(spec, kv, rows)),
            written: vec![0; bounds.blocks as usize],
            step: 0,
            activations: Activations::default(),
            hidden: buffer(config.hidden_size),
            normed: buffer(config.hidden_size),
            gate_up: vec![0.0; rows.min(MLP_ROWS) * 2 * inner],
            gated: vec![0.0; rows.min(MLP_ROWS) * inner],
            delta: match config.arithmetic.norms {
                NormPlaces::Before => Vec::new(),
                NormPlaces::Around => buffer(config.hidden_size),
            },
            logits: Vec::new(),
            own_logits: Vec::new(),
            samples: 0,
            scorer: Scorer::default(),
            scores: Vec::new(),
            non_finite: Vec::new(),
            config: config.clone(),
        }
    }

    /// Logits of the last step, on rank 0; [samples, vocab_size].
    pub(super) fn logits(&self) -> &[f32] {
        &self.logits[..self.samples * self.config.vocab_size]
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
        let drafts = batch.drafts.iter().max().copied().unwrap_or(0);
        if drafts > bounds.sequence_drafts {
            return Err(Error::Malformed(format!(
                "a sequence has {drafts} drafts, more than sequence_drafts"
            )));
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
        pool: &Pool,
        isa: Isa,
        collective: &dyn Collective,
    ) -> Result<(), GroupFailed> {
        let Self { config, attention_layers, activations, leads, inner, .. } = self;
        let (leads, inner) = (*leads, *inner);
        let (rows, eps) = (batch.rows(), config.norm_eps);
        let width = config.hidden_size;
        let hidden = &mut self.hidden[..rows * width];
        let normed = &mut self.normed[..rows * width];
        let gate_up = &mut self.gate_up[..];
        let gated = &mut self.gated[..];
        let delta = &mut self.delta[..];

        attention_layers.ensure(&batch.positions);
        let embedding = &weights.embedding;
        for (token, out) in batch.tokens.iter().zip(hidden.chunks_exact_mut(width)) {
            embedding.row(*token as usize, out);
            if let Some(scale) = self.embedding_scale {
                out.iter_mut().for_each(|element| *element *= scale);
            }
        }

        // Layers of each kind are counted by themselves.
        let (mut attentive, mut recurrent) = (0.., 0..);
        for (layer, spec) in weights.layers.iter().zip(&config.layers) {
            rms_norm(pool, isa, hidden, &layer.mixer_norm, eps, normed);
            let (inputs, threads) = ((batch, &*normed), (pool, isa, &mut *activations));
            let (mixed, output) = match (&layer.mixer, spec.attention(), &mut self.delta_layers) {
                (MixerWeights::Attention(weights), Some(spec), _) => {
                    let index = attentive.next().unwrap_or_default();
                    (attention_layers.run(index, (weights, spec), inputs, kv, threads), &weights.output)
                }
                (MixerWeights::Delta(weights), _, Some(layers)) => {
                    let index = recurrent.next().unwrap_or_default();
                    (layers.run(index, weights, eps, inputs, kv, threads), &weights.output)
                }
                _ => unreachable!("weights and buffers are of the layers of one configuration"),
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
                let activation = config.arithmetic.activation;
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
        }

        // Only scored and sampled rows go through the LM head.
        self.scores.clear();
        self.non_finite.clear();
        for rows in batch.scores.chunks(SCORE_ROWS) {
            let picked: Vec<u32> = rows.iter().map(|score| score.row).collect();
            self.head(&picked, weights, pool, isa, collective)?;
            if leads {
                let logits = &self.logits[..rows.len() * self.config.vocab_size];
                self.scorer.run(pool, isa, rows, logits, &mut self.scores, &mut self.non_finite);
            }
        }
        let picked: Vec<u32> = batch.samples.iter().map(|sample| sample.row).collect();
        self.samples = picked.len();
        self.head(&picked, weights, pool, isa, collective)
    }

    /// Computes the logits of these rows of the hidden state, on rank 0.
    ///
    /// # Errors
    /// Another rank failed.
    fn head(
        &mut self,
        rows: &[u32],
        weights: &Weights,
        pool: &Pool,
        isa: Isa,
        collective: &dyn Collective,
    ) -> Result<(), GroupFailed> {
        let Self { config, activations, leads, .. } = self;
        let (count, vocab, own, width) = (rows.len(), config.vocab_size, self.vocabulary, config.hidden_size);
        if count == 0 {
            return Ok(());
        }
        if *leads && self.logits.len() < count * vocab {
            self.logits.resize(count * vocab, 0.0);
        }
        if own < vocab && self.own_logits.len() < count * own {
            self.own_logits.resize(count * own, 0.0);
        }
        if self.normed.len() < count * width {
            self.normed.resize(count * width, 0.0);
        }
        for (row, normed) in rows.iter().zip(self.normed.chunks_exact_mut(width)) {
            let row = &self.hidden[*row as usize * width..][..width];
            rms_norm(pool, isa, row, &weights.norm, config.norm_eps, normed);
        }
        let normed = &self.normed[..count * width];
        if own == vocab {
            let logits = &mut self.logits[..count * vocab];
            gemm(pool, &weights.head, normed, count, AccumulatorInit::Zero, logits, activations);
            return Ok(());
        }
        let part = &mut self.own_logits[..count * own];
        gemm(pool, &weights.head, normed, count, AccumulatorInit::Zero, part, activations);
        let whole = if *leads { Some(&mut self.logits[..count * vocab]) } else { None };
        collective.gather(part, count, whole)
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

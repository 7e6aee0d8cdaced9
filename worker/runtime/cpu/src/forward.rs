//! Forward pass of one rank: embedding, decoder layers, LM head.

use inflight_kernels::cpu::{
    AccumulatorInit, Activations, Isa, KvLayout, KvPool, KvSlot, Pool, QkvShape, Ragged, RopeTable,
    attention, finish_qkv, gemm, gemm_gated, inverse_frequencies, rms_norm, sigmoid_gate,
};
use inflight_models::{MixerWeights, ModelConfig, NormPlaces, Rope};
use inflight_runtime::collective::{Collective, GroupFailed};
use inflight_runtime::sharding::Shard;
use inflight_runtime::{Batch, Capabilities, Error, KvPlan, LayerPlace, PromptLogprobs};

use super::delta::DeltaLayers;
use super::scorer::{SCORE_ROWS, Scorer};
use super::weights::{Linear, Weights};

/// Rows per pass through the MLP.
const MLP_ROWS: usize = 256;

/// What the layers whose rows are in the same blocks share.
struct BlockView {
    /// Index of their group, and of the block among those of a span.
    group: usize,
    part: usize,
    ragged: Ragged,
    /// Block and offset of each row.
    places: Vec<KvSlot>,
}

impl BlockView {
    /// Sets the rows that the layers of the view see in a batch, which [`Batch::check`] has passed.
    fn set(&mut self, batch: &Batch, bounds: &Capabilities) {
        let (group, tables) = (bounds.shape.groups()[self.group], &batch.tables[self.group]);
        self.ragged.clear(group.window);
        for s in 0..batch.sequences() {
            let positions = &batch.positions[batch.starts[s] as usize..batch.starts[s + 1] as usize];
            let blocks = tables.of(s).iter().copied().skip(self.part).step_by(group.blocks as usize);
            let block_tokens = bounds.shape.block_tokens() as usize;
            self.ragged.push(positions, tables.first_spans[s], blocks, block_tokens);
        }
    }
}

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
    shape: QkvShape,
    /// Rotary tables, by index of [`ModelConfig::ropes`].
    ropes: Vec<RopeTable>,
    /// Factor of embeddings, if they are scaled.
    embedding_scale: Option<f32>,
    views: Vec<BlockView>,
    /// View and layout of the keys and values of each layer with attention.
    kv_layers: Vec<(usize, KvLayout)>,
    delta_layers: Option<DeltaLayers>,
    /// Outputs of a query projection that has rows of gates; empty if it has none.
    projected: Vec<f32>,
    /// Gates of the outputs of attention, likewise.
    gates: Vec<f32>,
    /// Last step that wrote to each block.
    written: Vec<u64>,
    step: u64,
    activations: Activations,
    hidden: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
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
        let Shard { head_dim, .. } = *shard;
        let shape = QkvShape { heads: shard.heads.len(), kv_heads: shard.kv_heads.len(), head_dim };
        let inner = shard.intermediate.len();
        let rows = bounds.batch_tokens as usize;
        let buffer = |width: usize| vec![0.0; rows * width];
        let kv_shape = kv.shape();
        let groups = kv_shape.groups().iter().enumerate();
        let views: Vec<BlockView> = groups
            .flat_map(|(group, blocks)| (0..blocks.blocks as usize).map(move |part| (group, part)))
            .map(|(group, part)| BlockView {
                group,
                part,
                ragged: Ragged::default(),
                places: Vec::with_capacity(rows),
            })
            .collect();
        let view = |place: &LayerPlace| {
            views.iter().position(|view| (view.group, view.part) == (place.group, place.part)).unwrap_or(0)
        };
        let layer = |place: &LayerPlace| {
            (view(place), layout.within(kv.block_bytes() as usize, place.offset as usize))
        };
        let kv_layers = kv.places().iter().map(layer).collect();
        let rotated = config.rotated_dim;
        let table = |rope: &Rope| RopeTable::new(inverse_frequencies(rotated, rope.theta, &rope.scaling));
        let gates = if config.arithmetic.output_gate { shape.heads * head_dim } else { 0 };
        let projected = if gates > 0 { shape.width() + gates } else { 0 };
        Self {
            leads: shard.rank == 0,
            inner,
            vocabulary: shard.vocabulary.len(),
            shape,
            ropes: config.ropes.iter().map(table).collect(),
            embedding_scale,
            views,
            kv_layers,
            delta_layers: config.delta.as_ref().map(|spec| DeltaLayers::new(spec, kv, rows)),
            projected: buffer(projected),
            gates: buffer(gates),
            written: vec![0; bounds.blocks as usize],
            step: 0,
            activations: Activations::default(),
            hidden: buffer(config.hidden_size),
            normed: buffer(config.hidden_size),
            qkv: buffer(shape.width()),
            attended: buffer(shape.heads * shape.head_dim),
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
        let block_tokens = bounds.shape.block_tokens();
        for view in &mut self.views {
            let (stride, tables) = (bounds.shape.groups()[view.group].blocks, &batch.tables[view.group]);
            view.places.clear();
            for s in 0..batch.sequences() {
                let (table, first) = (tables.of(s), tables.first_spans[s]);
                let positions = &batch.positions[batch.starts[s] as usize..batch.starts[s + 1] as usize];
                for (i, position) in positions.iter().enumerate() {
                    let span = (position / block_tokens - first) * stride;
                    let block = table[span as usize + view.part];
                    let offset = position % block_tokens;
                    if i == 0 || offset == 0 {
                        let written = &mut self.written[block as usize];
                        if *written == self.step {
                            return Err(Error::Malformed(format!(
                                "block {block} is written from two places"
                            )));
                        }
                        *written = self.step;
                    }
                    view.places.push(KvSlot { block, offset });
                }
            }
            view.set(batch, bounds);
        }
        for block in &batch.states {
            if std::mem::replace(&mut self.written[*block as usize], self.step) == self.step {
                return Err(Error::Malformed(format!("block {block} of a state is written from two places")));
            }
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
        let Self { config, shape, ropes, views, activations, leads, inner, .. } = self;
        let (leads, inner) = (*leads, *inner);
        let (rows, shape, eps) = (batch.rows(), *shape, config.norm_eps);
        let width = config.hidden_size;
        let hidden = &mut self.hidden[..rows * width];
        let normed = &mut self.normed[..rows * width];
        let qkv = &mut self.qkv[..rows * shape.width()];
        let attended = &mut self.attended[..rows * shape.heads * shape.head_dim];
        let gate_up = &mut self.gate_up[..];
        let gated = &mut self.gated[..];
        let delta = &mut self.delta[..];

        let positions = &batch.positions;
        let longest = positions.iter().max().map_or(0, |last| *last as usize + 1);
        ropes.iter_mut().for_each(|rope| rope.ensure(longest));

        let embedding = &weights.embedding;
        for (token, out) in batch.tokens.iter().zip(hidden.chunks_exact_mut(width)) {
            embedding.row(*token as usize, out);
            if let Some(scale) = self.embedding_scale {
                out.iter_mut().for_each(|element| *element *= scale);
            }
        }

        let mut kv_layers = self.kv_layers.iter();
        let mut recurrent = 0..;
        for (layer, spec) in weights.layers.iter().zip(&config.layers) {
            rms_norm(pool, isa, hidden, &layer.mixer_norm, eps, normed);
            let (mixed, output) = match (&layer.mixer, &mut self.delta_layers) {
                (MixerWeights::Delta(delta), Some(layers)) => {
                    // One of an endless range.
                    let index = recurrent.next().unwrap_or_default();
                    let (threads, scratch) = ((pool, isa, &mut *activations), (batch, &*normed));
                    (layers.run(index, delta, eps, scratch, kv, threads), &delta.output)
                }
                (MixerWeights::Delta(_), None) => unreachable!("a model with such layers has their states"),
                (MixerWeights::Attention(weights), _) => {
                    let (Some((view, layout)), Some(spec)) = (kv_layers.next(), spec.attention()) else {
                        unreachable!("a layer with attention has keys and values")
                    };
                    let gates = &mut self.gates[..];
                    if gates.is_empty() {
                        linear(pool, &weights.qkv, normed, rows, qkv, activations);
                    } else {
                        let projected = &mut self.projected[..rows * (shape.width() + attended.len() / rows)];
                        linear(pool, &weights.qkv, normed, rows, projected, activations);
                        part_gates(shape, projected, qkv, gates);
                    }
                    let norms = weights.qk_norm.as_ref().map(|(q, k)| (q.as_slice(), k.as_slice(), eps));
                    let BlockView { ragged, places, .. } = &views[*view];
                    let (rope, score_size) = (&ropes[spec.rope], config.arithmetic.score_size);
                    finish_qkv(pool, isa, shape, qkv, norms, rope, positions, places, kv, layout);
                    attention(pool, isa, shape, qkv, ragged, kv, layout, score_size, attended);
                    if !gates.is_empty() {
                        sigmoid_gate(pool, isa, &gates[..attended.len()], attended);
                    }
                    (&*attended, &weights.output)
                }
            };
            let post_norms = layer.post_norms.as_ref().map(|(attention, mlp)| (&attention[..], &mlp[..]));
            match post_norms {
                None => {
                    linear_residual(pool, output, mixed, rows, hidden, leads, activations);
                    collective.all_reduce(hidden)?;
                }
                Some((weight, _)) => {
                    let delta = &mut delta[..rows * width];
                    linear(pool, output, mixed, rows, delta, activations);
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
                    linear(pool, &layer.down, gated, count, &mut delta[part], activations);
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

/// Parts rows of a query projection with gates, [heads, (query, gate)] before keys and values, into rows of queries, keys and values
/// and those of gates.
fn part_gates(shape: QkvShape, projected: &[f32], qkv: &mut [f32], gates: &mut [f32]) {
    let QkvShape { heads, head_dim, .. } = shape;
    let queries = heads * head_dim;
    let rows = projected.chunks_exact(shape.width() + queries).zip(qkv.chunks_exact_mut(shape.width()));
    for ((projected, qkv), gates) in rows.zip(gates.chunks_exact_mut(queries)) {
        let (of_heads, rest) = projected.split_at(2 * queries);
        for (head, both) in of_heads.chunks_exact(2 * head_dim).enumerate() {
            qkv[head * head_dim..(head + 1) * head_dim].copy_from_slice(&both[..head_dim]);
            gates[head * head_dim..(head + 1) * head_dim].copy_from_slice(&both[head_dim..]);
        }
        qkv[queries..].copy_from_slice(rest);
    }
}

/// y = x W^T + bias
pub(super) fn linear(
    pool: &Pool,
    linear: &Linear,
    x: &[f32],
    rows: usize,
    y: &mut [f32],
    scratch: &mut Activations,
) {
    let start = linear.bias.as_deref().map_or(AccumulatorInit::Zero, AccumulatorInit::Bias);
    gemm(pool, &linear.matrix, x, rows, start, y, scratch);
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

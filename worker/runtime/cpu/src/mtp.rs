//! Drafts of a layer of multi-token prediction (MTP).
//!
//! The layer predicts the token after the next one from the last hidden state, that before the LM head, and the embedding of the next token
//! (DeepSeek-AI, DeepSeek-V3 technical report, 2024, section 2.2). Its row for a pair of state and token is kept at the position of the
//! token, so the rows of a block depend on the tokens up to the block's end and are shared with the block. The first token of a sequence has
//! no state before it; its row is left out of attention.
//!
//! Drafts are verified, so nothing here changes an output. A sequence that resumes (from cached blocks, after a preemption, on another
//! worker) has one row without a hidden state.

use inflight_kernels::cpu::{KvPool, rms_norm};
use inflight_models::{AttentionSpec, LayerSpec, MixerWeights, ModelConfig};
use inflight_runtime::collective::GroupFailed;
use inflight_runtime::{Batch, Capabilities, DRAFT_ROWS, Slot};

use super::attention_layers::AttentionLayers;
use super::forward::{Head, LayerBuffers, RankDevice};
use super::weights::{Mtp, Weights};

/// Maximum tokens predicted for a sequence in a step.
pub(super) const PREDICTED_MAX: u32 = 8;

/// Returns the number of blocks behind those of the scheduler, for rows of predicted tokens that are beyond a sequence's blocks.
pub(super) fn scratch_blocks(slots: u32, block_tokens: u32) -> u32 {
    // A block of a token each, at most; or so many for each slot.
    DRAFT_ROWS.min(slots.saturating_mul(PREDICTED_MAX.div_ceil(block_tokens)))
}

/// Token whose successor the layer predicts.
#[derive(Debug, Clone, Copy)]
pub(super) struct PredictedRow {
    /// Index in the batch's predictions.
    pub(super) index: usize,
    pub(super) token: u32,
    /// Position of the token.
    pub(super) position: u32,
    /// True if the MTP layer predicted the token, false if it was sampled.
    pub(super) is_predicted: bool,
}

/// Last hidden states of a slot's sequence, of consecutive positions.
#[derive(Default)]
struct SlotStates {
    first: u32,
    states: Vec<f32>,
}

impl SlotStates {
    /// Returns the state at a position, if it is kept.
    fn at(&self, position: u32, width: usize) -> Option<&[f32]> {
        let nth = position.checked_sub(self.first)? as usize;
        self.states.get(nth * width..(nth + 1) * width)
    }
}

/// MTP layer of a rank.
pub(super) struct MtpDrafter {
    /// Index of its keys and values among those of layers with attention.
    layer: usize,
    width: usize,
    norm_eps: f32,
    block_tokens: u32,
    /// First block of [`scratch_blocks`].
    scratch: u32,
    slots: Vec<SlotStates>,
    /// Embeddings or states, the same normalized, and the inputs of the projection: [rows, width] and [rows, 2 width].
    rows: Vec<f32>,
    normed: Vec<f32>,
    joined: Vec<f32>,
    /// Hidden states of the rows predicted last before the LM head, by index of the prediction; [sequences, width].
    outputs: Vec<f32>,
    positions: Vec<u32>,
    /// Blocks of the sequences that are predicted, by index of the row.
    tables: Vec<Vec<u32>>,
    logits: Vec<f32>,
    vocab: usize,
}

impl MtpDrafter {
    /// Creates buffers, which take memory at first use.
    pub(super) fn new(config: &ModelConfig, bounds: &Capabilities) -> Self {
        let (rows, width) = (bounds.batch_tokens as usize, config.hidden_size);
        Self {
            layer: config.layers.iter().filter_map(LayerSpec::attention).count(),
            width,
            norm_eps: config.norm_eps,
            block_tokens: bounds.shape.block_tokens(),
            scratch: bounds.blocks,
            slots: (0..bounds.slots).map(|_| SlotStates::default()).collect(),
            rows: vec![0.0; rows * width],
            normed: vec![0.0; rows * width],
            joined: vec![0.0; rows * 2 * width],
            outputs: vec![0.0; rows.min(bounds.slots as usize) * width],
            positions: Vec::new(),
            tables: Vec::new(),
            logits: Vec::new(),
            vocab: config.vocab_size,
        }
    }

    /// Logits of the rows predicted last, on rank 0; [rows, vocab_size].
    pub(super) fn logits(&self) -> &[f32] {
        let predicted = self.positions.len() * self.vocab;
        self.logits.get(..predicted).unwrap_or(&[])
    }

    /// Forgets the states of a slot.
    pub(super) fn forget(&mut self, slot: Slot) {
        if let Some(states) = self.slots.get_mut(slot as usize) {
            states.states.clear();
        }
    }

    /// Writes the layer's keys and values of all rows of a batch, whose normalized hidden states are in `layers`, and keeps the last states
    /// of its sequences.
    pub(super) fn see(
        &mut self,
        batch: &Batch,
        (weights, own, scale): (&Weights, &Mtp, Option<f32>),
        layers: &mut LayerBuffers,
        attention_layers: &mut AttentionLayers,
        kv: &mut KvPool,
        on: RankDevice<'_>,
    ) {
        let (width, count) = (self.width, batch.rows());
        for (token, out) in batch.tokens.iter().zip(self.rows.chunks_exact_mut(width)) {
            weights.embed(*token, scale, out);
        }
        self.join(0, &own.embedding_norm, count, on);
        // Each row takes the state of the row before it; the first one of a sequence, that of its slot.
        self.rows[width..count * width].copy_from_slice(&layers.normed[..(count - 1) * width]);
        for s in 0..batch.sequences() {
            let first = batch.starts[s] as usize;
            self.rows[first * width..(first + 1) * width].fill(0.0);
        }
        for prediction in &batch.predictions {
            let s = prediction.sequence as usize;
            let (first, end) = (batch.starts[s] as usize, batch.starts[s + 1] as usize);
            let (states, position) = (&mut self.slots[prediction.slot as usize], batch.positions[first]);
            if let Some(state) = position.checked_sub(1).and_then(|before| states.at(before, width)) {
                self.rows[first * width..(first + 1) * width].copy_from_slice(state);
            }
            // The states that the next batch, or a prediction, may need: of the row before the drafts and of each of them.
            let kept = end - 1 - batch.drafts[s] as usize;
            states.first = batch.positions[kept];
            states.states.clear();
            states.states.extend_from_slice(&layers.normed[kept * width..end * width]);
        }
        self.join(1, &own.hidden_norm, count, on);
        let MixerWeights::Attention(attention) = &own.layer.mixer else { return };
        let (rows, normed) = (&mut self.rows[..count * width], &mut self.normed[..count * width]);
        own.inputs.apply(on.pool, &self.joined[..count * 2 * width], count, rows, &mut layers.activations);
        rms_norm(on.pool, on.isa, rows, &own.layer.mixer_norm, self.norm_eps, normed);
        let threads = (on.pool, on.isa, &mut layers.activations);
        let inputs = (&batch.positions[..], &*normed);
        attention_layers.write(self.layer, (attention, AttentionSpec::FULL), inputs, kv, threads);
    }

    /// Normalizes the first `count` rows into the left (0) or right (1) half of the inputs of the projection.
    fn join(&mut self, half: usize, weight: &[f32], count: usize, on: RankDevice<'_>) {
        let width = self.width;
        let (rows, normed) = (&self.rows[..count * width], &mut self.normed[..count * width]);
        rms_norm(on.pool, on.isa, rows, weight, self.norm_eps, normed);
        let joined = self.joined.chunks_exact_mut(2 * width);
        for (normed, joined) in normed.chunks_exact(width).zip(joined) {
            joined[half * width..(half + 1) * width].copy_from_slice(normed);
        }
    }

    /// Sets where the rows of [`MtpDrafter::predict`] are kept: in the sequence's blocks, and behind them in blocks of their own.
    pub(super) fn place(
        &mut self,
        batch: &Batch,
        rows: &[PredictedRow],
        attention_layers: &mut AttentionLayers,
        bounds: &Capabilities,
    ) {
        // Scratch blocks of each prediction, behind those of the predictions before it.
        let spans = |tokens: u32| tokens.div_ceil(self.block_tokens);
        let mut taken = batch.predictions.iter().scan(self.scratch, |next, prediction| {
            let first = *next;
            *next += spans(prediction.tokens);
            Some(first..*next)
        });
        self.tables.resize_with(rows.len(), Vec::new);
        let mut before = 0;
        for (row, table) in rows.iter().zip(&mut self.tables) {
            let scratch = taken.nth(row.index - before).unwrap_or(0..0);
            before = row.index + 1;
            let sequence = batch.predictions[row.index].sequence as usize;
            table.clear();
            table.extend(attention_layers.blocks(self.layer, batch, sequence, bounds));
            table.extend(scratch);
        }
        self.positions.clear();
        self.positions.extend(rows.iter().map(|row| row.position));
        attention_layers.ensure(&self.positions);
        attention_layers.place_single(self.layer, &self.positions, &self.tables, self.block_tokens);
    }

    /// Computes the logits of the tokens behind these rows, which are placed.
    ///
    /// # Errors
    /// Another rank failed.
    pub(super) fn predict(
        &mut self,
        batch: &Batch,
        rows: &[PredictedRow],
        (weights, own, scale): (&Weights, &Mtp, Option<f32>),
        layers: &mut LayerBuffers,
        attention_layers: &mut AttentionLayers,
        kv: &mut KvPool,
        head: &mut Head,
        on: RankDevice<'_>,
    ) -> Result<(), GroupFailed> {
        let (width, count) = (self.width, rows.len());
        for (row, out) in rows.iter().zip(self.rows.chunks_exact_mut(width)) {
            weights.embed(row.token, scale, out);
        }
        self.join(0, &own.embedding_norm, count, on);
        for (row, out) in rows.iter().zip(self.rows.chunks_exact_mut(width)) {
            let prediction = &batch.predictions[row.index];
            let states = &self.slots[prediction.slot as usize];
            // The model's own state or, behind a predicted token, that of the layer.
            match states.at(row.position - 1, width).filter(|_| !row.is_predicted) {
                Some(state) => out.copy_from_slice(state),
                None => out.copy_from_slice(&self.outputs[row.index * width..(row.index + 1) * width]),
            }
        }
        self.join(1, &own.hidden_norm, count, on);
        let MixerWeights::Attention(attention) = &own.layer.mixer else { return Ok(()) };
        let joined = &self.joined[..count * 2 * width];
        own.inputs.apply(
            on.pool,
            joined,
            count,
            &mut layers.hidden[..count * width],
            &mut layers.activations,
        );
        layers.normalize(&own.layer.mixer_norm, count, on);
        let threads = (on.pool, on.isa, &mut layers.activations);
        let places = (&self.positions[..], &self.tables[..count], self.block_tokens);
        let normed = &layers.normed[..count * width];
        let mixed = attention_layers.run_single(
            self.layer,
            (attention, AttentionSpec::FULL),
            places,
            normed,
            kv,
            threads,
        );
        layers.finish(&own.layer, mixed, count, on)?;
        layers.normalize(&own.norm, count, on);
        let normed = &layers.normed[..count * width];
        for (row, state) in rows.iter().zip(normed.chunks_exact(width)) {
            self.outputs[row.index * width..(row.index + 1) * width].copy_from_slice(state);
        }
        head.run((normed, count), weights, on, &mut layers.activations, &mut self.logits)
    }
}

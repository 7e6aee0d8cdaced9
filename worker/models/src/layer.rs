//! Arithmetic of a decoder, as data: one loop in each runtime interprets it.

use inflight_kernels::Encoding;
use inflight_kernels::cpu::{Activation, RopeScaling};

/// Arithmetic of a decoder layer: h += mixer(norm(h)), h += mlp(norm(h)), with a second norm behind each where
/// [`Arithmetic::norms`] says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSpec {
    /// What mixes the tokens of a sequence.
    pub mixer: Mixer,
}

impl LayerSpec {
    /// Returns the layer's attention; `None` of a recurrent layer.
    pub fn attention(&self) -> Option<AttentionSpec> {
        match self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Delta => None,
        }
    }
}

/// What mixes the tokens of a sequence in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Attention to the tokens before.
    Attention(AttentionSpec),
    /// The gated delta rule, of the shape [`ModelConfig::delta`](crate::ModelConfig::delta): a state of one size.
    Delta,
}

/// Gated delta rule of a model's recurrent layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaSpec {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values; a multiple of the key heads.
    pub value_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Positions that the convolution before the rule sees, its own included.
    pub taps: usize,
    /// Form of the weights.
    pub form: DeltaForm,
}

/// Form of the weights of a gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaForm {
    /// As of Hugging Face checkpoints: a key head serves consecutive value heads, and rates of decays are given by their logarithms.
    Checkpoint,
    /// As of Hugging Face checkpoints of Qwen3-Next: as those, but the projections to the inputs of the convolution and to the gates are one
    /// matrix, those to betas and decays another, and the rows of both are ordered by key head.
    Fused,
    /// As of GGUF files: the value heads of a key head are as many apart as there are key heads, rates of decays are given negated, and
    /// norms are not zero-centred.
    Gguf,
}

impl DeltaSpec {
    /// Returns the channels of the convolution: queries, keys and values of all heads.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Returns the elements of all value heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the value heads of a key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Returns the part of one of `ranks` ranks, which divide the key heads.
    #[must_use]
    pub fn of_rank(self, ranks: usize) -> Self {
        Self { key_heads: self.key_heads / ranks, value_heads: self.value_heads / ranks, ..self }
    }
}

/// Attention of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Positions that a token sees, its own included; `None`: all up to its own.
    pub window: Option<u32>,
    /// Index in [`ModelConfig::ropes`](crate::ModelConfig::ropes) of the layer's rotary embedding.
    pub rope: usize,
}

impl AttentionSpec {
    /// Attention to all positions, with the first rotary embedding.
    pub const FULL: Self = Self { window: None, rope: 0 };
}

/// Rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

/// Where a layer normalizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlaces {
    /// The inputs of attention and MLP.
    Before,
    /// Their inputs, and their outputs before these are added to the residual.
    Around,
}

/// Arithmetic that all layers of a model share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arithmetic {
    /// Where a layer normalizes.
    pub norms: NormPlaces,
    /// Norms multiply with 1 + weight instead of the weight.
    pub zero_centred_norms: bool,
    /// Activation of the MLP's gates.
    pub activation: Activation,
    /// Scores of attention are divided by the square root of this number.
    pub score_size: f64,
    /// Embeddings are multiplied with the square root of the hidden size, rounded to the embedding's type.
    pub scaled_embedding: bool,
    /// Outputs of attention are multiplied with the sigmoid of a gate; the query projection has, for each head, its rows and those of
    /// its gate.
    pub output_gate: bool,
}

impl Arithmetic {
    /// Returns what a norm multiplies with, if its weight is stored as `weight`.
    pub fn norm_factors(&self, mut weight: Vec<f32>) -> Vec<f32> {
        if self.zero_centred_norms {
            weight.iter_mut().for_each(|element| *element += 1.0);
        }
        weight
    }

    /// Returns the factor of embeddings of `hidden_size` elements that are stored in `encoding`, if they are scaled.
    pub fn embedding_scale(&self, hidden_size: usize, encoding: Encoding) -> Option<f32> {
        let scale = (hidden_size as f64).sqrt() as f32;
        let rounded = match encoding {
            Encoding::Plain(dtype) => dtype.round(scale),
            _ => scale,
        };
        self.scaled_embedding.then_some(rounded)
    }
}

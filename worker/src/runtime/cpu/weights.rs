use std::io;

use inflight_kernels::Dtype;
use inflight_kernels::cpu::{Isa, PackedMatrix, Pool, Rows, WeightFormat};

use super::quantization::{Quantization, kv_dtype, packed_bytes};
use crate::models::{Error, ModelDir, Tensor};
use crate::runtime::decoder::DecoderLayer;

/// Weights in the form that kernels read.
pub(super) struct Weights {
    pub(super) embedding: Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    pub(super) head: PackedMatrix,
}

pub(super) type Layer = DecoderLayer<Vec<f32>, Linear>;

pub(super) struct Linear {
    pub(super) matrix: PackedMatrix,
    pub(super) bias: Option<Vec<f32>>,
}

impl Weights {
    /// Bytes held in memory; the embedding stays in its file.
    pub(super) fn bytes(&self) -> usize {
        let linears = self.layers.iter().flat_map(Layer::products);
        linears.map(|linear| linear.matrix.bytes()).sum::<usize>() + self.head.bytes()
    }
}

/// The tensors of a model, all found and of the right shape.
pub(super) struct Found {
    embedding: Tensor,
    layers: Vec<FoundLayer>,
    norm: Tensor,
    head: FoundLinear,
}

type FoundLayer = DecoderLayer<Tensor, FoundLinear>;

/// Matrices to be stacked, and their biases if they have any.
struct FoundLinear {
    matrices: Vec<Tensor>,
    biases: Vec<Tensor>,
    k: usize,
}

/// Finds every tensor that the configuration calls for.
pub(super) fn find(model: &ModelDir) -> Result<Found, Error> {
    let (config, tensors) = (model.config(), model.tensors());
    let hidden = config.hidden_size;
    let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let linear = |prefix: &str, parts: &[(&str, usize)], k: usize, bias: bool| {
        let mut found = FoundLinear { matrices: Vec::new(), biases: Vec::new(), k };
        for (part, n) in parts {
            found.matrices.push(tensors.get(&format!("{prefix}.{part}.weight"), &[*n, k])?);
            if bias {
                found.biases.push(tensors.get(&format!("{prefix}.{part}.bias"), &[*n])?);
            }
        }
        Ok::<_, Error>(found)
    };
    let embedding = tensors.get("model.embed_tokens.weight", &[config.vocab_size, hidden])?;
    let mut layers = Vec::with_capacity(config.layers);
    for layer in 0..config.layers {
        let at = format!("model.layers.{layer}");
        let attention = format!("{at}.self_attn");
        let mlp = format!("{at}.mlp");
        let parts = [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)];
        let head_norm = |which: &str| tensors.get(&format!("{attention}.{which}.weight"), &[config.head_dim]);
        let inner = config.intermediate_size;
        layers.push(FoundLayer {
            attention_norm: tensors.get(&format!("{at}.input_layernorm.weight"), &[hidden])?,
            qkv: linear(&attention, &parts, hidden, config.qkv_bias)?,
            qk_norm: match config.qk_norm {
                true => Some((head_norm("q_norm")?, head_norm("k_norm")?)),
                false => None,
            },
            output: linear(&attention, &[("o_proj", hidden)], queries, config.output_bias)?,
            mlp_norm: tensors.get(&format!("{at}.post_attention_layernorm.weight"), &[hidden])?,
            gate_up: linear(&mlp, &[("gate_proj", inner), ("up_proj", inner)], hidden, config.mlp_bias)?,
            down: linear(&mlp, &[("down_proj", hidden)], inner, config.mlp_bias)?,
        });
    }
    let norm = tensors.get("model.norm.weight", &[hidden])?;
    let head = match config.tied_embeddings {
        true => embedding.clone(),
        false => tensors.get("lm_head.weight", &[config.vocab_size, hidden])?,
    };
    let head = FoundLinear { matrices: vec![head], biases: Vec::new(), k: hidden };
    Ok(Found { embedding, layers, norm, head })
}

impl FoundLinear {
    /// How it is stored once packed.
    fn format(&self, quantization: Option<WeightFormat>) -> WeightFormat {
        let sources: Vec<Rows<'_>> = self.matrices.iter().map(Tensor::rows).collect();
        quantization.unwrap_or_else(|| WeightFormat::of(&sources))
    }

    fn columns(&self) -> usize {
        self.matrices.iter().map(|matrix| matrix.shape[0]).sum()
    }
}

impl Found {
    /// The dtype of keys and values: that of the model's first projection, or bf16 where weights are integers.
    pub(super) fn kv_dtype(&self) -> Dtype {
        kv_dtype(self.layers[0].qkv.format(None))
    }

    /// The matrices, with how each is to be stored.
    fn formats(&self, quantization: Option<Quantization>) -> Vec<(&FoundLinear, WeightFormat)> {
        let layers = quantization.map(Quantization::layers);
        self.layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down])
            .map(|linear| (linear, linear.format(layers)))
            .chain([(&self.head, self.head.format(quantization.map(Quantization::head)))])
            .collect()
    }

    /// How every matrix will be stored, in their order: part of what decides a token's bits.
    pub(super) fn format_names(&self, quantization: Option<Quantization>) -> String {
        let names = self.formats(quantization).into_iter().map(|(_, format)| format.to_string());
        names.collect::<Vec<_>>().join(" ")
    }

    /// Bytes that all matrices take once packed.
    pub(super) fn packed_bytes(&self, quantization: Option<Quantization>, isa: Isa) -> u64 {
        let formats = self.formats(quantization).into_iter();
        formats.map(|(linear, format)| packed_bytes(format, isa, linear.columns(), linear.k)).sum()
    }

    /// Packs all matrices.
    ///
    /// # Errors
    /// There is no memory for them.
    pub(super) fn pack(
        self,
        pool: &Pool,
        isa: Isa,
        quantization: Option<Quantization>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> io::Result<Weights> {
        let size = |linear: &FoundLinear| linear.matrices.iter().map(|m| m.bytes().len() as u64).sum::<u64>();
        let total = self.formats(None).into_iter().map(|(linear, _)| size(linear)).sum();
        let mut done = 0;
        progress(done, total);
        let mut pack = |linear: &FoundLinear, quantization: Option<WeightFormat>| {
            let sources: Vec<Rows<'_>> = linear.matrices.iter().map(Tensor::rows).collect();
            let matrix = PackedMatrix::pack(pool, isa, linear.k, &sources, linear.format(quantization))?;
            // What is packed is not read again, but for the embedding, which may be the head.
            linear.matrices.iter().for_each(Tensor::release);
            done += size(linear);
            progress(done, total);
            let bias: Vec<f32> = linear.biases.iter().flat_map(Tensor::to_f32).collect();
            Ok::<_, io::Error>(Linear { matrix, bias: (!bias.is_empty()).then_some(bias) })
        };
        let formats = quantization.map(Quantization::layers);
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            layers.push(Layer {
                attention_norm: layer.attention_norm.to_f32(),
                qkv: pack(&layer.qkv, formats)?,
                qk_norm: layer.qk_norm.as_ref().map(|(q, k)| (q.to_f32(), k.to_f32())),
                output: pack(&layer.output, formats)?,
                mlp_norm: layer.mlp_norm.to_f32(),
                gate_up: pack(&layer.gate_up, formats)?,
                down: pack(&layer.down, formats)?,
            });
        }
        let head = pack(&self.head, quantization.map(Quantization::head))?.matrix;
        Ok(Weights { embedding: self.embedding, layers, norm: self.norm.to_f32(), head })
    }
}

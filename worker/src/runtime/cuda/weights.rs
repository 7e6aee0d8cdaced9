//! Weights on the device: rows of matrices as checkpoints have them, in one 16-bit type.

use inflight_kernels::Encoding;
use inflight_kernels::cuda::{DeviceError, Half};

use super::gpu::{Bias, Gpu, Memory, bytes_of};
use crate::models::{Error, ModelConfig, ModelDir, Tensor};
use crate::runtime::decoder::DecoderLayer;

/// The tensors of a model, all found and of the right shape.
pub(super) struct Found {
    embedding: Tensor,
    layers: Vec<FoundLayer>,
    norm: Tensor,
    head: Option<Tensor>,
}

type FoundLayer = DecoderLayer<Tensor, FoundLinear>;

/// Matrices to be stacked, and their biases if they have any.
struct FoundLinear {
    matrices: Vec<Tensor>,
    biases: Vec<Tensor>,
}

/// Weights in the device's memory.
pub(super) struct Weights<M> {
    pub(super) embedding: M,
    pub(super) layers: Vec<Layer<M>>,
    pub(super) norm: M,
    /// `None`: it is the embedding.
    pub(super) head: Option<M>,
}

pub(super) type Layer<M> = DecoderLayer<M, Linear<M>>;

pub(super) struct Linear<M> {
    pub(super) matrix: M,
    wide_bias: Option<M>,
    half_bias: Option<M>,
}

impl<M: Memory> Linear<M> {
    pub(super) fn bias(&self) -> Option<Bias> {
        let (wide, half) = (self.wide_bias.as_ref()?, self.half_bias.as_ref()?);
        Some(Bias { wide: wide.address(), half: half.address() })
    }
}

impl FoundLinear {
    fn numbers(&self) -> u64 {
        self.matrices.iter().map(numbers).sum()
    }
}

fn numbers(tensor: &Tensor) -> u64 {
    tensor.shape.iter().map(|n| *n as u64).product()
}

/// Finds every tensor that the configuration calls for.
pub(super) fn find(model: &ModelDir) -> Result<Found, Error> {
    let (config, tensors) = (model.config(), model.tensors());
    let ModelConfig { hidden_size: hidden, intermediate_size: inner, head_dim, .. } = *config;
    let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
    let linear = |prefix: &str, parts: &[(&str, usize)], k: usize, bias: bool| {
        let mut found = FoundLinear { matrices: Vec::new(), biases: Vec::new() };
        for (part, n) in parts {
            found.matrices.push(tensors.get(&format!("{prefix}.{part}.weight"), &[*n, k])?);
            if bias {
                found.biases.push(tensors.get(&format!("{prefix}.{part}.bias"), &[*n])?);
            }
        }
        Ok::<_, Error>(found)
    };
    let layer = |index: usize| {
        let at = format!("model.layers.{index}");
        let (attention, mlp) = (format!("{at}.self_attn"), format!("{at}.mlp"));
        let head_norm = |which: &str| tensors.get(&format!("{attention}.{which}.weight"), &[head_dim]);
        let qkv = [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)];
        Ok(FoundLayer {
            attention_norm: tensors.get(&format!("{at}.input_layernorm.weight"), &[hidden])?,
            qkv: linear(&attention, &qkv, hidden, config.qkv_bias)?,
            qk_norm: match config.qk_norm {
                true => Some((head_norm("q_norm")?, head_norm("k_norm")?)),
                false => None,
            },
            output: linear(&attention, &[("o_proj", hidden)], queries, config.output_bias)?,
            mlp_norm: tensors.get(&format!("{at}.post_attention_layernorm.weight"), &[hidden])?,
            gate_up: linear(&mlp, &[("gate_proj", inner), ("up_proj", inner)], hidden, config.mlp_bias)?,
            down: linear(&mlp, &[("down_proj", hidden)], inner, config.mlp_bias)?,
        })
    };
    Ok(Found {
        embedding: tensors.get("model.embed_tokens.weight", &[config.vocab_size, hidden])?,
        layers: (0..config.layers).map(layer).collect::<Result<_, Error>>()?,
        norm: tensors.get("model.norm.weight", &[hidden])?,
        head: match config.tied_embeddings {
            true => None,
            false => Some(tensors.get("lm_head.weight", &[config.vocab_size, hidden])?),
        },
    })
}

impl Found {
    /// The model's dtype: that of its first projection. Norms may differ from it.
    pub(super) fn half(&self) -> Half {
        match self.layers[0].qkv.matrices[0].encoding {
            Encoding::Plain(dtype) => Half::of(dtype),
            _ => Half::Bf16, // integers with scales are widened
        }
    }

    /// Bytes of all matrices on the device; norms and biases are small beside them.
    pub(super) fn bytes(&self) -> u64 {
        let linears: u64 = self.layers.iter().flat_map(FoundLayer::products).map(FoundLinear::numbers).sum();
        (linears + numbers(&self.embedding) + self.head.as_ref().map_or(0, numbers)) * 2
    }

    /// Copies everything to the device. `progress` hears the bytes done and in all.
    pub(super) fn upload<G: Gpu>(
        &self,
        gpu: &G,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Weights<G::Memory>, DeviceError> {
        let mut upload =
            Upload { gpu, half: self.half(), done: 0, total: self.bytes(), progress, scratch: Vec::new() };
        (upload.progress)(0, upload.total);
        Ok(Weights {
            embedding: upload.matrix(std::slice::from_ref(&self.embedding))?,
            layers: self
                .layers
                .iter()
                .map(|layer| upload.layer(layer))
                .collect::<Result<_, DeviceError>>()?,
            norm: upload.wide(std::slice::from_ref(&self.norm))?,
            head: match &self.head {
                Some(head) => Some(upload.matrix(std::slice::from_ref(head))?),
                None => None,
            },
        })
    }
}

struct Upload<'a, G> {
    gpu: &'a G,
    half: Half,
    done: u64,
    total: u64,
    progress: &'a (dyn Fn(u64, u64) + Sync),
    /// Numbers of a piece whose type is changed.
    scratch: Vec<u16>,
}

/// Bytes that are copied or converted at once.
const PIECE_BYTES: usize = 16 << 20;

impl<G: Gpu> Upload<'_, G> {
    fn layer(&mut self, layer: &FoundLayer) -> Result<Layer<G::Memory>, DeviceError> {
        Ok(Layer {
            attention_norm: self.wide(std::slice::from_ref(&layer.attention_norm))?,
            qkv: self.linear(&layer.qkv)?,
            qk_norm: match &layer.qk_norm {
                Some((q, k)) => {
                    Some((self.wide(std::slice::from_ref(q))?, self.wide(std::slice::from_ref(k))?))
                }
                None => None,
            },
            output: self.linear(&layer.output)?,
            mlp_norm: self.wide(std::slice::from_ref(&layer.mlp_norm))?,
            gate_up: self.linear(&layer.gate_up)?,
            down: self.linear(&layer.down)?,
        })
    }

    fn linear(&mut self, linear: &FoundLinear) -> Result<Linear<G::Memory>, DeviceError> {
        let (mut wide_bias, mut half_bias) = (None, None);
        if !linear.biases.is_empty() {
            wide_bias = Some(self.wide(&linear.biases)?);
            half_bias = Some(self.halves(&linear.biases)?);
        }
        Ok(Linear { matrix: self.matrix(&linear.matrices)?, wide_bias, half_bias })
    }

    /// Numbers as f32.
    fn wide(&self, tensors: &[Tensor]) -> Result<G::Memory, DeviceError> {
        let values: Vec<f32> = tensors.iter().flat_map(Tensor::to_f32).collect();
        let memory = self.gpu.alloc(values.len() * 4)?;
        self.gpu.upload(&memory, 0, bytes_of(&values))?;
        Ok(memory)
    }

    fn halves(&self, tensors: &[Tensor]) -> Result<G::Memory, DeviceError> {
        let values: Vec<u16> = tensors.iter().flat_map(Tensor::to_f32).map(|x| self.half.narrow(x)).collect();
        let memory = self.gpu.alloc(values.len() * 2)?;
        self.gpu.upload(&memory, 0, bytes_of(&values))?;
        Ok(memory)
    }

    /// Rows of several matrices, one after the other.
    fn matrix(&mut self, tensors: &[Tensor]) -> Result<G::Memory, DeviceError> {
        let all: u64 = tensors.iter().map(numbers).sum();
        let memory = self.gpu.alloc(all as usize * 2)?;
        let mut at = 0;
        for tensor in tensors {
            let (block, block_bytes) = (tensor.encoding.block(), tensor.encoding.block_bytes());
            for piece in tensor.bytes().chunks(PIECE_BYTES / block_bytes * block_bytes) {
                let count = piece.len() / block_bytes * block;
                if tensor.encoding == Encoding::Plain(self.half.dtype()) {
                    self.gpu.upload(&memory, at, piece)?;
                } else {
                    self.convert(tensor.encoding, piece, count);
                    self.gpu.upload(&memory, at, bytes_of(&self.scratch))?;
                }
                at += count * 2;
                self.done += count as u64 * 2;
                (self.progress)(self.done, self.total);
            }
        }
        Ok(memory)
    }

    fn convert(&mut self, from: Encoding, piece: &[u8], count: usize) {
        let mut wide = vec![0.0; count];
        from.widen(piece, &mut wide);
        self.scratch.clear();
        self.scratch.extend(wide.into_iter().map(|x| self.half.narrow(x)));
    }
}

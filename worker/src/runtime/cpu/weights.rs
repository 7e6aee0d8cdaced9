//! Weights of the CPU runtime: lookup in the checkpoint, sharding and packing for the kernels.

use std::io;
use std::ops::Range;

use inflight_kernels::Dtype;
use inflight_kernels::cpu::{Isa, PackedMatrix, Pool, Rows, WeightFormat};

use super::super::sharding::{Cut, Grain, Matrix, Shard};
use super::quantization::{Quantization, kv_dtype, packed_bytes};
use crate::models::{Error, ModelDir, Tensor};
use crate::runtime::decoder::DecoderLayer;

/// Packed weights of one rank.
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
    /// Bytes of the packed matrices; the embedding stays memory-mapped.
    pub(super) fn bytes(&self) -> usize {
        let linears = self.layers.iter().flat_map(Layer::products);
        linears.map(|linear| linear.matrix.bytes()).sum::<usize>() + self.head.bytes()
    }
}

/// Tensors of a model in the checkpoint, with validated shapes.
pub(super) struct CheckpointWeights {
    embedding: Tensor,
    layers: Vec<CheckpointLayer>,
    norm: Tensor,
    head: CheckpointLinear,
}

type CheckpointLayer = DecoderLayer<Tensor, CheckpointLinear>;

/// Linear layer in the checkpoint: matrices to be stacked, and their biases if any.
struct CheckpointLinear {
    matrix: Matrix,
    matrices: Vec<Tensor>,
    biases: Vec<Tensor>,
    /// Inputs of the unsharded matrices.
    k: usize,
}

/// Looks up every tensor that the configuration requires.
pub(super) fn find(model: &ModelDir) -> Result<CheckpointWeights, Error> {
    let (config, tensors) = (model.config(), model.tensors());
    let hidden = config.hidden_size;
    let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let linear = |matrix: Matrix, prefix: &str, parts: &[(&str, usize)], k: usize, bias: bool| {
        let mut found = CheckpointLinear { matrix, matrices: Vec::new(), biases: Vec::new(), k };
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
        layers.push(CheckpointLayer {
            attention_norm: tensors.get(&format!("{at}.input_layernorm.weight"), &[hidden])?,
            qkv: linear(Matrix::Qkv, &attention, &parts, hidden, config.qkv_bias)?,
            qk_norm: match config.qk_norm {
                true => Some((head_norm("q_norm")?, head_norm("k_norm")?)),
                false => None,
            },
            output: linear(Matrix::Output, &attention, &[("o_proj", hidden)], queries, config.output_bias)?,
            mlp_norm: tensors.get(&format!("{at}.post_attention_layernorm.weight"), &[hidden])?,
            gate_up: linear(
                Matrix::GateUp,
                &mlp,
                &[("gate_proj", inner), ("up_proj", inner)],
                hidden,
                config.mlp_bias,
            )?,
            down: linear(Matrix::Down, &mlp, &[("down_proj", hidden)], inner, config.mlp_bias)?,
        });
    }
    let norm = tensors.get("model.norm.weight", &[hidden])?;
    let head = match config.tied_embeddings {
        true => embedding.clone(),
        false => tensors.get("lm_head.weight", &[config.vocab_size, hidden])?,
    };
    let head = CheckpointLinear { matrix: Matrix::Head, matrices: vec![head], biases: Vec::new(), k: hidden };
    Ok(CheckpointWeights { embedding, layers, norm, head })
}

impl CheckpointLinear {
    /// Returns the packed format for `ranks` ranks.
    fn format(&self, quantization: Option<Quantization>, ranks: usize) -> WeightFormat {
        let Some(quantization) = quantization else {
            let sources: Vec<Rows<'_>> = self.matrices.iter().map(Tensor::rows).collect();
            return WeightFormat::of(&sources);
        };
        match self.matrix {
            Matrix::Head => quantization.head(self.k),
            Matrix::Qkv | Matrix::GateUp => quantization.layer(self.k),
            // By a rank's inputs, so that partitions are whole groups.
            Matrix::Output | Matrix::Down => quantization.layer(self.k / ranks),
        }
    }

    /// Returns outputs and inputs of a shard's partition.
    fn shape(&self, shard: &Shard) -> (usize, usize) {
        match shard.cut(self.matrix) {
            Cut::Outputs(outputs) => (outputs.iter().map(Range::len).sum(), self.k),
            Cut::Inputs(inputs) => (self.matrices.iter().map(|matrix| matrix.shape[0]).sum(), inputs.len()),
        }
    }

    /// Returns the bytes of a shard's partition in the file.
    fn bytes(&self, shard: &Shard) -> u64 {
        let (n, k) = self.shape(shard);
        let bytes: usize = self.matrices.iter().map(|matrix| matrix.bytes().len()).sum();
        let elements: usize = self.matrices.iter().map(|matrix| matrix.shape[0]).sum::<usize>() * self.k;
        (bytes as u128 * (n * k) as u128 / elements as u128) as u64
    }

    /// Packs a shard's partition.
    fn pack(&self, pool: &Pool, isa: Isa, format: WeightFormat, shard: &Shard) -> io::Result<Linear> {
        let (_, k) = self.shape(shard);
        let wide = |biases: &[Tensor]| biases.iter().flat_map(Tensor::to_f32).collect::<Vec<f32>>();
        let (matrix, bias) = match shard.cut(self.matrix) {
            Cut::Outputs(outputs) => {
                let parts = self.matrices.iter().zip(&outputs);
                let sources: Vec<Rows<'_>> =
                    parts.map(|(matrix, part)| matrix.rows_in(part.clone())).collect();
                let biases = self.biases.iter().zip(outputs);
                let bias = biases.flat_map(|(bias, part)| bias.to_f32()[part].to_vec()).collect();
                (PackedMatrix::pack(pool, isa, k, &sources, format)?, bias)
            }
            Cut::Inputs(_) if k == self.k => {
                let sources: Vec<Rows<'_>> = self.matrices.iter().map(Tensor::rows).collect();
                (PackedMatrix::pack(pool, isa, k, &sources, format)?, wide(&self.biases))
            }
            Cut::Inputs(inputs) => {
                let parts: Vec<Vec<u8>> =
                    self.matrices.iter().map(|matrix| matrix.columns_in(inputs.clone())).collect();
                let sources = self.matrices.iter().zip(&parts);
                let sources: Vec<Rows<'_>> =
                    sources.map(|(matrix, bytes)| Rows { bytes, ..matrix.rows() }).collect();
                let bias = if shard.rank == 0 { wide(&self.biases) } else { Vec::new() };
                (PackedMatrix::pack(pool, isa, k, &sources, format)?, bias)
            }
        };
        // Packed tensors are not read again, except an embedding that is also the LM head.
        self.matrices.iter().for_each(Tensor::release);
        Ok(Linear { matrix, bias: (!bias.is_empty()).then_some(bias) })
    }
}

impl CheckpointWeights {
    /// Default KV cache dtype: that of the first layer's QKV projection, or bf16 if its encoding is integer.
    pub(super) fn kv_dtype(&self) -> Dtype {
        kv_dtype(self.layers[0].qkv.format(None, 1))
    }

    /// Returns all linear layers with their packed formats for `ranks` ranks.
    fn formats(
        &self,
        quantization: Option<Quantization>,
        ranks: usize,
    ) -> Vec<(&CheckpointLinear, WeightFormat)> {
        self.layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down])
            .chain([&self.head])
            .map(|linear| (linear, linear.format(quantization, ranks)))
            .collect()
    }

    /// Returns the formats of all matrices in order, for the numerics fingerprint.
    pub(super) fn format_names(&self, quantization: Option<Quantization>, ranks: usize) -> String {
        let names = self.formats(quantization, ranks).into_iter().map(|(_, format)| format.to_string());
        names.collect::<Vec<_>>().join(" ")
    }

    /// Returns the packed bytes of a shard.
    pub(super) fn packed_bytes(&self, quantization: Option<Quantization>, isa: Isa, shard: &Shard) -> u64 {
        let packed = |(linear, format): (&CheckpointLinear, WeightFormat)| {
            let (n, k) = linear.shape(shard);
            packed_bytes(format, isa, n, k)
        };
        self.formats(quantization, shard.ranks).into_iter().map(packed).sum()
    }

    /// Returns the bytes that [`CheckpointWeights::pack`] reads from the files for a shard.
    pub(super) fn file_bytes(&self, shard: &Shard) -> u64 {
        self.formats(None, shard.ranks).into_iter().map(|(linear, _)| linear.bytes(shard)).sum()
    }

    /// Returns the alignment of row-parallel partitions for `ranks` ranks.
    pub(super) fn grain(&self, quantization: Option<Quantization>, ranks: usize) -> Grain {
        let mut grain = Grain { output: 1, down: 1 };
        for (linear, format) in self.formats(quantization, ranks) {
            let alignment = match linear.matrix {
                Matrix::Output => &mut grain.output,
                Matrix::Down => &mut grain.down,
                Matrix::Qkv | Matrix::GateUp | Matrix::Head => continue,
            };
            let blocks = linear.matrices.iter().map(|matrix| matrix.encoding.block());
            let group = match format {
                WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => 1,
                WeightFormat::Int8 { group } | WeightFormat::Int4 { group } => group,
            };
            *alignment = blocks.chain([group]).fold(*alignment, least_common_multiple);
        }
        grain
    }

    /// Packs a shard of all matrices. Calls `read` with the bytes read for each matrix.
    ///
    /// # Errors
    /// Allocating memory failed.
    pub(super) fn pack(
        &self,
        pool: &Pool,
        isa: Isa,
        quantization: Option<Quantization>,
        shard: &Shard,
        read: &(dyn Fn(u64) + Sync),
    ) -> io::Result<Weights> {
        let pack = |linear: &CheckpointLinear| {
            let packed = linear.pack(pool, isa, linear.format(quantization, shard.ranks), shard)?;
            read(linear.bytes(shard));
            Ok::<_, io::Error>(packed)
        };
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            layers.push(Layer {
                attention_norm: layer.attention_norm.to_f32(),
                qkv: pack(&layer.qkv)?,
                qk_norm: layer.qk_norm.as_ref().map(|(q, k)| (q.to_f32(), k.to_f32())),
                output: pack(&layer.output)?,
                mlp_norm: layer.mlp_norm.to_f32(),
                gate_up: pack(&layer.gate_up)?,
                down: pack(&layer.down)?,
            });
        }
        let head = pack(&self.head)?.matrix;
        Ok(Weights { embedding: self.embedding.clone(), layers, norm: self.norm.to_f32(), head })
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::{Arch, Checkpoint, Dtype};
    use inflight_kernels::cpu::{Activations, Start, gemm};

    use super::super::super::sharding::shards;
    use super::*;
    use crate::models::{ModelDir, ModelSource};

    /// Elements of a packed matrix [n, k] as a GEMM computes with them; [k, n].
    fn elements(pool: &Pool, matrix: &PackedMatrix) -> Vec<f32> {
        let (n, k) = (matrix.n(), matrix.k());
        let one = |i: usize| if i.is_multiple_of(k + 1) { 1.0 } else { 0.0 };
        let identity: Vec<f32> = (0..k * k).map(one).collect();
        let mut out = vec![0.0; k * n];
        gemm(pool, matrix, &identity, k, Start::Zero, &mut out, &mut Activations::default());
        out
    }

    #[test]
    fn shards_hold_the_elements_of_the_unsharded_weights_and_one_bias() {
        let pool = Pool::new(1).unwrap();
        let mut compared = 0;
        for arch in [Arch::Llama2, Arch::Llama32, Arch::Qwen2, Arch::Qwen3] {
            for quantize in [None, Some("int8:8"), Some("int4:8")] {
                let folder = Checkpoint::new(arch, Dtype::Bf16).write_temp().unwrap();
                let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
                let checkpoint = find(&model).unwrap();
                let quantize: Option<Quantization> = quantize.map(|name| name.parse().unwrap());
                let sharded = |ranks| {
                    shards(model.config(), ranks, &|ranks| checkpoint.grain(quantize, ranks)).unwrap()
                };
                let (isa, whole) = (Isa::detect(), sharded(1));
                let group = if quantize.is_some() { sharded(2) } else { sharded(4) };
                for (linear, format) in checkpoint.formats(quantize, group.len()) {
                    let whole = linear.pack(&pool, isa, format, &whole[0]).unwrap();
                    let (n, all) = (whole.matrix.n(), elements(&pool, &whole.matrix));
                    for shard in &group {
                        let part = linear.pack(&pool, isa, format, shard).unwrap();
                        let (outputs, inputs) = match shard.cut(linear.matrix) {
                            Cut::Outputs(ranges) => {
                                let starts = linear.matrices.iter().scan(0, |at, matrix| {
                                    let start = *at;
                                    *at += matrix.shape[0];
                                    Some(start)
                                });
                                let places = starts.zip(ranges);
                                let places =
                                    places.flat_map(|(start, range)| range.map(move |row| start + row));
                                (places.collect::<Vec<_>>(), 0..linear.k)
                            }
                            Cut::Inputs(inputs) => ((0..n).collect(), inputs),
                        };
                        let expected = inputs.clone().flat_map(|k| outputs.iter().map(move |o| k * n + o));
                        let expected: Vec<u32> = expected.map(|at| all[at].to_bits()).collect();
                        let got = elements(&pool, &part.matrix);
                        let got: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
                        assert!(
                            got == expected,
                            "{arch} {format} {:?} of rank {}",
                            linear.matrix,
                            shard.rank
                        );
                        let bias =
                            whole.bias.as_ref().filter(|_| inputs.len() == linear.k || shard.rank == 0);
                        let bias = bias.map(|bias| outputs.iter().map(|o| bias[*o]).collect::<Vec<_>>());
                        assert_eq!(part.bias, bias, "{arch} {:?} of rank {}", linear.matrix, shard.rank);
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 200, "only {compared} parts were compared");
    }
}

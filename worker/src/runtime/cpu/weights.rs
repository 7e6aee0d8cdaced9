use std::io;
use std::ops::Range;

use inflight_kernels::Dtype;
use inflight_kernels::cpu::{Isa, PackedMatrix, Pool, Rows, WeightFormat};

use super::super::sharding::{Cut, Grain, Matrix, Shard};
use super::quantization::{Quantization, kv_dtype, packed_bytes};
use crate::models::{Error, ModelDir, Tensor};
use crate::runtime::decoder::DecoderLayer;

/// A rank's weights in the form that kernels read.
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
    matrix: Matrix,
    matrices: Vec<Tensor>,
    biases: Vec<Tensor>,
    k: usize,
}

/// Finds every tensor that the configuration calls for.
pub(super) fn find(model: &ModelDir) -> Result<Found, Error> {
    let (config, tensors) = (model.config(), model.tensors());
    let hidden = config.hidden_size;
    let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let linear = |matrix: Matrix, prefix: &str, parts: &[(&str, usize)], k: usize, bias: bool| {
        let mut found = FoundLinear { matrix, matrices: Vec::new(), biases: Vec::new(), k };
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
    let head = FoundLinear { matrix: Matrix::Head, matrices: vec![head], biases: Vec::new(), k: hidden };
    Ok(Found { embedding, layers, norm, head })
}

impl FoundLinear {
    /// How it is stored once packed by each of so many ranks.
    fn format(&self, quantization: Option<Quantization>, ranks: usize) -> WeightFormat {
        let Some(quantization) = quantization else {
            let sources: Vec<Rows<'_>> = self.matrices.iter().map(Tensor::rows).collect();
            return WeightFormat::of(&sources);
        };
        match self.matrix {
            Matrix::Head => quantization.head(self.k),
            Matrix::Qkv | Matrix::GateUp => quantization.layer(self.k),
            // What a rank gets should be whole groups.
            Matrix::Output | Matrix::Down => quantization.layer(self.k / ranks),
        }
    }

    /// Outputs and inputs of a shard's part.
    fn shape(&self, shard: &Shard) -> (usize, usize) {
        match shard.cut(self.matrix) {
            Cut::Outputs(outputs) => (outputs.iter().map(Range::len).sum(), self.k),
            Cut::Inputs(inputs) => (self.matrices.iter().map(|matrix| matrix.shape[0]).sum(), inputs.len()),
        }
    }

    /// Bytes of a shard's part in the file.
    fn bytes(&self, shard: &Shard) -> u64 {
        let (n, k) = self.shape(shard);
        let whole: usize = self.matrices.iter().map(|matrix| matrix.bytes().len()).sum();
        let numbers: usize = self.matrices.iter().map(|matrix| matrix.shape[0]).sum::<usize>() * self.k;
        (whole as u128 * (n * k) as u128 / numbers as u128) as u64
    }

    /// Packs a shard's part.
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
        // What is packed is not read again, but for the embedding, which may be the head.
        self.matrices.iter().for_each(Tensor::release);
        Ok(Linear { matrix, bias: (!bias.is_empty()).then_some(bias) })
    }
}

impl Found {
    /// The dtype of keys and values: that of the model's first projection, or bf16 where weights are integers.
    pub(super) fn kv_dtype(&self) -> Dtype {
        kv_dtype(self.layers[0].qkv.format(None, 1))
    }

    /// The matrices, with how each is to be stored by a group of ranks.
    fn formats(&self, quantization: Option<Quantization>, ranks: usize) -> Vec<(&FoundLinear, WeightFormat)> {
        self.layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down])
            .chain([&self.head])
            .map(|linear| (linear, linear.format(quantization, ranks)))
            .collect()
    }

    /// How every matrix will be stored, in their order: part of what decides a token's bits.
    pub(super) fn format_names(&self, quantization: Option<Quantization>, ranks: usize) -> String {
        let names = self.formats(quantization, ranks).into_iter().map(|(_, format)| format.to_string());
        names.collect::<Vec<_>>().join(" ")
    }

    /// Bytes that the matrices of a shard take once packed.
    pub(super) fn packed_bytes(&self, quantization: Option<Quantization>, isa: Isa, shard: &Shard) -> u64 {
        let packed = |(linear, format): (&FoundLinear, WeightFormat)| {
            let (n, k) = linear.shape(shard);
            packed_bytes(format, isa, n, k)
        };
        self.formats(quantization, shard.ranks).into_iter().map(packed).sum()
    }

    /// Bytes that [`Found::pack`] reads of the files for a shard.
    pub(super) fn file_bytes(&self, shard: &Shard) -> u64 {
        self.formats(None, shard.ranks).into_iter().map(|(linear, _)| linear.bytes(shard)).sum()
    }

    /// How the matrices may be cut along their inputs among so many ranks.
    pub(super) fn grain(&self, quantization: Option<Quantization>, ranks: usize) -> Grain {
        let mut grain = Grain { output: 1, down: 1 };
        for (linear, format) in self.formats(quantization, ranks) {
            let numbers = match linear.matrix {
                Matrix::Output => &mut grain.output,
                Matrix::Down => &mut grain.down,
                Matrix::Qkv | Matrix::GateUp | Matrix::Head => continue,
            };
            let blocks = linear.matrices.iter().map(|matrix| matrix.encoding.block());
            let group = match format {
                WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => 1,
                WeightFormat::Int8 { group } | WeightFormat::Int4 { group } => group,
            };
            *numbers = blocks.chain([group]).fold(*numbers, least_common_multiple);
        }
        grain
    }

    /// Packs a shard of all matrices. `read` hears of the bytes of the files that were packed.
    ///
    /// # Errors
    /// There is no memory for them.
    pub(super) fn pack(
        &self,
        pool: &Pool,
        isa: Isa,
        quantization: Option<Quantization>,
        shard: &Shard,
        read: &(dyn Fn(u64) + Sync),
    ) -> io::Result<Weights> {
        let pack = |linear: &FoundLinear| {
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

    /// Every number of a packed matrix [n, k], as products see them; [k, n].
    fn numbers(pool: &Pool, matrix: &PackedMatrix) -> Vec<f32> {
        let (n, k) = (matrix.n(), matrix.k());
        let one = |i: usize| if i.is_multiple_of(k + 1) { 1.0 } else { 0.0 };
        let identity: Vec<f32> = (0..k * k).map(one).collect();
        let mut out = vec![0.0; k * n];
        gemm(pool, matrix, &identity, k, Start::Zero, &mut out, &mut Activations::default());
        out
    }

    #[test]
    fn every_number_of_every_shard_is_that_of_the_whole_and_biases_are_added_once() {
        let pool = Pool::new(1).unwrap();
        let mut compared = 0;
        for arch in [Arch::Llama2, Arch::Llama32, Arch::Qwen2, Arch::Qwen3] {
            for quantize in [None, Some("int8:8"), Some("int4:8")] {
                let folder = Checkpoint::new(arch, Dtype::Bf16).write_temp().unwrap();
                let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
                let found = find(&model).unwrap();
                let quantize: Option<Quantization> = quantize.map(|name| name.parse().unwrap());
                let cut =
                    |ranks| shards(model.config(), ranks, &|ranks| found.grain(quantize, ranks)).unwrap();
                let (isa, whole) = (Isa::detect(), cut(1));
                let group = if quantize.is_some() { cut(2) } else { cut(4) };
                for (linear, format) in found.formats(quantize, group.len()) {
                    let whole = linear.pack(&pool, isa, format, &whole[0]).unwrap();
                    let (n, all) = (whole.matrix.n(), numbers(&pool, &whole.matrix));
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
                        let got = numbers(&pool, &part.matrix);
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

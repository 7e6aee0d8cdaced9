//! Weights on the device: rows of matrices as checkpoints have them, in one 16-bit type.

use std::ops::Range;

use inflight_kernels::Encoding;
use inflight_kernels::cuda::{DeviceError, Half};

use super::gpu::{Bias, Gpu, Memory, bytes_of};
use super::sizing;
use crate::models::{Error, ModelConfig, ModelDir, Tensor};
use crate::runtime::decoder::DecoderLayer;
use crate::runtime::sharding::{Cut, Grain, Matrix, Shard};

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
    matrix: Matrix,
    matrices: Vec<Tensor>,
    biases: Vec<Tensor>,
}

/// Rows of a tensor, of which some columns.
struct Part<'a> {
    tensor: &'a Tensor,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a> Part<'a> {
    fn rows(tensor: &'a Tensor, rows: Range<usize>) -> Self {
        Self { tensor, rows, columns: 0..tensor.shape[1] }
    }

    fn whole(tensor: &'a Tensor) -> Self {
        Self::rows(tensor, 0..tensor.shape[0])
    }

    fn numbers(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Its bytes in the file, if they are one piece there.
    fn piece(&self) -> Option<&'a [u8]> {
        let width = self.tensor.shape[1];
        let row = self.tensor.encoding.bytes(width);
        let one = self.tensor.in_order() && self.columns.len() == width;
        one.then(|| &self.tensor.bytes()[self.rows.start * row..self.rows.end * row])
    }
}

/// Weights in the device's memory.
pub(super) struct Weights<M> {
    pub(super) embedding: M,
    pub(super) layers: Vec<Layer<M>>,
    pub(super) norm: M,
    /// `None`: it is rows of the embedding, `head_offset` bytes behind its beginning.
    head: Option<M>,
    head_offset: u64,
}

impl<M: Memory> Weights<M> {
    /// Where this rank's rows of the head are.
    pub(super) fn head(&self) -> u64 {
        self.head.as_ref().map_or(self.embedding.address() + self.head_offset, Memory::address)
    }
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
    /// A shard's part.
    fn parts(&self, shard: &Shard) -> Vec<Part<'_>> {
        match shard.cut(self.matrix) {
            Cut::Outputs(outputs) => {
                let parts = self.matrices.iter().zip(outputs);
                parts.map(|(tensor, rows)| Part::rows(tensor, rows)).collect()
            }
            Cut::Inputs(inputs) => {
                let part = |tensor| Part { columns: inputs.clone(), ..Part::whole(tensor) };
                self.matrices.iter().map(part).collect()
            }
        }
    }

    /// A shard's part of the bias; empty if it adds none.
    fn bias(&self, shard: &Shard) -> Vec<f32> {
        match shard.cut(self.matrix) {
            Cut::Outputs(outputs) => {
                let biases = self.biases.iter().zip(outputs);
                biases.flat_map(|(bias, rows)| bias.to_f32()[rows].to_vec()).collect()
            }
            // A sum over ranks has it once.
            Cut::Inputs(_) if shard.rank > 0 => Vec::new(),
            Cut::Inputs(_) => self.biases.iter().flat_map(Tensor::to_f32).collect(),
        }
    }
}

fn numbers(parts: &[Part<'_>]) -> usize {
    parts.iter().map(Part::numbers).sum()
}

/// Where products want a matrix to begin: at multiples of so many bytes.
const MATRIX_ALIGN: u64 = 256;

/// Finds every tensor that the configuration calls for.
pub(super) fn find(model: &ModelDir) -> Result<Found, Error> {
    let (config, tensors) = (model.config(), model.tensors());
    let ModelConfig { hidden_size: hidden, intermediate_size: inner, head_dim, .. } = *config;
    let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
    let linear = |matrix: Matrix, prefix: &str, parts: &[(&str, usize)], k: usize, bias: bool| {
        let mut found = FoundLinear { matrix, matrices: Vec::new(), biases: Vec::new() };
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
            qkv: linear(Matrix::Qkv, &attention, &qkv, hidden, config.qkv_bias)?,
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

    /// How the matrices may be cut along their inputs: blocks of a file stay whole.
    pub(super) fn grain(&self) -> Grain {
        let mut grain = Grain { output: 1, down: 1 };
        for layer in &self.layers {
            for (linear, whole) in [(&layer.output, &mut grain.output), (&layer.down, &mut grain.down)] {
                // Blocks are of 32 numbers or of 256, so the larger is a multiple of the smaller.
                let blocks = linear.matrices.iter().map(|matrix| matrix.encoding.block());
                *whole = blocks.fold(*whole, usize::max);
            }
        }
        grain
    }

    /// The rows of the head that a shard has, and where they lie in the embedding on the device, if they can be used there.
    fn head(&self, shard: &Shard) -> (Part<'_>, Option<u64>) {
        let rows = shard.vocabulary.clone();
        match &self.head {
            Some(head) => (Part::rows(head, rows), None),
            None => {
                let offset = (rows.start * self.embedding.shape[1] * 2) as u64;
                let usable = offset.is_multiple_of(MATRIX_ALIGN).then_some(offset);
                (Part::rows(&self.embedding, rows), usable)
            }
        }
    }

    /// Bytes of a shard's matrices on the device; norms and biases are small beside them. The embedding is not cut.
    pub(super) fn bytes(&self, shard: &Shard) -> u64 {
        let linears = self.layers.iter().flat_map(FoundLayer::products);
        let linears: usize = linears.map(|linear| numbers(&linear.parts(shard))).sum();
        let head = match self.head(shard) {
            (_, Some(_)) => 0,
            (head, None) => head.numbers(),
        };
        (linears + Part::whole(&self.embedding).numbers() + head) as u64 * 2
    }

    /// Bytes that they take, for each lies by itself.
    pub(super) fn taken_bytes(&self, shard: &Shard) -> u64 {
        let linears = self.layers.iter().flat_map(FoundLayer::products);
        let linears = linears.map(|linear| numbers(&linear.parts(shard)));
        let head = match self.head(shard) {
            (_, Some(_)) => 0,
            (head, None) => head.numbers(),
        };
        let all = linears.chain([Part::whole(&self.embedding).numbers(), head]);
        all.map(|numbers| sizing::taken_bytes(numbers as u64 * 2)).sum()
    }

    /// Copies a shard to the device. `progress` hears the bytes done and in all.
    pub(super) fn upload<G: Gpu>(
        &self,
        gpu: &G,
        shard: &Shard,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Weights<G::Memory>, DeviceError> {
        let mut upload = Upload {
            gpu,
            shard,
            half: self.half(),
            done: 0,
            total: self.bytes(shard),
            progress,
            gathered: Vec::new(),
            scratch: Vec::new(),
        };
        (upload.progress)(0, upload.total);
        let (head, offset) = self.head(shard);
        Ok(Weights {
            embedding: upload.matrix(&[Part::whole(&self.embedding)])?,
            layers: self
                .layers
                .iter()
                .map(|layer| upload.layer(layer))
                .collect::<Result<_, DeviceError>>()?,
            norm: upload.wide(&self.norm.to_f32())?,
            head: match offset {
                Some(_) => None,
                None => Some(upload.matrix(&[head])?),
            },
            head_offset: offset.unwrap_or(0),
        })
    }
}

struct Upload<'a, G> {
    gpu: &'a G,
    shard: &'a Shard,
    half: Half,
    done: u64,
    total: u64,
    progress: &'a dyn Fn(u64, u64),
    /// A piece that is none in the file.
    gathered: Vec<u8>,
    /// Numbers of a piece whose type is changed.
    scratch: Vec<u16>,
}

/// Bytes that are copied or converted at once.
const PIECE_BYTES: usize = 16 << 20;

impl<G: Gpu> Upload<'_, G> {
    fn layer(&mut self, layer: &FoundLayer) -> Result<Layer<G::Memory>, DeviceError> {
        Ok(Layer {
            attention_norm: self.wide(&layer.attention_norm.to_f32())?,
            qkv: self.linear(&layer.qkv)?,
            qk_norm: match &layer.qk_norm {
                Some((q, k)) => Some((self.wide(&q.to_f32())?, self.wide(&k.to_f32())?)),
                None => None,
            },
            output: self.linear(&layer.output)?,
            mlp_norm: self.wide(&layer.mlp_norm.to_f32())?,
            gate_up: self.linear(&layer.gate_up)?,
            down: self.linear(&layer.down)?,
        })
    }

    fn linear(&mut self, linear: &FoundLinear) -> Result<Linear<G::Memory>, DeviceError> {
        let (mut wide_bias, mut half_bias) = (None, None);
        let bias = linear.bias(self.shard);
        if !bias.is_empty() {
            wide_bias = Some(self.wide(&bias)?);
            half_bias = Some(self.halves(&bias)?);
        }
        Ok(Linear { matrix: self.matrix(&linear.parts(self.shard))?, wide_bias, half_bias })
    }

    /// Numbers as f32.
    fn wide(&self, values: &[f32]) -> Result<G::Memory, DeviceError> {
        let memory = self.gpu.alloc(values.len() * 4)?;
        self.gpu.upload(&memory, 0, bytes_of(values))?;
        Ok(memory)
    }

    fn halves(&self, values: &[f32]) -> Result<G::Memory, DeviceError> {
        let values: Vec<u16> = values.iter().map(|x| self.half.narrow(*x)).collect();
        let memory = self.gpu.alloc(values.len() * 2)?;
        self.gpu.upload(&memory, 0, bytes_of(&values))?;
        Ok(memory)
    }

    /// Parts of matrices, one after the other.
    fn matrix(&mut self, parts: &[Part<'_>]) -> Result<G::Memory, DeviceError> {
        let memory = self.gpu.alloc(numbers(parts) * 2)?;
        let mut at = 0;
        for part in parts {
            let encoding = part.tensor.encoding;
            if let Some(bytes) = part.piece() {
                for piece in bytes.chunks(PIECE_BYTES / encoding.block_bytes() * encoding.block_bytes()) {
                    self.piece(&memory, &mut at, encoding, piece)?;
                }
                continue;
            }
            let mut gathered = std::mem::take(&mut self.gathered);
            gathered.clear();
            for row in part.rows.clone() {
                gathered.extend_from_slice(part.tensor.columns_of_row(row, part.columns.clone()));
                if gathered.len() >= PIECE_BYTES || row + 1 == part.rows.end {
                    self.piece(&memory, &mut at, encoding, &gathered)?;
                    gathered.clear();
                }
            }
            self.gathered = gathered;
        }
        Ok(memory)
    }

    fn piece(
        &mut self,
        memory: &G::Memory,
        at: &mut usize,
        encoding: Encoding,
        piece: &[u8],
    ) -> Result<(), DeviceError> {
        let count = piece.len() / encoding.block_bytes() * encoding.block();
        if encoding == Encoding::Plain(self.half.dtype()) {
            self.gpu.upload(memory, *at, piece)?;
        } else {
            self.convert(encoding, piece, count);
            self.gpu.upload(memory, *at, bytes_of(&self.scratch))?;
        }
        *at += count * 2;
        self.done += count as u64 * 2;
        (self.progress)(self.done, self.total);
        Ok(())
    }

    fn convert(&mut self, from: Encoding, piece: &[u8], count: usize) {
        let mut wide = vec![0.0; count];
        from.widen(piece, &mut wide);
        self.scratch.clear();
        self.scratch.extend(wide.into_iter().map(|x| self.half.narrow(x)));
    }
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::{Arch, Checkpoint, Dtype, Family, TempDir};
    use inflight_kernels::cuda::{Harness, HostMemory};

    use super::*;
    use crate::models::ModelSource;
    use crate::runtime::sharding::shards;

    fn model(path: &std::path::Path) -> ModelDir {
        ModelDir::open(&ModelSource::Directory(path.to_owned())).unwrap()
    }

    fn words(memory: &HostMemory) -> Vec<u16> {
        memory.read::<u16>(memory.bytes() / 2)
    }

    /// Rows of the head as products read them.
    fn head(weights: &Weights<HostMemory>, numbers: usize) -> Vec<u16> {
        let at = weights.head() as *const u16;
        // SAFETY: so many are there, in one of the two.
        unsafe { std::slice::from_raw_parts(at, numbers) }.to_vec()
    }

    #[test]
    fn every_number_of_every_shard_is_that_of_the_whole_and_biases_are_added_once() {
        let mut compared = 0;
        for (arch, dtype) in [
            (Arch::Llama2, Dtype::Bf16),
            (Arch::Llama32, Dtype::F16),
            (Arch::Qwen2, Dtype::F32),
            (Arch::Qwen3, Dtype::Bf16),
        ] {
            let folder = Checkpoint::new(arch, dtype).write_temp().unwrap();
            let model = model(folder.path());
            let found = find(&model).unwrap();
            let (config, harness) = (model.config(), Harness::new());
            let hidden = config.hidden_size;
            let cut = |world| shards(config, world, &|_| found.grain()).unwrap();
            let upload = |shard: &Shard| {
                let told = std::cell::Cell::new((0, 0));
                let weights = found.upload(&harness, shard, &|done, total| told.set((done, total))).unwrap();
                assert_eq!(told.get(), (found.bytes(shard), found.bytes(shard)), "{arch}");
                weights
            };
            let whole = upload(&cut(1)[0]);
            let all_of_head = head(&whole, config.vocab_size * hidden);
            for shard in [2, 4].into_iter().flat_map(cut) {
                let part = upload(&shard);
                let rows = shard.vocabulary.clone();
                let expected = &all_of_head[rows.start * hidden..rows.end * hidden];
                assert!(head(&part, rows.len() * hidden) == expected, "{arch}: head of rank {}", shard.rank);
                assert!(part.head().is_multiple_of(16));
                for (index, layer) in found.layers.iter().enumerate() {
                    let (of_whole, of_part) = (&whole.layers[index], &part.layers[index]);
                    for (linear, (one, own)) in
                        layer.products().iter().zip(of_whole.products().into_iter().zip(of_part.products()))
                    {
                        let k = linear.matrices[0].shape[1];
                        let (outputs, inputs) = match shard.cut(linear.matrix) {
                            Cut::Inputs(inputs) => ((0..linear.matrices[0].shape[0]).collect(), inputs),
                            Cut::Outputs(ranges) => {
                                let mut first = 0;
                                let mut outputs: Vec<usize> = Vec::new();
                                for (matrix, range) in linear.matrices.iter().zip(ranges) {
                                    outputs.extend(range.map(|row| first + row));
                                    first += matrix.shape[0];
                                }
                                (outputs, 0..k)
                            }
                        };
                        let numbers = words(&one.matrix);
                        let row = |o: &usize| numbers[o * k + inputs.start..o * k + inputs.end].to_vec();
                        let expected: Vec<u16> = outputs.iter().flat_map(row).collect();
                        assert!(words(&own.matrix) == expected, "{arch} {:?}", linear.matrix);
                        let has = one.wide_bias.is_some() && (inputs.len() == k || shard.rank == 0);
                        assert_eq!(own.wide_bias.is_some(), has, "{arch} {:?}", linear.matrix);
                        if let (Some(one), Some(own)) = (&one.half_bias, &own.half_bias) {
                            let numbers = words(one);
                            let expected: Vec<u16> = outputs.iter().map(|o| numbers[*o]).collect();
                            assert_eq!(words(own), expected, "{arch} {:?}", linear.matrix);
                        }
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 100, "only {compared} parts were compared");
    }

    #[test]
    fn rows_that_a_file_holds_interleaved_are_brought_apart() {
        for arch in [Arch::Llama2, Arch::Llama2Linear] {
            let checkpoint = Checkpoint::new(arch, Dtype::F16);
            let directory = checkpoint.write_temp().unwrap();
            let folder = TempDir::new("inflight-cuda-gguf").unwrap();
            let file = folder.path().join("tiny.gguf");
            std::fs::write(folder.path().join("tokenizer.json"), Family::Llama3.tokenizer_json()).unwrap();
            std::fs::write(&file, checkpoint.gguf().unwrap()).unwrap();
            let harness = Harness::new();
            for world in [1, 2] {
                let of = |path: &std::path::Path, rank: usize| {
                    let model = model(path);
                    let found = find(&model).unwrap();
                    let shards = shards(model.config(), world, &|_| found.grain()).unwrap();
                    let weights = found.upload(&harness, &shards[rank], &|_, _| {}).unwrap();
                    weights.layers.iter().map(|layer| words(&layer.qkv.matrix)).collect::<Vec<_>>()
                };
                for rank in 0..world {
                    assert!(of(directory.path(), rank) == of(&file, rank), "{arch}, rank {rank} of {world}");
                }
            }
        }
    }
}

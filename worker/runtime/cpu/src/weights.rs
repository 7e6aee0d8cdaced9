//! Weights of the CPU runtime: lookup in the checkpoint, sharding and packing for the kernels.
//!
//! Loaded weights are in memory of the process: matrices packed, the embedding as in the checkpoint, one copy for
//! all ranks. No step reads a file.

use std::io;
use std::sync::Arc;

use inflight_kernels::Dtype;
use inflight_kernels::cpu::{
    AccumulatorInit, Activations, Isa, PackedMatrix, Pool, WeightFormat, WeightRows, gemm,
};
use inflight_models::{
    Arithmetic, CheckpointLayer, CheckpointMtp, DecoderLayer, DeltaSpec, Error, LoadedTensor, Matrix,
    MixerWeights, ModelConfig, ModelDir, StackedLinear, Tensor, VectorKind,
};
use inflight_runtime::recurrent::RecurrentVectors;
use inflight_runtime::sharding::{Alignment, Partition, Shard};

use super::quantization::{Quantization, kv_dtype, packed_bytes};

/// Packed weights of one rank.
pub(super) struct Weights {
    pub(super) embedding: Arc<LoadedTensor>,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    pub(super) head: PackedMatrix,
    /// MTP layer, if it is loaded.
    pub(super) mtp: Option<Mtp>,
}

/// Packed weights of one rank without the embedding.
pub(super) struct PackedLayers {
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: PackedMatrix,
    mtp: Option<Mtp>,
}

impl PackedLayers {
    pub(super) fn with_embedding(self, embedding: Arc<LoadedTensor>) -> Weights {
        let Self { layers, norm, head, mtp } = self;
        Weights { embedding, layers, norm, head, mtp }
    }
}

pub(super) type Layer = DecoderLayer<Vec<f32>, Linear>;

/// Packed weights of an MTP layer.
pub(super) type Mtp = inflight_models::MtpLayer<Vec<f32>, Linear>;

/// Packed weights of attention.
pub(super) type Attention = inflight_models::AttentionWeights<Vec<f32>, Linear>;

/// Packed weights of a recurrent layer.
pub(super) type Delta = inflight_models::DeltaWeights<Vec<f32>, Linear>;

pub(super) struct Linear {
    pub(super) matrix: PackedMatrix,
    pub(super) bias: Option<Vec<f32>>,
}

impl Linear {
    /// y = x W^T + bias
    pub(super) fn apply(
        &self,
        pool: &Pool,
        x: &[f32],
        rows: usize,
        y: &mut [f32],
        scratch: &mut Activations,
    ) {
        let start = self.bias.as_deref().map_or(AccumulatorInit::Zero, AccumulatorInit::Bias);
        gemm(pool, &self.matrix, x, rows, start, y, scratch);
    }
}

impl Weights {
    /// Writes the embedding of a token to `out`, multiplied with `scale` if the model scales it.
    pub(super) fn embed(&self, token: u32, scale: Option<f32>, out: &mut [f32]) {
        self.embedding.row(token as usize, out);
        if let Some(scale) = scale {
            out.iter_mut().for_each(|element| *element *= scale);
        }
    }

    /// Bytes of the packed matrices, without the embedding, of which a step reads a few rows.
    pub(super) fn bytes(&self) -> usize {
        let linears = self.layers.iter().flat_map(Layer::linears);
        linears.map(|linear| linear.matrix.bytes()).sum::<usize>() + self.head.bytes()
    }
}

/// Tensors of a model in the checkpoint, with validated shapes.
pub(super) struct CheckpointWeights {
    embedding: Tensor,
    layers: Vec<CheckpointLayer>,
    norm: Tensor,
    head: StackedLinear,
    /// MTP layer, if it is to be loaded.
    mtp: Option<CheckpointMtp>,
    /// The embedding is also the LM head.
    tied: bool,
    arithmetic: Arithmetic,
}

/// Failure to pack weights.
#[derive(Debug, thiserror::Error)]
pub(super) enum PackError {
    /// A weight file can't be read, or has changed.
    #[error(transparent)]
    Model(#[from] Error),
    /// Allocating memory failed.
    #[error(transparent)]
    Memory(#[from] io::Error),
}

/// Looks up every tensor that the configuration requires, and those of the MTP layer if `mtp` is set and the model has one.
pub(super) fn find(model: &ModelDir, mtp: bool) -> Result<CheckpointWeights, Error> {
    let decoder = model.decoder()?;
    let tied = decoder.head.is_none();
    let head = decoder.head.unwrap_or_else(|| decoder.embedding.clone());
    Ok(CheckpointWeights {
        embedding: decoder.embedding,
        layers: decoder.layers,
        norm: decoder.norm,
        head: StackedLinear { matrix: Matrix::Head, matrices: vec![head], biases: Vec::new() },
        mtp: if mtp { model.mtp()? } else { None },
        tied,
        arithmetic: model.config().arithmetic,
    })
}

/// Returns the packed format of a linear layer for `ranks` ranks.
fn packed_format(linear: &StackedLinear, quantization: Option<Quantization>, ranks: usize) -> WeightFormat {
    // Few, and their errors would add up over all positions.
    let quantization = quantization.filter(|_| linear.matrix != Matrix::DeltaScalars);
    let Some(quantization) = quantization else {
        // The format depends on the encodings alone.
        let source = |matrix: &Tensor| WeightRows {
            encoding: matrix.encoding,
            bytes: &[],
            rows: 0,
            interleaved: None,
        };
        return WeightFormat::of(&linear.matrices.iter().map(source).collect::<Vec<_>>());
    };
    match linear.matrix {
        Matrix::Head => quantization.head(linear.inputs()),
        Matrix::Qkv
        | Matrix::GateUp
        | Matrix::DeltaInputs
        | Matrix::DeltaGates
        | Matrix::DeltaScalars
        | Matrix::MtpInputs => quantization.layer(linear.inputs()),
        // By a rank's inputs, so that partitions are whole groups.
        Matrix::Output | Matrix::Down | Matrix::DeltaOutput => quantization.layer(linear.inputs() / ranks),
    }
}

/// Returns the bytes of a shard's partition of a linear layer in the file.
fn file_bytes(linear: &StackedLinear, shard: &Shard) -> u64 {
    let (n, k) = shard.shape(linear);
    let bytes: usize = linear.matrices.iter().map(Tensor::bytes).sum();
    let elements = linear.outputs() * linear.inputs();
    (bytes as u128 * (n * k) as u128 / elements as u128) as u64
}

/// Reads and packs a shard's partition of a linear layer.
fn pack(
    linear: &StackedLinear,
    pool: &Pool,
    isa: Isa,
    format: WeightFormat,
    shard: &Shard,
) -> Result<Linear, PackError> {
    let (_, k) = shard.shape(linear);
    let matrices = linear.matrices.iter();
    let parts: Vec<LoadedTensor> = match shard.partition(linear.matrix) {
        Partition::Outputs(outputs) => {
            let parts = matrices.zip(outputs);
            let parts =
                parts.flat_map(|(matrix, ranges)| ranges.into_iter().map(move |rows| matrix.load_rows(rows)));
            parts.collect::<Result<_, _>>()?
        }
        Partition::Inputs(inputs) => {
            matrices.map(|matrix| matrix.load_columns(inputs.clone())).collect::<Result<_, _>>()?
        }
    };
    let sources: Vec<WeightRows<'_>> = parts.iter().map(LoadedTensor::rows).collect();
    let matrix = PackedMatrix::pack(pool, isa, k, &sources, format)?;
    let bias = shard.bias(linear)?;
    Ok(Linear { matrix, bias: (!bias.is_empty()).then_some(bias) })
}

impl CheckpointWeights {
    /// Default KV cache dtype: that of the first layer's first projection, or bf16 if its encoding is integer.
    pub(super) fn kv_dtype(&self) -> Dtype {
        kv_dtype(packed_format(self.layers[0].linears()[0], None, 1))
    }

    /// Returns whether an MTP layer is to be loaded.
    pub(super) fn has_mtp(&self) -> bool {
        self.mtp.is_some()
    }

    /// Returns all linear layers with their packed formats for `ranks` ranks.
    fn formats(
        &self,
        quantization: Option<Quantization>,
        ranks: usize,
    ) -> Vec<(&StackedLinear, WeightFormat)> {
        let of_mtp = self.mtp.iter().flat_map(CheckpointMtp::linears);
        let linears = self.decoder_linears().chain(of_mtp);
        linears.map(|linear| (linear, packed_format(linear, quantization, ranks))).collect()
    }

    /// Returns the linear layers without those of the MTP layer.
    fn decoder_linears(&self) -> impl Iterator<Item = &StackedLinear> {
        self.layers.iter().flat_map(CheckpointLayer::linears).chain([&self.head])
    }

    /// Returns the formats of the matrices in order, for the numerics fingerprint: without those of the MTP layer, which changes no output.
    pub(super) fn format_names(&self, quantization: Option<Quantization>, ranks: usize) -> String {
        let format = |linear| packed_format(linear, quantization, ranks).to_string();
        self.decoder_linears().map(format).collect::<Vec<_>>().join(" ")
    }

    /// Returns the formats of the matrices in words, each once, for operators.
    pub(super) fn distinct_formats(&self, quantization: Option<Quantization>, ranks: usize) -> String {
        let mut names: Vec<String> = Vec::new();
        for (_, format) in self.formats(quantization, ranks) {
            let name = format.to_string();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.join(", ")
    }

    /// Returns the packed bytes of a shard.
    pub(super) fn packed_bytes(&self, quantization: Option<Quantization>, isa: Isa, shard: &Shard) -> u64 {
        let packed = |(linear, format): (&StackedLinear, WeightFormat)| {
            let (n, k) = shard.shape(linear);
            packed_bytes(format, isa, n, k)
        };
        self.formats(quantization, shard.ranks).into_iter().map(packed).sum()
    }

    /// Returns the bytes that [`CheckpointWeights::pack`] reads from the files for a shard.
    pub(super) fn file_bytes(&self, shard: &Shard) -> u64 {
        self.formats(None, shard.ranks).into_iter().map(|(linear, _)| file_bytes(linear, shard)).sum()
    }

    /// Returns the alignment of row-parallel partitions for `ranks` ranks.
    pub(super) fn alignment(&self, quantization: Option<Quantization>, ranks: usize) -> Alignment {
        let mut alignment = Alignment { output: 1, down: 1, delta_output: 1 };
        for (linear, format) in self.formats(quantization, ranks) {
            let alignment = match linear.matrix {
                Matrix::Output => &mut alignment.output,
                Matrix::Down => &mut alignment.down,
                Matrix::DeltaOutput => &mut alignment.delta_output,
                Matrix::Qkv
                | Matrix::GateUp
                | Matrix::Head
                | Matrix::DeltaInputs
                | Matrix::DeltaGates
                | Matrix::DeltaScalars
                | Matrix::MtpInputs => continue,
            };
            let blocks = linear.matrices.iter().map(|matrix| matrix.encoding.block());
            let group = match format {
                WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => 1,
                WeightFormat::Int8 { group } | WeightFormat::Int4 { group } => group,
            };
            *alignment = blocks.chain([group]).fold(*alignment, least_common_multiple);
        }
        alignment
    }

    /// Returns the factor of the embeddings, if the model scales them: rounded to the type in which they are stored.
    pub(super) fn embedding_scale(&self, config: &ModelConfig) -> Option<f32> {
        self.arithmetic.embedding_scale(config.hidden_size, self.embedding.encoding)
    }

    /// Bytes of the embedding, which all ranks share.
    pub(super) fn embedding_bytes(&self) -> u64 {
        self.embedding.bytes() as u64
    }

    /// Reads the embedding if it is also the LM head.
    ///
    /// # Errors
    /// A weight file can't be read, or has changed.
    pub(super) fn tied_embedding(&self) -> Result<Option<Arc<LoadedTensor>>, Error> {
        self.tied.then(|| self.load_embedding()).transpose()
    }

    /// Reads the embedding.
    ///
    /// # Errors
    /// A weight file can't be read, or has changed.
    pub(super) fn load_embedding(&self) -> Result<Arc<LoadedTensor>, Error> {
        self.embedding.load().map(Arc::new)
    }

    /// Reads and packs a shard of all matrices; the LM head from `tied_embedding`, if given. Calls `read` with
    /// the bytes read for each matrix.
    ///
    /// # Errors
    /// A weight file can't be read or has changed, or allocating memory failed.
    pub(super) fn pack(
        &self,
        tied_embedding: Option<&LoadedTensor>,
        pool: &Pool,
        isa: Isa,
        quantization: Option<Quantization>,
        shard: &Shard,
        read: &(dyn Fn(u64) + Sync),
    ) -> Result<PackedLayers, PackError> {
        let pack = |linear: &StackedLinear| {
            let format = packed_format(linear, quantization, shard.ranks);
            let packed = pack(linear, pool, isa, format, shard)?;
            read(file_bytes(linear, shard));
            Ok::<_, PackError>(packed)
        };
        let vector = |kind: VectorKind, vector: &Tensor| match kind {
            VectorKind::Norm => self.norm_weight(vector),
            VectorKind::Plain => Ok(vector.to_f32()?),
        };
        let layers = self.layers.iter().map(|layer| layer.try_map(vector, &pack));
        let mut layers: Vec<Layer> = layers.collect::<Result<_, PackError>>()?;
        let recurrent = layers.iter_mut().filter_map(|layer| match &mut layer.mixer {
            MixerWeights::Delta(delta) => Some(delta),
            MixerWeights::Attention(_) => None,
        });
        if let Some(spec) = shard.delta {
            recurrent.for_each(|layer| prepare(layer, &spec, shard));
        }
        let head = match tied_embedding {
            Some(embedding) => {
                let format = packed_format(&self.head, quantization, shard.ranks);
                let rows = embedding.rows_in(shard.vocabulary.clone());
                let packed = PackedMatrix::pack(pool, isa, self.head.inputs(), &[rows], format)?;
                read(file_bytes(&self.head, shard));
                packed
            }
            None => pack(&self.head)?.matrix,
        };
        let mtp = self.mtp.as_ref().map(|mtp| mtp.try_map(vector, &pack)).transpose()?;
        Ok(PackedLayers { layers, norm: self.norm_weight(&self.norm)?, head, mtp })
    }

    /// Reads the factors of a norm.
    fn norm_weight(&self, vector: &Tensor) -> Result<Vec<f32>, PackError> {
        Ok(self.arithmetic.norm_factors(vector.to_f32()?))
    }
}

/// Prepares a shard's part of the vectors of a recurrent layer for the kernels.
fn prepare(layer: &mut Delta, spec: &DeltaSpec, shard: &Shard) {
    let take = std::mem::take::<Vec<f32>>;
    let vectors = RecurrentVectors {
        convolution: take(&mut layer.convolution),
        decay: take(&mut layer.decay),
        decay_bias: take(&mut layer.decay_bias),
    };
    let RecurrentVectors { convolution, decay, decay_bias } = vectors.of_rank(spec, shard);
    (layer.convolution, layer.decay, layer.decay_bias) = (convolution, decay, decay_bias);
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
    use inflight_models::ModelSource;
    use inflight_runtime::sharding::shards;

    use super::*;

    /// Elements of a packed matrix [n, k] as a GEMM computes with them; [k, n].
    fn elements(pool: &Pool, matrix: &PackedMatrix) -> Vec<f32> {
        let (n, k) = (matrix.n(), matrix.k());
        let one = |i: usize| if i.is_multiple_of(k + 1) { 1.0 } else { 0.0 };
        let identity: Vec<f32> = (0..k * k).map(one).collect();
        let mut out = vec![0.0; k * n];
        gemm(pool, matrix, &identity, k, AccumulatorInit::Zero, &mut out, &mut Activations::default());
        out
    }

    #[test]
    fn shards_hold_the_elements_of_the_unsharded_weights_and_one_bias() {
        let pool = Pool::new(1).unwrap();
        let mut compared = 0;
        for arch in [Arch::Llama2, Arch::Llama32, Arch::Qwen2, Arch::Qwen3, Arch::Qwen35] {
            for quantize in [None, Some("int8:8"), Some("int4:8")] {
                let folder = Checkpoint::new(arch, Dtype::Bf16).write_temp().unwrap();
                let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
                let checkpoint = find(&model, true).unwrap();
                let quantize: Option<Quantization> = quantize.map(|name| name.parse().unwrap());
                let sharded = |ranks| {
                    shards(model.config(), ranks, &|ranks| checkpoint.alignment(quantize, ranks)).unwrap()
                };
                let (isa, whole) = (Isa::detect(), sharded(1));
                // Two key heads of recurrent layers.
                let whole_heads = quantize.is_some() || model.config().delta.is_some();
                let group = if whole_heads { sharded(2) } else { sharded(4) };
                for (linear, format) in checkpoint.formats(quantize, group.len()) {
                    let whole = pack(linear, &pool, isa, format, &whole[0]).unwrap();
                    let (n, all) = (whole.matrix.n(), elements(&pool, &whole.matrix));
                    for shard in &group {
                        let part = pack(linear, &pool, isa, format, shard).unwrap();
                        let (outputs, inputs) = match shard.partition(linear.matrix) {
                            Partition::Outputs(ranges) => {
                                let starts = linear.matrices.iter().scan(0, |at, matrix| {
                                    let start = *at;
                                    *at += matrix.shape[0];
                                    Some(start)
                                });
                                let places = starts.zip(ranges);
                                let places = places.flat_map(|(start, ranges)| {
                                    ranges.into_iter().flatten().map(move |row| start + row)
                                });
                                (places.collect::<Vec<_>>(), 0..linear.inputs())
                            }
                            Partition::Inputs(inputs) => ((0..n).collect(), inputs),
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
                        let bias = whole
                            .bias
                            .as_ref()
                            .filter(|_| inputs.len() == linear.inputs() || shard.rank == 0);
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

//! Model weights: tensors of the checkpoint, and their upload to the device in one 16-bit type, row-major as
//! in checkpoints.

use std::ops::Range;

use inflight_kernels::Encoding;
use inflight_kernels::cuda::{DeviceError, HalfDtype};
use inflight_models::{
    self as models, Arithmetic, AttentionWeights, CheckpointDecoder, CheckpointLayer, DeltaWeights,
    LoadedTensor, MixerWeights, ModelDir, StackedLinear, Tensor,
};
use inflight_runtime::recurrent::RecurrentVectors;
use inflight_runtime::sharding::{Alignment, Shard};

use super::device_layer::{DeviceAttention, DeviceDelta, DeviceLayer, DeviceLinear, DeviceMixer};
use super::gpu::{Gpu, GpuMemory, bytes_of};
use super::head_order::HeadOrder;
use super::memory_plan;
use super::source_matrix::{SourceMatrix, TensorSlice};

/// Tensors of a model in the checkpoint, all present and of the expected shape.
pub(super) struct SourceTensors {
    decoder: CheckpointDecoder,
    arithmetic: Arithmetic,
    order: HeadOrder,
}

/// Weights of a rank's shard in device memory.
pub(super) struct DeviceWeights<M> {
    pub(super) embedding: M,
    /// Factor of embeddings, if the model scales them.
    pub(super) embedding_scale: Option<f32>,
    pub(super) layers: Vec<DeviceLayer<M>>,
    pub(super) norm: M,
    /// LM head; `None`: rows of the embedding, from byte `head_offset` on.
    head: Option<M>,
    head_offset: u64,
}

impl<M: GpuMemory> DeviceWeights<M> {
    /// Returns the device address of this rank's rows of the LM head.
    pub(super) fn head(&self) -> u64 {
        self.head.as_ref().map_or(self.embedding.address() + self.head_offset, GpuMemory::address)
    }
}

/// Byte alignment of GEMM operands, which cuBLASLt assumes where it is told nothing else.
const MATRIX_ALIGN: u64 = 256;

/// Looks up every tensor that the configuration requires.
///
/// # Errors
/// [`models::Error`].
pub(super) fn find(model: &ModelDir) -> Result<SourceTensors, models::Error> {
    let config = model.config();
    Ok(SourceTensors {
        decoder: model.decoder()?,
        arithmetic: config.arithmetic,
        order: HeadOrder::of(config),
    })
}

impl SourceTensors {
    /// Returns the model's 16-bit type: that of its first projection. Norms may have another type.
    pub(super) fn half(&self) -> HalfDtype {
        match self.decoder.layers[0].linears()[0].matrices[0].encoding {
            Encoding::Plain(dtype) => HalfDtype::of(dtype),
            _ => HalfDtype::Bf16, // integers with scales are widened
        }
    }

    /// Returns the alignment of input ranges of row-parallel matrices: quantization blocks stay whole.
    pub(super) fn alignment(&self) -> Alignment {
        let mut alignment = Alignment { output: 1, down: 1, delta_output: 1 };
        for layer in &self.decoder.layers {
            let (output, inputs) = match &layer.mixer {
                MixerWeights::Attention(attention) => (&attention.output, &mut alignment.output),
                MixerWeights::Delta(delta) => (&delta.output, &mut alignment.delta_output),
            };
            for (linear, inputs) in [(output, inputs), (&layer.down, &mut alignment.down)] {
                // Blocks have 32 or 256 elements, so the larger is a multiple of the smaller.
                let blocks = linear.matrices.iter().map(|matrix| matrix.encoding.block());
                *inputs = blocks.fold(*inputs, usize::max);
            }
        }
        alignment
    }

    /// Returns a shard's rows of the LM head and, if the embedding on the device can serve as head, their
    /// byte offset in it.
    fn head(&self, shard: &Shard) -> (TensorSlice<'_>, Option<u64>) {
        let rows = shard.vocabulary.clone();
        match &self.decoder.head {
            Some(head) => (TensorSlice::rows(head, rows), None),
            None => {
                let offset = (rows.start * self.decoder.embedding.shape[1] * 2) as u64;
                let usable = offset.is_multiple_of(MATRIX_ALIGN).then_some(offset);
                (TensorSlice::rows(&self.decoder.embedding, rows), usable)
            }
        }
    }

    /// Returns the matrices of a shard's layers.
    fn matrices<'a>(&'a self, shard: &'a Shard) -> impl Iterator<Item = SourceMatrix<'a>> {
        self.decoder.layers.iter().flat_map(|layer| SourceMatrix::of_layer(layer, shard, self.order))
    }

    /// Returns the bytes of a shard's matrices on the device, without norms and biases, which are small. The
    /// embedding is replicated.
    pub(super) fn bytes(&self, shard: &Shard) -> u64 {
        let linears: usize = self.matrices(shard).map(|matrix| matrix.elements()).sum();
        let head = match self.head(shard) {
            (_, Some(_)) => 0,
            (head, None) => head.elements(),
        };
        (linears + TensorSlice::whole(&self.decoder.embedding).elements() + head) as u64 * 2
    }

    /// Returns the bytes that the driver uses for a shard's matrices, each allocated separately.
    pub(super) fn allocated_bytes(&self, shard: &Shard) -> u64 {
        let linears = self.matrices(shard).map(|matrix| matrix.elements());
        let head = match self.head(shard) {
            (_, Some(_)) => 0,
            (head, None) => head.elements(),
        };
        let all = linears.chain([TensorSlice::whole(&self.decoder.embedding).elements(), head]);
        all.map(|elements| memory_plan::allocated_bytes(elements as u64 * 2)).sum()
    }

    /// Reads and uploads a shard. `progress` is called with the bytes done and the total.
    ///
    /// # Errors
    /// A weight file can't be read or has changed, or the device failed.
    pub(super) fn upload<G: Gpu>(
        &self,
        gpu: &G,
        shard: &Shard,
        progress: &dyn Fn(u64, u64),
    ) -> Result<DeviceWeights<G::Memory>, UploadError> {
        let mut upload = WeightUpload {
            gpu,
            shard,
            arithmetic: self.arithmetic,
            order: self.order,
            half: self.half(),
            done: 0,
            total: self.bytes(shard),
            progress,
            gathered: Vec::new(),
            scratch: Vec::new(),
        };
        (upload.progress)(0, upload.total);
        let (head, offset) = self.head(shard);
        Ok(DeviceWeights {
            embedding: upload.matrix(&[TensorSlice::whole(&self.decoder.embedding)])?,
            embedding_scale: self
                .arithmetic
                .embedding_scale(self.decoder.embedding.shape[1], self.decoder.embedding.encoding),
            layers: self.decoder.layers.iter().map(|layer| upload.layer(layer)).collect::<Result<_, _>>()?,
            norm: upload_f32(gpu, &self.arithmetic.norm_factors(self.decoder.norm.to_f32()?))?,
            head: match offset {
                Some(_) => None,
                None => Some(upload.matrix(&[head])?),
            },
            head_offset: offset.unwrap_or(0),
        })
    }
}

/// Upload of a shard in progress.
struct WeightUpload<'a, G> {
    gpu: &'a G,
    shard: &'a Shard,
    arithmetic: Arithmetic,
    order: HeadOrder,
    half: HalfDtype,
    done: u64,
    total: u64,
    progress: &'a dyn Fn(u64, u64),
    /// Buffer for rows that are not contiguous in the file.
    gathered: Vec<u8>,
    /// Elements of a chunk converted to the 16-bit type.
    scratch: Vec<u16>,
}

/// Bytes that are read at once: pieces for several threads.
const READ_BYTES: usize = 64 << 20;
/// Bytes that are copied or converted at once.
const CHUNK_BYTES: usize = 16 << 20;

/// Failure to upload weights.
#[derive(Debug, thiserror::Error)]
pub(super) enum UploadError {
    /// A weight file can't be read, or has changed.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Uploads f32 values.
fn upload_f32<G: Gpu>(gpu: &G, values: &[f32]) -> Result<G::Memory, DeviceError> {
    let memory = gpu.alloc(values.len() * 4)?;
    gpu.upload(&memory, 0, bytes_of(values))?;
    Ok(memory)
}

impl<G: Gpu> WeightUpload<'_, G> {
    fn layer(&mut self, layer: &CheckpointLayer) -> Result<DeviceLayer<G::Memory>, UploadError> {
        Ok(DeviceLayer {
            mixer_norm: self.norm(&layer.mixer_norm)?,
            mixer: match &layer.mixer {
                MixerWeights::Attention(attention) => DeviceMixer::Attention(self.attention(attention)?),
                MixerWeights::Delta(delta) => DeviceMixer::Delta(self.delta(delta)?),
            },
            post_norms: match &layer.post_norms {
                Some((mixer, mlp)) => Some((self.norm(mixer)?, self.norm(mlp)?)),
                None => None,
            },
            mlp_norm: self.norm(&layer.mlp_norm)?,
            gate_up: self.linear(SourceMatrix::of(&layer.gate_up, self.shard))?,
            down: self.linear(SourceMatrix::of(&layer.down, self.shard))?,
        })
    }

    fn norm(&self, weight: &Tensor) -> Result<G::Memory, UploadError> {
        Ok(upload_f32(self.gpu, &self.arithmetic.norm_factors(weight.to_f32()?))?)
    }

    fn attention(
        &mut self,
        attention: &AttentionWeights<Tensor, StackedLinear>,
    ) -> Result<DeviceAttention<G::Memory>, UploadError> {
        let (shard, order) = (self.shard, self.order);
        let of_head = |norm: &Tensor| {
            let factors = self.arithmetic.norm_factors(norm.to_f32()?);
            Ok::<_, UploadError>(upload_f32(self.gpu, &order.reorder(&factors))?)
        };
        let qk_norm = match &attention.qk_norm {
            Some((q, k)) => Some((of_head(q)?, of_head(k)?)),
            None => None,
        };
        let gates = SourceMatrix::gates(&attention.qkv, shard, order);
        Ok(DeviceAttention {
            qkv: self.linear(SourceMatrix::qkv(&attention.qkv, shard, order))?,
            qk_norm,
            gates: gates.map(|gates| self.linear(gates)).transpose()?,
            output: self.linear(SourceMatrix::of(&attention.output, shard))?,
        })
    }

    fn delta(
        &mut self,
        delta: &DeltaWeights<Tensor, StackedLinear>,
    ) -> Result<DeviceDelta<G::Memory>, UploadError> {
        let shard = self.shard;
        let vectors = RecurrentVectors {
            convolution: delta.convolution.to_f32()?,
            decay: delta.decay.to_f32()?,
            decay_bias: delta.decay_bias.to_f32()?,
        };
        let Some(spec) = &shard.delta else { unreachable!("a model with recurrent layers has their shape") };
        let vectors = vectors.of_rank(spec, shard);
        let inputs = [&delta.inputs, &delta.gates, &delta.scalars];
        let inputs = inputs.map(|linear| SourceMatrix::of(linear, shard));
        Ok(DeviceDelta {
            inputs: self.linear(SourceMatrix::stacked(inputs))?,
            convolution: upload_f32(self.gpu, &vectors.convolution)?,
            decay: upload_f32(self.gpu, &vectors.decay)?,
            decay_bias: upload_f32(self.gpu, &vectors.decay_bias)?,
            norm: upload_f32(self.gpu, &delta.norm.to_f32()?)?,
            output: self.linear(SourceMatrix::of(&delta.output, shard))?,
        })
    }

    fn linear(&mut self, source: SourceMatrix<'_>) -> Result<DeviceLinear<G::Memory>, UploadError> {
        let (mut f32_bias, mut half_bias) = (None, None);
        let bias = source.load_bias()?;
        if !bias.is_empty() {
            f32_bias = Some(upload_f32(self.gpu, &bias)?);
            half_bias = Some(self.upload_half(&bias)?);
        }
        let (n, k) = source.shape();
        let matrix = self.matrix(&source.slices)?;
        Ok(DeviceLinear { matrix, n: n as u32, k: k as u32, f32_bias, half_bias })
    }

    /// Uploads values converted to the 16-bit type.
    fn upload_half(&self, values: &[f32]) -> Result<G::Memory, DeviceError> {
        let values: Vec<u16> = values.iter().map(|x| self.half.narrow(*x)).collect();
        let memory = self.gpu.alloc(values.len() * 2)?;
        self.gpu.upload(&memory, 0, bytes_of(&values))?;
        Ok(memory)
    }

    /// Reads and uploads slices of matrices, concatenated by rows.
    fn matrix(&mut self, slices: &[TensorSlice<'_>]) -> Result<G::Memory, UploadError> {
        let memory = self.gpu.alloc(slices.iter().map(TensorSlice::elements).sum::<usize>() * 2)?;
        let mut at = 0;
        for slices in slices.chunk_by(|a, b| std::ptr::eq(a.tensor, b.tensor)) {
            match slices {
                [slice] => self.upload_slice(&memory, &mut at, slice)?,
                _ => self.upload_slices(&memory, &mut at, slices)?,
            }
        }
        Ok(memory)
    }

    /// Reads a slice in parts and uploads it to byte offset `at`, which it advances.
    fn upload_slice(
        &mut self,
        memory: &G::Memory,
        at: &mut usize,
        slice: &TensorSlice<'_>,
    ) -> Result<(), UploadError> {
        let encoding = slice.tensor.encoding;
        let step = slice.tensor.rows_of_bytes(READ_BYTES);
        for first in slice.rows.clone().step_by(step) {
            let rows = first..(first + step).min(slice.rows.end);
            let loaded = slice.tensor.load_rows(rows.clone())?;
            if slice.contiguous() {
                self.upload_encoded(memory, at, encoding, loaded.bytes())?;
            } else {
                self.upload_gathered(
                    memory,
                    at,
                    encoding,
                    &loaded,
                    [(0..rows.len(), slice.columns.clone())],
                )?;
            }
        }
        Ok(())
    }

    /// Reads the rows of several slices of a tensor at once, since they are scattered, and uploads them to byte offset `at`, which it
    /// advances.
    fn upload_slices(
        &mut self,
        memory: &G::Memory,
        at: &mut usize,
        slices: &[TensorSlice<'_>],
    ) -> Result<(), UploadError> {
        let Some(tensor) = slices.first().map(|slice| slice.tensor) else { return Ok(()) };
        let first = slices.iter().map(|slice| slice.rows.start).min().unwrap_or(0);
        let end = slices.iter().map(|slice| slice.rows.end).max().unwrap_or(0);
        let loaded = tensor.load_rows(first..end)?;
        let part = |slice: &TensorSlice<'_>| {
            (slice.rows.start - first..slice.rows.end - first, slice.columns.clone())
        };
        self.upload_gathered(memory, at, tensor.encoding, &loaded, slices.iter().map(part))
    }

    /// Uploads ranges of rows and columns of a loaded tensor.
    fn upload_gathered(
        &mut self,
        memory: &G::Memory,
        at: &mut usize,
        encoding: Encoding,
        loaded: &LoadedTensor,
        parts: impl IntoIterator<Item = (Range<usize>, Range<usize>)>,
    ) -> Result<(), UploadError> {
        let mut gathered = std::mem::take(&mut self.gathered);
        gathered.clear();
        for (rows, columns) in parts {
            for row in rows {
                gathered.extend_from_slice(loaded.columns_of_row(row, columns.clone()));
            }
        }
        self.upload_encoded(memory, at, encoding, &gathered)?;
        self.gathered = gathered;
        Ok(())
    }

    /// Uploads whole blocks to byte offset `at`, chunk by chunk, and advances `at`.
    fn upload_encoded(
        &mut self,
        memory: &G::Memory,
        at: &mut usize,
        encoding: Encoding,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let block = encoding.block_bytes();
        let mut chunks = bytes.chunks(CHUNK_BYTES / block * block);
        chunks.try_for_each(|chunk| self.upload_chunk(memory, at, encoding, chunk))
    }

    /// Uploads a chunk to byte offset `at`, converting it if its type differs, and advances `at`.
    fn upload_chunk(
        &mut self,
        memory: &G::Memory,
        at: &mut usize,
        encoding: Encoding,
        chunk: &[u8],
    ) -> Result<(), DeviceError> {
        let count = chunk.len() / encoding.block_bytes() * encoding.block();
        if encoding == Encoding::Plain(self.half.dtype()) {
            self.gpu.upload(memory, *at, chunk)?;
        } else {
            self.convert(encoding, chunk, count);
            self.gpu.upload(memory, *at, bytes_of(&self.scratch))?;
        }
        *at += count * 2;
        self.done += count as u64 * 2;
        (self.progress)(self.done, self.total);
        Ok(())
    }

    fn convert(&mut self, from: Encoding, chunk: &[u8], count: usize) {
        let mut values = vec![0.0; count];
        from.widen(chunk, &mut values);
        self.scratch.clear();
        self.scratch.extend(values.into_iter().map(|x| self.half.narrow(x)));
    }
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::{Arch, Checkpoint, Dtype, Family, TempDir};
    use inflight_kernel_harness::{Harness, HostMemory};
    use inflight_models::ModelSource;
    use inflight_runtime::sharding::{Partition, shards};

    use super::super::device_layer::LinearRole;

    use super::*;

    fn model(path: &std::path::Path) -> ModelDir {
        ModelDir::open(&ModelSource::Directory(path.to_owned())).unwrap()
    }

    fn words(memory: &HostMemory) -> Vec<u16> {
        memory.read::<u16>(memory.bytes() / 2)
    }

    /// Returns the elements of the head as GEMMs read them.
    fn head(weights: &DeviceWeights<HostMemory>, elements: usize) -> Vec<u16> {
        let at = weights.head() as *const u16;
        // SAFETY: the head, or the embedding that serves as head, has this many elements from that address
        // on.
        unsafe { std::slice::from_raw_parts(at, elements) }.to_vec()
    }

    #[test]
    fn every_element_of_every_shard_is_the_unsharded_one_and_biases_are_added_once() {
        let mut compared = 0;
        for (arch, dtype) in [
            (Arch::Llama2, Dtype::Bf16),
            (Arch::Llama32, Dtype::F16),
            (Arch::Qwen2, Dtype::F32),
            (Arch::Qwen3, Dtype::Bf16),
        ] {
            let folder = Checkpoint::new(arch, dtype).write_temp().unwrap();
            let model = model(folder.path());
            let tensors = find(&model).unwrap();
            let (config, harness) = (model.config(), Harness::new());
            let hidden = config.hidden_size;
            let sharded = |world| shards(config, world, &|_| tensors.alignment()).unwrap();
            let upload = |shard: &Shard| {
                let progress = std::cell::Cell::new((0, 0));
                let report = |done, total| progress.set((done, total));
                let weights = tensors.upload(&harness, shard, &report).unwrap();
                assert_eq!(progress.get(), (tensors.bytes(shard), tensors.bytes(shard)), "{arch}");
                weights
            };
            let whole = upload(&sharded(1)[0]);
            let all_of_head = head(&whole, config.vocab_size * hidden);
            for shard in [2, 4].into_iter().flat_map(sharded) {
                let part = upload(&shard);
                let rows = shard.vocabulary.clone();
                let expected = &all_of_head[rows.start * hidden..rows.end * hidden];
                assert!(head(&part, rows.len() * hidden) == expected, "{arch}: head of rank {}", shard.rank);
                assert!(part.head().is_multiple_of(16));
                for (index, layer) in tensors.decoder.layers.iter().enumerate() {
                    let (of_whole, of_part) = (&whole.layers[index], &part.layers[index]);
                    for (linear, (one, own)) in
                        layer.linears().iter().zip(of_whole.linears().into_iter().zip(of_part.linears()))
                    {
                        let ((_, one), (_, own)) = (one, own);
                        let k = linear.matrices[0].shape[1];
                        let (outputs, inputs) = match shard.partition(linear.matrix) {
                            Partition::Inputs(inputs) => ((0..linear.matrices[0].shape[0]).collect(), inputs),
                            Partition::Outputs(ranges) => {
                                let mut first = 0;
                                let mut outputs: Vec<usize> = Vec::new();
                                for (matrix, ranges) in linear.matrices.iter().zip(ranges) {
                                    outputs.extend(ranges.into_iter().flatten().map(|row| first + row));
                                    first += matrix.shape[0];
                                }
                                (outputs, 0..k)
                            }
                        };
                        let elements = words(&one.matrix);
                        let row = |o: &usize| elements[o * k + inputs.start..o * k + inputs.end].to_vec();
                        let expected: Vec<u16> = outputs.iter().flat_map(row).collect();
                        assert!(words(&own.matrix) == expected, "{arch} {:?}", linear.matrix);
                        let has = one.f32_bias.is_some() && (inputs.len() == k || shard.rank == 0);
                        assert_eq!(own.f32_bias.is_some(), has, "{arch} {:?}", linear.matrix);
                        if let (Some(one), Some(own)) = (&one.half_bias, &own.half_bias) {
                            let elements = words(one);
                            let expected: Vec<u16> = outputs.iter().map(|o| elements[*o]).collect();
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
    fn rows_that_are_interleaved_in_a_file_are_deinterleaved() {
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
                    let tensors = find(&model).unwrap();
                    let shards = shards(model.config(), world, &|_| tensors.alignment()).unwrap();
                    let weights = tensors.upload(&harness, &shards[rank], &|_, _| {}).unwrap();
                    weights.layers.iter().map(|layer| words(&layer.linears()[0].1.matrix)).collect::<Vec<_>>()
                };
                for rank in 0..world {
                    assert!(of(directory.path(), rank) == of(&file, rank), "{arch}, rank {rank} of {world}");
                }
            }
        }
    }
    /// Rows of a matrix with `k` columns.
    fn rows_of(memory: &HostMemory, k: usize) -> Vec<Vec<u16>> {
        words(memory).chunks(k).map(<[u16]>::to_vec).collect()
    }

    fn floats(memory: &HostMemory) -> Vec<f32> {
        memory.read::<f32>(memory.bytes() / 4)
    }

    /// Projections in one matrix, and the value heads of GGUF files, which have another order.
    #[test]
    fn recurrent_layers_of_all_forms_have_the_same_weights() {
        let checkpoint = Checkpoint::new(Arch::Qwen35, Dtype::F16);
        let plain = checkpoint.write_temp().unwrap();
        let fused = Checkpoint::new(Arch::Qwen35, Dtype::F16).fused().write_temp().unwrap();
        let folder = TempDir::new("inflight-cuda-gguf").unwrap();
        let file = folder.path().join("tiny.gguf");
        std::fs::write(folder.path().join("tokenizer.json"), Arch::Qwen35.family().tokenizer_json()).unwrap();
        std::fs::write(&file, checkpoint.gguf().unwrap()).unwrap();
        let harness = Harness::new();
        let upload = |path: &std::path::Path, world: usize, rank: usize| {
            let model = model(path);
            let tensors = find(&model).unwrap();
            let shards = shards(model.config(), world, &|_| tensors.alignment()).unwrap();
            let progress = std::cell::Cell::new((0, 0));
            let report = |done, total| progress.set((done, total));
            let weights = tensors.upload(&harness, &shards[rank], &report).unwrap();
            let bytes = tensors.bytes(&shards[rank]);
            assert_eq!(progress.get(), (bytes, bytes));
            weights
        };
        let pairs = |ours: &DeviceWeights<HostMemory>, theirs: &DeviceWeights<HostMemory>, in_order: bool| {
            let mut recurrent = 0;
            for (ours, theirs) in ours.layers.iter().zip(&theirs.layers) {
                for ((role, ours), (_, theirs)) in ours.linears().into_iter().zip(theirs.linears()) {
                    let k = ours.k as usize;
                    let (mut ours, mut theirs) = (rows_of(&ours.matrix, k), rows_of(&theirs.matrix, k));
                    if !in_order {
                        // Value heads are rows of the inputs, and columns of the output.
                        [&mut ours, &mut theirs].into_iter().for_each(|rows| {
                            rows.iter_mut()
                                .filter(|_| role == LinearRole::DeltaOutput)
                                .for_each(|row| row.sort());
                            rows.sort();
                        });
                    }
                    assert!(ours == theirs, "{role:?}");
                }
                let (DeviceMixer::Delta(ours), DeviceMixer::Delta(theirs)) = (&ours.mixer, &theirs.mixer)
                else {
                    continue;
                };
                recurrent += 1;
                for (ours, theirs) in [
                    (&ours.convolution, &theirs.convolution),
                    (&ours.decay, &theirs.decay),
                    (&ours.decay_bias, &theirs.decay_bias),
                    (&ours.norm, &theirs.norm),
                ] {
                    let (mut ours, mut theirs) = (floats(ours), floats(theirs));
                    if !in_order {
                        [&mut ours, &mut theirs].into_iter().for_each(|all| all.sort_by(f32::total_cmp));
                    }
                    // The file has rates of decays rounded to f16, the checkpoint their logarithms.
                    let tolerance = if in_order { 0.0 } else { 1e-3 };
                    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= tolerance * b.abs();
                    let same = ours.len() == theirs.len() && ours.iter().zip(&theirs).all(close);
                    assert!(same, "{ours:?} are not {theirs:?}");
                }
            }
            assert!(recurrent > 0);
        };
        for (world, rank) in [(1, 0), (2, 0), (2, 1)] {
            pairs(&upload(fused.path(), world, rank), &upload(plain.path(), world, rank), true);
        }
        pairs(&upload(&file, 1, 0), &upload(plain.path(), 1, 0), false);
    }
}

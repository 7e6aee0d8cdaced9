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
mod tests;

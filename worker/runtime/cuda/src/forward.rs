//! Forward pass of a decoder on the GPU: device buffers and the sequence of kernels.

use std::ops::Range;

use inflight_kernels::cpu::inverse_frequencies;
use inflight_kernels::cuda::{
    AttentionParams, CopyParams, DeltaParams, DeviceError, EmbeddingParams, HalfDtype, NormParams,
    OutputGateParams, QkvParams, SamplingParams, SamplingResult, ScoreParams, ScoreRow, accept_drafts,
    attention, attention_blocks, copy_blocks, delta, embedding, finish_qkv, norm, norm_after, output_gate,
    sample, sampling_parts, score,
};
use inflight_models::{ModelConfig, NormPlaces, Rope};

use super::buffers::ForwardBuffers;
use super::device_layer::{DeviceAttention, DeviceDelta, DeviceLayer, DeviceLinear, DeviceMixer};
use super::gpu::{ColumnCopy, Gpu, GpuMemory, Matmul, bytes_of};
use super::kv_layers::KvLayers;
use super::metadata::StepShape;
use super::shapes::{BufferLimits, ModelShapes};
use super::shard_plan::ShardPlan;
use super::step_graph::StepGraph;
use super::step_slot::StepAddresses;
use super::weights::DeviceWeights;

/// Weights, KV pool and activation buffers of a rank. Addresses never change, so steps can be captured as
/// graphs.
pub(super) struct CudaForward<G: Gpu> {
    /// Configuration of this rank's shard.
    config: ModelConfig,
    shard_plan: ShardPlan,
    shapes: ModelShapes,
    half: HalfDtype,
    kv_layers: KvLayers,
    weights: DeviceWeights<G::Memory>,
    kv: G::Memory,
    /// Bytes of the angles of a rotary embedding.
    angle_bytes: u64,
    pub(super) buffers: ForwardBuffers<G::Memory>,
    /// Rows of logits that are held at once.
    logits_rows: u32,
}

/// Returns the GEMM of `m` rows of a linear layer: y[m, n] = x[m, k] * weight^T + bias.
fn linear_matmul<M: GpuMemory>(linear: &DeviceLinear<M>, x: &M, y: &M, m: u32) -> Matmul {
    Matmul {
        x: x.address(),
        weight: linear.matrix.address(),
        bias: linear.bias(),
        y: y.address(),
        m,
        n: linear.n,
        k: linear.k,
        stride: linear.stride(),
        f32_out: false,
    }
}

impl<G: Gpu> CudaForward<G> {
    /// Allocates buffers and a KV pool of `blocks` blocks for a rank's shard. `unsharded` is the configuration of the whole model.
    pub(super) fn new(
        gpu: &G,
        unsharded: &ModelConfig,
        shard_plan: ShardPlan,
        half: HalfDtype,
        weights: DeviceWeights<G::Memory>,
        limits: &BufferLimits,
        kv_layers: KvLayers,
        blocks: u32,
    ) -> Result<Self, DeviceError> {
        let (config, shapes) = (shard_plan.shard().config(unsharded), shard_plan.shapes(unsharded));
        let buffers = ForwardBuffers::alloc(gpu, &shapes, limits)?;
        upload_rope_tables(gpu, &buffers.angles, &config, limits.context as u32)?;
        let places = kv_layers.state_places().iter().flatten();
        let places: Vec<u32> = places.flat_map(|place| [place.part as u32, place.offset as u32]).collect();
        gpu.upload(&buffers.state_places, 0, bytes_of(&places))?;
        let kv = gpu.alloc((u64::from(blocks) * kv_layers.plan().block_bytes()) as usize)?;
        // Zeros, so that stale NaNs in unused blocks cannot reach a sum.
        gpu.zero(&kv)?;
        Ok(Self {
            shapes,
            half,
            kv_layers,
            weights,
            kv,
            angle_bytes: limits.context * shapes.head_dim * 4,
            buffers,
            logits_rows: limits.samples as u32,
            config,
            shard_plan,
        })
    }

    /// KV pool, [blocks, bytes of a block].
    pub(super) fn kv(&self) -> &G::Memory {
        &self.kv
    }

    /// Logits of the last step, [samples, stride], and the stride in elements.
    pub(super) fn logits(&self) -> (&G::Memory, usize) {
        (&self.buffers.logits, self.shapes.logits as usize)
    }

    fn linear(
        &self,
        gpu: &G,
        linear: &DeviceLinear<G::Memory>,
        x: &G::Memory,
        y: &G::Memory,
        m: u32,
    ) -> Result<(), DeviceError> {
        let matmul = linear_matmul(linear, x, y, m);
        // SAFETY: x and y have room for the largest batch, and the weight is [n, k].
        unsafe { gpu.matmul(self.half, &matmul) }
    }

    /// All-reduces the output of a row-parallel GEMM (`delta`) over the ranks.
    fn sum_delta(&self, gpu: &G, rows: u32) -> Result<(), DeviceError> {
        let Some(collective) = gpu.collective() else { return Ok(()) };
        let elements = rows as usize * self.config.hidden_size;
        // SAFETY: `delta` has room for the largest batch.
        unsafe { collective.all_reduce(self.half, self.buffers.delta.address(), elements) }
    }

    /// Computes the logits of `samples` rows; afterwards every rank has the full vocabulary.
    fn head(&self, gpu: &G, samples: u32) -> Result<(), DeviceError> {
        let shapes = &self.shapes;
        let head = |y: u64, n: usize, stride: usize| Matmul {
            x: self.buffers.sampled_hidden.address(),
            weight: self.weights.head(),
            bias: None,
            y,
            m: samples,
            n: n as u32,
            k: shapes.hidden as u32,
            stride: stride as u32,
            f32_out: true,
        };
        let gathered = &self.buffers.gathered;
        let Some(shards) = self.shard_plan.collective_shards() else {
            let matmul = head(self.buffers.logits.address(), self.config.vocab_size, shapes.logits as usize);
            // SAFETY: the logits have room for as many samples as a step may have.
            return unsafe { gpu.matmul(self.half, &matmul) };
        };
        let stride = shapes.gathered as usize / shards.len();
        let part = samples as usize * stride * 4;
        let part_of = |rank: usize| gathered.address() + (rank * part) as u64;
        let own = self.shard_plan.shard();
        let matmul = head(part_of(own.rank), own.vocabulary.len(), stride);
        // SAFETY: `gathered` has room for one such part per rank, and `part_of` is this rank's.
        unsafe {
            gpu.matmul(self.half, &matmul)?;
            // Called right before its use: it marks the end of a chain of built-in kernels.
            let Some(collective) = gpu.collective() else {
                let (what, reason) = ("gathering logits", "this rank has no communicator");
                return Err(DeviceError::Failed { what: what.to_owned(), reason: reason.to_owned() });
            };
            collective.all_gather(gathered.address(), part)?;
        }
        for shard in shards {
            let columns = ColumnCopy {
                from: part_of(shard.rank),
                from_stride: stride * 4,
                to: self.buffers.logits.address() + shard.vocabulary.start as u64 * 4,
                to_stride: shapes.logits as usize * 4,
                width: shard.vocabulary.len() * 4,
                rows: samples as usize,
            };
            // SAFETY: each part lies in `gathered`, and a rank's columns are within the vocabulary.
            unsafe { gpu.copy_columns(&columns) }?;
        }
        Ok(())
    }

    /// Whether the output of attention or MLP (`delta`) is added to the residual by the next norm kernel; otherwise its post-norm adds
    /// it.
    fn delta_is_pending(&self) -> bool {
        self.config.arithmetic.norms == NormPlaces::Before
    }

    /// All-reduces the output of attention or MLP (`delta`) over the ranks; with a post-norm, adds its norm to the residual.
    fn end_part(&self, gpu: &G, post_norm: Option<&G::Memory>, rows: u32) -> Result<(), DeviceError> {
        self.sum_delta(gpu, rows)?;
        let Some(weight) = post_norm else { return Ok(()) };
        let p = NormParams {
            residual: self.buffers.hidden.address(),
            delta: self.buffers.delta.address(),
            weight: weight.address(),
            rows,
            width: self.config.hidden_size as u32,
            eps: self.config.norm_eps,
            ..NormParams::default()
        };
        // SAFETY: buffers have room for the largest batch.
        unsafe { norm_after(gpu, self.half, &p) }
    }

    fn norm(
        &self,
        gpu: &G,
        weight: &G::Memory,
        rows: u32,
        delta: bool,
        pick: Option<u64>,
    ) -> Result<(), DeviceError> {
        let p = NormParams {
            residual: self.buffers.hidden.address(),
            delta: if delta { self.buffers.delta.address() } else { 0 },
            weight: weight.address(),
            out: if pick.is_some() {
                self.buffers.sampled_hidden.address()
            } else {
                self.buffers.normed.address()
            },
            pick: pick.unwrap_or(0),
            rows,
            width: self.config.hidden_size as u32,
            eps: self.config.norm_eps,
            unused: 0,
        };
        // SAFETY: buffers have room for the largest batch, and picked rows are rows of the batch.
        unsafe { norm(gpu, self.half, &p) }
    }

    /// Enqueues the kernels of one step up to the logits; `replay` enqueues the step's graph in place of the part that it was
    /// captured from, if it has one.
    pub(super) fn run(
        &self,
        gpu: &G,
        step: &StepShape,
        at: StepAddresses,
        replay: impl FnOnce(StepGraph) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.copy_blocks(gpu, step, at.metadata)?;
        match step.graph {
            Some(graph) => replay(graph)?,
            None => self.layers(gpu, step, at.metadata)?,
        }
        // Only scored and sampled rows go through the LM head.
        for first in (0..step.scores).step_by(self.logits_rows as usize) {
            self.score(gpu, step, at, first, self.logits_rows.min(step.scores - first))?;
        }
        match step.graph {
            Some(StepGraph::Decode(_)) => Ok(()),
            Some(StepGraph::Layers(_)) | None => self.sampled_logits(gpu, step, at.metadata),
        }
    }

    /// Enqueues the kernels that the step's graph is captured from.
    pub(super) fn captured(&self, gpu: &G, step: &StepShape, metadata: u64) -> Result<(), DeviceError> {
        self.layers(gpu, step, metadata)?;
        match step.graph {
            Some(StepGraph::Decode(_)) | None => self.sampled_logits(gpu, step, metadata),
            Some(StepGraph::Layers(_)) => Ok(()),
        }
    }

    /// Enqueues embedding and layers.
    fn layers(&self, gpu: &G, step: &StepShape, metadata: u64) -> Result<(), DeviceError> {
        self.embed(gpu, step, metadata)?;
        let head_dim = self.config.head_dim;
        let blocks = attention_blocks(&gpu.profile(), head_dim as u32, self.kv_layers.store(), step.mixed);
        let pending = self.delta_is_pending();
        // Layers of each kind are counted by themselves.
        let (mut attention_index, mut recurrent_index) = (0.., 0..);
        for (index, (layer, spec)) in self.weights.layers.iter().zip(&self.config.layers).enumerate() {
            let post_norms = layer.post_norms.as_ref();
            self.norm(gpu, &layer.mixer_norm, step.rows, pending && index > 0, None)?;
            match &layer.mixer {
                DeviceMixer::Attention(attention) => {
                    let rope = spec.attention().map_or(0, |attention| attention.rope);
                    let index = attention_index.next().unwrap_or_default();
                    self.attend(gpu, step, metadata, (index, attention, rope), blocks)?;
                }
                DeviceMixer::Delta(delta) => {
                    self.recur(gpu, step, metadata, (recurrent_index.next().unwrap_or_default(), delta))?;
                }
            }
            self.end_part(gpu, post_norms.map(|(mixer, _)| mixer), step.rows)?;
            self.norm(gpu, &layer.mlp_norm, step.rows, pending, None)?;
            self.mlp(gpu, layer, step.rows)?;
            self.end_part(gpu, post_norms.map(|(_, mlp)| mlp), step.rows)?;
        }
        Ok(())
    }

    /// Enqueues the last norm and the LM head of the sampled rows.
    fn sampled_logits(&self, gpu: &G, step: &StepShape, metadata: u64) -> Result<(), DeviceError> {
        if step.samples == 0 {
            return Ok(());
        }
        let sampled_rows = metadata + step.layout.sampled_rows as u64;
        self.norm(gpu, &self.weights.norm, step.samples, self.delta_is_pending(), Some(sampled_rows))?;
        self.head(gpu, step.samples)
    }

    /// Copies KV blocks within the pool.
    fn copy_blocks(&self, gpu: &G, step: &StepShape, metadata: u64) -> Result<(), DeviceError> {
        let block_bytes = self.kv_layers.plan().block_bytes();
        for (first, end) in &step.copies {
            let p = CopyParams {
                pool: self.kv.address(),
                pairs: metadata + step.layout.copies as u64 + u64::from(*first) * 8,
                block_bytes,
            };
            // SAFETY: the blocks are in the pool, and copies of one range are independent of each other.
            unsafe { copy_blocks(gpu, end - first, &p) }?;
        }
        Ok(())
    }

    /// Looks up the embeddings of the step's tokens (`hidden`).
    fn embed(&self, gpu: &G, step: &StepShape, metadata: u64) -> Result<(), DeviceError> {
        let p = EmbeddingParams {
            table: self.weights.embedding.address(),
            tokens: metadata + step.layout.tokens as u64,
            sampled: self.buffers.sampled.address(),
            hidden: self.buffers.hidden.address(),
            rows: step.rows,
            width: self.shapes.hidden as u32,
            scale: self.weights.embedding_scale.unwrap_or(1.0),
            unused: 0,
        };
        let scaled = self.weights.embedding_scale.is_some();
        // SAFETY: tokens are below the vocabulary size; fed-back samples are of the previous step.
        unsafe { embedding(gpu, self.half, scaled, &p) }
    }

    /// Runs a layer's attention, the layer `index` of those that have it, from its normalized input (`normed`) to its output projection
    /// (`delta`), on `blocks` thread blocks. Writes the keys and values of the step's tokens.
    fn attend(
        &self,
        gpu: &G,
        step: &StepShape,
        metadata: u64,
        (index, layer, rope): (usize, &DeviceAttention<G::Memory>, usize),
        blocks: u32,
    ) -> Result<(), DeviceError> {
        let (half, rows) = (self.half, step.rows);
        let (layout, kv_layers, buffers) = (&step.layout, &self.kv_layers, &self.buffers);
        let at = |section: usize| metadata + section as u64;
        let ModelConfig { heads, kv_heads, head_dim, norm_eps, .. } = self.config;
        let (store, block_tokens) = (kv_layers.store(), kv_layers.plan().shape().block_tokens());
        let (block_numbers, layer_offset) = kv_layers.numbers(index);
        let (view, part, window) = kv_layers.of_layer(index);
        self.linear(gpu, &layer.qkv, &buffers.normed, &buffers.projected, rows)?;
        if let Some(gates) = &layer.gates {
            self.linear(gpu, gates, &buffers.normed, &buffers.gates, rows)?;
        }
        let norms = layer.qk_norm.as_ref();
        let p = QkvParams {
            qkv: buffers.projected.address(),
            q_norm: norms.map_or(0, |(q, _)| q.address()),
            k_norm: norms.map_or(0, |(_, k)| k.address()),
            angles: buffers.angles.address() + rope as u64 * self.angle_bytes,
            positions: at(layout.positions),
            places: at(layout.kv_indices(part)),
            kv: self.kv.address(),
            block_numbers,
            layer_offset,
            rows,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            block_tokens,
            eps: norm_eps,
        };
        // SAFETY: positions are below the context; KV indices are in the pool and all different.
        unsafe { finish_qkv(gpu, half, store, &p) }?;
        let p = AttentionParams {
            qkv: buffers.projected.address(),
            out: buffers.mixed.address(),
            kv: self.kv.address(),
            items: at(layout.items(view)),
            item_count: at(layout.item_count(view)),
            tables: at(layout.tables),
            partial_sums: buffers.partial_sums.address(),
            partial_tops: buffers.partial_tops.address(),
            counters: buffers.counters.address(),
            block_numbers,
            layer_offset,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            block_shift: block_tokens.trailing_zeros(),
            window: window.unwrap_or(0),
            stages: 0,
            scale: (1.0 / self.config.arithmetic.score_size.sqrt() * std::f64::consts::LOG2_E) as f32,
        };
        // SAFETY: the plan was built from this batch, whose block tables cover all positions.
        unsafe { attention(gpu, half, store, head_dim as u32, step.mixed, blocks, &p) }?;
        if layer.gates.is_some() {
            let elements = u64::from(rows) * self.shapes.queries();
            let p = OutputGateParams { x: buffers.mixed.address(), gates: buffers.gates.address(), elements };
            // SAFETY: both buffers have room for the largest batch.
            unsafe { output_gate(gpu, half, &p) }?;
        }
        self.linear(gpu, &layer.output, &buffers.mixed, &buffers.delta, rows)
    }

    /// Runs the recurrent layer `index`, counted among those, from its normalized input (`normed`) to its output projection (`delta`).
    /// Updates the states of the step's sequences.
    fn recur(
        &self,
        gpu: &G,
        step: &StepShape,
        metadata: u64,
        (index, layer): (usize, &DeviceDelta<G::Memory>),
    ) -> Result<(), DeviceError> {
        let (rows, layout, buffers) = (step.rows, &step.layout, &self.buffers);
        let Some(layers) = self.shapes.recurrent else {
            unreachable!("a model with recurrent layers has their shape")
        };
        let shape = layers.shape();
        let at = |section: usize| metadata + section as u64;
        let place_bytes = self.shapes.state_place_bytes() / layers.count() as u64;
        self.linear(gpu, &layer.inputs, &buffers.normed, &buffers.projected, rows)?;
        let p = DeltaParams {
            projected: buffers.projected.address(),
            convolved: buffers.convolved.address(),
            factors: buffers.factors.address(),
            out: buffers.mixed.address(),
            convolution: layer.convolution.address(),
            decay: layer.decay.address(),
            decay_bias: layer.decay_bias.address(),
            norm: layer.norm.address(),
            pool: self.kv.address(),
            sequences: at(layout.sequences),
            sequence_count: at(layout.sequence_count),
            row_sequences: at(layout.row_sequences),
            tables: at(layout.tables),
            places: buffers.state_places.address() + index as u64 * place_bytes,
            block_bytes: self.kv_layers.plan().block_bytes(),
            rows,
            stride: layer.inputs.stride(),
            key_heads: shape.key_heads as u32,
            value_heads: shape.value_heads as u32,
            key_dim: shape.key_dim as u32,
            value_dim: shape.value_dim as u32,
            tiled: shape.tiled.into(),
            taps: shape.taps as u32,
            log: shape.log() as u32,
            inputs: shape.inputs() as u32,
            norm_eps: self.config.norm_eps,
            unused: 0,
        };
        // SAFETY: buffers have room for the largest batch; each sequence has blocks of its own, in which the plan has placed all pieces.
        unsafe { delta(gpu, self.half, &p) }?;
        self.linear(gpu, &layer.output, &buffers.mixed, &buffers.delta, rows)
    }

    /// Runs a layer's MLP from its normalized input (`normed`) to its down projection (`delta`).
    fn mlp(&self, gpu: &G, layer: &DeviceLayer<G::Memory>, rows: u32) -> Result<(), DeviceError> {
        let buffers = &self.buffers;
        let matmul = linear_matmul(&layer.gate_up, &buffers.normed, &buffers.gate_up, rows);
        // SAFETY: buffers have room for the largest batch, and the weight is [n, k].
        unsafe {
            gpu.matmul_gated(self.half, self.config.arithmetic.activation, &matmul, buffers.gated.address())
        }?;
        self.linear(gpu, &layer.down, &buffers.gated, &buffers.delta, rows)
    }

    /// Scores `count` rows from the `first` scored one on.
    fn score(
        &self,
        gpu: &G,
        step: &StepShape,
        addresses: StepAddresses,
        first: u32,
        count: u32,
    ) -> Result<(), DeviceError> {
        let StepAddresses { metadata, scores, .. } = addresses;
        let at = |section: usize, size: usize| metadata + section as u64 + u64::from(first) * size as u64;
        let rows = at(step.layout.scored_rows, size_of::<u32>());
        self.norm(gpu, &self.weights.norm, count, self.delta_is_pending(), Some(rows))?;
        self.head(gpu, count)?;
        let p = ScoreParams {
            logits: self.buffers.logits.address(),
            rows: at(step.layout.scores, size_of::<ScoreRow>()),
            results: scores + u64::from(first) * size_of::<SamplingResult>() as u64,
            vocabulary: self.config.vocab_size as u32,
            stride: self.shapes.logits as u32,
        };
        // SAFETY: there are at most `logits_rows` rows of logits and SCORES_MAX results, and tokens are below
        // the vocabulary size.
        unsafe { score(gpu, count, &p) }
    }

    /// Samples a token from the logits of each sampled row, once the step's token masks are on the device, and counts
    /// those that count.
    pub(super) fn sample(&self, gpu: &G, step: &StepShape, at: StepAddresses) -> Result<(), DeviceError> {
        if step.samples == 0 {
            return Ok(());
        }
        let (rows, vocabulary) = (step.samples, self.config.vocab_size as u32);
        let (parts, part_tokens) = sampling_parts(&gpu.profile(), rows, vocabulary);
        let p = SamplingParams {
            logits: self.buffers.logits.address(),
            rows: at.metadata + step.layout.sampling as u64,
            results: at.results,
            sampled: self.buffers.sampled.address(),
            tokens: at.metadata + step.layout.tokens as u64,
            split: self.buffers.split.address(),
            vocabulary,
            stride: self.shapes.logits as u32,
            parts,
            part_tokens,
        };
        // SAFETY: results have room for as many samples as a step may have; histories, outputs and adjustments
        // are those of attached slots, and drafts are tokens of the batch, below the vocabulary size.
        unsafe {
            sample(gpu, rows, step.split_kernels, &p)?;
            if step.drafted { accept_drafts(gpu, rows, &p) } else { Ok(()) }
        }
    }
}

/// Positions of the RoPE table that are computed and uploaded at once.
const ROPE_POSITIONS: u32 = 1 << 14;

/// Uploads the RoPE tables of all positions, [rotary embeddings, context, head_dim / 2, (cos, sin)], in parts, so that the host never
/// holds all of one (512 MiB at a context of a million).
fn upload_rope_tables<G: Gpu>(
    gpu: &G,
    tables: &G::Memory,
    config: &ModelConfig,
    context: u32,
) -> Result<(), DeviceError> {
    for (index, rope) in config.ropes.iter().enumerate() {
        for first in (0..context).step_by(ROPE_POSITIONS as usize) {
            let part = rope_table(rope, config, first..context.min(first + ROPE_POSITIONS));
            let row = index * context as usize + first as usize;
            gpu.upload(tables, row * config.head_dim * 4, bytes_of(&part))?;
        }
    }
    Ok(())
}

/// Returns the RoPE table of some positions, [positions, head_dim / 2, (cos, sin)]; elements that are not rotated, the last ones, have angle
/// 0. The angle is rounded to f32 as in training; its sine and cosine are computed in f64.
fn rope_table(rope: &Rope, config: &ModelConfig, positions: Range<u32>) -> Vec<f32> {
    let ModelConfig { head_dim, rotated_dim, .. } = *config;
    let mut frequencies = inverse_frequencies(rotated_dim, rope.theta, &rope.scaling);
    frequencies.resize(head_dim / 2, 0.0);
    let mut angles = Vec::with_capacity(positions.len() * head_dim);
    for position in positions {
        for frequency in &frequencies {
            let angle = f64::from(position as f32 * frequency);
            angles.extend([libm::cos(angle) as f32, libm::sin(angle) as f32]);
        }
    }
    angles
}

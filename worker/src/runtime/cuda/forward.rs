//! The forward pass: its buffers on the device, and the order of its kernels.

use inflight_kernels::cpu::inverse_frequencies;
use inflight_kernels::cuda::{
    AttentionParams, CopyParams, DeviceError, EmbeddingParams, Half, KvStore, NormParams, QkvParams,
    SamplingParams, SamplingResult, SwigluParams, attention, attention_blocks, copy_blocks, embedding,
    finish_qkv, norm, sample, swiglu,
};

use super::division::Division;
use super::gpu::{Columns, Gpu, Matmul, Memory, bytes_of};
use super::metadata::StepShape;
use super::sizing::{PARTIALS, Shapes};
use super::weights::{Linear, Weights};
use crate::models::ModelConfig;

/// Everything that a step works on, at addresses that never change, so that graphs may be captured.
pub(super) struct Forward<G: Gpu> {
    /// Of what this rank computes.
    config: ModelConfig,
    division: Division,
    shapes: Shapes,
    half: Half,
    store: KvStore,
    block_tokens: u32,
    /// Of each layer: which of the plans it uses.
    plan_of: Vec<usize>,
    weights: Weights<G::Memory>,
    kv: G::Memory,
    angles: G::Memory,
    hidden: G::Memory,
    normed: G::Memory,
    qkv: G::Memory,
    attended: G::Memory,
    delta: G::Memory,
    gate_up: G::Memory,
    gated: G::Memory,
    picked: G::Memory,
    logits: G::Memory,
    /// [ranks, samples, stride]: the logits of each, before they are brought together.
    gathered: Option<G::Memory>,
    results: G::Memory,
    sampled: G::Memory,
    partial_sums: G::Memory,
    partial_tops: G::Memory,
    counters: G::Memory,
}

/// How a [`Forward`] is sized.
#[derive(Debug, Clone, Copy)]
pub(super) struct ForwardSize {
    pub(super) rows: u32,
    pub(super) samples: u32,
    pub(super) context: u32,
    pub(super) block_tokens: u32,
    pub(super) blocks: u32,
    pub(super) store: KvStore,
}

/// The windows that a model's layers have, each once, and which of them each layer has.
pub(super) fn windows(config: &ModelConfig) -> (Vec<Option<u32>>, Vec<usize>) {
    let mut windows: Vec<Option<u32>> = Vec::new();
    let plan_of = config
        .windows
        .iter()
        .map(|window| {
            windows.iter().position(|known| known == window).unwrap_or_else(|| {
                windows.push(*window);
                windows.len() - 1
            })
        })
        .collect();
    (windows, plan_of)
}

impl<G: Gpu> Forward<G> {
    /// Of a rank's part of a model, whose configuration is that of the whole.
    pub(super) fn new(
        gpu: &G,
        whole: &ModelConfig,
        division: Division,
        half: Half,
        weights: Weights<G::Memory>,
        size: &ForwardSize,
    ) -> Result<Self, DeviceError> {
        let (config, shapes) = (division.shard().config(whole), division.shapes(whole));
        let (rows, samples) = (size.rows as usize, size.samples as usize);
        let zeroed = |bytes: u64| {
            let memory = gpu.alloc(bytes as usize)?;
            gpu.zero(&memory)?;
            Ok(memory)
        };
        let halves = |count: usize, width: u64| zeroed(count as u64 * width * 2);
        let partial = shapes.partial_bytes();
        let angles = angles(&config, size.context);
        let angles_at = gpu.alloc(angles.len() * 4)?;
        gpu.upload(&angles_at, 0, bytes_of(&angles))?;
        Ok(Self {
            shapes,
            half,
            store: size.store,
            block_tokens: size.block_tokens,
            plan_of: windows(&config).1,
            weights,
            // Zeros, so that blocks never used cannot spoil a sum.
            kv: zeroed(u64::from(size.blocks) * shapes.block_bytes(size.block_tokens, size.store))?,
            angles: angles_at,
            hidden: zeroed(rows as u64 * shapes.hidden * 4)?,
            normed: halves(rows, shapes.hidden)?,
            qkv: halves(rows, shapes.qkv())?,
            attended: halves(rows, shapes.heads * shapes.head_dim)?,
            delta: halves(rows, shapes.hidden)?,
            gate_up: halves(rows, 2 * shapes.inner)?,
            gated: halves(rows, shapes.inner)?,
            picked: halves(samples, shapes.hidden)?,
            logits: zeroed(samples as u64 * shapes.logits * 4)?,
            gathered: match shapes.gathered {
                0 => None,
                numbers => Some(zeroed(samples as u64 * numbers * 4)?),
            },
            results: gpu.alloc(samples * size_of::<SamplingResult>())?,
            sampled: zeroed(samples as u64 * 4)?,
            partial_sums: gpu.alloc(partial.0 as usize)?,
            partial_tops: gpu.alloc(partial.1 as usize)?,
            counters: zeroed(u64::from(PARTIALS) * shapes.kv_heads * 4)?,
            config,
            division,
        })
    }

    /// The KV pool.
    pub(super) fn kv(&self) -> &G::Memory {
        &self.kv
    }

    /// Where results come to lie.
    pub(super) fn results(&self) -> &G::Memory {
        &self.results
    }

    /// Where logits come to lie; [samples, stride].
    pub(super) fn logits(&self) -> (&G::Memory, usize) {
        (&self.logits, self.shapes.logits as usize)
    }

    fn linear(
        &self,
        gpu: &G,
        linear: &Linear<G::Memory>,
        x: &G::Memory,
        y: &G::Memory,
        m: u32,
        n: u64,
        k: u64,
    ) -> Result<(), DeviceError> {
        let matmul = Matmul {
            x: x.address(),
            weight: linear.matrix.address(),
            bias: linear.bias(),
            y: y.address(),
            m,
            n: n as u32,
            k: k as u32,
            stride: n as u32,
            wide: false,
        };
        // SAFETY: x and y have room for the largest batch, the matrix is [n, k].
        unsafe { gpu.matmul(self.half, &matmul) }
    }

    /// What goes from a product that was cut along its inputs to the hidden state: the sum of what all ranks have of it.
    fn sum_delta(&self, gpu: &G, rows: u32) -> Result<(), DeviceError> {
        let Some(peers) = gpu.peers() else { return Ok(()) };
        let numbers = rows as usize * self.config.hidden_size;
        // SAFETY: there is room for the largest batch.
        unsafe { peers.all_reduce(self.half, self.delta.address(), numbers) }
    }

    /// The logits of so many samples, on every rank those of the whole vocabulary.
    fn head(&self, gpu: &G, samples: u32) -> Result<(), DeviceError> {
        let shapes = &self.shapes;
        let product = |y: u64, n: usize, stride: usize| Matmul {
            x: self.picked.address(),
            weight: self.weights.head(),
            bias: None,
            y,
            m: samples,
            n: n as u32,
            k: shapes.hidden as u32,
            stride: stride as u32,
            wide: true,
        };
        let (Some(gathered), Some(shards)) = (&self.gathered, self.division.group()) else {
            let matmul = product(self.logits.address(), self.config.vocab_size, shapes.logits as usize);
            // SAFETY: there is room for as many samples as there are slots.
            return unsafe { gpu.matmul(self.half, &matmul) };
        };
        let stride = shapes.gathered as usize / shards.len();
        let part = samples as usize * stride * 4;
        let part_of = |rank: usize| gathered.address() + (rank * part) as u64;
        let own = self.division.shard();
        let matmul = product(part_of(own.rank), own.vocabulary.len(), stride);
        // SAFETY: as above, for each of the ranks.
        unsafe {
            gpu.matmul(self.half, &matmul)?;
            // Asked for right before its use: it is then known that no kernel of ours follows one of ours.
            let Some(peers) = gpu.peers() else {
                let (what, reason) = ("gathering logits", "this rank has no communicator");
                return Err(DeviceError::Failed { what: what.to_owned(), reason: reason.to_owned() });
            };
            peers.all_gather(gathered.address(), part)?;
        }
        for shard in shards {
            let columns = Columns {
                from: part_of(shard.rank),
                from_stride: stride * 4,
                to: self.logits.address() + shard.vocabulary.start as u64 * 4,
                to_stride: shapes.logits as usize * 4,
                width: shard.vocabulary.len() * 4,
                rows: samples as usize,
            };
            // SAFETY: as above; a rank's columns are within the vocabulary.
            unsafe { gpu.copy_columns(&columns) }?;
        }
        Ok(())
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
            residual: self.hidden.address(),
            delta: if delta { self.delta.address() } else { 0 },
            weight: weight.address(),
            out: if pick.is_some() { self.picked.address() } else { self.normed.address() },
            pick: pick.unwrap_or(0),
            rows,
            width: self.config.hidden_size as u32,
            eps: self.config.norm_eps,
            unused: 0,
        };
        // SAFETY: buffers have room for the largest batch, picks are rows of the batch.
        unsafe { norm(gpu, self.half, &p) }
    }

    /// Enqueues a whole step, whose metadata lies at `metadata`.
    pub(super) fn run(&self, gpu: &G, step: &StepShape, metadata: u64) -> Result<(), DeviceError> {
        let (shapes, half, rows) = (&self.shapes, self.half, step.rows);
        let layout = &step.layout;
        let at = |section: usize| metadata + section as u64;
        let ModelConfig { heads, kv_heads, head_dim, norm_eps, .. } = self.config;
        let store = self.store;
        let layer_bytes = store.layer_bytes(shapes.kv_heads, u64::from(self.block_tokens), shapes.head_dim);
        let (layer_numbers, block_bytes) = (layer_bytes / store.unit(), shapes.layers * layer_bytes);
        let block_numbers = shapes.layers * layer_numbers;
        for (first, end) in &step.copies {
            let p = CopyParams {
                pool: self.kv.address(),
                pairs: at(layout.copies) + u64::from(*first) * 8,
                block_bytes,
            };
            // SAFETY: the blocks are in the pool, and no copy of the range depends on another.
            unsafe { copy_blocks(gpu, end - first, &p) }?;
        }
        let p = EmbeddingParams {
            table: self.weights.embedding.address(),
            tokens: at(layout.tokens),
            sampled: self.sampled.address(),
            hidden: self.hidden.address(),
            rows,
            width: shapes.hidden as u32,
        };
        // SAFETY: tokens are below the vocabulary's size, samples were taken in the step before.
        unsafe { embedding(gpu, half, &p) }?;
        let blocks = attention_blocks(&gpu.profile(), head_dim as u32, store, step.mixed);
        let scale = (1.0 / (head_dim as f64).sqrt() * std::f64::consts::LOG2_E) as f32;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.norm(gpu, &layer.attention_norm, rows, index > 0, None)?;
            self.linear(gpu, &layer.qkv, &self.normed, &self.qkv, rows, shapes.qkv(), shapes.hidden)?;
            let layer_offset = index as u64 * layer_numbers;
            let norms = layer.qk_norm.as_ref();
            let p = QkvParams {
                qkv: self.qkv.address(),
                q_norm: norms.map_or(0, |(q, _)| q.address()),
                k_norm: norms.map_or(0, |(_, k)| k.address()),
                angles: self.angles.address(),
                positions: at(layout.positions),
                places: at(layout.places),
                kv: self.kv.address(),
                block_numbers,
                layer_offset,
                rows,
                heads: heads as u32,
                kv_heads: kv_heads as u32,
                head_dim: head_dim as u32,
                block_tokens: self.block_tokens,
                eps: norm_eps,
            };
            // SAFETY: positions are below the context, places in the pool and all different.
            unsafe { finish_qkv(gpu, half, store, &p) }?;
            let plan = self.plan_of[index];
            let p = AttentionParams {
                qkv: self.qkv.address(),
                out: self.attended.address(),
                kv: self.kv.address(),
                items: at(layout.items(plan)),
                item_count: at(layout.item_count(plan)),
                tables: at(layout.tables),
                partial_sums: self.partial_sums.address(),
                partial_tops: self.partial_tops.address(),
                counters: self.counters.address(),
                block_numbers,
                layer_offset,
                heads: heads as u32,
                kv_heads: kv_heads as u32,
                block_shift: self.block_tokens.trailing_zeros(),
                window: self.config.windows[index].unwrap_or(0),
                stages: 0,
                scale,
            };
            // SAFETY: the plan was made of this batch, whose block tables cover all positions.
            unsafe { attention(gpu, half, store, head_dim as u32, step.mixed, blocks, &p) }?;
            let queries = shapes.heads * shapes.head_dim;
            self.linear(gpu, &layer.output, &self.attended, &self.delta, rows, shapes.hidden, queries)?;
            self.sum_delta(gpu, rows)?;
            self.norm(gpu, &layer.mlp_norm, rows, true, None)?;
            self.linear(
                gpu,
                &layer.gate_up,
                &self.normed,
                &self.gate_up,
                rows,
                2 * shapes.inner,
                shapes.hidden,
            )?;
            let p = SwigluParams {
                gate_up: self.gate_up.address(),
                out: self.gated.address(),
                rows,
                width: shapes.inner as u32,
            };
            // SAFETY: buffers have room for the largest batch.
            unsafe { swiglu(gpu, half, &p) }?;
            self.linear(gpu, &layer.down, &self.gated, &self.delta, rows, shapes.hidden, shapes.inner)?;
            self.sum_delta(gpu, rows)?;
        }
        if step.samples == 0 {
            return Ok(());
        }
        // Only sampled rows go through the head.
        self.norm(gpu, &self.weights.norm, step.samples, true, Some(at(layout.pick)))?;
        self.head(gpu, step.samples)?;
        let p = SamplingParams {
            logits: self.logits.address(),
            rows: at(layout.sampling),
            results: self.results.address(),
            sampled: self.sampled.address(),
            vocabulary: self.config.vocab_size as u32,
            stride: shapes.logits as u32,
        };
        // SAFETY: there is room for as many samples as there are slots; histories and adjustments are those of attached ones.
        unsafe { sample(gpu, step.samples, &p) }
    }
}

/// Cosines and sines of all positions; [context, head_dim / 2, (cos, sin)]. The angle is rounded to f32 as in
/// training; its functions are then taken exactly.
fn angles(config: &ModelConfig, context: u32) -> Vec<f32> {
    let frequencies = inverse_frequencies(config.head_dim, config.rope_theta, &config.rope_scaling);
    let mut angles = Vec::with_capacity(context as usize * config.head_dim);
    for position in 0..context {
        for frequency in &frequencies {
            let angle = f64::from(position as f32 * frequency);
            angles.extend([libm::cos(angle) as f32, libm::sin(angle) as f32]);
        }
    }
    angles
}

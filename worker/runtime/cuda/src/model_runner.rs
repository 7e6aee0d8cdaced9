//! Model runner: turns a batch into packed metadata and runs the forward pass and sampling on any [`Gpu`].

use inflight_kernels::cpu::Activation;
use inflight_kernels::cuda::{
    DELTA_COLUMNS, DELTA_KEY_DIMS, DeviceError, HEAD_DIMS, HalfDtype, PlanShape, SamplingResult, SamplingRow,
    attention_blocks,
};
use inflight_models::{self as models, Arithmetic, DeltaSpec, ModelConfig, NormPlaces};
use inflight_runtime::{
    Batch, Capabilities, Error, PositionLogprobs, PromptLogprobs, Sampled, Slot, SlotSetup, TokenLogprob,
    TokenMasks,
};

use super::forward::CudaForward;
use super::gpu::Gpu;
use super::kv_layers::KvLayers;
use super::metadata::{MetadataPacker, PackerConfig, StepShape};
use super::shapes::{BufferLimits, PARTIALS};
use super::shard_plan::ShardPlan;
use super::slots::GpuSlots;
use super::step_graph::{StepGraph, StepGraphs};
use super::weights::DeviceWeights;

/// Maximum number of query heads per key head (grouped-query attention).
const QUERIES_PER_KEY_MAX: usize = 16;

/// State of all steps of a rank: weights, buffers, KV pool and sampling slots, but not streams and graphs.
pub(super) struct ModelRunner<G: Gpu> {
    pub(super) capabilities: Capabilities,
    pub(super) forward: CudaForward<G>,
    slots: GpuSlots<G>,
    packer: MetadataPacker,
    packer_config: PackerConfig,
    rows: Vec<SamplingRow>,
    previous_samples: usize,
    /// CUDA graphs that batches are padded for; `None`: no padding.
    graphs: Option<StepGraphs>,
}

/// Execution modes of a model runner.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunnerModes {
    /// Batch-invariant kernels only.
    pub(super) deterministic: bool,
    /// Batches are padded to the rows of CUDA graphs.
    pub(super) graphs: bool,
}

/// Head dimensions whose attention kernels have run on a GPU.
const PROVEN_HEAD_DIMS: [u32; 2] = [64, 128];

/// Returns whether the kernels of a model's arithmetic have run on a GPU: those of Llama's.
fn is_proven(config: &ModelConfig) -> bool {
    let Arithmetic { norms, zero_centred_norms, activation, score_size, scaled_embedding, output_gate } =
        config.arithmetic;
    norms == NormPlaces::Before
        && !zero_centred_norms
        && activation == Activation::Silu
        && score_size == config.head_dim as f64
        && !scaled_embedding
        && !output_gate
        && config.rotated_dim == config.head_dim
        && config.delta.is_none()
        && config.ropes.len() == 1
}

/// Checks that kernels exist for the shapes of a model, or of one rank's shard where `ranks` is above 1; `experimental`: also those
/// that were tested in emulation only.
///
/// # Errors
/// [`models::Error::Unsupported`], naming the field and the supported values.
pub(super) fn check_model(
    config: &ModelConfig,
    ranks: usize,
    experimental: bool,
) -> Result<(), models::Error> {
    let unsupported = |field: &str, found: String, supported: String| {
        Err(models::Error::Unsupported {
            file: "config.json".to_owned(),
            field: field.to_owned(),
            found,
            supported,
        })
    };
    if !experimental && !is_proven(config) {
        let supported = "models whose kernels have run on a GPU; --device cpu computes this one, and --gpu-experimental computes it \
            on GPUs with kernels that were tested in emulation only";
        return unsupported("architectures", config.architecture.name().to_owned(), supported.to_owned());
    }
    let head_dims = if experimental { &HEAD_DIMS[..] } else { &PROVEN_HEAD_DIMS[..] };
    if !head_dims.contains(&(config.head_dim as u32)) {
        let supported = format!("{head_dims:?} on CUDA; the CPU runtime (--device cpu) takes any even one");
        return unsupported("head_dim", config.head_dim.to_string(), supported);
    }
    if config.heads / config.kv_heads > QUERIES_PER_KEY_MAX {
        let found = format!("{} heads on {} key heads", config.heads, config.kv_heads);
        return unsupported(
            "num_key_value_heads",
            found,
            format!("up to {QUERIES_PER_KEY_MAX} heads on one, on CUDA"),
        );
    }
    if let Some(DeltaSpec { key_dim, value_dim, .. }) = config.delta {
        if !DELTA_KEY_DIMS.contains(&(key_dim as u32)) {
            let supported = format!("{DELTA_KEY_DIMS:?} on CUDA; --device cpu computes this model");
            return unsupported("linear_key_head_dim", key_dim.to_string(), supported);
        }
        if !value_dim.is_multiple_of(DELTA_COLUMNS as usize) {
            let supported = format!("multiples of {DELTA_COLUMNS} on CUDA; --device cpu computes this model");
            return unsupported("linear_value_head_dim", value_dim.to_string(), supported);
        }
    }
    for (field, width) in
        [("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)]
    {
        if !width.is_multiple_of(8) {
            let found = match ranks {
                1 => width.to_string(),
                _ => format!("{width} on each of {ranks} ranks"),
            };
            return unsupported(field, found, "multiples of 8, on CUDA".to_owned());
        }
    }
    Ok(())
}

impl<G: Gpu> ModelRunner<G> {
    /// Allocates buffers and the KV pool for a rank's shard. `unsharded` is the configuration of the whole
    /// model, already checked.
    pub(super) fn new(
        gpu: &G,
        unsharded: &ModelConfig,
        shard_plan: ShardPlan,
        half: HalfDtype,
        weights: DeviceWeights<G::Memory>,
        capabilities: Capabilities,
        limits: &BufferLimits,
        kv_layers: KvLayers,
        modes: RunnerModes,
    ) -> Result<Self, DeviceError> {
        let RunnerModes { deterministic, graphs } = modes;
        let (sample_rows, batch_tokens) = (capabilities.sample_rows, capabilities.batch_tokens);
        let step_graphs = StepGraphs { sample_rows, batch_tokens };
        let (blocks, store) = (capabilities.blocks, kv_layers.store());
        let config = shard_plan.shard().config(unsharded);
        let slots = GpuSlots::new(gpu, &shard_plan.shapes(unsharded), limits, capabilities.vocab_size)?;
        let forward =
            CudaForward::new(gpu, unsharded, shard_plan, half, weights, limits, kv_layers.clone(), blocks)?;
        let packer_config = PackerConfig {
            vocabulary: capabilities.vocab_size,
            blocks,
            kv_layers,
            plan: PlanShape {
                group: (config.heads / config.kv_heads) as u32,
                kv_heads: config.kv_heads as u32,
                head_dim: config.head_dim as u32,
                window: None,
                deterministic,
                slots: attention_blocks(&gpu.profile(), config.head_dim as u32, store, false),
                partials: PARTIALS,
            },
        };
        Ok(Self {
            capabilities,
            forward,
            slots,
            packer: MetadataPacker::default(),
            packer_config,
            rows: Vec::new(),
            previous_samples: 0,
            graphs: graphs.then_some(step_graphs),
        })
    }

    pub(super) fn attach(&mut self, gpu: &G, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        self.slots.attach(gpu, slot, setup)
    }

    pub(super) fn detach(&mut self, slot: Slot) {
        self.slots.detach(slot);
    }

    /// Fills the buffers that a step writes before it reads them with NaN and impossible tokens, so that what a step leaves out shows.
    pub(super) fn poison(&self, gpu: &G) -> Result<(), DeviceError> {
        self.forward.buffers.poison(gpu)?;
        self.slots.poison(gpu)
    }

    /// Uploads the token masks of the batch just prepared, one for each of its masked sample rows.
    pub(super) fn upload_masks(&mut self, gpu: &G, batch: &Batch, masks: &TokenMasks) -> Result<(), Error> {
        masks.check(batch, self.capabilities.vocab_size)?;
        self.slots.upload_masks(gpu, batch, masks)
    }

    /// Graphs to capture.
    pub(super) fn graphs(&self) -> impl Iterator<Item = StepGraph> + use<G> {
        self.graphs.into_iter().flat_map(StepGraphs::all)
    }

    /// Returns a step whose rows are all padding, and its metadata, to capture a graph from.
    pub(super) fn padding_step(&self, graph: StepGraph) -> (StepShape, Vec<u8>) {
        self.packer_config.padding_step(graph)
    }

    /// Validates a batch and packs its metadata into `out`.
    pub(super) fn prepare(&mut self, batch: &Batch, out: &mut Vec<u8>) -> Result<StepShape, Error> {
        batch.check(&self.capabilities)?;
        self.slots.check(batch)?;
        let graphs = self.graphs;
        let graph_for = |rows, decodes| graphs.and_then(|graphs| graphs.for_batch(rows, decodes));
        self.slots.sampling_rows(batch, &mut self.rows);
        let step = self.packer.pack(
            batch,
            &self.packer_config,
            &self.rows,
            self.previous_samples,
            graph_for,
            out,
        )?;
        self.previous_samples = batch.samples.len();
        Ok(step)
    }
}

/// Converts a row's sampling result, with log probabilities if `with_logprobs`.
pub(super) fn sampled(result: &SamplingResult, with_logprobs: bool) -> Sampled {
    let logprobs = with_logprobs.then(|| {
        let chosen = TokenLogprob { token: result.token, logprob: result.logprob };
        Box::new(PositionLogprobs { chosen, top: alternatives(result) })
    });
    Sampled { token: result.token, logprobs }
}

/// Converts the result of a scored row.
pub(super) fn scored(result: &SamplingResult) -> PromptLogprobs {
    let token = TokenLogprob { token: result.token, logprob: result.logprob };
    PromptLogprobs { token, rank: result.rank, top: alternatives(result) }
}

fn alternatives(result: &SamplingResult) -> Vec<TokenLogprob> {
    let top = result.top.min(result.tokens.len() as u32) as usize;
    let pairs = result.tokens.iter().zip(&result.logprobs).take(top);
    pairs.map(|(token, logprob)| TokenLogprob { token: *token, logprob: *logprob }).collect()
}

impl<G: Gpu> ModelRunner<G> {
    /// Writes, per sampled row of the batch just prepared, whether log probabilities are requested.
    pub(super) fn logprobs_requested(&self, requested: &mut Vec<bool>) {
        requested.clear();
        requested.extend(self.rows.iter().map(|row| row.logprobs > 0));
    }
}

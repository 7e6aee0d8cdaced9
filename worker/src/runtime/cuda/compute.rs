//! One step from batch to sampled tokens, on any [`Gpu`].

use inflight_kernels::cuda::{
    DeviceError, HEAD_DIMS, Half, KvStore, PlanShape, SamplingResult, SamplingRow, attention_blocks,
};

use super::division::Division;
use super::forward::{Forward, ForwardSize, windows};
use super::gpu::Gpu;
use super::metadata::{Packer, PackerShape, StepShape};
use super::sizing::{PARTIALS, bucket};
use super::slots::Slots;
use super::weights::Weights;
use crate::models::{self, ModelConfig};
use crate::runtime::{Batch, Capabilities, Error, PositionLogprobs, Sampled, Slot, SlotSetup, TokenLogprob};

/// Query heads that may share a key head.
const GROUP_MAX: usize = 16;

/// All that a step touches but the streams it runs on.
pub(super) struct Compute<G: Gpu> {
    pub(super) capabilities: Capabilities,
    pub(super) forward: Forward<G>,
    slots: Slots<G>,
    packer: Packer,
    packer_shape: PackerShape,
    rows: Vec<SamplingRow>,
    previous_samples: usize,
    /// Whether decoding runs in buckets, which graphs are captured of.
    buckets: bool,
}

/// How a model is computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Modes {
    pub(super) store: KvStore,
    /// No bit depends on the batch.
    pub(super) deterministic: bool,
    /// Decoding runs in buckets, which graphs are captured of.
    pub(super) buckets: bool,
}

/// Checks that kernels exist for the shapes of a model, or of what each of `ranks` ranks computes of it.
///
/// # Errors
/// [`models::Error::Unsupported`], naming the field and what is supported.
pub(super) fn check_model(config: &ModelConfig, ranks: usize) -> Result<(), models::Error> {
    let unsupported = |field: &str, found: String, supported: String| {
        Err(models::Error::Unsupported {
            file: "config.json".to_owned(),
            field: field.to_owned(),
            found,
            supported,
        })
    };
    if !HEAD_DIMS.contains(&(config.head_dim as u32)) {
        let supported = format!("{HEAD_DIMS:?} on CUDA; the CPU runtime (--device cpu) takes any even one");
        return unsupported("head_dim", config.head_dim.to_string(), supported);
    }
    if config.heads / config.kv_heads > GROUP_MAX {
        let found = format!("{} heads on {} key heads", config.heads, config.kv_heads);
        return unsupported("num_key_value_heads", found, format!("up to {GROUP_MAX} heads on one, on CUDA"));
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

impl<G: Gpu> Compute<G> {
    /// Sets up buffers and the KV pool for a rank's part of a model, whose configuration is that of the whole. It was checked.
    pub(super) fn new(
        gpu: &G,
        whole: &ModelConfig,
        division: Division,
        half: Half,
        weights: Weights<G::Memory>,
        capabilities: Capabilities,
        modes: Modes,
    ) -> Result<Self, DeviceError> {
        let Modes { store, deterministic, buckets } = modes;
        let size = ForwardSize {
            // Graphs run whole buckets.
            rows: capabilities.batch_tokens.max(super::sizing::largest_bucket(capabilities.slots)),
            samples: capabilities.slots.max(super::sizing::largest_bucket(capabilities.slots)),
            context: capabilities.context_tokens,
            block_tokens: capabilities.block_tokens,
            blocks: capabilities.blocks,
            store,
        };
        let config = division.shard().config(whole);
        let forward = Forward::new(gpu, whole, division, half, weights, &size)?;
        let slots =
            Slots::new(gpu, capabilities.slots, capabilities.vocab_size, capabilities.context_tokens)?;
        let packer_shape = PackerShape {
            block_tokens: capabilities.block_tokens,
            blocks: capabilities.blocks,
            windows: windows(&config).0,
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
            packer: Packer::default(),
            packer_shape,
            rows: Vec::new(),
            previous_samples: 0,
            buckets,
        })
    }

    pub(super) fn attach(&mut self, gpu: &G, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        self.slots.attach(gpu, slot, setup)
    }

    pub(super) fn detach(&mut self, slot: Slot) {
        self.slots.detach(slot);
    }

    /// Number of block-table plans, one for each window.
    pub(super) fn plans(&self) -> usize {
        self.packer_shape.windows.len()
    }

    /// Checks a batch and packs what the device needs of it.
    pub(super) fn prepare(&mut self, batch: &Batch, out: &mut Vec<u8>) -> Result<StepShape, Error> {
        batch.check(&self.capabilities)?;
        self.slots.check(batch)?;
        let slots = self.capabilities.slots;
        let buckets = self.buckets;
        let graphs = |rows| if buckets { bucket(rows, slots) } else { None };
        // Rows count the tokens to come, so nothing may fail behind them; what packing refuses, it refuses before.
        self.rows.clear();
        self.rows.resize(batch.samples.len(), SamplingRow::default());
        let step =
            self.packer.pack(batch, &self.packer_shape, &self.rows, self.previous_samples, graphs, out)?;
        self.slots.rows(batch, &mut self.rows);
        let size = size_of::<SamplingRow>();
        for (i, row) in self.rows.iter().enumerate() {
            let at = step.layout.sampling + i * size;
            out[at..at + size].copy_from_slice(inflight_kernels::cuda::as_bytes(row));
        }
        self.previous_samples = batch.samples.len();
        Ok(step)
    }
}

/// What the device reports of a row, with log probabilities if `wanted`.
pub(super) fn sampled(result: &SamplingResult, wanted: bool) -> Sampled {
    let entry = |token, logprob| TokenLogprob { token, logprob };
    let logprobs = wanted.then(|| {
        let top = result.top.min(result.tokens.len() as u32) as usize;
        let pairs = result.tokens.iter().zip(&result.logprobs).take(top);
        Box::new(PositionLogprobs {
            chosen: entry(result.token, result.logprob),
            top: pairs.map(|(token, logprob)| entry(*token, *logprob)).collect(),
        })
    });
    Sampled { token: result.token, logprobs }
}

/// Which of the rows just packed want log probabilities.
impl<G: Gpu> Compute<G> {
    pub(super) fn wanted(&self, wanted: &mut Vec<bool>) {
        wanted.clear();
        wanted.extend(self.rows.iter().map(|row| row.logprobs > 0));
    }
}

//! Load plan of a model: its shards, their formats and the bytes of weights and KV blocks, known before weights are read.

use inflight_kernels::cpu::{Isa, KvDtype};
use inflight_models::{LayerSpec, ModelDir};
use inflight_runtime::recurrent::RecurrentLayers;
use inflight_runtime::sharding::{self, Shard};
use inflight_runtime::{HostMemory, KvPlan, LayerRows, MemoryNeeds, RuntimeFacts};

use super::mtp::scratch_blocks;
use super::weights::{self, CheckpointWeights};
use super::{CpuOptions, Error, check, kv_layout, processor};

/// What is loaded, and how many bytes it takes.
pub(super) struct LoadPlan {
    /// Maximum tokens per sequence.
    pub(super) context_tokens: u32,
    pub(super) tensors: CheckpointWeights,
    /// Shards by rank.
    pub(super) shards: Vec<Shard>,
    pub(super) kv_dtype: KvDtype,
    pub(super) isa: Isa,
    /// KV memory of a rank.
    pub(super) kv: KvPlan,
    /// Bytes of a KV block, over all ranks.
    pub(super) block_bytes: u64,
    /// Bytes of the packed weights of all ranks and of the embedding.
    pub(super) weight_bytes: u64,
    /// Blocks behind those of the scheduler, for the MTP layer.
    pub(super) scratch_blocks: u32,
}

impl LoadPlan {
    /// Plans the load of a model on `world` ranks.
    ///
    /// # Errors
    /// [`Error`] if an option is invalid, a tensor is missing, or the model cannot be partitioned.
    pub(super) fn new(model: &ModelDir, options: &CpuOptions, world: usize) -> Result<Self, Error> {
        let config = model.config();
        let context_tokens = check(options, config)?;
        let tensors = weights::find(model, options.mtp)?;
        let shards = sharding::shards(config, world, &|ranks| tensors.alignment(options.quantize, ranks))?;
        let kv_dtype = options.kv_dtype.unwrap_or_else(|| tensors.kv_dtype().into());
        // All ranks have equally many KV heads.
        let bytes = kv_layout(&shards[0], kv_dtype, options.block_tokens).layer_bytes() as u64;
        let attention = config.layers.iter().filter_map(LayerSpec::attention);
        let mut rows: Vec<LayerRows> =
            attention.map(|layer| LayerRows { window: layer.window, bytes }).collect();
        rows.extend(tensors.has_mtp().then_some(LayerRows { window: None, bytes }));
        let recurrent = RecurrentLayers::of(&shards[0].config(config));
        let kv = RecurrentLayers::plan(recurrent, options.block_tokens, context_tokens, &rows)?;
        let block_bytes = kv.block_bytes() * world as u64;
        let isa = options.isa.unwrap_or_else(Isa::detect);
        let packed = |shard| tensors.packed_bytes(options.quantize, isa, shard);
        let weight_bytes = shards.iter().map(packed).sum::<u64>() + tensors.embedding_bytes();
        let scratch_blocks =
            if tensors.has_mtp() { scratch_blocks(options.slots, options.block_tokens) } else { 0 };
        Ok(Self {
            context_tokens,
            tensors,
            shards,
            kv_dtype,
            isa,
            kv,
            block_bytes,
            weight_bytes,
            scratch_blocks,
        })
    }

    /// Returns device and memory of the runtime, for operators.
    pub(super) fn facts(&self, options: &CpuOptions, world: usize) -> RuntimeFacts {
        RuntimeFacts {
            device: processor::name(self.isa),
            memory_bytes: HostMemory::read().map_or(0, |memory| memory.limit()),
            weight_bytes: self.weight_bytes,
            weight_encoding: self.tensors.distinct_formats(options.quantize, world),
            kv_encoding: self.kv_dtype.name().to_owned(),
            ranks: u32::try_from(world).unwrap_or(u32::MAX),
            groups: if self.kv.shape().is_uniform() { Vec::new() } else { self.kv.groups().to_vec() },
        }
    }
}

/// Returns the memory that a model takes, without reading its weights.
///
/// # Errors
/// [`Error`] if an option is invalid, a tensor is missing, or the model cannot be partitioned.
pub fn memory_needs(model: &ModelDir, options: &CpuOptions) -> Result<MemoryNeeds, Error> {
    let plan = LoadPlan::new(model, options, options.tensor_parallel)?;
    Ok(MemoryNeeds {
        weight_bytes: plan.weight_bytes,
        buffer_bytes: u64::from(plan.scratch_blocks) * plan.block_bytes,
        block_bytes: plan.block_bytes,
        shape: plan.kv.shape(),
        context_tokens: plan.context_tokens,
    })
}

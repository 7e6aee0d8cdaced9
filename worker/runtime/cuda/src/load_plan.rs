//! Load plan of a rank: sizes of its buffers and of the KV pool, from the model, the options and the memory
//! that is free when loading begins.

use inflight_models::ModelConfig;
use inflight_runtime::{Capabilities, MemoryNeeds, RuntimeFacts, SCORES_MAX, recurrent};

use super::error::Error as LoadError;
use super::kv_layers::KvLayers;
use super::load_job::LoadJob;
use super::memory_plan::{
    MemoryBudget, MemoryComponent, PoolSize, RESERVE_BYTES, WORKSPACE_BYTES, allocated_bytes,
    component_table, mebibytes, options_to_lower, pool_blocks, total_bytes,
};
use super::metadata::{MetadataCapacity, MetadataLayout};
use super::options::CudaOptions;
use super::shapes::{BufferLimits, DEPTH, ModelShapes, PARTIALS};
use super::shard_plan::ShardPlan;
use super::step_graph::StepGraphs;

/// Sizes of what a rank allocates.
pub(super) struct LoadPlan {
    pub(super) shapes: ModelShapes,
    /// Maximum rows of a step.
    pub(super) rows: u32,
    /// Maximum sampled rows of a step.
    pub(super) samples: u32,
    /// Sizes of the buffers.
    pub(super) limits: BufferLimits,
    pub(super) kv_layers: KvLayers,
    /// Allocations beside weights and KV pool.
    components: Vec<MemoryComponent>,
    /// Bytes of the GPU that are free before loading.
    pub(super) free: u64,
    /// Bytes of the GPU.
    total: u64,
}

impl LoadPlan {
    /// Plans the load of a shard on a GPU with `memory`: free and total bytes.
    pub(super) fn new(job: &LoadJob, memory: (u64, u64)) -> Self {
        let LoadJob { config, shard_plan, options, context_tokens, kv_layers, .. } = job;
        Self::of_shard(config, shard_plan, options, *context_tokens, kv_layers.clone(), memory)
    }

    fn of_shard(
        config: &ModelConfig,
        shard_plan: &ShardPlan,
        options: &CudaOptions,
        context_tokens: u32,
        kv_layers: KvLayers,
        memory: (u64, u64),
    ) -> Self {
        let shapes = shard_plan.shapes(config);
        let graphs = StepGraphs { sample_rows: options.sample_rows(), batch_tokens: options.batch_tokens };
        let (samples, rows) = (graphs.logits_rows_max(), graphs.rows_max());
        let table_entries = kv_layers.table_entries(options.slots, context_tokens, rows);
        let capacity = MetadataCapacity {
            rows: rows as usize,
            sampled_rows: rows as usize,
            samples: samples as usize,
            scores: SCORES_MAX as usize,
            items: (rows + PARTIALS) as usize,
            copies: kv_layers.copies_max(options.slots),
            sequences: kv_layers.sequences_max(rows as usize),
            parts: kv_layers.parts().len(),
            views: kv_layers.views().len(),
            table_entries: table_entries.min(1 << 24),
        };
        let metadata = MetadataLayout::new(&capacity).bytes;
        let limits = BufferLimits::new(graphs, options.slots, context_tokens, metadata);
        let (free, total) = memory;
        Self { shapes, rows, samples, limits, kv_layers, components: shapes.components(&limits), free, total }
    }

    /// Returns the memory that a shard takes, if its weights take `weight_bytes`.
    pub(super) fn needs(
        config: &ModelConfig,
        shard_plan: &ShardPlan,
        options: &CudaOptions,
        context_tokens: u32,
        kv_layers: KvLayers,
        weight_bytes: u64,
    ) -> MemoryNeeds {
        let plan = Self::of_shard(config, shard_plan, options, context_tokens, kv_layers, (0, 0));
        MemoryNeeds {
            weight_bytes,
            buffer_bytes: total_bytes(&plan.components),
            block_bytes: plan.block_bytes(),
            shape: plan.kv_layers.plan().shape(),
            context_tokens,
        }
    }

    /// Returns the bytes of a KV block of this rank's shard.
    pub(super) fn block_bytes(&self) -> u64 {
        self.kv_layers.plan().block_bytes()
    }

    /// Returns the blocks of the KV pool if weights and libraries have taken `taken` bytes.
    ///
    /// # Errors
    /// [`LoadError::Memory`] if the GPU memory left for the KV cache holds not even the blocks of a sequence of one span.
    pub(super) fn pool_blocks(&self, job: &LoadJob, taken: u64) -> Result<u32, LoadError> {
        let options = &job.options;
        let budget = MemoryBudget { total: self.total, free: self.free, taken };
        // A sequence needs a span in each group of layers, and a state.
        let (block_bytes, least) = (self.block_bytes(), self.kv_layers.plan().shape().blocks(1, 1));
        let sized =
            pool_blocks(budget, options.utilization, &self.components, block_bytes, least, options.kv_bytes);
        match sized {
            PoolSize::Blocks(blocks) => Ok(blocks),
            PoolSize::Missing(missing) => {
                let weights = MemoryComponent { name: "weights", option: "", bytes: taken };
                let all: Vec<MemoryComponent> = self.components.iter().copied().chain([weights]).collect();
                Err(LoadError::Memory {
                    name: job.gpu_info.name.clone(),
                    missing: mebibytes(missing),
                    allowed: mebibytes(budget.allowed(options.utilization)),
                    total: mebibytes(self.total),
                    components: component_table(&all),
                    options: options_to_lower(&self.components),
                })
            }
        }
    }

    /// Returns the capabilities of the loaded model with a pool of `blocks` blocks.
    pub(super) fn capabilities(&self, job: &LoadJob, blocks: u32) -> Capabilities {
        let options = &job.options;
        // Each rank's host pool holds its shard of every block.
        let host_bytes = options.host_bytes / job.shard_plan.world() as u64;
        Capabilities {
            vocab_size: job.config.vocab_size as u32,
            context_tokens: job.context_tokens,
            shape: self.kv_layers.plan().shape(),
            block_bytes: self.block_bytes() * job.shard_plan.world() as u64,
            blocks,
            host_blocks: u32::try_from(host_bytes / self.block_bytes()).unwrap_or(u32::MAX),
            slots: options.slots,
            batch_tokens: options.batch_tokens,
            sample_rows: options.sample_rows(),
            snapshot: recurrent::snapshot(self.kv_layers.plan()),
            sequence_drafts: recurrent::sequence_drafts(self.kv_layers.plan()),
            predicted_drafts: 0,
            depth: DEPTH,
            // Known when all ranks have read their tensors.
            fingerprint: String::new(),
            facts: RuntimeFacts { memory_bytes: self.total, ..RuntimeFacts::default() },
        }
    }

    /// Logs the memory of a rank that has loaded, and warns if more was allocated than planned. `taken`:
    /// bytes of weights and libraries; `left`: bytes still free.
    pub(super) fn log_allocated(&self, rank: usize, taken: u64, blocks: u32, left: u64) {
        let pool = allocated_bytes(u64::from(blocks) * self.block_bytes());
        // The workspace was allocated before memory was measured, and the reserve is never allocated.
        let planned = taken + total_bytes(&self.components) + pool - RESERVE_BYTES - WORKSPACE_BYTES;
        let unplanned = self.free.saturating_sub(left).saturating_sub(planned);
        tracing::info!(
            rank,
            total_mib = mebibytes(self.total),
            weights_mib = mebibytes(taken),
            pool_mib = mebibytes(pool),
            others_mib = component_table(&self.components),
            unplanned_mib = mebibytes(unplanned),
            "GPU memory allocated; nothing is allocated from here on"
        );
        if unplanned > RESERVE_BYTES {
            tracing::warn!(
                rank,
                unplanned_mib = mebibytes(unplanned),
                reserve_mib = mebibytes(RESERVE_BYTES),
                "less free GPU memory than planned; lower --gpu-memory-utilization if no other process uses it"
            );
        }
    }
}

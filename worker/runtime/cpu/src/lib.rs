//! CPU runtime: the decoder forward pass on SIMD kernels, with tensor parallelism over threads.
//!
//! Results are batch invariant, see the invariant of [`inflight_kernels`]: this module only sequences its
//! kernels. Activations are f32 throughout; by default keys and values are stored in the model's own dtype.

mod attention_layers;
mod copy_thread;
mod delta;
mod forward;
mod known_answers;
mod load_plan;
mod mtp;
mod overlapped;
mod processor;
mod quantization;
mod rank_group;
mod sampler;
mod sampling_slots;
mod scorer;
mod weights;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use inflight_kernels::cpu::{Isa, KvCopier, KvDtype, KvLayout, KvPool, Pool};
use inflight_models::{self as models, LayerSpec, ModelConfig, ModelDir};
use inflight_runtime::collective::{Collective, host_group};
use inflight_runtime::sharding::{Indivisible, RANKS_MAX, Shard};
use inflight_runtime::{
    self as runtime, Batch, Capabilities, DRAFT_ROWS, KvPlanError, MemoryLedger, NonFiniteRows, OverLimit,
    Predictions, PromptLogprobs, Readable, Runtime, Sampled, Slot, SlotSetup, TokenMasks, TransferDone,
    recurrent,
};
use inflight_worker_core::Transfer;

use copy_thread::CopyThread;
use forward::Forward;
pub use known_answers::{KnownAnswersError, WrongAnswer, check_known_answer};
use load_plan::LoadPlan;
pub use load_plan::memory_needs;
pub use overlapped::Overlapped;
pub use quantization::{Quantization, UnknownQuantization};
use rank_group::{Rank, RankGroup};
use sampler::Sampler;
use sampling_slots::SamplingSlots;
use weights::{CheckpointWeights, PackError, Weights};

/// Configuration of a [`CpuRuntime`].
#[derive(Debug, Clone)]
pub struct CpuOptions {
    /// Compute threads; defaults to the CPUs available to the process.
    pub threads: Option<usize>,
    /// Maximum bytes of the KV block pool. Blocks take memory at first use.
    pub kv_bytes: u64,
    /// Maximum bytes of the host pool for swapped sequences; 0: no host pool.
    pub host_bytes: u64,
    /// Tokens per KV block; a power of two.
    pub block_tokens: u32,
    /// Maximum attached sequences.
    pub slots: u32,
    /// Maximum tokens per batch.
    pub batch_tokens: u32,
    /// Maximum tokens per sequence; defaults to the model's context length.
    pub context_tokens: Option<u32>,
    /// Instruction set; defaults to the best one that the CPU supports.
    pub isa: Option<Isa>,
    /// Weight quantization; `None` keeps the checkpoint's types.
    pub quantize: Option<Quantization>,
    /// Element type of the KV cache; defaults to that of the weights, or bf16 for quantized ones.
    pub kv_dtype: Option<KvDtype>,
    /// Tensor-parallel degree; the threads are divided among the ranks.
    pub tensor_parallel: usize,
    /// Load the MTP layer, if the model has one, to draft tokens.
    pub mtp: bool,
}

/// Error of [`CpuRuntime::load`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model can't be used.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// An option is out of its range.
    #[error("{name} is {value}; it must be {range}")]
    Option {
        /// Name of the option.
        name: &'static str,
        /// Given value.
        value: u64,
        /// Allowed range.
        range: String,
    },
    /// The KV memory can't be planned.
    #[error(transparent)]
    KvPlan(#[from] KvPlanError),
    /// The model can't be partitioned among the ranks.
    #[error(transparent)]
    Indivisible(#[from] Indivisible),
    /// The KV block pool can't hold one span of tokens in all layers.
    #[error(
        "the KV pool of {} can't hold {block_tokens} tokens (--block-tokens), which take {block_bytes} bytes with this model; \
         give at least that much",
        Readable(*kv_bytes)
    )]
    KvTooSmall {
        /// Bytes of the pool.
        kv_bytes: u64,
        /// Tokens of a span.
        block_tokens: u32,
        /// Bytes of a span in all layers.
        block_bytes: u64,
    },
    /// Allocating the pools failed.
    #[error(
        "this machine can't give {} to the KV pool and {} to the host pool behind it; lower --kv-cache-bytes or \
         --host-cache-bytes",
        Readable(*kv_bytes),
        Readable(*host_bytes)
    )]
    Memory {
        /// Bytes requested for the KV block pool.
        kv_bytes: u64,
        /// Bytes requested for the host pool.
        host_bytes: u64,
    },
    /// The weights exceed the available memory.
    #[error(
        "the weights take {}, and {} are available; free some memory, or store them smaller with --quantize",
        Readable(*needed),
        Readable(*available)
    )]
    WeightMemory {
        /// Bytes of the packed weights and of the embedding.
        needed: u64,
        /// Bytes of available memory.
        available: u64,
    },
    /// Weights and pools exceed a memory limit, together with what other workers of the host have promised.
    #[error(
        "the weights take {}, the KV pool {} and the host pool behind it {}, {over}; lower --kv-cache-bytes or \
         --host-cache-bytes{}",
        Readable(*weight_bytes),
        Readable(*kv_bytes),
        Readable(*host_bytes),
        if over.others == 0 { "" } else { ", of this worker or of the others, or stop one" }
    )]
    TotalMemory {
        /// Bytes of the packed weights and of the embedding.
        weight_bytes: u64,
        /// Bytes requested for the KV block pool.
        kv_bytes: u64,
        /// Bytes requested for the host pool.
        host_bytes: u64,
        /// Limit that is exceeded.
        over: OverLimit,
    },
    /// Starting threads failed.
    #[error("cannot start the kernels' threads: {0}")]
    Threads(#[from] std::io::Error),
}

/// KV cache bytes per token, over all layers.
pub fn kv_bytes_per_token(config: &ModelConfig, dtype: KvDtype) -> usize {
    let layers = config.layers.iter().filter_map(LayerSpec::attention).count();
    layers * KvLayout::new(dtype, config.kv_heads, config.head_dim, 1).layer_bytes()
}

/// Returns the layout of a layer's KV on a rank.
fn kv_layout(shard: &Shard, dtype: KvDtype, block_tokens: u32) -> KvLayout {
    KvLayout::new(dtype, shard.kv_heads.len(), shard.head_dim, block_tokens as usize)
}

/// CPU runtime whose steps run synchronously, on the caller's thread and the thread pools.
///
/// Each rank has a shard of the weights and of the KV block pool, and its own threads. Block operations apply
/// to every rank; tokens are sampled from the gathered logits. A failure of one rank fails the runtime.
pub struct CpuRuntime {
    compute: Compute,
    copies: CopyThread,
    /// Samples of the step launched last.
    last: Vec<Sampled>,
    /// Scores of the step launched last.
    scores: Vec<PromptLogprobs>,
    /// Rows of the step launched last whose logits are not all finite.
    non_finite: NonFiniteRows,
    /// Tokens predicted in the step launched last.
    predictions: Predictions,
    /// Duration of a launched step that is not completed.
    took: Option<Duration>,
    /// Batch of a launched step that waits for its token masks.
    unmasked: Option<Batch>,
}

/// State used by steps; moves to the step thread in [`Overlapped`].
struct Compute {
    capabilities: Capabilities,
    isa: Isa,
    group: RankGroup,
    slots: SamplingSlots,
    sampler: Sampler,
}

impl CpuRuntime {
    /// Loads a model as [`load_beside`](Self::load_beside), without regard to other workers of the host.
    ///
    /// # Errors
    /// [`Error`]; invalid options and models are rejected before large allocations.
    pub fn load(
        model: &ModelDir,
        options: &CpuOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        Self::load_beside(model, options, &MemoryLedger::alone(), progress)
    }

    /// Loads a model: validates tensors, reserves memory in the ledger, packs weights for the kernels and
    /// allocates the pools. Calls `progress` with bytes packed and bytes in total.
    ///
    /// # Errors
    /// [`Error`]; invalid options and models are rejected before large allocations.
    pub fn load_beside(
        model: &ModelDir,
        options: &CpuOptions,
        ledger: &MemoryLedger,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        check(options, model.config())?;
        Self::load_with_group(model, options, host_group(options.tensor_parallel), ledger, progress)
    }

    fn new(compute: Compute, copies: CopyThread) -> Self {
        let (last, scores, non_finite) = (Vec::new(), Vec::new(), NonFiniteRows::default());
        let predictions = Predictions::default();
        Self { compute, copies, last, scores, non_finite, predictions, took: None, unmasked: None }
    }

    /// Loads a model on the ranks of a given collective group.
    fn load_with_group(
        model: &ModelDir,
        options: &CpuOptions,
        collectives: Vec<Box<dyn Collective>>,
        ledger: &MemoryLedger,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        let config = model.config();
        let world = collectives.len();
        let plan = LoadPlan::new(model, options, world)?;
        let facts = plan.facts(options, world);
        let LoadPlan {
            context_tokens,
            tensors,
            shards,
            kv_dtype,
            isa,
            kv,
            block_bytes,
            weight_bytes,
            scratch_blocks,
        } = plan;
        let blocks = u32::try_from(options.kv_bytes / block_bytes).unwrap_or(u32::MAX);
        let host_blocks = u32::try_from(options.host_bytes / block_bytes).unwrap_or(u32::MAX);
        // A sequence needs a span in each group of layers, and a state.
        let span_blocks = kv.shape().blocks(1, 1);
        if blocks < span_blocks {
            let CpuOptions { kv_bytes, block_tokens, .. } = *options;
            let block_bytes = block_bytes * u64::from(span_blocks);
            return Err(Error::KvTooSmall { kv_bytes, block_tokens, block_bytes });
        }
        let (kv_bytes, host_bytes) = (options.kv_bytes, options.host_bytes);
        let kv_bytes = kv_bytes.saturating_add(u64::from(scratch_blocks) * block_bytes);
        reserve_memory(ledger, weight_bytes, kv_bytes, host_bytes)?;
        let pool_blocks = blocks as usize + scratch_blocks as usize;
        let pools = allocate(world, kv.block_bytes() as usize, pool_blocks, host_blocks as usize);
        let (pools, copiers) = pools.map_err(|_| Error::Memory { kv_bytes, host_bytes })?;
        let threads = compute_threads(options, world);
        let share = |rank: usize| threads * (rank + 1) / world - threads * rank / world;
        let rank_pools = (0..world).map(|rank| Pool::pinned(share(rank))).collect::<Result<Vec<_>, _>>()?;
        let rank_threads = Pool::new(world)?;
        let mut formats = tensors.format_names(options.quantize, world);
        if world > 1 {
            // The degree decides the summation order over ranks.
            formats.push_str(&format!(" tensor-parallel {world}"));
        }
        let weights = pack(&tensors, &shards, options.quantize, isa, &rank_threads, &rank_pools, progress);
        let weights = weights.map_err(|error| match error {
            PackError::Model(error) => Error::Model(error),
            PackError::Memory(_) => Error::WeightMemory { needed: weight_bytes, available: 0 },
        })?;
        // After the last tensor was read: it covers what was read.
        let fingerprint = models::fingerprint(model, kv_dtype.name(), &formats, isa)?;
        let capabilities = Capabilities {
            vocab_size: config.vocab_size as u32,
            context_tokens,
            shape: kv.shape(),
            block_bytes,
            blocks,
            host_blocks,
            slots: options.slots,
            batch_tokens: options.batch_tokens,
            sample_rows: options.slots.saturating_add(DRAFT_ROWS),
            snapshot: recurrent::snapshot(&kv),
            sequence_drafts: recurrent::sequence_drafts(&kv),
            predicted_drafts: if tensors.has_mtp() { mtp::PREDICTED_MAX } else { 0 },
            depth: 1,
            fingerprint,
            facts,
        };
        let mut ranks = Vec::with_capacity(world);
        for ((((shard, pool), weights), kv_pool), collective) in
            shards.iter().zip(rank_pools).zip(weights).zip(pools).zip(collectives)
        {
            let layout = kv_layout(shard, kv_dtype, options.block_tokens);
            let scale = tensors.embedding_scale(config);
            let forward = Forward::new(config, shard, scale, &capabilities, &kv, layout);
            ranks.push(Rank { pool, isa, weights, kv: kv_pool, forward, collective, copies: Vec::new() });
        }
        let lead = ranks.remove(0);
        let group = RankGroup::new(lead, ranks, rank_threads);
        tracing::info!(
            model = model.name(),
            isa = isa.name(),
            threads,
            ranks = world,
            pinned = group.is_pinned(),
            weight_bytes = group.weight_bytes(),
            blocks,
            block_bytes,
            kv = %kv,
            "model weights packed"
        );
        let copies = CopyThread::start(copiers, blocks, host_blocks)?;
        let slots = SamplingSlots::new(options.slots as usize);
        let compute = Compute { isa, group, slots, sampler: Sampler::default(), capabilities };
        Ok(Self::new(compute, copies))
    }

    /// Converts to a runtime that runs steps on a dedicated thread, so that the caller can plan the next one
    /// meanwhile.
    ///
    /// # Errors
    /// Starting the thread failed.
    pub fn overlapped(self) -> Result<Overlapped, Error> {
        Ok(Overlapped::start(self.compute, self.copies)?)
    }

    /// Logits of the last step's sample rows, before penalties and biases; [samples, vocab_size].
    pub fn logits(&self) -> &[f32] {
        self.compute.group.logits()
    }

    /// Bytes of the packed weights, which a decode step reads once besides the KV cache.
    pub fn weight_bytes(&self) -> usize {
        self.compute.group.weight_bytes()
    }

    /// Instruction set of the kernels.
    pub fn isa(&self) -> Isa {
        self.compute.isa
    }
}

/// Allocates the KV pool of each rank, and its copies to and from the host pool.
fn allocate(
    world: usize,
    block_bytes: usize,
    blocks: usize,
    host_blocks: usize,
) -> std::io::Result<(Vec<KvPool>, Vec<KvCopier>)> {
    let of_rank = |_| {
        let pool = KvPool::new(block_bytes, blocks)?;
        let copier = KvCopier::new(&pool, host_blocks)?;
        Ok((pool, copier))
    };
    (0..world).map(of_rank).collect()
}

/// Packs every shard on its rank's threads.
fn pack(
    tensors: &CheckpointWeights,
    shards: &[Shard],
    quantize: Option<Quantization>,
    isa: Isa,
    threads: &Pool,
    rank_pools: &[Pool],
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Vec<Weights>, PackError> {
    let total = shards.iter().map(|shard| tensors.file_bytes(shard)).sum();
    let done = AtomicU64::new(0);
    progress(0, total);
    let read = |bytes: u64| progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, total);
    let tied_embedding = tensors.tied_embedding()?;
    let packed: Vec<_> = shards.iter().map(|_| Mutex::new(None)).collect();
    RankGroup::on_each(threads, shards.len(), &|rank| {
        let embedding = tied_embedding.as_deref();
        let weights = tensors.pack(embedding, &rank_pools[rank], isa, quantize, &shards[rank], &read);
        *packed[rank].lock().unwrap_or_else(PoisonError::into_inner) = Some(weights);
    });
    let taken =
        packed.into_iter().map(|weights| weights.into_inner().unwrap_or_else(PoisonError::into_inner));
    // All are set: if a rank panics, `on_each` panics, too.
    let packed = taken.flatten().collect::<Result<Vec<_>, _>>()?;
    // An embedding of its own is read last, when no matrix is in memory twice.
    let embedding = match tied_embedding {
        Some(embedding) => embedding,
        None => tensors.load_embedding()?,
    };
    Ok(packed.into_iter().map(|packed| packed.with_embedding(embedding.clone())).collect())
}

/// Returns the compute threads over all ranks, which are divided among them.
fn compute_threads(options: &CpuOptions, ranks: usize) -> usize {
    let available = || std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let threads = options.threads.unwrap_or_else(available);
    if threads < ranks {
        tracing::warn!(threads, ranks, "fewer threads than tensor-parallel ranks; using one thread per rank");
    }
    threads
}

/// Reserves the memory of weights and pools.
///
/// # Errors
/// [`Error::WeightMemory`] or [`Error::TotalMemory`].
fn reserve_memory(
    ledger: &MemoryLedger,
    weight_bytes: u64,
    kv_bytes: u64,
    host_bytes: u64,
) -> Result<(), Error> {
    if let Some(memory) = ledger.host()
        && weight_bytes > memory.available
    {
        return Err(Error::WeightMemory { needed: weight_bytes, available: memory.available });
    }
    // Pools take memory at first use, so they are checked against limits rather than available memory.
    let bytes = weight_bytes.saturating_add(kv_bytes).saturating_add(host_bytes);
    ledger.reserve(bytes).map_err(|over| Error::TotalMemory { weight_bytes, kv_bytes, host_bytes, over })
}

/// Validates all options; returns the maximum tokens per sequence.
fn check(options: &CpuOptions, config: &ModelConfig) -> Result<u32, Error> {
    let within = |name, value: u64, low: u64, high: u64| {
        if (low..=high).contains(&value) {
            return Ok(());
        }
        Err(Error::Option { name, value, range: format!("from {low} to {high}") })
    };
    within("--threads", options.threads.unwrap_or(1) as u64, 1, 1024)?;
    within("--tensor-parallel", options.tensor_parallel as u64, 1, RANKS_MAX as u64)?;
    within("--max-sequences", options.slots.into(), 1, 1 << 20)?;
    within("--max-batch-tokens", options.batch_tokens.into(), 1, 1 << 20)?;
    within("--block-tokens", options.block_tokens.into(), 1, 1 << 12)?;
    if !options.block_tokens.is_power_of_two() {
        let value = options.block_tokens.into();
        return Err(Error::Option { name: "--block-tokens", value, range: "a power of two".to_owned() });
    }
    let context_tokens = options.context_tokens.unwrap_or(config.context_tokens);
    within("--max-context-tokens", context_tokens.into(), 2, config.context_tokens.into())?;
    Ok(context_tokens)
}

impl Compute {
    /// Runs the forward pass of a checked batch and returns its duration. `last` holds the samples of the previous
    /// step and is emptied; `scores` and `non_finite` are replaced by those of this step.
    fn forward(
        &mut self,
        batch: &mut Batch,
        last: &mut Vec<Sampled>,
        scores: &mut Vec<PromptLogprobs>,
        non_finite: &mut NonFiniteRows,
    ) -> Result<Duration, runtime::Error> {
        let begun = Instant::now();
        batch.feed(last)?;
        last.clear();
        self.slots.check(batch)?;
        scores.clear();
        non_finite.clear();
        self.group.step(batch, &self.capabilities)?;
        self.group.take_scores(scores, &mut non_finite.scores);
        Ok(begun.elapsed())
    }

    /// Samples from the logits of the forward pass of `batch` and returns the duration; then lets the MTP layer predict. Adds the sample
    /// rows whose logits are not all finite to `non_finite`; `predictions` is replaced.
    fn sample(
        &mut self,
        batch: &Batch,
        masks: &TokenMasks,
        last: &mut Vec<Sampled>,
        non_finite: &mut NonFiniteRows,
        predictions: &mut Predictions,
    ) -> Result<Duration, runtime::Error> {
        let begun = Instant::now();
        masks.check(batch, self.capabilities.vocab_size)?;
        self.sampler.run(batch, masks, &mut self.slots, &self.group, self.isa, last, &mut non_finite.samples);
        let took = begun.elapsed();
        predictions.clear();
        if self.capabilities.predicted_drafts > 0 {
            self.group.predict(batch, last, &self.capabilities, predictions)?;
            predictions.took = begun.elapsed() - took;
        }
        Ok(took)
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), runtime::Error> {
        self.group.forget(slot);
        self.slots.attach(slot, setup)
    }
}

impl Runtime for CpuRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.compute.capabilities
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), runtime::Error> {
        self.compute.attach(slot, setup)
    }

    fn detach(&mut self, slot: Slot) {
        self.compute.slots.detach(slot);
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), runtime::Error> {
        batch.check(&self.compute.capabilities)?;
        let took = self.compute.forward(batch, &mut self.last, &mut self.scores, &mut self.non_finite)?;
        self.took = Some(took);
        if batch.masked_rows() > 0 {
            self.unmasked = Some(std::mem::take(batch));
            return Ok(());
        }
        let none = TokenMasks::none(self.compute.capabilities.vocab_size);
        let Self { last, non_finite, predictions, .. } = self;
        let sampling = self.compute.sample(batch, &none, last, non_finite, predictions)?;
        self.took = Some(took + sampling);
        Ok(())
    }

    fn supply_masks(&mut self, masks: &mut TokenMasks) -> Result<(), runtime::Error> {
        let batch = self.unmasked.take().ok_or_else(runtime::Error::no_step_lacks_masks)?;
        let Self { last, non_finite, predictions, .. } = self;
        let took = self.compute.sample(&batch, masks, last, non_finite, predictions)?;
        self.took = self.took.map(|forward| forward + took);
        Ok(())
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, runtime::Error> {
        sampled.clear();
        if self.unmasked.is_some() {
            return Err(runtime::Error::Malformed("the step lacks its token masks".to_owned()));
        }
        let took =
            self.took.take().ok_or_else(|| runtime::Error::Malformed("no step was launched".to_owned()))?;
        sampled.append(&mut self.last);
        Ok(took)
    }

    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>) {
        scores.append(&mut self.scores);
    }

    fn take_non_finite(&mut self, rows: &mut NonFiniteRows) {
        rows.clear();
        std::mem::swap(rows, &mut self.non_finite);
    }

    fn take_predictions(&mut self, predictions: &mut Predictions) {
        predictions.clear();
        std::mem::swap(predictions, &mut self.predictions);
    }

    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), runtime::Error> {
        self.copies.submit(transfer)
    }

    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>) {
        self.copies.finished(finished);
    }

    fn wait_for_transfer(&mut self) -> Result<(), runtime::Error> {
        self.copies.wait()
    }
}

//! CUDA runtime: runs a model on an NVIDIA GPU or on a tensor-parallel group of GPUs.
//!
//! A device thread ([`device_thread`]) owns each GPU and enqueues steps; the engine's thread waits for their
//! results ([`ranks`]). A step is one upload of packed metadata ([`metadata`]), the forward pass
//! ([`forward`]), of which all or the layers are a captured CUDA graph ([`step_graph`]), and one copy of
//! results to the host; the copies run beside the steps before and after ([`step_slot`]). Tokens that the next step needs stay on the device. GEMMs run on cuBLASLt
//! ([`cublaslt`]) or on built-in kernels ([`gemm`]), whichever autotuning measured as faster ([`autotune`]);
//! in the deterministic mode on one built-in kernel, whose bits do not depend on the batch. KV blocks are
//! swapped by the copy engines ([`copy_engine`]).
//!
//! In a group, each GPU holds a shard of the weights and of every KV block, and runs the same steps on the
//! same metadata. Twice per layer, and for the logits, the ranks run a collective ([`gpu::DeviceCollective`])
//! through NCCL ([`nccl`]) on the compute stream. Each rank then samples from identical logits, so all know
//! the same tokens without a host round trip.
//!
//! Weights, model runner, sampling slots and forward pass are generic over [`gpu::Gpu`] and tested on the
//! kernels' CPU harness.

mod algorithm_search;
mod autotune;
mod buffers;
mod copy_engine;
mod cublaslt;
mod device_layer;
mod device_memory;
mod device_state;
mod device_thread;
mod driver;
mod driver_error;
mod error;
mod forward;
mod gemm;
mod gemm_cache;
mod gpu;
mod gpu_info;
mod gpu_paths;
mod group_swap;
mod head_order;
mod kernel_function;
mod kv_layers;
mod load_job;
mod load_plan;
mod memory_plan;
mod metadata;
mod model_gemms;
mod model_runner;
mod nccl;
mod options;
mod ranks;
mod shapes;
mod shard_plan;
mod slots;
mod source_matrix;
mod staging;
mod step_graph;
mod step_slot;
mod stream;
#[cfg(test)]
mod tests;
mod weights;

use std::sync::Arc;
use std::time::Duration;

pub use inflight_kernels::cuda::KvStore;
use inflight_kernels::cuda::{Replacement, SamplingResult};
use inflight_models::{self as models, ModelDir};
use inflight_runtime::sharding::{self, RANKS_MAX};
use inflight_runtime::{
    self as runtime, Batch, Capabilities, GroupMemory, MemoryNeeds, NonFiniteRows, PromptLogprobs, Runtime,
    RuntimeFacts, Sampled, Slot, SlotSetup, TokenMasks, TransferDone,
};
use inflight_worker_core::{MemoryShape, Transfer};

pub use autotune::GemmTuning;
use copy_engine::GpuCopyEngine;
use device_thread::{DeviceCommand, LoadedRank, thread_ended};
pub use error::Error;
pub use gpu_info::Unavailable;
pub use gpu_paths::{GpuPath, GpuPaths, PathOff};
use group_swap::GroupSwap;
use kv_layers::KvLayers;
use load_job::LoadJob;
use load_plan::LoadPlan;
use model_runner::check_model;
pub use options::CudaOptions;
use ranks::{CompletedStep, Ranks};
use shapes::DEPTH;
use shard_plan::ShardPlan;

/// Returns the number of GPUs that the driver reports; 0 without a driver.
pub fn count() -> u32 {
    gpu_info::count()
}

/// Returns the bytes of a GPU's memory; `None` without a driver or such a GPU.
pub fn memory_bytes(gpu: usize) -> Option<u64> {
    gpu_info::memory_bytes(gpu)
}

/// Checks that these GPUs are usable: all exist, and several are of one model and have NCCL.
///
/// # Errors
/// [`Unavailable`] with the reason.
pub fn available(gpus: &[usize]) -> Result<(), Unavailable> {
    gpu_info::probe_all(gpus)?;
    if gpus.len() > 1 {
        nccl::version()?;
    }
    Ok(())
}

/// Checks that a model can be sharded over `ranks` GPUs and that kernels exist for the shapes of each shard; `experimental`: also those
/// that were tested in emulation only.
///
/// # Errors
/// [`Error::Indivisible`], or [`Error::Model`] naming the field at fault.
pub fn supports(model: &ModelDir, ranks: usize, experimental: bool) -> Result<(), Error> {
    shard_model(model, &weights::find(model)?, ranks, experimental).map(drop)
}

/// Returns the memory that the rank with the most of it takes on its GPU, without reading weights or asking a driver.
///
/// # Errors
/// [`Error`] if an option is invalid, or the model cannot run on GPUs.
pub fn memory_needs(model: &ModelDir, options: &CudaOptions) -> Result<MemoryNeeds, Error> {
    let config = model.config();
    let context_tokens = validate_options(options, config)?;
    let tensors = weights::find(model)?;
    let shards = shard_model(model, &tensors, options.gpus.len(), options.experimental)?;
    let collective = shards.len() > 1 || options.lone_communicator;
    let shape = MemoryShape::uniform(options.block_tokens);
    let mut most = MemoryNeeds { weight_bytes: 0, buffer_bytes: 0, block_bytes: 0, shape, context_tokens };
    let bytes = |needs: &MemoryNeeds| needs.weight_bytes.saturating_add(needs.buffer_bytes);
    for plan in ShardPlan::for_ranks(shards, collective) {
        let kv_layers = kv_layers(config, &plan, options, context_tokens)?;
        let weight_bytes = tensors.allocated_bytes(plan.shard());
        let needs = LoadPlan::needs(config, &plan, options, context_tokens, kv_layers, weight_bytes);
        if bytes(&needs) > bytes(&most) {
            most = needs;
        }
    }
    Ok(most)
}

/// Returns a model's shards by rank, after checking that kernels exist for their shapes.
fn shard_model(
    model: &ModelDir,
    tensors: &weights::SourceTensors,
    ranks: usize,
    experimental: bool,
) -> Result<Vec<sharding::Shard>, Error> {
    let config = model.config();
    // Checked unsharded first: a shape that is unsupported as a whole is unsupported in shards.
    check_model(config, 1, experimental)?;
    let shards = sharding::shards(config, ranks, &|_| tensors.alignment())?;
    for shard in &shards {
        check_model(&shard.config(config), ranks, experimental)?;
    }
    Ok(shards)
}

/// Plans the KV memory of a rank's shard.
fn kv_layers(
    config: &models::ModelConfig,
    shard_plan: &ShardPlan,
    options: &CudaOptions,
    context_tokens: u32,
) -> Result<KvLayers, Error> {
    let shard = shard_plan.shard().config(config);
    let (store, release) = (options.kv_store, options.experimental);
    Ok(KvLayers::new(&shard, options.block_tokens, context_tokens, store, release)?)
}

/// Model loaded on a GPU or on a tensor-parallel group.
pub struct CudaRuntime {
    capabilities: Capabilities,
    // Dropped before the device threads, which own the pools that it copies from.
    swap: Option<GroupSwap<GpuCopyEngine>>,
    ranks: Ranks,
    in_flight: u32,
    /// Scores of the step completed last.
    scores: Vec<PromptLogprobs>,
    /// Rows of the step completed last whose logits are not all finite.
    non_finite: NonFiniteRows,
    tuned: Vec<GemmTuning>,
    paths: GpuPaths,
}

impl CudaRuntime {
    /// Loads a model: checks its tensors, copies each rank's shard to its GPU, allocates the KV pool in the
    /// remaining memory and captures CUDA graphs. `progress` is called with the bytes copied so far and the
    /// total.
    ///
    /// # Errors
    /// [`Error`]; most are found before weights are copied.
    pub fn load(
        model: &ModelDir,
        options: &CudaOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        let config = model.config();
        let context_tokens = validate_options(options, config)?;
        let gpus = gpu_info::probe_all(&options.gpus)?;
        let tensors = Arc::new(weights::find(model)?);
        let shards = shard_model(model, &tensors, options.gpus.len(), options.experimental)?;
        let world = shards.len();
        let collective = world > 1 || options.lone_communicator;
        let group = if collective { Some(nccl::NcclGroup::open(&options.gpus)?) } else { None };
        let mut arithmetic = format!(
            "cuda sm_{}{} {}{}",
            gpus[0].compute.0,
            gpus[0].compute.1,
            match (options.deterministic, options.autotune) {
                (true, _) => "deterministic".to_owned(),
                // Autotuning may choose other algorithms at the next start; the bits differ as they do
                // between batches.
                (false, true) => format!("{} autotuned", cublaslt::version()),
                (false, false) => cublaslt::version(),
            },
            match options.kv_store {
                KvStore::Half => "",
                KvStore::Fp8 => " kv e4m3",
            }
        );
        if world > 1 {
            // The summation order over ranks.
            arithmetic.push_str(&format!(" tensor-parallel {world} {}", nccl::version()?));
        }
        let replaced_images = replaced_images()?;
        arithmetic.push_str(&replaced_images);
        let name = gpus[0].name.clone();
        let plans = ShardPlan::for_ranks(shards, collective);
        let jobs = gpus.into_iter().zip(plans).map(|(gpu_info, shard_plan)| {
            Ok::<_, Error>(LoadJob {
                gpu_info,
                kv_layers: kv_layers(config, &shard_plan, options, context_tokens)?,
                shard_plan,
                config: config.clone(),
                tensors: Arc::clone(&tensors),
                options: options.clone(),
                context_tokens,
                replaced_images: replaced_images.clone(),
                group: group.clone(),
            })
        });
        let jobs = jobs.collect::<Result<Vec<_>, _>>()?;
        let (groups, kv) = (jobs[0].kv_layers.groups(), jobs[0].kv_layers.plan().to_string());
        let (ranks, mut loaded) = Ranks::start(jobs, progress)?;
        // After the last tensor was read: it covers what was read.
        let fingerprint = models::fingerprint_of(model, tensors.half().dtype().name(), &arithmetic)?;
        let facts = facts(&name, &loaded, tensors.half().dtype().name(), options.kv_store, groups);
        let capabilities = Capabilities { fingerprint, facts, ..loaded[0].capabilities.clone() };
        let swap = match capabilities.host_blocks {
            0 => None,
            host_blocks => {
                let engine = |rank: &LoadedRank| {
                    let (context, pool) = (&rank.context, rank.pool);
                    context
                        .bind_to_thread()
                        .map_err(|error| Error::Device(driver_error::error_message(error)))?;
                    let engine =
                        GpuCopyEngine::new(context, pool.0, pool.1, capabilities.blocks, host_blocks);
                    engine.map_err(|error| Error::Device(error.to_string()))
                };
                Some(GroupSwap::new(loaded.iter().map(engine).collect::<Result<_, _>>()?))
            }
        };
        tracing::info!(
            model = model.name(),
            gpu = name,
            ranks = world,
            gemm_backend = loaded[0].gemm_backend,
            weight_bytes = loaded.iter().map(|rank| rank.weight_bytes).sum::<u64>(),
            blocks = capabilities.blocks,
            block_bytes = loaded.iter().map(|rank| rank.pool.1).sum::<usize>(),
            host_blocks = capabilities.host_blocks,
            kv,
            graphs = loaded[0].graphs,
            deterministic = options.deterministic,
            "model loaded on the GPU"
        );
        let tuned = std::mem::take(&mut loaded[0].tuned);
        let paths = loaded[0].paths.clone();
        Ok(Self {
            capabilities,
            swap,
            ranks,
            in_flight: 0,
            scores: Vec::new(),
            non_finite: NonFiniteRows::default(),
            tuned,
            paths,
        })
    }

    /// Autotuning results of rank 0; empty if nothing was timed.
    pub fn tuned(&self) -> &[GemmTuning] {
        &self.tuned
    }

    /// Fast paths of rank 0: which are in use, and why one is not.
    pub fn paths(&self) -> &GpuPaths {
        &self.paths
    }

    /// Fills the buffers that a step writes before it reads them, of rank 0, with NaN and impossible token ids, so that whatever a step
    /// leaves out is found in its results. Blocks until the GPU is done; for tests, with no step in flight.
    ///
    /// # Errors
    /// [`runtime::Error::Device`].
    pub fn poison(&mut self) -> Result<(), runtime::Error> {
        let (reply, receiver) = std::sync::mpsc::sync_channel(1);
        self.ranks.send_to_first(DeviceCommand::Poison(reply))?;
        receiver.recv().map_err(|_| thread_ended())?
    }

    /// Returns the logits of the last step's sampled rows, [samples, vocab_size]. Blocks until the GPU is
    /// done; for tests.
    ///
    /// # Errors
    /// [`runtime::Error::Device`].
    pub fn logits(&mut self) -> Result<Vec<f32>, runtime::Error> {
        let (reply, receiver) = std::sync::mpsc::sync_channel(1);
        self.ranks.send_to_first(DeviceCommand::Logits(reply))?;
        receiver.recv().map_err(|_| thread_ended())?
    }
}

/// Returns what operators see of a device and its memory, from its ranks and the dtype of its weights.
fn facts(
    device: &str,
    ranks: &[LoadedRank],
    half: &str,
    kv_store: KvStore,
    groups: Vec<GroupMemory>,
) -> RuntimeFacts {
    RuntimeFacts {
        device: device.to_owned(),
        memory_bytes: ranks.iter().map(|rank| rank.capabilities.facts.memory_bytes).sum(),
        weight_bytes: ranks.iter().map(|rank| rank.weight_bytes).sum(),
        weight_encoding: half.to_owned(),
        kv_encoding: match kv_store {
            KvStore::Half => half.to_owned(),
            KvStore::Fp8 => "fp8".to_owned(),
        },
        ranks: u32::try_from(ranks.len()).unwrap_or(u32::MAX),
        groups,
    }
}

/// Logs the kernel images that files replace; returns them for the fingerprint, since their bits may differ from those of
/// the embedded ones.
fn replaced_images() -> Result<String, Error> {
    let replacements = Replacement::of_environment().map_err(|error| Error::Device(error.to_string()))?;
    let describe = |replacement: &Replacement| {
        let Replacement { family, file, sha256, .. } = replacement;
        tracing::info!(family, file = %file.display(), sha256, "kernel image replaced");
        format!(" {family} {sha256}")
    };
    Ok(replacements.iter().map(describe).collect())
}

/// Validates all options and returns the maximum sequence length in tokens.
fn validate_options(options: &CudaOptions, config: &models::ModelConfig) -> Result<u32, Error> {
    let within = |name, value: u64, low: u64, high: u64| {
        if (low..=high).contains(&value) {
            return Ok(());
        }
        Err(Error::Option { name, value: value.to_string(), range: format!("from {low} to {high}") })
    };
    within("--tensor-parallel", options.gpus.len() as u64, 1, RANKS_MAX as u64)?;
    let duplicate = options.gpus.iter().enumerate().find(|(i, gpu)| options.gpus[..*i].contains(gpu));
    if let Some((_, gpu)) = duplicate {
        let (value, range) = (format!("GPU {gpu} twice"), "different GPUs, one a rank".to_owned());
        return Err(Error::Option { name: "--gpu", value, range });
    }
    if options.deterministic && options.gpus.len() > 2 {
        let value = format!("on, with {} ranks", options.gpus.len());
        // A sum of two elements does not depend on their order; with more ranks, NCCL's order depends on an
        // element's position in the batch.
        let range = "off, or on with 2 ranks at most: NCCL's sums over more depend on the batch".to_owned();
        return Err(Error::Option { name: "--deterministic", value, range });
    }
    within("--max-sequences", options.slots.into(), 1, 4096)?;
    within("the rows of drafts", options.draft_rows.into(), 0, 4096)?;
    within("--max-batch-tokens", options.batch_tokens.into(), 1, 1 << 16)?;
    within("--block-tokens", options.block_tokens.into(), 1, 1 << 12)?;
    let block_tokens_min = options.kv_store.block_tokens_min();
    if options.block_tokens < block_tokens_min {
        let value = options.block_tokens.to_string();
        let range = format!(
            "at least {block_tokens_min} with a KV cache in 8 bits, whose scales are copied four at a time"
        );
        return Err(Error::Option { name: "--block-tokens", value, range });
    }
    if !options.block_tokens.is_power_of_two() {
        let value = options.block_tokens.to_string();
        return Err(Error::Option { name: "--block-tokens", value, range: "a power of two".to_owned() });
    }
    if !(options.utilization > 0.0 && options.utilization <= 1.0) {
        let (name, value) = ("gpu_memory_utilization", options.utilization.to_string());
        return Err(Error::Option { name, value, range: "above 0 and at most 1".to_owned() });
    }
    let context_tokens = options.context_tokens.unwrap_or(config.context_tokens);
    within("--max-context-tokens", context_tokens.into(), 2, config.context_tokens.into())?;
    Ok(context_tokens)
}

impl Runtime for CudaRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), runtime::Error> {
        self.capabilities.check_slot(slot)?;
        // Only penalties read the token history; the count of generated tokens is always needed.
        let prompt = if setup.sampling.needs_history() { setup.prompt } else { &[] };
        let setup = SlotSetup { prompt, ..setup.clone() };
        self.ranks.send(DeviceCommand::Attach(slot, (&setup).into()))
    }

    fn detach(&mut self, slot: Slot) {
        // Without a device thread there is no slot; the next step reports the error.
        let _ = self.ranks.send(DeviceCommand::Detach(slot));
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), runtime::Error> {
        batch.check(&self.capabilities)?;
        if self.in_flight == DEPTH {
            return Err(runtime::Error::Malformed("as many steps are launched as there may be".to_owned()));
        }
        self.ranks.launch(batch)?;
        self.in_flight += 1;
        Ok(())
    }

    fn supply_masks(&mut self, masks: &mut TokenMasks) -> Result<(), runtime::Error> {
        self.ranks.supply_masks(std::mem::take(masks))
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, runtime::Error> {
        if self.in_flight == 0 {
            return Err(runtime::Error::Malformed("no step was launched".to_owned()));
        }
        self.in_flight -= 1;
        sampled.clear();
        let CompletedStep { step_slot, logprobs, scores } = self.ranks.complete()?;
        let step_slot = self.ranks.step_slot(step_slot);
        let size = size_of::<SamplingResult>();
        // SAFETY: the copies into this step slot have completed, and the next ones into it are enqueued by a
        // later launch.
        let (samples, scored) = unsafe { (step_slot.results.as_slice(), step_slot.scores.as_slice()) };
        // SAFETY: `SamplingResult` is plain data valid for any bytes, and the chunk has its size.
        let read = |chunk: &[u8]| unsafe { chunk.as_ptr().cast::<SamplingResult>().read_unaligned() };
        self.scores.clear();
        self.non_finite.clear();
        for (row, (chunk, logprobs)) in (0..).zip(samples.chunks_exact(size).zip(logprobs)) {
            let result = read(chunk);
            sampled.push(model_runner::sampled(&result, logprobs));
            self.non_finite.samples.extend((result.non_finite != 0).then_some(row));
        }
        for (row, chunk) in (0..).zip(scored.chunks_exact(size).take(scores)) {
            let result = read(chunk);
            self.scores.push(model_runner::scored(&result));
            self.non_finite.scores.extend((result.non_finite != 0).then_some(row));
        }
        Ok(Duration::from_secs_f64(f64::from(step_slot.milliseconds().max(0.0)) / 1e3))
    }

    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>) {
        scores.append(&mut self.scores);
    }

    fn take_non_finite(&mut self, rows: &mut NonFiniteRows) {
        rows.clear();
        std::mem::swap(rows, &mut self.non_finite);
    }

    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), runtime::Error> {
        match &mut self.swap {
            Some(swap) => swap.start(transfer),
            None => Err(runtime::Error::Malformed("there is no host pool to transfer to".to_owned())),
        }
    }

    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>) {
        if let Some(swap) = &mut self.swap {
            swap.finished(finished);
        }
    }

    fn wait_for_transfer(&mut self) -> Result<(), runtime::Error> {
        self.swap.as_mut().map_or(Ok(()), GroupSwap::wait)
    }
}

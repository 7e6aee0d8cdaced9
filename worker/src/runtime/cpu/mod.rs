//! Runs the model on CPU cores.
//!
//! The answer for a sequence depends on its own tokens alone, see the invariant of [`inflight_kernels`]: this module
//! only strings its kernels together. Activations are f32 throughout; keys and values are stored in the model's
//! own dtype.

mod copies;
mod forward;
mod group;
mod memory;
mod overlapped;
mod quantization;
mod sampler;
mod slots;
mod weights;

use inflight_kernels::cpu::{Isa, KvCopier, KvDtype, KvLayout, KvPool, Pool, RopeTable, inverse_frequencies};

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use inflight_worker_core::Transfer;

use super::collective::{Collective, host_group};
use super::sharding::{self, Indivisible, RANKS_MAX, Shard};
use super::{Batch, Capabilities, Runtime, Sampled, Slot, SlotSetup, TransferDone};
use crate::models::{self, ModelConfig, ModelDir};
use copies::Copies;
use forward::Forward;
use group::{Group, Rank};
use memory::{Readable, memory};
pub use overlapped::Overlapped;
pub use quantization::{Quantization, UnknownQuantization};
use sampler::Sampler;
use slots::Slots;
use weights::{Found, Weights};

/// How a [`CpuRuntime`] is sized.
#[derive(Debug, Clone)]
pub struct CpuOptions {
    /// Threads to compute with; all that the process may use if not given.
    pub threads: Option<usize>,
    /// Most bytes of the KV pool. Blocks never used take no memory.
    pub kv_bytes: u64,
    /// Most bytes of the host pool behind it, for swapped sequences; 0: none.
    pub host_bytes: u64,
    /// Tokens in a KV block; a power of two.
    pub block_tokens: u32,
    /// Sequences that may be attached at once.
    pub slots: u32,
    /// Most tokens in one batch.
    pub batch_tokens: u32,
    /// Most tokens of one sequence; the model's own limit if not given.
    pub context_tokens: Option<u32>,
    /// Instruction set; the best one here if not given.
    pub isa: Option<Isa>,
    /// What weights are rounded to; they stay as they are if not given.
    pub quantize: Option<Quantization>,
    /// What keys and values are stored as; what suits the weights if not given.
    pub kv_dtype: Option<KvDtype>,
    /// Ranks that share the model, each with its part of the threads; 1: it is not divided.
    pub tensor_parallel: usize,
}

/// Why a runtime can't be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model is unusable.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// An option is out of its range.
    #[error("{name} is {value}; it must be {range}")]
    Option {
        /// The option.
        name: &'static str,
        /// What was given.
        value: u64,
        /// What is allowed.
        range: String,
    },
    /// The model can't be divided among so many ranks.
    #[error(transparent)]
    Indivisible(#[from] Indivisible),
    /// The KV pool can't hold a single block.
    #[error(
        "the KV pool of {} can't hold one block of {block_tokens} tokens, which takes {block_bytes} bytes with this model; \
         give at least that much",
        Readable(*kv_bytes)
    )]
    KvTooSmall {
        /// Bytes given.
        kv_bytes: u64,
        /// Tokens in a block.
        block_tokens: u32,
        /// Bytes of a block.
        block_bytes: u64,
    },
    /// There is no such amount of memory.
    #[error(
        "this machine can't give {} to the KV pool and {} to the host pool behind it; lower --kv-cache-bytes or \
         --host-cache-bytes",
        Readable(*kv_bytes),
        Readable(*host_bytes)
    )]
    Memory {
        /// Bytes asked for the KV pool.
        kv_bytes: u64,
        /// Bytes asked for the host pool.
        host_bytes: u64,
    },
    /// The weights do not fit beside what runs already.
    #[error(
        "the packed weights take {}, and {} are available; free some memory, or store them smaller with --quantize",
        Readable(*needed),
        Readable(*available)
    )]
    WeightMemory {
        /// Bytes of the packed weights.
        needed: u64,
        /// Bytes to be had.
        available: u64,
    },
    /// Weights and pools together exceed what the process may ever use.
    #[error(
        "the packed weights take {}, the KV pool {} and the host pool behind it {}, but this process may use {} in all; \
         lower --kv-cache-bytes or --host-cache-bytes",
        Readable(*weight_bytes),
        Readable(*kv_bytes),
        Readable(*host_bytes),
        Readable(*total)
    )]
    TotalMemory {
        /// Bytes of the packed weights.
        weight_bytes: u64,
        /// Bytes asked for the KV pool.
        kv_bytes: u64,
        /// Bytes asked for the host pool.
        host_bytes: u64,
        /// Bytes that the process may use.
        total: u64,
    },
    /// The operating system refused threads.
    #[error("cannot start the kernels' threads: {0}")]
    Threads(#[from] std::io::Error),
}

/// Bytes that the keys and values of one token take, all layers together.
pub fn kv_bytes_per_token(config: &ModelConfig, dtype: KvDtype) -> usize {
    kv_layout(config, dtype, 1).block_bytes()
}

fn kv_layout(config: &ModelConfig, dtype: KvDtype, block_tokens: usize) -> KvLayout {
    let ModelConfig { layers, kv_heads, head_dim, .. } = *config;
    KvLayout { dtype, layers, kv_heads, head_dim, block_tokens }
}

fn shard_layout(shard: &Shard, config: &ModelConfig, dtype: KvDtype, block_tokens: usize) -> KvLayout {
    KvLayout { kv_heads: shard.kv_heads.len(), ..kv_layout(config, dtype, block_tokens) }
}

/// A model on CPU cores: steps run on the caller's thread and the pools'.
///
/// With several ranks, each has a shard of the weights and of the KV pool, and threads of its own. Whatever is done to
/// blocks is done on every rank; tokens are chosen from the logits of all. The group fails as one.
pub struct CpuRuntime {
    compute: Compute,
    copies: Copies,
    /// What the last step launched yielded.
    last: Vec<Sampled>,
    took: Option<Duration>,
}

/// What computes: all that a step touches.
struct Compute {
    capabilities: Capabilities,
    isa: Isa,
    group: Group,
    slots: Slots,
    sampler: Sampler,
}

impl CpuRuntime {
    /// Loads a model: checks its tensors, packs them for the kernels, and sets up the KV pool. `progress` hears the
    /// bytes packed so far and in all.
    ///
    /// # Errors
    /// [`Error`], before anything large is allocated unless threads are refused.
    pub fn load(
        model: &ModelDir,
        options: &CpuOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        check(options, model.config())?;
        Self::load_over(model, options, host_group(options.tensor_parallel), progress)
    }

    /// The same over given ends of a group, as many as there are to be ranks.
    fn load_over(
        model: &ModelDir,
        options: &CpuOptions,
        ends: Vec<Box<dyn Collective>>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        let config = model.config();
        let context_tokens = check(options, config)?;
        let tensors = weights::find(model)?;
        let world = ends.len();
        let shards = sharding::shards(config, world, &|ranks| tensors.grain(options.quantize, ranks))?;
        let kv_dtype = options.kv_dtype.unwrap_or_else(|| tensors.kv_dtype().into());
        let layout = |shard| shard_layout(shard, config, kv_dtype, options.block_tokens as usize);
        let block_bytes = shards.iter().map(|shard| layout(shard).block_bytes() as u64).sum::<u64>();
        let blocks = u32::try_from(options.kv_bytes / block_bytes).unwrap_or(u32::MAX);
        let host_blocks = u32::try_from(options.host_bytes / block_bytes).unwrap_or(u32::MAX);
        if blocks == 0 {
            let CpuOptions { kv_bytes, block_tokens, .. } = *options;
            return Err(Error::KvTooSmall { kv_bytes, block_tokens, block_bytes });
        }
        let isa = options.isa.unwrap_or_else(Isa::detect);
        let packed = |shard| tensors.packed_bytes(options.quantize, isa, shard);
        let weight_bytes = shards.iter().map(packed).sum::<u64>();
        let (kv_bytes, host_bytes) = (options.kv_bytes, options.host_bytes);
        // Pools are taken as they are used, so they need not be available now, but must not exceed what there is.
        if let Some(memory) = memory() {
            let all = weight_bytes.saturating_add(kv_bytes).saturating_add(host_bytes);
            if weight_bytes > memory.available {
                return Err(Error::WeightMemory { needed: weight_bytes, available: memory.available });
            }
            if all > memory.total {
                return Err(Error::TotalMemory { weight_bytes, kv_bytes, host_bytes, total: memory.total });
            }
        }
        let no_memory = |_| Error::Memory { kv_bytes, host_bytes };
        let mut pools = Vec::with_capacity(world);
        let mut copiers = Vec::with_capacity(world);
        for shard in &shards {
            let kv = KvPool::new(layout(shard), blocks as usize).map_err(no_memory)?;
            copiers.push(KvCopier::new(&kv, host_blocks as usize).map_err(no_memory)?);
            pools.push(kv);
        }
        let threads = match options.threads {
            Some(threads) => threads,
            None => std::thread::available_parallelism().map_or(1, |threads| threads.get()),
        };
        if threads < world {
            tracing::warn!(
                threads,
                ranks = world,
                "fewer threads than tensor-parallel ranks; using one thread per rank"
            );
        }
        let share = |rank: usize| threads * (rank + 1) / world - threads * rank / world;
        let teams = (0..world).map(|rank| Pool::pinned(share(rank))).collect::<Result<Vec<_>, _>>()?;
        let rank_threads = Pool::new(world)?;
        let mut formats = tensors.format_names(options.quantize, world);
        if world > 1 {
            // The order of sums over ranks.
            formats.push_str(&format!(" tensor-parallel {world}"));
        }
        let fingerprint = models::fingerprint(model, kv_dtype.name(), &formats, isa);
        let weights = pack(&tensors, &shards, options.quantize, isa, &rank_threads, &teams, progress)
            .map_err(|_| Error::WeightMemory { needed: weight_bytes, available: 0 })?;
        let capabilities = Capabilities {
            vocab_size: config.vocab_size as u32,
            context_tokens,
            block_tokens: options.block_tokens,
            blocks,
            host_blocks,
            slots: options.slots,
            batch_tokens: options.batch_tokens,
            depth: 1,
            fingerprint,
        };
        let mut ranks = Vec::with_capacity(world);
        for ((((shard, pool), weights), kv), collective) in
            shards.iter().zip(teams).zip(weights).zip(pools).zip(ends)
        {
            let frequencies = inverse_frequencies(config.head_dim, config.rope_theta, &config.rope_scaling);
            let forward = Forward::new(config, shard, RopeTable::new(frequencies), &capabilities);
            ranks.push(Rank { pool, isa, weights, kv, forward, collective });
        }
        let lead = ranks.remove(0);
        let group = Group::new(lead, ranks, rank_threads);
        tracing::info!(
            model = model.name(),
            isa = isa.name(),
            threads,
            ranks = world,
            pinned = group.is_pinned(),
            weight_bytes = group.weight_bytes(),
            blocks,
            block_bytes,
            "model weights packed"
        );
        let copies = Copies::start(copiers, blocks, host_blocks)?;
        let slots = Slots::new(options.slots as usize);
        let compute = Compute { isa, group, slots, sampler: Sampler::default(), capabilities };
        Ok(Self { compute, copies, last: Vec::new(), took: None })
    }

    /// The same with steps on a thread of their own, so that the next one is planned while one runs.
    ///
    /// # Errors
    /// The operating system refused the thread.
    pub fn overlapped(self) -> Result<Overlapped, Error> {
        Ok(Overlapped::start(self.compute, self.copies)?)
    }

    /// The logits of the last step's sample rows, before penalties and biases; [samples, vocab_size].
    pub fn logits(&self) -> &[f32] {
        self.compute.group.logits()
    }

    /// Bytes of the packed weights: what a step with one token reads, but for keys and values.
    pub fn weight_bytes(&self) -> usize {
        self.compute.group.weight_bytes()
    }

    /// The instruction set it computes with.
    pub fn isa(&self) -> Isa {
        self.compute.isa
    }
}

/// Packs every shard, each on its rank's threads.
fn pack(
    tensors: &Found,
    shards: &[Shard],
    quantize: Option<Quantization>,
    isa: Isa,
    threads: &Pool,
    teams: &[Pool],
    progress: &(dyn Fn(u64, u64) + Sync),
) -> std::io::Result<Vec<Weights>> {
    let total = shards.iter().map(|shard| tensors.file_bytes(shard)).sum();
    let done = AtomicU64::new(0);
    progress(0, total);
    let read = |bytes: u64| progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, total);
    let packed: Vec<_> = shards.iter().map(|_| Mutex::new(None)).collect();
    Group::on_each(threads, shards.len(), &|rank| {
        let weights = tensors.pack(&teams[rank], isa, quantize, &shards[rank], &read);
        *packed[rank].lock().unwrap_or_else(PoisonError::into_inner) = Some(weights);
    });
    let taken =
        packed.into_iter().map(|weights| weights.into_inner().unwrap_or_else(PoisonError::into_inner));
    // A rank that did not get so far panicked, and so did `on_each`.
    taken.flatten().collect()
}

/// Checks every option; the context to serve.
fn check(options: &CpuOptions, config: &ModelConfig) -> Result<u32, Error> {
    let within = |name, value: u64, low: u64, high: u64| {
        if (low..=high).contains(&value) {
            return Ok(());
        }
        Err(Error::Option { name, value, range: format!("from {low} to {high}") })
    };
    within("threads", options.threads.unwrap_or(1) as u64, 1, 1024)?;
    within("tensor_parallel", options.tensor_parallel as u64, 1, RANKS_MAX as u64)?;
    within("slots", options.slots.into(), 1, 1 << 20)?;
    within("batch_tokens", options.batch_tokens.into(), 1, 1 << 20)?;
    within("block_tokens", options.block_tokens.into(), 1, 1 << 12)?;
    if !options.block_tokens.is_power_of_two() {
        let value = options.block_tokens.into();
        return Err(Error::Option { name: "block_tokens", value, range: "a power of two".to_owned() });
    }
    let context_tokens = options.context_tokens.unwrap_or(config.context_tokens);
    within("context_tokens", context_tokens.into(), 2, config.context_tokens.into())?;
    Ok(context_tokens)
}

impl Compute {
    /// One step, from a batch that was checked. `last` is what the step before yielded, and gets what this one does.
    fn step(&mut self, batch: &mut Batch, last: &mut Vec<Sampled>) -> Result<Duration, super::Error> {
        let begun = Instant::now();
        batch.feed(last)?;
        last.clear();
        self.slots.check(batch)?;
        self.group.step(batch, &self.capabilities)?;
        self.sampler.run(batch, &mut self.slots, &self.group, self.isa, last);
        Ok(begun.elapsed())
    }
}

impl Runtime for CpuRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.compute.capabilities
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), super::Error> {
        self.compute.slots.attach(slot, setup)
    }

    fn detach(&mut self, slot: Slot) {
        self.compute.slots.detach(slot);
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), super::Error> {
        batch.check(&self.compute.capabilities)?;
        self.took = Some(self.compute.step(batch, &mut self.last)?);
        Ok(())
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, super::Error> {
        sampled.clear();
        let took =
            self.took.take().ok_or_else(|| super::Error::Malformed("no step was launched".to_owned()))?;
        sampled.append(&mut self.last);
        Ok(took)
    }

    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), super::Error> {
        self.copies.submit(transfer)
    }

    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>) {
        self.copies.finished(finished);
    }

    fn wait_for_transfer(&mut self) -> Result<(), super::Error> {
        self.copies.wait()
    }
}

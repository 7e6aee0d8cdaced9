//! Runs the model on an NVIDIA GPU, or on a tensor-parallel group of them.
//!
//! One thread owns a GPU ([`owner`]) and enqueues steps; the engine's thread waits for their results ([`ranks`]). A step is one
//! copy of packed metadata ([`metadata`]), the forward pass ([`forward`]) — decoding as a captured graph of the next
//! larger bucket — and one copy of results; tokens that the next step needs stay on the device. Products are made by
//! cuBLASLt ([`products`]) or kernels of our own, whichever is the fastest ([`trials`]), and in the deterministic mode by one
//! of our own, whose bits do not depend on the batch.
//! Swapped blocks are moved by the copy engines ([`swap`]).
//!
//! In a group each GPU has a shard of the weights and of every block, and runs the same steps on the same metadata. Twice a
//! layer, and for the logits, they tell each other what they have ([`gpu::Peers`]), through NCCL ([`nccl`]) on the stream
//! that computes; then each samples for itself from the same logits, so each knows the same tokens and nobody's host is asked.
//!
//! Everything but driver, products, NCCL and swap is written against [`gpu::Gpu`], and tested on the kernels' harness.

mod catalog;
mod compute;
mod division;
mod driver;
mod forward;
mod found;
mod function;
mod gpu;
mod metadata;
mod nccl;
mod owner;
mod products;
mod ranks;
mod sizing;
mod slots;
mod staging;
mod swap;
mod swaps;
#[cfg(test)]
mod tests;
mod trials;
mod tuning;
mod weights;

use std::sync::Arc;
use std::time::Duration;

pub use inflight_kernels::cuda::KvStore;
use inflight_kernels::cuda::{
    Device, DeviceError, GemmParams, Half, SamplingResult, gemm, skinny_gemm, skinny_takes,
};
use inflight_worker_core::Transfer;

use super::sharding::{self, Indivisible, RANKS_MAX};
use super::{Batch, Capabilities, Runtime, Sampled, Slot, SlotSetup, TransferDone};
use crate::models::{self, ModelDir};
use compute::check_model;
use division::Division;
pub use found::Unavailable;
use gpu::Matmul;
use owner::{Command, DEPTH, Job, gone};
use ranks::{Done, Ranks};
use swap::Swap;
use swaps::Swaps;
pub use trials::Tuned;

/// How a [`CudaRuntime`] is sized.
#[derive(Debug, Clone)]
pub struct CudaOptions {
    /// Which GPUs: a single one, or those of a tensor-parallel group by rank, all different and of one kind.
    pub gpus: Vec<usize>,
    /// A single GPU gets a communicator, too, and asks it as ranks of a group do: it changes no bit, and shows that
    /// it can be asked.
    pub lone_communicator: bool,
    /// The part of each one's memory to use, in (0, 1]: weights, buffers, and the KV pool in what is left.
    pub utilization: f32,
    /// Most bytes of each one's KV pool, if it is to be smaller than that.
    pub kv_bytes: Option<u64>,
    /// Most bytes of the host pool behind them, for swapped sequences; 0: none.
    pub host_bytes: u64,
    /// Tokens in a KV block; a power of two.
    pub block_tokens: u32,
    /// Sequences that may be attached at once.
    pub slots: u32,
    /// Most tokens in one batch.
    pub batch_tokens: u32,
    /// Most tokens of one sequence; the model's own limit if not given.
    pub context_tokens: Option<u32>,
    /// How keys and values are stored.
    pub kv_store: KvStore,
    /// The bits of an answer do not depend on the batch, at a price.
    pub deterministic: bool,
    /// Decoding runs as captured graphs.
    pub graphs: bool,
    /// The ways to make each product are timed at load, and the fastest is taken.
    pub autotune: bool,
    /// Kernels begin while those before them end, where GPU and driver can do that (compute capability 9.0); it changes no bit.
    pub overlap: bool,
}

/// Why a runtime can't be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model is unusable.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// There is no GPU to use.
    #[error("cannot compute on CUDA: {0}; --device cpu computes on the host")]
    Unavailable(#[from] Unavailable),
    /// The model can't be divided among so many GPUs.
    #[error(transparent)]
    Indivisible(#[from] Indivisible),
    /// An option is out of its range.
    #[error("{name} is {value}; it must be {range}")]
    Option {
        /// The option.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        range: String,
    },
    /// It does not fit the GPU.
    #[error(
        "the model does not fit {name}: {missing} MiB are missing of the {allowed} MiB that it may use of {total} (in MiB: \
         {parts}); lower {levers}, raise --gpu-memory-utilization, end what else uses the GPU, or take a smaller model"
    )]
    Memory {
        /// The GPU.
        name: String,
        /// MiB missing for a single KV block.
        missing: u64,
        /// MiB that may be used.
        allowed: u64,
        /// MiB of the GPU.
        total: u64,
        /// What takes how many MiB, the largest first.
        parts: String,
        /// What to lower, that with the largest effect first.
        levers: String,
    },
    /// The device refused or failed.
    #[error("the GPU failed while loading: {0}")]
    Device(String),
    /// The operating system refused a thread.
    #[error("cannot start the GPU's thread: {0}")]
    Threads(#[from] std::io::Error),
}

impl Error {
    fn of(error: DeviceError, found: &found::Found) -> Self {
        match error {
            DeviceError::Memory { bytes } => Self::Device(format!(
                "{} has no {} MiB left; another process may have taken them: lower --gpu-memory-utilization",
                found.name,
                mebibytes(bytes)
            )),
            failed @ DeviceError::Failed { .. } => Self::Device(failed.to_string()),
        }
    }
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// How many GPUs the driver sees; 0 without one.
pub fn count() -> u32 {
    found::count()
}

/// Whether these GPUs can be used: all are there, and where there are several, they are of one kind and NCCL is there.
///
/// # Errors
/// [`Unavailable`], saying why not.
pub fn available(gpus: &[usize]) -> Result<(), Unavailable> {
    found::find_all(gpus)?;
    if gpus.len() > 1 {
        nccl::release()?;
    }
    Ok(())
}

/// Whether a model can be divided among so many GPUs, and kernels exist for what each computes of it.
///
/// # Errors
/// [`Error::Indivisible`], or [`Error::Model`] naming the field at fault.
pub fn supports(model: &ModelDir, ranks: usize) -> Result<(), Error> {
    divide(model, &weights::find(model)?, ranks).map(drop)
}

/// A model's shards, each of a shape that kernels exist for.
fn divide(model: &ModelDir, tensors: &weights::Found, ranks: usize) -> Result<Vec<sharding::Shard>, Error> {
    let config = model.config();
    // Before it is divided: what does not fit as a whole fits in no part.
    check_model(config, 1)?;
    let shards = sharding::shards(config, ranks, &|_| tensors.grain())?;
    for shard in &shards {
        check_model(&shard.config(config), ranks)?;
    }
    Ok(shards)
}

/// A model on a GPU, or on a tensor-parallel group of them.
pub struct CudaRuntime {
    capabilities: Capabilities,
    // Dropped before the threads that hold the pools it copies from.
    swaps: Option<Swaps<Swap>>,
    ranks: Ranks,
    in_flight: u32,
    tuned: Vec<Tuned>,
}

impl CudaRuntime {
    /// Loads a model: checks its tensors, copies them to the GPUs, each its shard, sets up the KV pool in what is left,
    /// captures graphs. `progress` hears the bytes copied so far and in all.
    ///
    /// # Errors
    /// [`Error`], for most reasons before anything large is copied.
    pub fn load(
        model: &ModelDir,
        options: &CudaOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        let config = model.config();
        let context_tokens = check(options, config)?;
        let found = found::find_all(&options.gpus)?;
        let tensors = Arc::new(weights::find(model)?);
        let shards = divide(model, &tensors, options.gpus.len())?;
        let world = shards.len();
        let grouped = world > 1 || options.lone_communicator;
        let group = if grouped { Some(nccl::Group::open(&options.gpus)?) } else { None };
        let mut arithmetic = format!(
            "cuda sm_{}{} {}{}",
            found[0].compute.0,
            found[0].compute.1,
            match (options.deterministic, options.autotune) {
                (true, _) => "deterministic".to_owned(),
                // Which algorithms it comes to differs from start to start, as rounding does from batch to batch.
                (false, true) => format!("{} autotuned", products::library()),
                (false, false) => products::library(),
            },
            match options.kv_store {
                KvStore::Half => "",
                KvStore::Fp8 => " kv e4m3",
            }
        );
        if world > 1 {
            // The order of sums over ranks.
            arithmetic.push_str(&format!(" tensor-parallel {world} {}", nccl::release()?));
        }
        let fingerprint = models::fingerprint_of(model, tensors.half().dtype().name(), &arithmetic);
        let name = found[0].name.clone();
        let jobs = found.into_iter().zip(Division::of(shards, grouped)).map(|(found, division)| Job {
            found,
            division,
            config: config.clone(),
            tensors: Arc::clone(&tensors),
            options: options.clone(),
            context_tokens,
            fingerprint: fingerprint.clone(),
            group: group.clone(),
        });
        let (ranks, mut loaded) = Ranks::start(jobs.collect(), progress)?;
        let capabilities = loaded[0].capabilities.clone();
        let swaps = match capabilities.host_blocks {
            0 => None,
            host_blocks => {
                let swap = |rank: &owner::Loaded| {
                    let (context, pool) = (&rank.context, rank.pool);
                    context.bind_to_thread().map_err(|error| Error::Device(driver::explain(error)))?;
                    let swap = Swap::new(context, pool.0, pool.1, capabilities.blocks, host_blocks);
                    swap.map_err(|error| Error::Device(error.to_string()))
                };
                Some(Swaps::new(loaded.iter().map(swap).collect::<Result<_, _>>()?))
            }
        };
        tracing::info!(
            model = model.name(),
            gpu = name,
            ranks = world,
            products = loaded[0].products,
            weight_bytes = loaded.iter().map(|rank| rank.weight_bytes).sum::<u64>(),
            blocks = capabilities.blocks,
            block_bytes = loaded.iter().map(|rank| rank.pool.1).sum::<usize>(),
            host_blocks = capabilities.host_blocks,
            graphs = loaded[0].graphs,
            deterministic = options.deterministic,
            "model loaded on the GPU"
        );
        let tuned = std::mem::take(&mut loaded[0].tuned);
        Ok(Self { capabilities, swaps, ranks, in_flight: 0, tuned })
    }

    /// What was chosen to make products by on the first GPU, and how long each takes; empty where nothing was timed.
    pub fn tuned(&self) -> &[Tuned] {
        &self.tuned
    }

    /// The logits of the last step's sample rows; [samples, vocab_size]. For tests: it waits for the GPU.
    ///
    /// # Errors
    /// [`super::Error::Device`].
    pub fn logits(&mut self) -> Result<Vec<f32>, super::Error> {
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        self.ranks.ask(Command::Logits(reply))?;
        answer.recv().map_err(|_| gone())?
    }
}

/// Checks every option; the context to serve.
fn check(options: &CudaOptions, config: &models::ModelConfig) -> Result<u32, Error> {
    let within = |name, value: u64, low: u64, high: u64| {
        if (low..=high).contains(&value) {
            return Ok(());
        }
        Err(Error::Option { name, value: value.to_string(), range: format!("from {low} to {high}") })
    };
    within("tensor_parallel", options.gpus.len() as u64, 1, RANKS_MAX as u64)?;
    let twice = options.gpus.iter().enumerate().find(|(i, gpu)| options.gpus[..*i].contains(gpu));
    if let Some((_, gpu)) = twice {
        let (value, range) = (format!("GPU {gpu} twice"), "different GPUs, one a rank".to_owned());
        return Err(Error::Option { name: "gpu", value, range });
    }
    if options.deterministic && options.gpus.len() > 2 {
        let value = format!("on, with {} ranks", options.gpus.len());
        // Two numbers have one sum in any order; NCCL adds more of them in an order that depends on their place in the batch.
        let range = "off, or on with 2 ranks at most: NCCL's sums over more depend on the batch".to_owned();
        return Err(Error::Option { name: "deterministic", value, range });
    }
    within("slots", options.slots.into(), 1, 4096)?;
    within("batch_tokens", options.batch_tokens.into(), 1, 1 << 16)?;
    within("block_tokens", options.block_tokens.into(), 1, 1 << 12)?;
    let least = options.kv_store.block_tokens_min();
    if options.block_tokens < least {
        let value = options.block_tokens.to_string();
        let range =
            format!("at least {least} with a KV cache in 8 bits, whose scales are copied four at a time");
        return Err(Error::Option { name: "block_tokens", value, range });
    }
    if !options.block_tokens.is_power_of_two() {
        let value = options.block_tokens.to_string();
        return Err(Error::Option { name: "block_tokens", value, range: "a power of two".to_owned() });
    }
    if !(options.utilization > 0.0 && options.utilization <= 1.0) {
        let (name, value) = ("gpu_memory_utilization", options.utilization.to_string());
        return Err(Error::Option { name, value, range: "above 0 and at most 1".to_owned() });
    }
    let context_tokens = options.context_tokens.unwrap_or(config.context_tokens);
    within("context_tokens", context_tokens.into(), 2, config.context_tokens.into())?;
    Ok(context_tokens)
}

/// Our own kernels for products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OwnProduct {
    /// Takes any product; its bits do not depend on the number of rows. In the deterministic mode it makes all of them.
    Tiled,
    /// Takes few rows, faster. Its bits are others, so the deterministic mode, in which rows may be many, has no use for it.
    Skinny,
}

impl OwnProduct {
    /// Those that take a product.
    fn taking(p: &Matmul) -> impl Iterator<Item = Self> {
        [Self::Tiled, Self::Skinny].into_iter().filter(|own| own.takes(p))
    }

    /// Whether it takes a product.
    fn takes(self, p: &Matmul) -> bool {
        match self {
            Self::Tiled => true,
            Self::Skinny => skinny_takes(p.m, p.k) && (p.x | p.weight).is_multiple_of(16),
        }
    }

    /// What it is called in logs.
    fn name(self) -> &'static str {
        match self {
            Self::Tiled => "tiled",
            Self::Skinny => "skinny",
        }
    }

    /// Makes a product that it takes.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn make<D: Device>(self, device: &D, half: Half, p: &Matmul) -> Result<(), DeviceError> {
        let params = GemmParams {
            x: p.x,
            weight: p.weight,
            bias: p.bias.map_or(0, |bias| bias.wide),
            out: p.y,
            m: p.m,
            n: p.n,
            k: p.k,
            stride: p.stride,
        };
        // SAFETY: passed on to the caller.
        unsafe {
            match self {
                Self::Tiled => gemm(device, half, p.wide, &params),
                Self::Skinny => skinny_gemm(device, half, p.wide, &params),
            }
        }
    }
}

impl Runtime for CudaRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), super::Error> {
        if slot >= self.capabilities.slots {
            let slots = self.capabilities.slots;
            return Err(super::Error::Malformed(format!("slot {slot} is out of range: there are {slots}")));
        }
        // Only penalties need to know what came before; their number counts always.
        let history = setup.sampling.needs_history();
        let prompt = if history { setup.prompt.to_vec() } else { Vec::new() };
        self.ranks.send(Command::Attach {
            slot,
            sampling: setup.sampling.clone(),
            choice: setup.choice,
            prompt,
            generated: setup.generated.to_vec(),
            eos_token_ids: setup.eos_token_ids.to_vec(),
        })
    }

    fn detach(&mut self, slot: Slot) {
        // If the thread is gone, so is the slot; the next step says so.
        let _ = self.ranks.send(Command::Detach(slot));
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), super::Error> {
        batch.check(&self.capabilities)?;
        if self.in_flight == DEPTH {
            return Err(super::Error::Malformed("as many steps are launched as there may be".to_owned()));
        }
        self.ranks.launch(batch)?;
        self.in_flight += 1;
        Ok(())
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, super::Error> {
        if self.in_flight == 0 {
            return Err(super::Error::Malformed("no step was launched".to_owned()));
        }
        self.in_flight -= 1;
        sampled.clear();
        let Done { place, wanted } = self.ranks.complete()?;
        let place = self.ranks.place(place);
        // SAFETY: the copy to it is done, and the next one to this place comes with a launch after this.
        let bytes = unsafe { place.results.as_slice() };
        for (chunk, wanted) in bytes.chunks_exact(size_of::<SamplingResult>()).zip(wanted) {
            // SAFETY: a plain struct of numbers, whole in the chunk.
            let result = unsafe { chunk.as_ptr().cast::<SamplingResult>().read_unaligned() };
            sampled.push(compute::sampled(&result, wanted));
        }
        Ok(Duration::from_secs_f64(f64::from(place.done.since(&place.begin).max(0.0)) / 1e3))
    }

    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), super::Error> {
        match &mut self.swaps {
            Some(swaps) => swaps.start(transfer),
            None => Err(super::Error::Malformed("there is no host pool to transfer to".to_owned())),
        }
    }

    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>) {
        if let Some(swaps) = &mut self.swaps {
            swaps.finished(finished);
        }
    }

    fn wait_for_transfer(&mut self) -> Result<(), super::Error> {
        self.swaps.as_mut().map_or(Ok(()), Swaps::wait)
    }
}

//! Device thread: owns a GPU, loads the model or its shard, and enqueues steps in the order of commands. It
//! never waits for a step; the receiver of its result does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, sync_channel};
use std::thread::JoinHandle;

use inflight_contract::SamplingParams;
use inflight_kernels::cuda::{DeviceError, Half, SamplingResult};
use metrics::Gauge;

use super::autotune::{GemmBench, Tuned};
use super::device_memory::{DeviceMemory, PinnedMemory};
use super::driver::{CudaDevice, CudaGraph};
use super::forward::windows;
use super::gpu::{Gpu, GpuMemory};
use super::gpu_info::GpuInfo;
use super::memory_plan::{
    BufferLimits, MemoryBudget, MemoryComponent, PARTIALS, PoolSize, RESERVE_BYTES, WORKSPACE_BYTES,
    allocated_bytes, buckets, component_table, largest_bucket, options_to_lower, pool_blocks, total_bytes,
};
use super::metadata::{MetadataCapacity, MetadataLayout, StepShape, bucket_layout};
use super::model_gemms::model_gemms;
use super::model_runner::{ModelRunner, RunnerModes};
use super::nccl::{NcclGroup, NcclRank};
use super::shard_plan::ShardPlan;
use super::slots::device_error;
use super::stream::CudaEvent;
use super::{CudaOptions, Error as LoadError, algorithm_search, weights};
use crate::metrics::DEVICE_COMMANDS;
use crate::models::ModelConfig;
use crate::runtime::{self, Batch, Capabilities, Slot};

/// Maximum number of steps launched and not completed.
pub(super) const DEPTH: u32 = 2;
/// Bound of the command queue: two steps, each attaching and detaching every slot at most.
const COMMANDS_MAX: usize = 1 << 14;

/// Command to a device thread.
#[derive(Clone)]
pub(super) enum DeviceCommand {
    Attach {
        slot: Slot,
        sampling: Arc<SamplingParams>,
        choice: u32,
        prompt: Vec<u32>,
        generated: Vec<u32>,
        eos_token_ids: Vec<u32>,
    },
    Detach(Slot),
    Step(Arc<Batch>),
    /// Requests the logits of the last step.
    Logits(SyncSender<Result<Vec<f32>, runtime::Error>>),
}

/// Enqueued step, or the reason why it was not enqueued.
pub(super) struct LaunchedStep {
    pub(super) outcome: Result<(), runtime::Error>,
    /// Index of the result slot that this step writes to.
    pub(super) result_slot: usize,
    /// Whether log probabilities are requested, by sample.
    pub(super) logprobs: Vec<bool>,
    /// The step's batch, returned so that its buffers can be reused once no rank holds it.
    pub(super) batch: Arc<Batch>,
}

/// Pinned results and events of a step in flight, shared with the thread that waits for it.
pub(super) struct ResultSlot {
    pub(super) results: PinnedMemory,
    pub(super) begin: CudaEvent,
    pub(super) done: CudaEvent,
}

/// Result of loading a rank's shard.
pub(super) struct LoadedRank {
    pub(super) capabilities: Capabilities,
    pub(super) result_slots: Arc<Vec<ResultSlot>>,
    pub(super) context: Arc<cudarc::driver::CudaContext>,
    /// Address of the KV pool, and bytes per block.
    pub(super) pool: (u64, usize),
    pub(super) gemm_backend: &'static str,
    pub(super) weight_bytes: u64,
    pub(super) graphs: usize,
    pub(super) tuned: Vec<Tuned>,
}

/// Load event of a rank.
pub(super) enum LoadEvent {
    /// Bytes copied so far, and total bytes.
    Progress(u64, u64),
    Done(Result<Box<LoadedRank>, LoadError>),
}

/// Sender of load events, tagged with the rank.
pub(super) type LoadEventSender = Sender<(usize, LoadEvent)>;

/// Handle to the device thread.
pub(super) struct DeviceThread {
    commands: Option<SyncSender<DeviceCommand>>,
    /// Commands sent and not yet received by the thread.
    queued: Gauge,
    /// Launched steps, in order.
    pub(super) launched: Receiver<LaunchedStep>,
    thread: Option<JoinHandle<()>>,
}

/// Input of a device thread: the GPU, and what to load on it.
pub(super) struct LoadJob {
    pub(super) gpu_info: GpuInfo,
    /// Configuration of the unsharded model.
    pub(super) config: ModelConfig,
    pub(super) shard_plan: ShardPlan,
    pub(super) tensors: Arc<weights::SourceTensors>,
    pub(super) options: CudaOptions,
    pub(super) context_tokens: u32,
    pub(super) fingerprint: String,
    /// Communicators of the group; `None` without collectives.
    pub(super) group: Option<Arc<NcclGroup>>,
}

impl LoadJob {
    fn rank(&self) -> usize {
        self.shard_plan.shard().rank
    }

    /// Fails the group, so that ranks waiting for this one stop.
    fn fail(&self, reason: &str) {
        if let Some(group) = &self.group {
            group.fail(self.rank(), reason);
        }
    }

    /// Waits until all ranks have arrived, and returns the minimum of their values.
    fn barrier_min(&self, value: u32) -> Result<u32, LoadError> {
        let min = self.group.as_ref().map_or(Ok(value), |group| group.barrier_min(value));
        min.map_err(|failure| LoadError::Device(failure.to_string()))
    }

    /// Returns the group's failure, if any.
    fn failure(&self) -> Option<runtime::Error> {
        let failure = self.group.as_ref().and_then(|group| group.failure());
        failure.map(|failure| runtime::Error::Device(failure.to_string()))
    }
}

impl DeviceThread {
    /// Starts the thread, which loads the model and sends its progress to `events`.
    pub(super) fn start(job: LoadJob, events: LoadEventSender) -> Result<Self, LoadError> {
        let (commands, inbox) = sync_channel(COMMANDS_MAX);
        let (outbox, launched) = sync_channel(DEPTH as usize);
        let queued = metrics::gauge!(DEVICE_COMMANDS);
        queued.set(0.0);
        let dequeued = queued.clone();
        let name = if job.shard_plan.world() == 1 { "gpu".to_owned() } else { format!("gpu-{}", job.rank()) };
        let work = move || {
            run(&job, &events, inbox.iter().inspect(|_| dequeued.decrement(1.0)), &outbox);
        };
        let thread = std::thread::Builder::new().name(name).spawn(work)?;
        Ok(Self { commands: Some(commands), queued, launched, thread: Some(thread) })
    }

    pub(super) fn send(&self, command: DeviceCommand) -> Result<(), runtime::Error> {
        let Some(commands) = &self.commands else { return Err(thread_ended()) };
        self.queued.increment(1.0);
        commands.send(command).map_err(|_| thread_ended())
    }

    /// Closes the command queue; the thread ends after the commands in it.
    pub(super) fn close(&mut self) {
        self.commands = None;
    }

    fn stop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // It may be blocked on sending a launched step.
            while self.launched.recv().is_ok() {}
            // A panic was already logged by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the error of calls after the device thread has ended.
pub(super) fn thread_ended() -> runtime::Error {
    runtime::Error::Device("the GPU's device thread has ended".to_owned())
}

/// Body of the device thread: loads the model, then serves commands.
fn run(
    job: &LoadJob,
    events: &LoadEventSender,
    inbox: impl Iterator<Item = DeviceCommand>,
    outbox: &SyncSender<LaunchedStep>,
) {
    // Dropped last: a communicator ends after the graphs captured with it.
    let nccl = job.group.as_ref().map(|group| Rc::new(group.rank(job.rank())));
    // The receiver is gone if the worker has aborted loading.
    let done = |outcome| events.send((job.rank(), LoadEvent::Done(outcome))).is_ok();
    let panicked = "the GPU's device thread panicked; see the log above";
    let loading = AssertUnwindSafe(|| DeviceState::load(job, events, nccl.clone()));
    let (mut state, loaded) = match catch_unwind(loading) {
        Ok(Ok(loaded)) => loaded,
        Ok(Err(error)) => {
            // In this order, so that the cause is reported before its consequences on other ranks.
            let reason = error.to_string();
            done(Err(error));
            job.fail(&reason);
            return;
        }
        Err(_) => {
            done(Err(LoadError::Device(panicked.to_owned())));
            job.fail(panicked);
            return;
        }
    };
    if !done(Ok(Box::new(loaded))) {
        return;
    }
    let serving = AssertUnwindSafe(|| serve(job, &mut state, inbox, outbox));
    if catch_unwind(serving).is_err() {
        // Before the device state is dropped, which waits for collectives of other ranks.
        job.fail(panicked);
    }
}

/// Serves commands until the queue is closed.
fn serve(
    job: &LoadJob,
    state: &mut DeviceState,
    inbox: impl Iterator<Item = DeviceCommand>,
    outbox: &SyncSender<LaunchedStep>,
) {
    let mut result_slot = 0;
    for command in inbox {
        match command {
            DeviceCommand::Attach { slot, sampling, choice, prompt, generated, eos_token_ids } => {
                let setup = runtime::SlotSetup {
                    sampling,
                    choice,
                    prompt: &prompt,
                    generated: &generated,
                    eos_token_ids: &eos_token_ids,
                };
                if let Err(error) = state.runner.attach(&state.device, slot, &setup) {
                    // The slot stays free, so the step that samples from it fails with an error. Other ranks
                    // would run it.
                    tracing::error!(slot, %error, "cannot attach sequence to its slot");
                    job.fail(&error.to_string());
                }
            }
            DeviceCommand::Detach(slot) => state.runner.detach(slot),
            DeviceCommand::Step(batch) => {
                let mut logprobs = Vec::new();
                let outcome = match job.failure() {
                    Some(failure) => Err(failure),
                    None => state.step(&batch, result_slot, &mut logprobs),
                };
                if let Err(error @ runtime::Error::Device(_)) = &outcome {
                    job.fail(&error.to_string());
                }
                if outbox.send(LaunchedStep { outcome, result_slot, logprobs, batch }).is_err() {
                    return; // the runtime is gone
                }
                result_slot = (result_slot + 1) % state.result_slots.len();
            }
            DeviceCommand::Logits(reply) => {
                let _ = reply.send(state.logits());
            }
        }
    }
}

/// Runs collectives of all sizes once, so that NCCL allocates connections and buffers at load: all-reduces of
/// up to `elements` elements and all-gathers of up to `part` bytes per rank, in `buffer`.
fn warm_up_collectives(
    device: &CudaDevice,
    half: Half,
    buffer: &DeviceMemory,
    elements: usize,
    part: usize,
) -> Result<(), DeviceError> {
    let Some(collective) = device.collective() else { return Ok(()) };
    // NCCL's algorithm depends on the size.
    let sizes =
        |max: usize| (4..).map(|bits| 1usize << (2 * bits)).take_while(move |size| *size < max).chain([max]);
    for elements in sizes(elements) {
        // SAFETY: `buffer` has room for `elements` 16-bit elements.
        unsafe { collective.all_reduce(half, buffer.address(), elements) }?;
    }
    for part in sizes(part) {
        // SAFETY: `buffer` has room for the parts of all ranks.
        unsafe { collective.all_gather(buffer.address(), part) }?;
    }
    // The caller frees the buffer.
    device.stream.synchronize()
}

/// GPU with a loaded model.
struct DeviceState {
    // Fields drop in this order: allocations and graphs before the device.
    runner: ModelRunner<CudaDevice>,
    /// Captured graphs with their buckets.
    graphs: Vec<(u32, CudaGraph)>,
    metadata: DeviceMemory,
    result_slots: Arc<Vec<ResultSlot>>,
    packed: Vec<u8>,
    /// Samples of the last step.
    samples: usize,
    device: CudaDevice,
}

impl DeviceState {
    /// Loads a rank's shard: weights, buffers, KV pool, autotuned GEMMs and captured graphs.
    fn load(
        job: &LoadJob,
        events: &LoadEventSender,
        nccl: Option<Rc<NcclRank>>,
    ) -> Result<(Self, LoadedRank), LoadError> {
        let LoadJob { gpu_info, config, shard_plan, tensors, options, context_tokens, fingerprint, .. } = job;
        let (rank, shard) = (job.rank(), shard_plan.shard());
        let load_error = |error: DeviceError| LoadError::from_device(error, gpu_info);
        let device = CudaDevice::open(gpu_info, options.deterministic, nccl).map_err(load_error)?;
        device.set_overlap(options.overlap);
        let (half, shapes) = (tensors.half(), shard_plan.shapes(config));
        let weight_bytes = tensors.bytes(shard);
        let samples = options.slots.max(largest_bucket(options.slots));
        let rows = options.batch_tokens.max(samples);
        let table_entries =
            options.slots as usize * (*context_tokens as usize).div_ceil(options.block_tokens as usize);
        let capacity = MetadataCapacity {
            rows: rows as usize,
            samples: samples as usize,
            items: (rows + PARTIALS) as usize,
            copies: options.slots as usize,
            plans: windows(config).0.len(),
        };
        let metadata_bytes = MetadataLayout::new(&capacity).bytes(table_entries.min(1 << 24));
        let limits = BufferLimits {
            rows: rows.into(),
            samples: samples.into(),
            slots: options.slots.into(),
            context: (*context_tokens).into(),
            metadata: metadata_bytes as u64,
        };
        let components = shapes.components(&limits);
        let block_bytes = shapes.block_bytes(options.block_tokens, options.kv_store);
        let (free, total) = device.memory().map_err(load_error)?;
        let size_pool = |taken: u64| {
            let budget = MemoryBudget { total, free, taken };
            match pool_blocks(budget, options.utilization, &components, block_bytes, options.kv_bytes) {
                PoolSize::Blocks(blocks) => Ok(blocks),
                PoolSize::Missing(missing) => {
                    let weights = MemoryComponent { name: "weights", option: "", bytes: taken };
                    let all: Vec<MemoryComponent> = components.iter().copied().chain([weights]).collect();
                    Err(LoadError::Memory {
                        name: gpu_info.name.clone(),
                        missing: super::mebibytes(missing),
                        allowed: super::mebibytes(budget.allowed(options.utilization)),
                        total: super::mebibytes(total),
                        components: component_table(&all),
                        options: options_to_lower(&components),
                    })
                }
            }
        };
        // Fails before minutes of loading.
        size_pool(tensors.allocated_bytes(shard))?;
        let report = |done, total| {
            // The receiver is gone if the worker has aborted loading.
            let _ = events.send((rank, LoadEvent::Progress(done, total)));
        };
        let weights = tensors.upload(&device, shard, &report).map_err(load_error)?;
        device.stream.synchronize().map_err(load_error)?;
        // Libraries allocate their memory before the KV pool is sized.
        if device.collective().is_some() {
            let elements = rows as usize * shapes.hidden as usize;
            let gathered = samples as usize * shapes.gathered as usize * 4;
            let buffer = device.alloc((elements * 2).max(gathered)).map_err(load_error)?;
            device.zero(&buffer).map_err(load_error)?;
            // Allocations may synchronize all devices of the process, which would deadlock with ranks that
            // wait in a collective.
            job.barrier_min(0)?;
            warm_up_collectives(&device, half, &buffer, elements, gathered / shard_plan.world())
                .map_err(load_error)?;
        }
        let gemms = model_gemms(&weights, &shapes, shard_plan, config.vocab_size);
        let tuned = match GemmBench::new(&device, half, &gemms, rows, samples).map_err(load_error)? {
            Some(bench) => {
                let tuned = match options.autotune {
                    true => {
                        let row_counts = algorithm_search::row_counts(buckets(options.slots), rows);
                        bench.tune(&gemms, &row_counts, samples).map_err(load_error)?
                    }
                    false => Vec::new(),
                };
                bench.run_all(&gemms, rows, samples).map_err(load_error)?;
                tuned
            }
            None => Vec::new(),
        };
        let (left, _) = device.memory().map_err(load_error)?;
        let taken = free.saturating_sub(left);
        let blocks = size_pool(taken)?;
        let blocks = job.barrier_min(blocks)?;
        // Each rank's host pool holds its shard of every block.
        let host_bytes = options.host_bytes / shard_plan.world() as u64;
        let capabilities = Capabilities {
            vocab_size: config.vocab_size as u32,
            context_tokens: *context_tokens,
            block_tokens: options.block_tokens,
            blocks,
            host_blocks: u32::try_from(host_bytes / block_bytes).unwrap_or(u32::MAX),
            slots: options.slots,
            batch_tokens: options.batch_tokens,
            depth: DEPTH,
            fingerprint: fingerprint.clone(),
        };
        let modes = RunnerModes {
            store: options.kv_store,
            deterministic: options.deterministic,
            buckets: options.graphs,
        };
        let runner =
            ModelRunner::new(&device, config, shard_plan.clone(), half, weights, capabilities.clone(), modes)
                .map_err(load_error)?;
        let metadata = device.alloc(metadata_bytes).map_err(load_error)?;
        let result_slot = || -> Result<ResultSlot, DeviceError> {
            Ok(ResultSlot {
                results: PinnedMemory::new(&device.context, samples as usize * size_of::<SamplingResult>())?,
                begin: CudaEvent::new(&device.context)?,
                done: CudaEvent::new(&device.context)?,
            })
        };
        let result_slots = (0..=DEPTH).map(|_| result_slot()).collect::<Result<Vec<_>, DeviceError>>();
        let result_slots = Arc::new(result_slots.map_err(load_error)?);
        let mut state = Self {
            runner,
            graphs: Vec::new(),
            metadata,
            result_slots,
            packed: Vec::new(),
            samples: 0,
            device,
        };
        // Allocations may synchronize all devices of the process, which would deadlock with ranks that wait
        // in a collective.
        job.barrier_min(0)?;
        if options.graphs {
            state.capture(options.slots).map_err(load_error)?;
        }
        let (left, _) = state.device.memory().map_err(load_error)?;
        let pool = allocated_bytes(u64::from(blocks) * block_bytes);
        // The workspace was allocated before memory was measured, and the reserve is never allocated.
        let planned = taken + total_bytes(&components) + pool - RESERVE_BYTES - WORKSPACE_BYTES;
        let unplanned = free.saturating_sub(left).saturating_sub(planned);
        tracing::info!(
            rank,
            total_mib = super::mebibytes(total),
            weights_mib = super::mebibytes(taken),
            pool_mib = super::mebibytes(pool),
            others_mib = component_table(&components),
            unplanned_mib = super::mebibytes(unplanned),
            "GPU memory allocated; nothing is allocated from here on"
        );
        if unplanned > RESERVE_BYTES {
            tracing::warn!(
                rank,
                unplanned_mib = super::mebibytes(unplanned),
                reserve_mib = super::mebibytes(RESERVE_BYTES),
                "less free GPU memory than planned; lower --gpu-memory-utilization if no other process uses it"
            );
        }
        let loaded = LoadedRank {
            capabilities,
            result_slots: Arc::clone(&state.result_slots),
            context: Arc::clone(&state.device.context),
            pool: (state.runner.forward.kv().address(), block_bytes as usize),
            gemm_backend: state.device.gemm_backend(),
            weight_bytes,
            graphs: state.graphs.len(),
            tuned,
        };
        Ok((state, loaded))
    }

    /// Captures a graph per bucket, from a step in which every row is padding.
    fn capture(&mut self, slots: u32) -> Result<(), DeviceError> {
        let plans = self.runner.plans();
        for bucket in buckets(slots) {
            let layout = bucket_layout(bucket, plans);
            let bytes = layout.bytes(0);
            let mut padding = vec![0u8; bytes];
            let kv_indices = layout.kv_indices..layout.kv_indices + bucket as usize * 4;
            padding[kv_indices].fill(0xff);
            self.device.upload(&self.metadata, 0, &padding)?;
            let step = StepShape {
                layout,
                rows: bucket,
                samples: bucket,
                copies: Vec::new(),
                mixed: false,
                bucket: Some(bucket),
                bytes,
            };
            let at = self.metadata.address();
            // Runs once outside capture, so that nothing is loaded or planned while capturing.
            self.runner.forward.run(&self.device, &step, at)?;
            self.device.stream.synchronize()?;
            let work = || self.runner.forward.run(&self.device, &step, at);
            let graph = self.device.capture(work)?;
            self.device.replay(&graph)?;
            self.device.stream.synchronize()?;
            self.graphs.push((bucket, graph));
        }
        Ok(())
    }

    /// Enqueues a step that writes its results to the given result slot.
    fn step(
        &mut self,
        batch: &Batch,
        result_slot: usize,
        logprobs: &mut Vec<bool>,
    ) -> Result<(), runtime::Error> {
        let step = self.runner.prepare(batch, &mut self.packed)?;
        self.runner.logprobs_requested(logprobs);
        let ResultSlot { results, begin, done } = &self.result_slots[result_slot];
        if step.bytes > self.metadata.bytes() {
            return Err(runtime::Error::Malformed(format!(
                "it needs {} bytes of metadata; there is room for {}",
                step.bytes,
                self.metadata.bytes()
            )));
        }
        let stream = &self.device.stream;
        let at = self.metadata.address();
        let enqueue = || {
            begin.record(stream)?;
            self.device.upload(&self.metadata, 0, &self.packed)?;
            let graph = step.bucket.and_then(|b| self.graphs.iter().find(|(bucket, _)| *bucket == b));
            match graph {
                Some((_, graph)) => self.device.replay(graph)?,
                None => self.runner.forward.run(&self.device, &step, at)?,
            }
            let bytes = batch.samples.len() * size_of::<SamplingResult>();
            if bytes > 0 {
                // SAFETY: the range is within both allocations. The host reads it after `done`; the slot's
                // previous results were read before this launch, since fewer steps are in flight than there
                // are slots.
                unsafe {
                    stream.copy_to_host(results.as_ptr(), self.runner.forward.results().address(), bytes)
                }?;
            }
            done.record(stream)
        };
        enqueue().map_err(device_error)?;
        self.samples = batch.samples.len();
        Ok(())
    }

    fn logits(&self) -> Result<Vec<f32>, runtime::Error> {
        let (memory, stride) = self.runner.forward.logits();
        let bytes = self.samples * stride * 4;
        let pinned = PinnedMemory::new(&self.device.context, bytes).map_err(device_error)?;
        let stream = &self.device.stream;
        // SAFETY: the range is within both allocations, and `pinned` is read only after the stream is
        // synchronized.
        unsafe { stream.copy_to_host(pinned.as_ptr(), memory.address(), bytes) }.map_err(device_error)?;
        stream.synchronize().map_err(device_error)?;
        let vocabulary = self.runner.capabilities.vocab_size as usize;
        // SAFETY: the stream was synchronized, so no copy is in flight.
        let all = unsafe { pinned.as_slice() };
        let logits = all[..bytes].chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        let padded: Vec<f32> = logits.collect();
        Ok(padded.chunks(stride).flat_map(|row| &row[..vocabulary]).copied().collect())
    }
}

impl Drop for DeviceState {
    fn drop(&mut self) {
        // Enqueued work may still use the fields that drop next.
        let _ = self.device.stream.synchronize();
    }
}

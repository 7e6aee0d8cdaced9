//! State of a device thread: the GPU with a loaded model, its captured graphs, and the enqueueing of steps.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use inflight_kernels::cuda::{DeviceError, HalfDtype, KvStore};
use inflight_runtime::{self as runtime, Batch, TokenMasks};

use super::autotune::{GemmBench, GemmTuning};
use super::device_memory::{DeviceMemory, PinnedMemory};
use super::device_thread::{LoadEvent, LoadEventSender, LoadedRank};
use super::driver::{CudaDevice, CudaGraph};
use super::gemm_cache::{GemmCache, TuningContext};
use super::gpu::{Gpu, GpuMemory};
use super::gpu_paths::{self, GpuPaths, PathConditions};
use super::load_job::LoadJob;
use super::load_plan::LoadPlan;
use super::metadata::StepShape;
use super::model_gemms::{ModelGemm, model_gemms};
use super::model_runner::{ModelRunner, RunnerModes};
use super::nccl::NcclRank;
use super::shapes::DEPTH;
use super::slots::device_error;
use super::step_graph::{StepGraph, StepGraphs};
use super::step_slot::{CopyStreams, StepSlot};
use super::weights::UploadError;
use super::{Error as LoadError, algorithm_search, cublaslt};

/// GPU with a loaded model.
pub(super) struct DeviceState {
    // Fields drop in this order: allocations and graphs before the device.
    pub(super) runner: ModelRunner<CudaDevice>,
    /// Captured graphs, one for the metadata of each step slot.
    graphs: BTreeMap<StepGraph, Vec<CudaGraph>>,
    pub(super) step_slots: Arc<Vec<StepSlot>>,
    packed: Vec<u8>,
    /// Samples of the last step.
    samples: usize,
    copies: CopyStreams,
    pub(super) device: CudaDevice,
}

impl DeviceState {
    /// Loads a rank's shard: weights, buffers, KV pool, autotuned GEMMs and captured graphs.
    pub(super) fn load(
        job: &LoadJob,
        events: &LoadEventSender,
        nccl: Option<Rc<NcclRank>>,
    ) -> Result<(Self, LoadedRank), LoadError> {
        let LoadJob { gpu_info, config, shard_plan, tensors, options, .. } = job;
        let (rank, shard, half) = (job.rank(), shard_plan.shard(), tensors.half());
        let load_error = |error: DeviceError| LoadError::from_device(error, gpu_info);
        let device = CudaDevice::open(gpu_info, options.deterministic, nccl).map_err(load_error)?;
        device.set_overlap(options.overlap);
        let plan = LoadPlan::new(job, device.memory().map_err(load_error)?);
        // Fails before minutes of loading.
        plan.pool_blocks(job, tensors.allocated_bytes(shard))?;
        let report = |done, total| {
            // The receiver is gone if the worker has aborted loading.
            let _ = events.send((rank, LoadEvent::Progress(done, total)));
        };
        let weights = tensors.upload(&device, shard, &report).map_err(|error| match error {
            UploadError::Model(error) => LoadError::Model(error),
            UploadError::Device(error) => load_error(error),
        })?;
        device.stream.synchronize().map_err(load_error)?;
        // Libraries allocate their memory before the KV pool is sized.
        if device.collective().is_some() {
            warm_up_collectives(job, &device, &plan)?;
        }
        let gemms = model_gemms(&weights, &plan.shapes, shard_plan, config.vocab_size);
        let tuned = warm_up_gemms(job, &device, &gemms, &plan).map_err(load_error)?;
        let (left, _) = device.memory().map_err(load_error)?;
        let taken = plan.free.saturating_sub(left);
        let blocks = job.barrier_min(plan.pool_blocks(job, taken)?)?;
        let capabilities = plan.capabilities(job, blocks);
        let modes = RunnerModes { deterministic: options.deterministic, graphs: options.graphs };
        let runner = ModelRunner::new(
            &device,
            config,
            shard_plan.clone(),
            half,
            weights,
            capabilities.clone(),
            &plan.limits,
            job.kv_layers.clone(),
            modes,
        )
        .map_err(load_error)?;
        let copies = CopyStreams::new(&device, options.copy_streams).map_err(load_error)?;
        let step_slots =
            (0..DEPTH).map(|_| StepSlot::new(&device, &plan.shapes, &plan.limits)).collect::<Result<_, _>>();
        let step_slots = Arc::new(step_slots.map_err(load_error)?);
        let mut state = Self {
            runner,
            graphs: BTreeMap::new(),
            step_slots,
            packed: Vec::new(),
            samples: 0,
            copies,
            device,
        };
        // Allocations may synchronize all devices of the process, which would deadlock with ranks that wait
        // in a collective.
        job.barrier_min(0)?;
        state.capture().map_err(load_error)?;
        let (left, _) = state.device.memory().map_err(load_error)?;
        plan.log_allocated(rank, taken, blocks, left);
        let paths = state.path_conditions(job, !tuned.is_empty())?.paths();
        gpu_paths::report(rank, &paths);
        let loaded = LoadedRank {
            capabilities,
            step_slots: Arc::clone(&state.step_slots),
            context: Arc::clone(&state.device.context),
            pool: (state.runner.forward.kv().address(), plan.block_bytes() as usize),
            gemm_backend: state.device.gemm_backend(),
            weight_bytes: tensors.bytes(shard),
            graphs: state.graphs.values().map(Vec::len).sum(),
            paths: GpuPaths::new(paths, Arc::clone(state.device.overlap())),
            tuned,
        };
        Ok((state, loaded))
    }

    /// What decides which fast paths are in use, once everything is loaded.
    fn path_conditions(&self, job: &LoadJob, tuned: bool) -> Result<PathConditions, LoadError> {
        let LoadJob { gpu_info, options, .. } = job;
        let target = CudaDevice::target(gpu_info);
        Ok(PathConditions {
            compute: gpu_info.compute,
            target: target.map_err(|error| LoadError::from_device(error, gpu_info))?,
            deterministic: options.deterministic,
            cublaslt: self.device.cublaslt().is_some(),
            autotune: options.autotune,
            tuned,
            overlap_wanted: options.overlap,
            overlap: self.device.overlap().load(Relaxed),
            graphs: options.graphs,
            captured: !self.graphs.is_empty(),
            fp8_kv: options.kv_store == KvStore::Fp8,
        })
    }

    /// Captures all graphs, for each step slot, from steps in which every row is padding.
    fn capture(&mut self) -> Result<(), DeviceError> {
        let (device, forward) = (&self.device, &self.runner.forward);
        for graph in self.runner.graphs() {
            let step = self.upload_padding(graph)?;
            // Runs once outside capture, so that nothing is loaded or planned while capturing.
            let at = self.step_slots[0].buffers.addresses();
            forward.captured(device, &step, at.metadata)?;
            forward.sample(device, &step, at)?;
            device.stream.synchronize()?;
            let captured = self.step_slots.iter().map(|slot| {
                let metadata = slot.buffers.addresses().metadata;
                device.capture(|| forward.captured(device, &step, metadata))
            });
            let captured = captured.collect::<Result<Vec<_>, _>>()?;
            captured.iter().try_for_each(|graph| device.upload_graph(graph))?;
            self.graphs.insert(graph, captured);
        }
        // One of each kind, with the fewest rows: what a driver refuses only when a graph is launched fails the load.
        let smallest =
            |decode: bool| self.graphs.iter().find(|(graph, _)| graph.logits_rows().is_some() == decode);
        for (graph, captured) in [true, false].into_iter().filter_map(smallest) {
            self.upload_padding(*graph)?;
            captured.iter().try_for_each(|graph| device.replay(graph))?;
        }
        device.stream.synchronize()
    }

    /// Uploads the metadata of a step whose rows are all padding to each step slot, and returns the step.
    fn upload_padding(&self, graph: StepGraph) -> Result<StepShape, DeviceError> {
        let (step, packed) = self.runner.padding_step(graph);
        for slot in self.step_slots.iter() {
            self.device.upload(&slot.buffers.metadata, 0, &packed)?;
        }
        Ok(step)
    }

    /// Enqueues a step in the given step slot. `masks` waits for the token masks of a batch with masked rows, while the
    /// forward pass runs.
    pub(super) fn step(
        &mut self,
        batch: &Batch,
        step_slot: usize,
        logprobs: &mut Vec<bool>,
        masks: &mut dyn FnMut() -> Result<Arc<TokenMasks>, runtime::Error>,
    ) -> Result<(), runtime::Error> {
        let step = self.runner.prepare(batch, &mut self.packed)?;
        self.runner.logprobs_requested(logprobs);
        let slots = Arc::clone(&self.step_slots);
        let slot = &slots[step_slot];
        let (bytes, room) = (self.packed.len(), slot.metadata_bytes());
        if bytes > room {
            let reason = format!("it needs {bytes} bytes of metadata; there is room for {room}");
            return Err(runtime::Error::Malformed(reason));
        }
        self.copies.upload(&self.device, slot, &self.packed).map_err(device_error)?;
        let enqueued = self.enqueue(batch, &step, step_slot, masks);
        let (samples, scores) = match enqueued {
            Ok(()) => (batch.samples.len(), batch.scores.len()),
            Err(_) => (0, 0),
        };
        let downloaded = self.copies.download(&self.device, slot, samples, scores).map_err(device_error);
        enqueued.and(downloaded)?;
        self.samples = batch.samples.len();
        Ok(())
    }

    /// Enqueues the forward pass and sampling of a step, once its metadata is on the device.
    fn enqueue(
        &mut self,
        batch: &Batch,
        step: &StepShape,
        step_slot: usize,
        masks: &mut dyn FnMut() -> Result<Arc<TokenMasks>, runtime::Error>,
    ) -> Result<(), runtime::Error> {
        let Self { device, runner, graphs, .. } = self;
        let at = self.step_slots[step_slot].buffers.addresses();
        let replay = |graph: StepGraph| match graphs.get(&graph) {
            Some(captured) => device.replay(&captured[step_slot]),
            None => runner.forward.captured(device, step, at.metadata),
        };
        runner.forward.run(device, step, at, replay).map_err(device_error)?;
        if batch.masked_rows() > 0 {
            runner.upload_masks(device, batch, &*masks()?)?;
        }
        runner.forward.sample(device, step, at).map_err(device_error)
    }

    /// Fills what a step writes before it reads it, the results of both step slots included, with NaN and impossible tokens.
    pub(super) fn poison(&self) -> Result<(), runtime::Error> {
        self.runner.poison(&self.device).map_err(device_error)?;
        for slot in self.step_slots.iter() {
            slot.buffers.poison(&self.device).map_err(device_error)?;
        }
        self.device.stream.synchronize().map_err(device_error)
    }

    pub(super) fn logits(&self) -> Result<Vec<f32>, runtime::Error> {
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
        let _ = self.copies.synchronize();
    }
}

/// Runs collectives of all sizes once, so that NCCL allocates connections and buffers at load: all-reduces
/// and all-gathers of up to the largest step's elements.
fn warm_up_collectives(job: &LoadJob, device: &CudaDevice, plan: &LoadPlan) -> Result<(), LoadError> {
    let load_error = |error: DeviceError| LoadError::from_device(error, &job.gpu_info);
    let elements = plan.rows as usize * plan.shapes.hidden as usize;
    let gathered = plan.samples as usize * plan.shapes.gathered as usize * 4;
    let buffer = device.alloc((elements * 2).max(gathered)).map_err(load_error)?;
    device.zero(&buffer).map_err(load_error)?;
    // Allocations may synchronize all devices of the process, which would deadlock with ranks that wait in a
    // collective.
    job.barrier_min(0)?;
    let part = gathered / job.shard_plan.world();
    run_collectives(device, job.tensors.half(), &buffer, elements, part).map_err(load_error)
}

/// Runs all-reduces of up to `elements` elements and all-gathers of up to `part` bytes per rank, in `buffer`.
fn run_collectives(
    device: &CudaDevice,
    half: HalfDtype,
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

/// Runs every GEMM once, so that libraries allocate their memory, after timing the algorithms if requested;
/// returns the timings.
fn warm_up_gemms(
    job: &LoadJob,
    device: &CudaDevice,
    gemms: &[ModelGemm],
    plan: &LoadPlan,
) -> Result<Vec<GemmTuning>, DeviceError> {
    let LoadJob { options, replaced_images, .. } = job;
    let (rows, samples, half) = (plan.rows, plan.samples, job.tensors.half());
    let Some(bench) = GemmBench::new(device, half, gemms, rows, samples)? else { return Ok(Vec::new()) };
    let tuned = match options.autotune {
        true => {
            let graphs =
                StepGraphs { sample_rows: options.sample_rows(), batch_tokens: options.batch_tokens };
            let row_counts = algorithm_search::row_counts(graphs.all(), rows);
            let context = TuningContext {
                gpu: job.gpu_info.name.clone(),
                library: cublaslt::version(),
                kernels: format!("{}{}", device.sources(), replaced_images),
                dtype: half.dtype().name().to_owned(),
            };
            bench.tune(gemms, &row_counts, samples, GemmCache::open(options.gemm_cache.clone(), context))?
        }
        false => Vec::new(),
    };
    bench.run_all(gemms, rows, samples)?;
    Ok(tuned)
}

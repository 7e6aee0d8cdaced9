//! Step slots: the buffers of the steps in flight. Each step has its own metadata and results, so that the metadata of the
//! next step is uploaded, and the results of the last one are downloaded, while a step computes.

use inflight_kernels::cuda::{DeviceError, SamplingResult};

use super::buffers::StepBuffers;
use super::device_memory::{DeviceMemory, PinnedMemory};
use super::driver::CudaDevice;
use super::gpu::GpuMemory;
use super::shapes::{BufferLimits, ModelShapes};
use super::stream::{CudaEvent, CudaStream};

/// Device addresses of a [`StepBuffers`].
#[derive(Debug, Clone, Copy)]
pub(super) struct StepAddresses {
    pub(super) metadata: u64,
    pub(super) results: u64,
    pub(super) scores: u64,
}

impl<M: GpuMemory> StepBuffers<M> {
    pub(super) fn addresses(&self) -> StepAddresses {
        StepAddresses {
            metadata: self.metadata.address(),
            results: self.results.address(),
            scores: self.scores.address(),
        }
    }
}

/// Buffers and events of a step in flight, shared with the thread that waits for its results.
pub(super) struct StepSlot {
    pub(super) buffers: StepBuffers<DeviceMemory>,
    /// Source of the upload.
    metadata: PinnedMemory,
    /// Results of the sampled and of the scored rows.
    pub(super) results: PinnedMemory,
    pub(super) scores: PinnedMemory,
    uploaded: CudaEvent,
    begin: CudaEvent,
    /// Behind the step's last kernel.
    computed: CudaEvent,
    /// Behind the copies of its results.
    pub(super) done: CudaEvent,
}

impl StepSlot {
    /// Allocates a slot.
    pub(super) fn new(
        device: &CudaDevice,
        shapes: &ModelShapes,
        limits: &BufferLimits,
    ) -> Result<Self, DeviceError> {
        let context = &device.context;
        let buffers = StepBuffers::alloc(device, shapes, limits)?;
        let pinned = |buffer: &DeviceMemory| PinnedMemory::new(context, buffer.bytes());
        Ok(Self {
            metadata: pinned(&buffers.metadata)?,
            results: pinned(&buffers.results)?,
            scores: pinned(&buffers.scores)?,
            buffers,
            uploaded: CudaEvent::untimed(context)?,
            begin: CudaEvent::new(context)?,
            computed: CudaEvent::new(context)?,
            done: CudaEvent::untimed(context)?,
        })
    }

    /// Maximum bytes of a step's metadata.
    pub(super) fn metadata_bytes(&self) -> usize {
        self.metadata.bytes()
    }

    /// Returns the milliseconds from the step's first to its last kernel, once it is done.
    pub(super) fn milliseconds(&self) -> f32 {
        self.computed.milliseconds_since(&self.begin)
    }
}

/// Streams of the copies of metadata and results; `None`: the compute stream.
pub(super) struct CopyStreams {
    uploads: Option<CudaStream>,
    downloads: Option<CudaStream>,
}

impl CopyStreams {
    /// Creates streams beside the compute stream if `beside`.
    pub(super) fn new(device: &CudaDevice, beside: bool) -> Result<Self, DeviceError> {
        let stream = || beside.then(|| CudaStream::new(&device.context)).transpose();
        Ok(Self { uploads: stream()?, downloads: stream()? })
    }

    /// Uploads a step's metadata, of at most [`StepSlot::metadata_bytes`]; the compute stream waits for it.
    pub(super) fn upload(
        &self,
        device: &CudaDevice,
        slot: &StepSlot,
        packed: &[u8],
    ) -> Result<(), DeviceError> {
        // The slot's previous step. It was completed before this one was launched, unless it failed.
        slot.done.synchronize()?;
        let uploads = self.uploads.as_ref().unwrap_or(&device.stream);
        // SAFETY: the range is within both allocations, of one size. Nothing else accesses them: the slot's previous step is
        // done, and the next use of the slot waits for this step's `done` event, which is recorded after the copy.
        unsafe {
            slot.metadata.as_slice()[..packed.len()].copy_from_slice(packed);
            let to = slot.buffers.metadata.address();
            uploads.copy_to_device(to, slot.metadata.as_ptr(), packed.len())?;
        }
        slot.uploaded.record(uploads)?;
        device.wait_for(&slot.uploaded)?;
        slot.begin.record(&device.stream)
    }

    /// Downloads the results of a step's `samples` sampled and `scores` scored rows once they are computed. Called after a
    /// failed launch too, with 0 of each, since what was enqueued uses the slot.
    pub(super) fn download(
        &self,
        device: &CudaDevice,
        slot: &StepSlot,
        samples: usize,
        scores: usize,
    ) -> Result<(), DeviceError> {
        let downloads = self.downloads.as_ref().unwrap_or(&device.stream);
        slot.computed.record(&device.stream)?;
        downloads.wait_for(&slot.computed)?;
        let StepBuffers { results, scores: scored, .. } = &slot.buffers;
        for (host, from, count) in [(&slot.results, results, samples), (&slot.scores, scored, scores)] {
            let bytes = count * size_of::<SamplingResult>();
            if bytes > 0 {
                // SAFETY: the range is within both allocations. The host reads it after `done`; the slot's previous results
                // were read before this launch, since no more steps are in flight than there are slots.
                unsafe { downloads.copy_to_host(host.as_ptr(), from.address(), bytes) }?;
            }
        }
        slot.done.record(downloads)
    }

    /// Blocks until all copies have run.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        [&self.uploads, &self.downloads].into_iter().flatten().try_for_each(CudaStream::synchronize)
    }
}

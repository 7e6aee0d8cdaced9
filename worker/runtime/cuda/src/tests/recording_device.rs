//! Harness device that records allocations and GEMMs, with a preferred GEMM kernel and optional collectives.

use std::cell::RefCell;

use inflight_kernels::cuda::{Device, Launch, Profile};

use super::*;

/// Recording device on the harness.
pub(super) struct RecordingDevice {
    pub(super) device: Harness,
    /// Preferred GEMM kernel; [`GemmKernel::Tiled`] runs the GEMMs that it does not support.
    preferred: GemmKernel,
    /// Collectives of the tensor-parallel group.
    pub(super) collective: Option<ranks::HarnessCollective>,
    /// Bytes of each allocation.
    pub(super) allocated: RefCell<Vec<u64>>,
    /// GEMMs with the kernel that ran them.
    pub(super) gemms: RefCell<Vec<(GemmKernel, Matmul)>>,
}

impl RecordingDevice {
    pub(super) fn new(device: Harness) -> Self {
        let (allocated, gemms) = (RefCell::default(), RefCell::default());
        Self { device, preferred: GemmKernel::Tiled, collective: None, allocated, gemms }
    }

    pub(super) fn preferring(self, preferred: GemmKernel) -> Self {
        Self { preferred, ..self }
    }

    pub(super) fn with_collective(self, collective: ranks::HarnessCollective) -> Self {
        Self { collective: Some(collective), ..self }
    }

    /// Returns the GEMMs recorded so far and clears the record.
    pub(super) fn take_gemms(&self) -> Vec<Matmul> {
        self.gemms.take().into_iter().map(|(_, matmul)| matmul).collect()
    }
}

impl Device for RecordingDevice {
    fn profile(&self) -> Profile {
        self.device.profile()
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees the launch's parameters and addresses.
        unsafe { self.device.launch(launch) }
    }
}

impl Gpu for RecordingDevice {
    type Memory = HostMemory;

    fn alloc(&self, bytes: usize) -> Result<HostMemory, DeviceError> {
        self.allocated.borrow_mut().push(bytes as u64);
        Gpu::alloc(&self.device, bytes)
    }

    fn fill(&self, memory: &HostMemory, byte: u8) -> Result<(), DeviceError> {
        self.device.fill(memory, byte)
    }

    fn upload(&self, to: &HostMemory, byte: usize, from: &[u8]) -> Result<(), DeviceError> {
        Gpu::upload(&self.device, to, byte, from)
    }

    unsafe fn matmul(&self, half: HalfDtype, matmul: &Matmul) -> Result<(), DeviceError> {
        let mut supporting = GemmKernel::supporting(matmul);
        let kernel = supporting.find(|kernel| *kernel == self.preferred).unwrap_or(GemmKernel::Tiled);
        self.gemms.borrow_mut().push((kernel, *matmul));
        // SAFETY: the caller guarantees that the addresses are of matrices with the given shapes.
        unsafe { kernel.launch(&self.device, half, matmul) }
    }

    unsafe fn copy_columns(&self, columns: &ColumnCopy) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that both matrices are allocated and do not overlap.
        unsafe { self.device.copy_columns(columns) }
    }

    fn collective(&self) -> Option<&dyn DeviceCollective> {
        self.collective.as_ref().map(|collective| collective as &dyn DeviceCollective)
    }
}

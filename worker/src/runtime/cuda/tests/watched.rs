//! The harness as a device that notes what it is asked for, with products by any kernel of ours and with others beside it.

use std::cell::RefCell;

use inflight_kernels::cuda::{Device, Launch, Profile};

use super::*;

/// A device on the harness.
pub(super) struct Watched {
    pub(super) device: Harness,
    /// Makes products wherever it takes them; [`OwnProduct::Tiled`] makes the others.
    choice: OwnProduct,
    /// The others that share the model.
    pub(super) end: Option<ranks::End>,
    /// Bytes.
    pub(super) allocated: RefCell<Vec<u64>>,
    /// And who made them.
    pub(super) products: RefCell<Vec<(OwnProduct, Matmul)>>,
}

impl Watched {
    pub(super) fn new(device: Harness) -> Self {
        let (allocated, products) = (RefCell::default(), RefCell::default());
        Self { device, choice: OwnProduct::Tiled, end: None, allocated, products }
    }

    pub(super) fn choosing(self, choice: OwnProduct) -> Self {
        Self { choice, ..self }
    }

    pub(super) fn among(self, end: ranks::End) -> Self {
        Self { end: Some(end), ..self }
    }

    /// The products asked for so far, which are forgotten.
    pub(super) fn take_products(&self) -> Vec<Matmul> {
        self.products.take().into_iter().map(|(_, product)| product).collect()
    }
}

impl Device for Watched {
    fn profile(&self) -> Profile {
        self.device.profile()
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        unsafe { self.device.launch(launch) }
    }
}

impl Gpu for Watched {
    type Memory = HostMemory;

    fn alloc(&self, bytes: usize) -> Result<HostMemory, DeviceError> {
        self.allocated.borrow_mut().push(bytes as u64);
        Gpu::alloc(&self.device, bytes)
    }

    fn zero(&self, memory: &HostMemory) -> Result<(), DeviceError> {
        self.device.zero(memory)
    }

    fn upload(&self, to: &HostMemory, byte: usize, from: &[u8]) -> Result<(), DeviceError> {
        Gpu::upload(&self.device, to, byte, from)
    }

    unsafe fn matmul(&self, half: Half, matmul: &Matmul) -> Result<(), DeviceError> {
        let own = OwnProduct::taking(matmul).find(|own| *own == self.choice).unwrap_or(OwnProduct::Tiled);
        self.products.borrow_mut().push((own, *matmul));
        // SAFETY: passed on to the caller.
        unsafe { own.make(&self.device, half, matmul) }
    }

    unsafe fn copy_columns(&self, columns: &Columns) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        unsafe { self.device.copy_columns(columns) }
    }

    fn peers(&self) -> Option<&dyn Peers> {
        self.end.as_ref().map(|end| end as &dyn Peers)
    }
}

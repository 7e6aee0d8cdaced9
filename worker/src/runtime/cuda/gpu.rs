use inflight_kernels::cuda::{Device, DeviceError, Half};

/// Memory of a device, freed when dropped.
pub(super) trait Memory {
    /// Where it begins.
    fn address(&self) -> u64;
}

/// A product y[m, n] = x[m, k] * weight[n, k]^T + bias, by addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matmul {
    pub(super) x: u64,
    pub(super) weight: u64,
    pub(super) bias: Option<Bias>,
    pub(super) y: u64,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) k: u32,
    /// Numbers from one row of y to the next.
    pub(super) stride: u32,
    /// y is f32; else it is as x.
    pub(super) wide: bool,
}

/// A bias in both of the types that kernels want.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Bias {
    pub(super) wide: u64,
    pub(super) half: u64,
}

/// Some columns of a matrix that come to be some columns of another one; all but `rows` in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Columns {
    pub(super) from: u64,
    /// From one row to the next.
    pub(super) from_stride: usize,
    pub(super) to: u64,
    pub(super) to_stride: usize,
    pub(super) width: usize,
    pub(super) rows: usize,
}

/// A device's end of a group of those that share a model. All ranks ask for the same in the same order; it is done in the
/// order of each device's work, and can be captured.
pub(super) trait Peers {
    /// Replaces the numbers at `at` on every rank by their sum over all ranks.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn all_reduce(&self, half: Half, at: u64, numbers: usize) -> Result<(), DeviceError>;

    /// What lies at `at` is [ranks, `bytes`]: each rank has written its own part, and gets those of the others.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn all_gather(&self, at: u64, bytes: usize) -> Result<(), DeviceError>;
}

/// A device with memory of its own, which does what it is told in order.
pub(super) trait Gpu: Device {
    type Memory: Memory;

    /// Memory of undefined content.
    fn alloc(&self, bytes: usize) -> Result<Self::Memory, DeviceError>;

    /// Sets memory to zero bytes.
    fn zero(&self, memory: &Self::Memory) -> Result<(), DeviceError>;

    /// Copies to `byte` bytes behind the beginning of `to`. `from` may be reused when it returns.
    fn upload(&self, to: &Self::Memory, byte: usize, from: &[u8]) -> Result<(), DeviceError>;

    /// A product in the type given.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn matmul(&self, half: Half, matmul: &Matmul) -> Result<(), DeviceError>;

    /// Copies columns.
    ///
    /// # Safety
    /// As [`Device::launch`]; the two matrices do not overlap.
    unsafe fn copy_columns(&self, columns: &Columns) -> Result<(), DeviceError>;

    /// The others that share the model; `None`: it has the whole of it.
    fn peers(&self) -> Option<&dyn Peers>;
}

/// The bytes of plain numbers.
pub(super) fn bytes_of<T: numbers::Number>(values: &[T]) -> &[u8] {
    // SAFETY: numbers have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Types of which every byte is initialised.
pub(super) mod numbers {
    /// Plain numbers.
    pub trait Number: Copy {}
    impl Number for u8 {}
    impl Number for u16 {}
    impl Number for u32 {}
    impl Number for f32 {}
}

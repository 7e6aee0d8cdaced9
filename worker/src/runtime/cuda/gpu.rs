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

//! Device interface that the CUDA runtime is generic over: memory, GEMMs and collectives.

use inflight_kernels::cpu::Activation;
use inflight_kernels::cuda::{Device, DeviceError, HalfDtype, SwigluParams, geglu, swiglu};

/// Allocation in device memory, freed when dropped.
pub(super) trait GpuMemory {
    /// Device address of its first byte.
    fn address(&self) -> u64;
}

/// GEMM y[m, n] = x[m, k] * weight[n, k]^T + bias, with device addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matmul {
    pub(super) x: u64,
    pub(super) weight: u64,
    pub(super) bias: Option<BiasAddresses>,
    pub(super) y: u64,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) k: u32,
    /// Elements between the starts of two rows of y.
    pub(super) stride: u32,
    /// Whether y is f32; otherwise it has the type of x.
    pub(super) f32_out: bool,
}

/// Device addresses of a bias, in each of the types that GEMM implementations need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BiasAddresses {
    pub(super) f32: u64,
    pub(super) half: u64,
}

/// Copy of a column range of one matrix into another; all but `rows` in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct ColumnCopy {
    pub(super) from: u64,
    /// Bytes between the starts of two source rows.
    pub(super) from_stride: usize,
    pub(super) to: u64,
    pub(super) to_stride: usize,
    pub(super) width: usize,
    pub(super) rows: usize,
}

/// Collectives of a tensor-parallel group, from one rank's device. All ranks call the same operations in the
/// same order. Each runs in the order of the device's stream and can be captured.
pub(super) trait DeviceCollective {
    /// Replaces the elements at `address` on every rank by their sums over all ranks.
    ///
    /// # Safety
    /// As [`Device::launch`]: `address` is of `elements` elements of this device.
    unsafe fn all_reduce(&self, half: HalfDtype, address: u64, elements: usize) -> Result<(), DeviceError>;

    /// Gathers [ranks, `bytes`] at `address`: each rank has written its own part and receives the others'.
    ///
    /// # Safety
    /// As [`Device::launch`]: `address` is of `bytes` bytes per rank of this device.
    unsafe fn all_gather(&self, address: u64, bytes: usize) -> Result<(), DeviceError>;
}

/// Device with its own memory that runs operations in the order of the calls.
pub(super) trait Gpu: Device + Sized {
    type Memory: GpuMemory;

    /// Allocates memory of undefined content.
    fn alloc(&self, bytes: usize) -> Result<Self::Memory, DeviceError>;

    /// Fills memory with a byte.
    fn fill(&self, memory: &Self::Memory, byte: u8) -> Result<(), DeviceError>;

    /// Fills memory with zero bytes.
    fn zero(&self, memory: &Self::Memory) -> Result<(), DeviceError> {
        self.fill(memory, 0)
    }

    /// Copies `from` to byte offset `byte` of `to`. `from` may be reused when the call returns.
    fn upload(&self, to: &Self::Memory, byte: usize, from: &[u8]) -> Result<(), DeviceError>;

    /// Runs a GEMM whose 16-bit type is `half`.
    ///
    /// # Safety
    /// As [`Device::launch`]: addresses are of this device and of matrices with the given shapes.
    unsafe fn matmul(&self, half: HalfDtype, matmul: &Matmul) -> Result<(), DeviceError>;

    /// Runs a GEMM whose output is [m, gates and ups], and writes activation(gate) * up to `out`, [m, n / 2]. The GEMM's own
    /// output may or may not be written.
    ///
    /// # Safety
    /// As [`Gpu::matmul`], and `out` is of m * n / 2 elements.
    unsafe fn matmul_gated(
        &self,
        half: HalfDtype,
        activation: Activation,
        matmul: &Matmul,
        out: u64,
    ) -> Result<(), DeviceError> {
        let Matmul { m, n, y, .. } = *matmul;
        let p = SwigluParams { gate_up: y, out, rows: m, width: n / 2 };
        // SAFETY: the caller's.
        unsafe {
            self.matmul(half, matmul)?;
            gated(self, half, activation, &p)
        }
    }

    /// Copies a column range of one matrix to another.
    ///
    /// # Safety
    /// As [`Device::launch`]; the two matrices do not overlap.
    unsafe fn copy_columns(&self, columns: &ColumnCopy) -> Result<(), DeviceError>;

    /// Collectives of the tensor-parallel group; `None`: the device holds the whole model.
    fn collective(&self) -> Option<&dyn DeviceCollective>;
}

/// Applies an activation to gates and multiplies with the up projections.
///
/// # Safety
/// As [`Device::launch`].
pub(super) unsafe fn gated<D: Device>(
    device: &D,
    half: HalfDtype,
    activation: Activation,
    p: &SwigluParams,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's.
    unsafe {
        match activation {
            Activation::Silu => swiglu(device, half, p),
            Activation::GeluTanh => geglu(device, half, p),
        }
    }
}

/// Returns the bytes of a slice of primitive numbers.
pub(super) fn bytes_of<T: numbers::PrimitiveNumber>(values: &[T]) -> &[u8] {
    // SAFETY: implementors of `PrimitiveNumber` have no padding, and the byte slice borrows `values`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Types without padding bytes.
pub(super) mod numbers {
    /// Primitive numbers.
    pub trait PrimitiveNumber: Copy {}
    impl PrimitiveNumber for u8 {}
    impl PrimitiveNumber for u16 {}
    impl PrimitiveNumber for u32 {}
    impl PrimitiveNumber for f32 {}
}

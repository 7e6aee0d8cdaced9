//! Abstraction of a CUDA device, with the properties on which launch configurations depend.

use crate::Dtype;

/// 16-bit element type of a device's weights, activations and KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HalfDtype {
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl HalfDtype {
    /// Returns the equivalent [`Dtype`].
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::Bf16,
            Self::F16 => Dtype::F16,
        }
    }

    /// Returns the compute type for weights stored as `dtype`; single precision becomes bf16.
    pub fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F16 => Self::F16,
            Dtype::Bf16 | Dtype::F32 => Self::Bf16,
        }
    }

    /// Rounds to nearest, ties to even, and returns the bits. Saturates at the largest finite f16.
    pub fn narrow(self, x: f32) -> u16 {
        match self {
            Self::Bf16 => half::bf16::from_f32(x).to_bits(),
            Self::F16 if x.is_infinite() => half::f16::from_f32(x).to_bits(),
            Self::F16 => half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits(),
        }
    }

    /// Converts the bits of a value of this type to f32.
    pub fn widen(self, bits: u16) -> f32 {
        match self {
            Self::Bf16 => half::bf16::from_bits(bits).to_f32(),
            Self::F16 => half::f16::from_bits(bits).to_f32(),
        }
    }
}

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvStore {
    /// The activations' 16-bit type.
    Half,
    /// FP8 E4M3 (largest finite value 448) with an f32 scale per token and head, so that a token's stored
    /// bits do not depend on its neighbours.
    Fp8,
}

impl KvStore {
    /// Returns the minimum tokens per block; scales are copied four at a time.
    pub fn block_tokens_min(self) -> u32 {
        match self {
            Self::Half => 1,
            Self::Fp8 => 4,
        }
    }

    /// Returns the bytes of one layer's keys and values in a block.
    pub fn layer_bytes(self, kv_heads: u64, block_tokens: u64, head_dim: u64) -> u64 {
        let line = match self {
            Self::Half => head_dim * 2,
            Self::Fp8 => head_dim + 4,
        };
        2 * kv_heads * block_tokens * line
    }

    /// Returns the unit, in bytes, of offsets into the KV pool.
    pub fn unit(self) -> u64 {
        match self {
            Self::Half => 2,
            Self::Fp8 => 1,
        }
    }
}

/// Device properties on which launch configurations depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory of a thread block, in bytes.
    pub shared_bytes: u32,
    /// Shared memory of a streaming multiprocessor, in bytes.
    pub multiprocessor_shared_bytes: u32,
}

/// Configuration and parameters of one kernel launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Grid dimensions x and y, in thread blocks.
    pub grid: (u32, u32),
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
    /// Bytes of the kernel's parameter block.
    pub params: &'a [u8],
    /// Whether programmatic dependent launch is allowed: the kernel may start before its predecessor in the
    /// stream has ended. Every kernel itself waits for it before accessing memory that others write.
    pub overlaps: bool,
}

/// Failure of a device operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Out of device memory.
    #[error("the device cannot give {bytes} bytes of memory")]
    Memory {
        /// Size of the requested allocation.
        bytes: u64,
    },
    /// Any other failure; the device is unusable afterwards.
    #[error("{what} failed: {reason}")]
    Failed {
        /// Operation that failed.
        what: String,
        /// Error reported by the driver.
        reason: String,
    },
}

/// Device that runs kernels in launch order.
pub trait Device {
    /// Returns the properties on which launch configurations depend.
    fn profile(&self) -> Profile;

    /// Enqueues a kernel.
    ///
    /// # Errors
    /// [`DeviceError`] if the launch was rejected; errors during execution may be reported by a later call.
    ///
    /// # Safety
    /// The addresses in the parameter block belong to this device, are live until the kernel has run, and
    /// refer to allocations of at least the sizes that the kernel's documentation requires.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError>;
}

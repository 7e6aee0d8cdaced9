use crate::Dtype;

/// The 16-bit types that weights, activations and the KV pool of a device may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Half {
    /// The upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Half {
    /// The same as a [`Dtype`].
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::Bf16,
            Self::F16 => Dtype::F16,
        }
    }

    /// The type to compute in with weights stored as `dtype`; single precision becomes bf16.
    pub fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F16 => Self::F16,
            Dtype::Bf16 | Dtype::F32 => Self::Bf16,
        }
    }

    /// Rounds to it, to nearest with ties to even; the bits. Values beyond the range of f16 are held at its end.
    pub fn narrow(self, x: f32) -> u16 {
        match self {
            Self::Bf16 => half::bf16::from_f32(x).to_bits(),
            Self::F16 => half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits(),
        }
    }

    /// The value of its bits.
    pub fn widen(self, bits: u16) -> f32 {
        match self {
            Self::Bf16 => half::bf16::from_bits(bits).to_f32(),
            Self::F16 => half::f16::from_bits(bits).to_f32(),
        }
    }
}

/// How keys and values are stored in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvStore {
    /// As they were computed.
    Half,
    /// As e4m3 numbers (a sign, four bits of exponent, three of mantissa), the largest 448, with a scale in f32 for each
    /// token's head: what is stored of a token does not depend on its neighbours.
    Fp8,
}

impl KvStore {
    /// Fewest tokens of a block: scales are copied four at a time.
    pub fn block_tokens_min(self) -> u32 {
        match self {
            Self::Half => 1,
            Self::Fp8 => 4,
        }
    }

    /// Bytes of a layer's keys and values of a block.
    pub fn layer_bytes(self, kv_heads: u64, block_tokens: u64, head_dim: u64) -> u64 {
        let line = match self {
            Self::Half => head_dim * 2,
            Self::Fp8 => head_dim + 4,
        };
        2 * kv_heads * block_tokens * line
    }

    /// What offsets into the pool are counted in, in bytes.
    pub fn unit(self) -> u64 {
        match self {
            Self::Half => 2,
            Self::Fp8 => 1,
        }
    }
}

/// What launches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most bytes of shared memory that a block may have.
    pub shared_bytes: u32,
    /// Bytes of shared memory of a multiprocessor.
    pub multiprocessor_shared_bytes: u32,
}

/// One launch of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Columns and rows of the grid.
    pub grid: (u32, u32),
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of shared memory.
    pub shared_bytes: u32,
    /// The parameter block.
    pub params: &'a [u8],
    /// Whether it may begin while the kernel launched before it ends; every kernel waits for that one by itself before it
    /// touches what others write.
    pub overlaps: bool,
}

/// A device refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// It has not as much memory.
    #[error("the device cannot give {bytes} bytes of memory")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// Anything else: after it, the device can't be used any more.
    #[error("{what} failed: {reason}")]
    Failed {
        /// What was tried.
        what: String,
        /// What the driver says.
        reason: String,
    },
}

/// Something that runs kernels, in the order in which they are launched.
pub trait Device {
    /// What launches depend on.
    fn profile(&self) -> Profile;

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`DeviceError`] if the launch was refused; failures while it runs may come with a later call.
    ///
    /// # Safety
    /// The addresses in the parameter block are of this device, live until the kernel has run, and of memory as
    /// large as the kernel's documentation asks for.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError>;
}

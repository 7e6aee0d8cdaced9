//! GEMM algorithms: cuBLASLt's and the built-in kernels.

use inflight_kernels::cuda::{
    Device, DeviceError, GemmParams, HalfDtype, gemm, skinny_gemm, skinny_supports,
};

use super::cublaslt::CublasLtAlgorithm;
use super::gpu::Matmul;

/// Candidate implementation of a GEMM.
#[derive(Clone, Copy)]
pub(super) enum GemmAlgorithm {
    /// An algorithm that cuBLASLt's heuristic returned.
    CublasLt(CublasLtAlgorithm),
    /// A built-in kernel.
    BuiltIn(GemmKernel),
}

impl GemmAlgorithm {
    /// Returns the implementation's name, for logs and [`super::GemmTuning::by`].
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::CublasLt(_) => "cublaslt",
            Self::BuiltIn(kernel) => kernel.name(),
        }
    }
}

/// Built-in GEMM kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GemmKernel {
    /// Tiled kernel for any shape. Batch-invariant: it alone runs in the deterministic mode.
    Tiled,
    /// Faster kernel for few rows. Its bits differ from the tiled kernel's, so the deterministic mode cannot
    /// use it.
    Skinny,
}

impl GemmKernel {
    /// Lists the kernels that support a GEMM.
    pub(super) fn supporting(p: &Matmul) -> impl Iterator<Item = Self> {
        [Self::Tiled, Self::Skinny].into_iter().filter(|kernel| kernel.supports(p))
    }

    /// Returns whether the kernel supports the shape and alignment of a GEMM.
    pub(super) fn supports(self, p: &Matmul) -> bool {
        match self {
            Self::Tiled => true,
            Self::Skinny => skinny_supports(p.m, p.k) && (p.x | p.weight).is_multiple_of(16),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tiled => "tiled",
            Self::Skinny => "skinny",
        }
    }

    /// Returns the parameters of a built-in kernel for a GEMM.
    pub(super) fn params(p: &Matmul) -> GemmParams {
        GemmParams {
            x: p.x,
            weight: p.weight,
            bias: p.bias.map_or(0, |bias| bias.f32),
            out: p.y,
            m: p.m,
            n: p.n,
            k: p.k,
            stride: p.stride,
        }
    }

    /// Enqueues a GEMM that the kernel supports.
    ///
    /// # Safety
    /// As [`Device::launch`]: addresses are of this device and of matrices with the given shapes.
    pub(super) unsafe fn launch<D: Device>(
        self,
        device: &D,
        half: HalfDtype,
        p: &Matmul,
    ) -> Result<(), DeviceError> {
        let params = Self::params(p);
        // SAFETY: the caller guarantees that the addresses are of this device and of matrices with the given
        // shapes.
        unsafe {
            match self {
                Self::Tiled => gemm(device, half, p.f32_out, &params),
                Self::Skinny => skinny_gemm(device, half, p.f32_out, &params),
            }
        }
    }
}

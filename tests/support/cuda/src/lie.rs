//! Deliberate faults of the arithmetic that no call reports, against which the checks of proofs are checked.

use inflight_kernels::cuda::EmbeddingParams;

use crate::settings::Settings;

/// What the simulated GPU does wrong without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// No kernel and no GEMM computes anything.
    Nothing,
    /// Embeddings are NaN.
    Nan,
    /// Every second step computes nothing, so that results are those of the step before.
    Stale,
    /// All algorithms of the GEMM library but the first one compute nothing, and are the fastest.
    Algorithm,
    /// Copies from the host into the largest allocation, the KV pool, do nothing.
    Copies,
}

impl Lie {
    /// Returns the lie of a name.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        Some(match name {
            "nothing" => Self::Nothing,
            "nan" => Self::Nan,
            "stale" => Self::Stale,
            "algorithm" => Self::Algorithm,
            "copies" => Self::Copies,
            _ => return None,
        })
    }

    /// Whether this is the GPU's lie.
    pub(crate) fn told(self) -> bool {
        Settings::get().lie == Some(self)
    }
}

/// First kernel of a step.
pub(crate) fn begins_step(kernel: &str) -> bool {
    kernel.starts_with("embedding")
}

/// Overwrites the embeddings that a kernel with these parameters has written by NaN.
///
/// # Safety
/// They are the parameters of an embedding kernel that has run without an error.
pub(crate) unsafe fn overwrite_embeddings(parameters: &[u8]) {
    // SAFETY: the caller guarantees that these are the bytes of such parameters, which are plain data.
    let p = unsafe { parameters.as_ptr().cast::<EmbeddingParams>().read_unaligned() };
    let hidden = std::ptr::with_exposed_provenance_mut::<u8>(p.hidden as usize);
    // SAFETY: the kernel has written this range.
    unsafe { hidden.write_bytes(0xff, p.rows as usize * p.width as usize * 4) };
}

//! Embedded device code of the CUDA kernels.

/// Format of an embedded image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Machine code for several architectures, and PTX for later ones.
    Fatbin,
    /// PTX alone; the driver compiles it at load.
    Ptx,
}

/// Device code of one kernel family, ready to be loaded as a module.
#[derive(Debug, Clone, Copy)]
pub struct Image {
    /// Name of the family: the stem of its source file.
    pub name: &'static str,
    /// Format of `bytes`.
    pub form: Form,
    /// Fatbin or PTX text, as the driver's module loader expects it.
    pub bytes: &'static [u8],
}

/// Bytes at the alignment that nvcc gives to device code.
#[repr(C, align(64))]
struct Aligned<const N: usize>([u8; N]);

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Family of each kernel, by the prefix of the kernel's name.
pub const KERNELS: &[(&str, &str)] = &[
    ("embedding", "embedding"),
    ("norm", "norm"),
    ("finish_qkv", "qkv"),
    ("swiglu", "swiglu"),
    ("attention", "attention"),
    ("gemm", "gemm"),
    ("skinny_gemm", "skinny"),
    ("copy_blocks", "copy"),
    ("sample", "sampling"),
    ("count_history", "sampling"),
];

/// Returns the image that contains `kernel`, or `None` if no family has its prefix.
pub fn image_of(kernel: &str) -> Option<&'static Image> {
    let (_, family) = KERNELS.iter().find(|(prefix, _)| kernel.starts_with(prefix))?;
    IMAGES.iter().find(|image| image.name == *family)
}

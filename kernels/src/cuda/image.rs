/// What an image is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Machine code for several architectures, and PTX for later ones.
    Fatbin,
    /// PTX alone: the driver compiles it at load.
    Ptx,
}

/// A family of kernels, ready to be loaded.
#[derive(Debug, Clone, Copy)]
pub struct Image {
    /// Its name: that of its source.
    pub name: &'static str,
    /// Its form.
    pub form: Form,
    /// What to load.
    pub bytes: &'static [u8],
}

/// Machine code begins where a compiler for CUDA would place it, not just anywhere.
#[repr(C, align(64))]
struct Aligned<const N: usize>([u8; N]);

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Which family a kernel is of, by the beginning of its name.
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

/// The image that holds a kernel.
pub fn image_of(kernel: &str) -> Option<&'static Image> {
    let (_, family) = KERNELS.iter().find(|(prefix, _)| kernel.starts_with(prefix))?;
    IMAGES.iter().find(|image| image.name == *family)
}

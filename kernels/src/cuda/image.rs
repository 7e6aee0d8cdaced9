//! Embedded device code of the CUDA kernels: one compressed archive with machine code for two GPU
//! architectures and PTX for later ones.
//!
//! The archive is a zstd frame. It begins with text lines, up to an empty one: `sources DIGEST`, the SHA-256
//! of the CUDA sources, then `FAMILY TARGET BYTES` for each image; then come the images in that order.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::DeviceError;

static ARCHIVE: &[u8] = include_bytes!("../../cuda/images.zst");

/// Kind of device code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Machine code for compute capability 8.0, which all of 8.x run.
    Sm80,
    /// Machine code for compute capability 9.0 (Hopper) alone.
    Sm90a,
    /// PTX for compute capability 9.0 or later; the driver compiles it at load.
    Ptx90,
}

impl Target {
    /// Every target of the archive.
    pub const ALL: [Self; 3] = [Self::Sm80, Self::Sm90a, Self::Ptx90];

    /// Returns the target for GPUs of a compute capability, or `None` before 8.0.
    pub fn of(major: i32, minor: i32) -> Option<Self> {
        match (major, minor) {
            (8, _) => Some(Self::Sm80),
            (9, 0) => Some(Self::Sm90a),
            (9.., _) => Some(Self::Ptx90),
            _ => None,
        }
    }

    /// Name in the archive.
    fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90a => "sm_90a",
            Self::Ptx90 => "compute_90",
        }
    }
}

/// Device code of one kernel family for one target, ready to be loaded as a module.
pub struct Image {
    /// Name of the family: the stem of its source file.
    pub family: &'static str,
    /// ELF file or zero-terminated PTX. Words, because machine code must be aligned.
    words: Vec<u64>,
    /// File that it was read from; `None`: it is embedded.
    file: Option<PathBuf>,
}

impl fmt::Display for Image {
    /// Writes the family, and the file that replaces its embedded image.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "{} ({})", self.family, file.display()),
            None => f.write_str(self.family),
        }
    }
}

impl Image {
    fn new(family: &'static str, bytes: &[u8]) -> Self {
        // At least one zero byte follows, which ends PTX.
        let mut words = vec![0u64; bytes.len() / 8 + 1];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_ne_bytes(padded);
        }
        Self { family, words, file: None }
    }

    /// Image that was read from a file, in place of the embedded one.
    pub(super) fn of_file(family: &'static str, bytes: &[u8], file: PathBuf) -> Self {
        Self { file: Some(file), ..Self::new(family, bytes) }
    }

    /// Returns the file that replaces the embedded image, if any.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Returns the image's bytes, and some zeros behind them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: any byte of an integer is initialised, and the slice borrows the words.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), size_of_val(&self.words[..])) }
    }

    /// Returns the address of an ELF file, or of PTX that ends with a zero byte, aligned to 8 bytes: what the
    /// driver's module loader expects.
    pub fn as_ptr(&self) -> *const std::ffi::c_void {
        self.words.as_ptr().cast()
    }
}

/// Decompressed archive.
pub struct Images {
    bytes: Vec<u8>,
}

impl Images {
    /// Decompresses the archive, 8 MB in about 50 ms.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] if the embedded archive is damaged.
    pub fn unpack() -> Result<Self, DeviceError> {
        let damaged = |reason: String| DeviceError::Failed {
            what: "decompressing the embedded kernels".to_owned(),
            reason,
        };
        let mut decoder =
            ruzstd::decoding::StreamingDecoder::new(ARCHIVE).map_err(|error| damaged(error.to_string()))?;
        let mut bytes = Vec::new();
        decoder.read_to_end(&mut bytes).map_err(|error| damaged(error.to_string()))?;
        Ok(Self { bytes })
    }

    /// Header lines, split into words, and where the images begin.
    fn header(&self) -> Option<(Vec<Vec<&str>>, usize)> {
        let end = self.bytes.windows(2).position(|pair| pair == b"\n\n")?;
        let text = std::str::from_utf8(&self.bytes[..end]).ok()?;
        Some((text.lines().map(|line| line.split(' ').collect()).collect(), end + 2))
    }

    /// Returns the SHA-256 of the CUDA sources that the archive was compiled from, in hexadecimal.
    pub fn sources(&self) -> Option<&str> {
        let (lines, _) = self.header()?;
        lines.into_iter().find_map(|words| match words[..] {
            ["sources", digest] => Some(digest),
            _ => None,
        })
    }

    /// Returns the images of all families for a target.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] if the archive lacks one.
    pub fn of(&self, target: Target) -> Result<Vec<Image>, DeviceError> {
        FAMILIES
            .iter()
            .map(|family| {
                self.find(family, target).map(|bytes| Image::new(family, bytes)).ok_or_else(|| {
                    DeviceError::Failed {
                        what: format!("looking for the kernels of {family}"),
                        reason: format!("the embedded archive has none for {}", target.name()),
                    }
                })
            })
            .collect()
    }

    /// Returns the embedded image of a family for a target, or `None` if there is none.
    pub fn find(&self, family: &str, target: Target) -> Option<&[u8]> {
        let (lines, mut at) = self.header()?;
        for words in lines {
            let [name, form, bytes] = words[..] else { continue };
            let end = at.checked_add(bytes.parse().ok()?)?;
            if name == family && form == target.name() {
                return self.bytes.get(at..end);
            }
            at = end;
        }
        None
    }
}

/// Kernel families: the stems of the source files.
pub(super) const FAMILIES: [&str; 11] = [
    "attention",
    "copy",
    "delta",
    "embedding",
    "gemm",
    "norm",
    "output_gate",
    "qkv",
    "sampling",
    "skinny",
    "swiglu",
];

/// Family of each kernel, by the prefix of the kernel's name.
pub const KERNELS: &[(&str, &str)] = &[
    ("embedding", "embedding"),
    ("norm", "norm"),
    ("finish_qkv", "qkv"),
    ("swiglu", "swiglu"),
    ("geglu", "swiglu"),
    ("delta", "delta"),
    ("output_gate", "output_gate"),
    ("attention", "attention"),
    ("gemm", "gemm"),
    ("skinny_gemm", "skinny"),
    ("copy_blocks", "copy"),
    ("sample", "sampling"),
    ("accept_drafts", "sampling"),
    ("score", "sampling"),
    ("count_history", "sampling"),
];

/// Returns the family that contains `kernel`, or `None` if none has its prefix.
pub fn family_of(kernel: &str) -> Option<&'static str> {
    KERNELS.iter().find(|(prefix, _)| kernel.starts_with(prefix)).map(|(_, family)| *family)
}

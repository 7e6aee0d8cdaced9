//! Choices of GEMM autotuning, kept in a directory: a later start uses them without timing anything.
//!
//! A file belongs to one GPU model, one version of cuBLASLt and of the built-in kernels, and one dtype. Anything else
//! in it is a miss: a file that is broken, or that others could have written, is ignored and reported. A choice is
//! tried once before it is used, since an algorithm of cuBLASLt is data that only the library understands.

use inflight_models::CacheDirectory;
use serde::{Deserialize, Serialize};

/// Version of the files.
const FORMAT: u32 = 1;
/// Maximum size of a file.
const BYTES_MAX: u64 = 4 << 20;
/// Maximum number of choices in a file; a model has about a hundred.
const CHOICES_MAX: usize = 4096;

/// What a choice depends on, beside the GEMM's shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TuningContext {
    /// Name of the GPU, as the driver says it.
    pub(super) gpu: String,
    /// Version of cuBLASLt.
    pub(super) library: String,
    /// Version of the built-in kernels: the digest of their sources, and of the images that files replace.
    pub(super) kernels: String,
    /// Dtype of the operands.
    pub(super) dtype: String,
}

impl TuningContext {
    /// Name of the file: readable, and different for contexts that differ in a letter (FNV-1a).
    fn file_name(&self) -> String {
        let Self { gpu, library, kernels, dtype } = self;
        let text = format!("{gpu}\n{library}\n{kernels}\n{dtype}");
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        format!("gemm-{hash:016x}.json")
    }
}

/// Shape of a GEMM, as far as the choice depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TunedShape {
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) k: u32,
    pub(super) stride: u32,
    pub(super) f32_out: bool,
    pub(super) bias: bool,
}

/// Chosen algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CachedAlgorithm {
    /// cuBLASLt's description of one of its algorithms.
    CublasLt([u64; 8]),
    /// Built-in tiled kernel.
    Tiled,
    /// Built-in kernel for few rows.
    Skinny,
}

/// Choice for a shape, with its timings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct CachedChoice {
    pub(super) shape: TunedShape,
    pub(super) algorithm: CachedAlgorithm,
    /// Number of candidates, and which one was chosen; 0: the heuristic's first.
    pub(super) ways: usize,
    pub(super) way: usize,
    /// Seconds of a GEMM, by the choice and by the heuristic's first algorithm.
    pub(super) seconds: f64,
    pub(super) first_seconds: Option<f64>,
}

#[derive(Serialize, Deserialize)]
struct CacheFile {
    format: u32,
    context: TuningContext,
    choices: Vec<CachedChoice>,
}

/// Cached choices of one context.
#[derive(Debug)]
pub(super) struct GemmCache {
    directory: Option<CacheDirectory>,
    context: TuningContext,
    choices: Vec<CachedChoice>,
    changed: bool,
}

impl GemmCache {
    /// Reads the choices of a context; without a directory, or where reading fails, there are none.
    pub(super) fn open(directory: Option<CacheDirectory>, context: TuningContext) -> Self {
        let mut cache = Self { directory, context, choices: Vec::new(), changed: false };
        match cache.read() {
            Ok(choices) => cache.choices = choices,
            Err(error) => {
                tracing::warn!(file = cache.context.file_name(), error, "ignoring cached GEMM choices")
            }
        }
        cache
    }

    fn read(&self) -> Result<Vec<CachedChoice>, String> {
        let Some(directory) = &self.directory else { return Ok(Vec::new()) };
        let bytes =
            directory.read(&self.context.file_name(), BYTES_MAX).map_err(|error| error.to_string())?;
        let Some(bytes) = bytes else { return Ok(Vec::new()) };
        let file: CacheFile =
            serde_json::from_slice(&bytes).map_err(|error| format!("the file is broken: {error}"))?;
        if file.format != FORMAT || file.context != self.context {
            return Err("the file belongs to another GPU, library, dtype or version".to_owned());
        }
        Ok(file.choices)
    }

    /// Whether choices are kept for later starts.
    pub(super) fn is_kept(&self) -> bool {
        self.directory.is_some()
    }

    /// Returns the choice for a shape.
    pub(super) fn get(&self, shape: &TunedShape) -> Option<CachedChoice> {
        self.choices.iter().find(|choice| choice.shape == *shape).copied()
    }

    /// Adds or replaces a choice.
    pub(super) fn put(&mut self, choice: CachedChoice) {
        self.choices.retain(|known| known.shape != choice.shape);
        let excess = (self.choices.len() + 1).saturating_sub(CHOICES_MAX);
        self.choices.drain(..excess);
        self.choices.push(choice);
        self.changed = true;
    }

    /// Writes the choices if one is new. Another worker's that were written meanwhile stay. A failure is logged.
    pub(super) fn save(&mut self) {
        let Some(directory) = self.directory.clone().filter(|_| self.changed) else { return };
        let own = std::mem::take(&mut self.choices);
        self.choices = self.read().unwrap_or_default();
        own.into_iter().for_each(|choice| self.put(choice));
        let file = CacheFile { format: FORMAT, context: self.context.clone(), choices: self.choices.clone() };
        let written = serde_json::to_vec(&file)
            .map_err(std::io::Error::from)
            .and_then(|bytes| directory.write(&self.context.file_name(), &bytes));
        match written {
            Ok(()) => self.changed = false,
            Err(error) => {
                let directory = directory.path().display();
                tracing::warn!(%directory, %error, "cannot keep the GEMM choices; the next start times them again");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use inflight_fixtures::TempDir;

    use super::*;

    fn context() -> TuningContext {
        TuningContext {
            gpu: "NVIDIA H200".to_owned(),
            library: "cublaslt 130000".to_owned(),
            kernels: "0123".to_owned(),
            dtype: "BF16".to_owned(),
        }
    }

    fn choice(m: u32, way: usize) -> CachedChoice {
        CachedChoice {
            shape: TunedShape { m, n: 4096, k: 1024, stride: 4096, f32_out: false, bias: false },
            algorithm: match way {
                0 => CachedAlgorithm::CublasLt([u64::MAX, 1, 2, 3, 4, 5, 6, 7]),
                1 => CachedAlgorithm::Tiled,
                _ => CachedAlgorithm::Skinny,
            },
            ways: 10,
            way,
            seconds: 1.25e-5,
            first_seconds: (way > 0).then_some(2.5e-5),
        }
    }

    fn open(folder: &Path, context: TuningContext) -> GemmCache {
        GemmCache::open(Some(CacheDirectory::new(folder.to_owned(), "--gemm-cache")), context)
    }

    #[test]
    fn choices_are_found_by_a_later_start_with_the_same_gpu_library_and_kernels_alone() {
        let folder = TempDir::new("inflight-gemm").unwrap();
        let folder = folder.path().join("cache");
        let mut cache = open(&folder, context());
        assert_eq!(cache.get(&choice(1, 0).shape), None);
        let choices = [choice(1, 0), choice(8, 1), choice(16, 2)];
        choices.into_iter().for_each(|choice| cache.put(choice));
        cache.save();
        // Two workers that tuned different shapes keep both.
        let mut other = open(&folder, context());
        other.put(choice(64, 1));
        let mut late = open(&folder, context());
        late.put(choice(8, 2));
        other.save();
        late.save();
        let later = open(&folder, context());
        for choice in [choice(1, 0), choice(8, 2), choice(16, 2), choice(64, 1)] {
            assert_eq!(later.get(&choice.shape), Some(choice));
        }
        for other in [
            TuningContext { gpu: "NVIDIA H100".to_owned(), ..context() },
            TuningContext { library: "cublaslt 120800".to_owned(), ..context() },
            TuningContext { kernels: "4567".to_owned(), ..context() },
            TuningContext { dtype: "F16".to_owned(), ..context() },
        ] {
            assert_eq!(open(&folder, other).get(&choice(1, 0).shape), None);
        }
        let other = TunedShape { bias: true, ..choice(1, 0).shape };
        assert_eq!(later.get(&other), None);
    }

    #[test]
    fn a_broken_or_foreign_file_is_ignored_and_replaced() {
        let folder = TempDir::new("inflight-gemm").unwrap();
        let mut cache = open(folder.path(), context());
        cache.put(choice(1, 0));
        cache.save();
        let file = folder.path().join(context().file_name());
        let whole = fs::read(&file).unwrap();
        let foreign = String::from_utf8(whole.clone()).unwrap().replace("H200", "H100").into_bytes();
        let newer =
            String::from_utf8(whole.clone()).unwrap().replace("\"format\":1", "\"format\":2").into_bytes();
        let broken = [&whole[..whole.len() / 2], b"", b"[]", b"\xff\xfe", &foreign, &newer];
        for bytes in broken {
            fs::write(&file, bytes).unwrap();
            let mut cache = open(folder.path(), context());
            assert_eq!(cache.get(&choice(1, 0).shape), None);
            cache.put(choice(2, 1));
            cache.save();
            assert_eq!(open(folder.path(), context()).get(&choice(2, 1).shape), Some(choice(2, 1)));
        }
    }

    #[test]
    fn a_directory_that_cannot_be_written_loses_nothing_but_the_file() {
        let folder = TempDir::new("inflight-gemm").unwrap();
        let place = folder.path().join("cache");
        fs::write(&place, "a file in the place of the directory").unwrap();
        let mut cache = open(&place, context());
        cache.put(choice(1, 0));
        cache.save();
        assert_eq!(cache.get(&choice(1, 0).shape), Some(choice(1, 0)));
        let mut none = GemmCache::open(None, context());
        none.put(choice(1, 0));
        none.save();
        assert!(!none.is_kept() && none.get(&choice(1, 0).shape).is_some());
    }

    #[test]
    fn the_number_of_choices_is_bounded() {
        let mut cache = GemmCache::open(None, context());
        (0..CHOICES_MAX as u32 + 10).for_each(|m| cache.put(choice(m, 1)));
        assert_eq!(cache.choices.len(), CHOICES_MAX);
        assert_eq!(
            (cache.get(&choice(9, 1).shape), cache.get(&choice(10, 1).shape)),
            (None, Some(choice(10, 1)))
        );
    }
}

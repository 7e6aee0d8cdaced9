//! Model checkpoints: Hugging Face directories and GGUF files, validated.
//!
//! A [`ModelDir`] is opened from a directory, a GGUF file or the embedded model ([`ModelSource`]) by the same
//! code. Opening reads and validates configuration and headers, not weights; a runtime then loads the tensors
//! it needs into memory of its own, and takes the fingerprint after the last of them. Files are not mapped, so
//! nothing that happens to them later concerns a running worker.

mod architecture;
mod bundle;
mod cache_directory;
mod config;
mod config_keys;
mod content;
mod decoder;
mod embedded;
mod error;
mod fields;
mod files;
mod fingerprint;
mod fingerprint_cache;
mod foreign_tensors;
#[doc(hidden)]
pub mod fuzz;
mod generation;
mod gguf;
mod layer;
mod source;
mod tensors;
mod weight_file;

use std::path::Path;
use std::sync::Arc;

pub use architecture::Architecture;
pub use cache_directory::CacheDirectory;
pub use config::ModelConfig;
pub use decoder::{
    AttentionWeights, CheckpointDecoder, CheckpointLayer, CheckpointMtp, DecoderLayer, DeltaWeights, Matrix,
    MixerWeights, MtpLayer, StackedLinear, VectorKind,
};
pub use error::Error;
pub use fingerprint::{fingerprint, fingerprint_of};
pub use fingerprint_cache::FingerprintCache;
pub use generation::GenerationDefaults;
pub use inflight_kernels::cpu::RopeScaling;
pub use layer::{Arithmetic, AttentionSpec, DeltaForm, DeltaSpec, LayerSpec, Mixer, NormPlaces, Rope};
pub use source::ModelSource;
pub use tensors::{LoadedTensor, Tensor, Tensors};

use fields::Fields;
use files::Files;
use gguf::Gguf;
use weight_file::WeightFile;

/// Opened model: configuration, located tensors and bundle files.
#[derive(Debug)]
pub struct ModelDir {
    name: String,
    config: ModelConfig,
    generation: GenerationDefaults,
    tensors: Tensors,
    bundle: Vec<(String, Vec<u8>)>,
}

impl ModelDir {
    /// Opens and validates a model without reading weights.
    ///
    /// # Errors
    /// [`Error`] with the file and, where applicable, the invalid field or tensor.
    pub fn open(source: &ModelSource) -> Result<Self, Error> {
        match source {
            ModelSource::Embedded => {
                let (beside, file) = files::open_embedded()?;
                Self::open_gguf(&beside, file, embedded::WEIGHTS, embedded::NAME)
            }
            ModelSource::Directory(path) if path.extension().is_some_and(|kind| kind == "gguf") => {
                let (beside, file) = files::open_file(path)?;
                let stem = path.file_stem().map_or("model".into(), |stem| stem.to_string_lossy());
                // Of several files, the name that they share.
                let is_count = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
                let shared = stem.rsplit_once("-00001-of-").filter(|(_, count)| is_count(count));
                let name = shared.map_or(&*stem, |(name, _)| name);
                let file_name = path.file_name().map_or("".into(), |name| name.to_string_lossy());
                Self::open_gguf(&beside, file, &file_name, name)
            }
            ModelSource::Directory(path) => Self::open_directory(path),
        }
    }

    fn open_directory(path: &Path) -> Result<Self, Error> {
        let files = Files::of_directory(path)?;
        let config = ModelConfig::read(&files)?;
        let generation = GenerationDefaults::read(&files, &config)?;
        let bundle = bundle::read(&files)?;
        let tensors = Tensors::open(&files)?;
        // Canonicalized, because `.` and `..` have no file name.
        let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let name = absolute.file_name().map_or("model".into(), |name| name.to_string_lossy()).into_owned();
        Self { name, config, generation, tensors, bundle }.checked()
    }

    /// Checks that the checkpoint has the decoder's tensors and no others.
    fn checked(self) -> Result<Self, Error> {
        self.decoder().map(|_| self)
    }

    /// Opens a GGUF file, of several the first, with the files `beside` it. Uses their tokenizer.json or, if that is missing, the
    /// tokenizer in the file.
    fn open_gguf(beside: &Files, file: WeightFile, file_name: &str, name: &str) -> Result<Self, Error> {
        let label = file.label().to_owned();
        let mut gguf = Gguf::parse(&file)?;
        let parts = gguf.join_parts(file_name, beside)?;
        let files: Vec<Arc<WeightFile>> = std::iter::once(file).chain(parts).map(Arc::new).collect();
        let map = gguf::config(&gguf, &files)?;
        let text = serde_json::to_vec(&map).unwrap_or_default();
        let config = ModelConfig::of(&Fields::of(label, map))?;
        let generation = GenerationDefaults::read(beside, &config)?;
        let mut bundle = if beside.read("tokenizer.json")?.is_some() {
            bundle::read(beside)?
        } else {
            let files = gguf::tokenizer(&gguf)?.into_iter();
            files.map(|(name, value)| (name.to_owned(), value.to_string().into_bytes())).collect()
        };
        // A config.json in the same directory may belong to another model.
        bundle.retain(|(name, _)| name != "config.json");
        bundle.push(("config.json".to_owned(), text));
        let interleaved = config.architecture.gguf().is_some_and(|gguf| gguf.interleaved_heads);
        let names = config.architecture.spec().tensors;
        let head_dim = interleaved.then_some(config.head_dim);
        let tensors = Tensors::of_gguf(gguf, files, names, config.delta.is_some(), head_dim);
        Self { name: name.to_owned(), config, generation, tensors, bundle }.checked()
    }

    /// Uses a fingerprint cache. To be called before a runtime loads the model.
    #[must_use]
    pub fn with_fingerprint_cache(mut self, cache: FingerprintCache) -> Self {
        self.tensors.use_cache(cache);
        self
    }

    /// Replaces the model's chat templates by the one in a file.
    ///
    /// # Errors
    /// [`Error`] if the file cannot be read, is too large or is no text.
    pub fn with_chat_template(mut self, file: &Path) -> Result<Self, Error> {
        bundle::replace_template(&mut self.bundle, file)?;
        Ok(self)
    }

    /// Default model name: the directory's or file's name, or `inflight-demo`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Validated model configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Architecture name in config.json, such as "LlamaForCausalLM".
    pub fn architecture(&self) -> &'static str {
        self.config.architecture.name()
    }

    /// Defaults for generation from generation_config.json, with EOS tokens of config.json as a fallback.
    pub fn generation(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// EOS token ids, ascending.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.generation.eos_token_ids
    }

    /// Tensors of the weight files.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Bundle files for routers, as (name, content): tokenizer, chat template, configurations.
    pub fn bundle_files(&self) -> &[(String, Vec<u8>)] {
        &self.bundle
    }
}

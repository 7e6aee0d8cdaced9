//! Models: Hugging Face directories and GGUF files, memory-mapped and validated.
//!
//! A [`ModelDir`] comes from a directory or from the binary itself ([`ModelSource`]); both go through the same code, so
//! whatever holds for one holds for the other. Opening reads and checks every file but no weights; a runtime
//! then takes the tensors it needs.

mod bundle;
mod config;
mod embedded;
mod error;
mod fields;
mod files;
mod fingerprint;
mod generation;
mod gguf;
mod tensors;

use std::path::{Path, PathBuf};

pub use config::{Architecture, ModelConfig};
pub use error::Error;
pub use fingerprint::{fingerprint, fingerprint_of};
pub use generation::GenerationDefaults;
pub use inflight_kernels::cpu::RopeScaling;
pub use tensors::{Tensor, Tensors};

use fields::Fields;
use files::Files;
use gguf::Gguf;

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A directory in the layout of Hugging Face (config.json, safetensors, tokenizer.json and companions), or a file
    /// whose name ends in `.gguf`.
    Directory(PathBuf),
    /// The small model inside the binary.
    Embedded,
}

/// An opened model: configuration, tensors (memory-mapped) and the files that routers need.
#[derive(Debug)]
pub struct ModelDir {
    name: String,
    config: ModelConfig,
    generation: GenerationDefaults,
    tensors: Tensors,
    bundle: Vec<(String, Vec<u8>)>,
}

impl ModelDir {
    /// Opens and validates a model. No weight is read yet.
    ///
    /// # Errors
    /// [`Error`] naming the file and, where there is one, the field or tensor at fault.
    pub fn open(source: &ModelSource) -> Result<Self, Error> {
        let files = match source {
            ModelSource::Directory(path) if path.extension().is_some_and(|kind| kind == "gguf") => {
                return Self::open_gguf(path);
            }
            _ => Files::of(source)?,
        };
        let config = ModelConfig::read(&files)?;
        let generation = GenerationDefaults::read(&files, &config)?;
        let bundle = bundle::read(&files)?;
        let tensors = Tensors::open(&files)?;
        Ok(Self { name: files.model_name(), config, generation, tensors, bundle })
    }

    /// Opens a GGUF file. Its tokenizer is that of a tokenizer.json beside it or, if there is none, the one inside.
    fn open_gguf(path: &Path) -> Result<Self, Error> {
        let (beside, bytes) = files::open_file(path)?;
        let label = path.display().to_string();
        let gguf = Gguf::parse(&label, &bytes)?;
        let map = gguf::config(&gguf)?;
        let text = serde_json::to_vec(&map).unwrap_or_default();
        let config = ModelConfig::of(&Fields::of(label, map))?;
        let generation = GenerationDefaults::read(&beside, &config)?;
        let mut bundle = if beside.open("tokenizer.json")?.is_some() {
            bundle::read(&beside)?
        } else {
            let files = gguf::tokenizer(&gguf)?.into_iter();
            files.map(|(name, value)| (name.to_owned(), value.to_string().into_bytes())).collect()
        };
        // A config.json beside the file may be that of some other model.
        bundle.retain(|(name, _)| name != "config.json");
        bundle.push(("config.json".to_owned(), text));
        let name = path.file_stem().map_or("model".into(), |stem| stem.to_string_lossy()).into_owned();
        // Only this family's files have the halves of a head interleaved.
        let interleaved = (config.architecture == Architecture::Llama).then_some(config.head_dim);
        let tensors = Tensors::of_gguf(gguf, bytes, interleaved);
        Ok(Self { name, config, generation, tensors, bundle })
    }

    /// What to call it where no name is given: the directory's, or `inflight-demo`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What its config.json says, validated.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The architecture's name in config.json.
    pub fn architecture(&self) -> &'static str {
        self.config.architecture.name()
    }

    /// What its generation_config.json says, completed from config.json.
    pub fn generation(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// Tokens that end a sequence, ascending.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.generation.eos_token_ids
    }

    /// Its tensors.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Files to hand to routers, by name: tokenizer, chat template, configurations.
    pub fn bundle_files(&self) -> &[(String, Vec<u8>)] {
        &self.bundle
    }
}

//! Models: Hugging Face directories, memory-mapped and validated.
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
mod tensors;

use std::path::PathBuf;

pub use config::{Architecture, ModelConfig};
pub use error::Error;
pub use fingerprint::{fingerprint, fingerprint_of};
pub use generation::GenerationDefaults;
pub use inflight_kernels::cpu::RopeScaling;
pub use tensors::{Tensor, Tensors};

use files::Files;

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A directory in the layout of Hugging Face: config.json, safetensors, tokenizer.json and companions.
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
        let files = Files::of(source)?;
        let config = ModelConfig::read(&files)?;
        let generation = GenerationDefaults::read(&files, &config)?;
        let bundle = bundle::read(&files)?;
        let tensors = Tensors::open(&files)?;
        Ok(Self { name: files.model_name(), config, generation, tensors, bundle })
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

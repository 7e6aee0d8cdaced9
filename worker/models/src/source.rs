//! Source of a model: a path, or the embedded model.

use std::path::{Path, PathBuf};

/// Source of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// Directory in the Hugging Face layout (config.json, safetensors, tokenizer.json and companions), or a
    /// `.gguf` file.
    Directory(PathBuf),
    /// Small demo model embedded in the binary.
    Embedded,
}

impl ModelSource {
    /// Name of the embedded model.
    pub const EMBEDDED_NAME: &'static str = "inflight-demo";

    /// Returns the model of an argument: a path, or the embedded model by its name if there is no such path, or without
    /// an argument.
    pub fn of_argument(argument: Option<&Path>) -> Self {
        match argument {
            Some(path) if path != Path::new(Self::EMBEDDED_NAME) || path.exists() => {
                Self::Directory(path.to_owned())
            }
            Some(_) | None => Self::Embedded,
        }
    }
}

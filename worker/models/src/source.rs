//! Source of a model: a path, or the embedded model.

use std::path::PathBuf;

/// Source of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// Directory in the Hugging Face layout (config.json, safetensors, tokenizer.json and companions), or a
    /// `.gguf` file.
    Directory(PathBuf),
    /// Small demo model embedded in the binary.
    Embedded,
}

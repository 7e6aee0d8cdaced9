//! Errors of model loading, with file, field or tensor.

/// Error for a model that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model path is missing or not a directory.
    #[error("no model at {path}: {reason}; give the directory that holds config.json")]
    NoDirectory {
        /// Given path.
        path: String,
        /// Cause.
        reason: String,
    },
    /// The GGUF path is missing or not a file.
    #[error("no model at {path}: {reason}")]
    NoFile {
        /// Given path.
        path: String,
        /// Cause.
        reason: String,
    },
    /// Reading a file failed.
    #[error("cannot read {file}: {source}")]
    Read {
        /// File label.
        file: String,
        /// Cause.
        source: std::io::Error,
    },
    /// A weight file changed between its opening and the end of loading.
    #[error(
        "{file} changed while the model was loaded: {change}; start the worker again when the file is complete, and \
         replace weight files by renaming new ones over them, never by writing into them"
    )]
    Changed {
        /// File label.
        file: String,
        /// Difference.
        change: String,
    },
    /// A required file is missing.
    #[error("{file} is missing; {advice}")]
    MissingFile {
        /// File label.
        file: String,
        /// Remedy.
        advice: &'static str,
    },
    /// A file is malformed.
    #[error("{file} is broken: {reason}")]
    Broken {
        /// File label.
        file: String,
        /// Defect.
        reason: String,
    },
    /// A required field is missing.
    #[error("{file} has no field `{field}`, which this architecture needs")]
    MissingField {
        /// File label.
        file: String,
        /// Field name.
        field: String,
    },
    /// A field has an invalid value.
    #[error("{file}: `{field}` is {found}; it must be {expected}")]
    Field {
        /// File label.
        file: String,
        /// Field name.
        field: String,
        /// Value in the file.
        found: String,
        /// Valid values.
        expected: String,
    },
    /// A field requests an unsupported feature.
    #[error("{file}: `{field}` asks for {found}, which is not supported; supported: {supported}")]
    Unsupported {
        /// File label.
        file: String,
        /// Field name.
        field: String,
        /// Requested feature.
        found: String,
        /// Supported features.
        supported: String,
    },
    /// A required tensor is missing.
    #[error("{file} has no tensor {tensor}; expected one of shape {expected:?}")]
    MissingTensor {
        /// Label of the weight file, or a description of several.
        file: String,
        /// Tensor name.
        tensor: String,
        /// Shape that config.json implies.
        expected: Vec<usize>,
    },
    /// The checkpoint has tensors that its decoder does not use.
    #[error(
        "{file} has {count} {tensor}, which the architecture {architecture} does not use: it is {kind}; without it the \
         output would be wrong, so the model is not served"
    )]
    UnusedTensor {
        /// Label of the weight file.
        file: String,
        /// First of the tensors.
        tensor: String,
        /// "a tensor", or a number of tensors.
        count: String,
        /// Architecture of config.json.
        architecture: &'static str,
        /// What a model with such a tensor is.
        kind: &'static str,
    },
    /// The shape of a tensor contradicts config.json.
    #[error("{file}: tensor {tensor} has shape {found:?}; config.json implies {expected:?}")]
    Shape {
        /// Label of the weight file.
        file: String,
        /// Tensor name.
        tensor: String,
        /// Shape that config.json implies.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// An element of a tensor is infinite or NaN.
    #[error(
        "{file}: element {element} of tensor {tensor} is infinite or NaN, so that no output of the model would mean anything; the file is \
         damaged, or its conversion has overflowed: get or convert it again"
    )]
    NonFinite {
        /// Label of the weight file.
        file: String,
        /// Tensor name.
        tensor: String,
        /// Index of the element, or of the first one of its block.
        element: usize,
    },
    /// The element type of a tensor is not supported.
    #[error(
        "{file}: tensor {tensor} is {found}; supported: f32, bf16, f16, and in GGUF files {}",
        inflight_kernels::Encoding::block_names()
    )]
    Dtype {
        /// Label of the weight file.
        file: String,
        /// Tensor name.
        tensor: String,
        /// Element type in the file.
        found: String,
    },
}

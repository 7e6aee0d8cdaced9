/// Why a model can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model's directory is not there or not a directory.
    #[error("no model at {path}: {reason}; give the directory that holds config.json")]
    NoDirectory {
        /// The path given.
        path: String,
        /// What the operating system says.
        reason: String,
    },
    /// The model's file is not there or not a file.
    #[error("no model at {path}: {reason}")]
    NoFile {
        /// The path given.
        path: String,
        /// What the operating system says.
        reason: String,
    },
    /// A file can't be read.
    #[error("cannot read {file}: {source}")]
    Read {
        /// The file.
        file: String,
        /// What the operating system says.
        source: std::io::Error,
    },
    /// A file that every model needs is not there.
    #[error("{file} is missing; {advice}")]
    MissingFile {
        /// The file.
        file: String,
        /// What to do.
        advice: &'static str,
    },
    /// A file does not hold what its name promises.
    #[error("{file} is broken: {reason}")]
    Broken {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A needed field is not there.
    #[error("{file} has no field `{field}`, which this architecture needs")]
    MissingField {
        /// The file.
        file: String,
        /// The field.
        field: String,
    },
    /// A field has an unusable value.
    #[error("{file}: `{field}` is {found}; it must be {expected}")]
    Field {
        /// The file.
        file: String,
        /// The field.
        field: String,
        /// Its value.
        found: String,
        /// What would do.
        expected: String,
    },
    /// A field asks for something that does not exist here.
    #[error("{file}: `{field}` asks for {found}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The file.
        file: String,
        /// The field.
        field: String,
        /// What it asks for.
        found: String,
        /// What there is.
        supported: String,
    },
    /// No file has the tensor.
    #[error("{file} has no tensor {tensor}; expected one of shape {expected:?}")]
    MissingTensor {
        /// The weight file, or the directory's files if there are several.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shape that config.json implies.
        expected: Vec<usize>,
    },
    /// A tensor's shape contradicts config.json.
    #[error("{file}: tensor {tensor} has shape {found:?}; config.json implies {expected:?}")]
    Shape {
        /// The weight file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shape that config.json implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor's numbers are of a type that kernels don't have.
    #[error(
        "{file}: tensor {tensor} is {found}; supported: f32, bf16, f16, and in GGUF files q8_0, q4_0, q4_k, q6_k"
    )]
    Dtype {
        /// The weight file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
    },
}

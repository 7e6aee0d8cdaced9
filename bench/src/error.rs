//! Error that ends a benchmark.

/// Kind of an error, for exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The server failed.
    Failure,
    /// The settings contradict each other or the server.
    Usage,
    /// The server is unreachable.
    Unavailable,
    /// The server rejects the request as invalid.
    Refused,
    /// A queue or limit of the server is full.
    Exhausted,
    /// gRPC status of the server.
    Status(tonic::Code),
}

/// Error that ends a benchmark: its kind, and what was wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct BenchError {
    /// Kind of the error.
    pub kind: ErrorKind,
    /// Message for the terminal.
    pub message: String,
}

impl BenchError {
    /// Creates an error.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Prefixes the message with `context`.
    #[must_use]
    pub fn at(self, context: &str) -> Self {
        Self { message: format!("{context}: {}", self.message), ..self }
    }
}

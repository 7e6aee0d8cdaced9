//! Reasons for which options are refused.

use crate::cluster::discovery::SourceError;

/// Invalid options.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// No workers.
    #[error("no workers are given; name at least one as host:port")]
    NoWorkers,
    /// An expected model without a name, or with spaces around it.
    #[error("expected_models has the name {name:?}; name models as workers do, without spaces around them")]
    ExpectedModel {
        /// The name.
        name: String,
    },
    /// Malformed address.
    #[error("the worker address {address:?} is not host:port: {reason}")]
    WorkerAddress {
        /// The given address.
        address: String,
        /// The reason.
        reason: String,
    },
    /// Invalid discovery source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// Duplicate worker.
    #[error("the worker address {address:?} is given twice; each worker has one session")]
    DuplicateWorker {
        /// The given address.
        address: String,
    },
    /// Receive budget smaller than one message.
    #[error(
        "--receive-bytes-max is {receive}, less than --message-bytes-max {message}; raise the first or lower the second"
    )]
    ReceiveBytes {
        /// Receive budget in bytes.
        receive: u64,
        /// Maximum message size in bytes.
        message: usize,
    },
    /// Zero limit.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// The option, as it is given on the command line.
        name: &'static str,
    },
}

//! Reasons for which options are refused.

use std::net::SocketAddr;

use inflight_worker_core::StepTargetOption;

/// Error for invalid options.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// A value is out of its range.
    #[error("{name} is {value}; it must be {range}")]
    OutOfRange {
        /// The option, as it is given on the command line.
        name: &'static str,
        /// Given value.
        value: String,
        /// Allowed range.
        range: &'static str,
    },
    /// An objective beside a target that is not `auto`, which would have no effect.
    #[error("--slo-ttft and --slo-gap need --step-target auto, not {0}")]
    Objectives(StepTargetOption),
    /// Callers need not authenticate, and others than this host's processes can connect.
    #[error(
        "listening on {0} without authentication: everyone who can connect could read prompts and take the worker's capacity; \
         give --secret-file, or --tls-client-ca for client certificates, or --insecure where only routers can connect"
    )]
    Unauthenticated(SocketAddr),
}

//! Error of a tenants' file.

use std::path::PathBuf;

/// Invalid tenants' file.
#[derive(Debug, thiserror::Error)]
pub enum TenantsError {
    /// Unreadable file.
    #[error("cannot read the tenants' file {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// I/O error.
        source: std::io::Error,
    },
    /// Invalid contents.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
}

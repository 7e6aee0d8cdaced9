//! Errors, each a sentence with what to do.

use std::io;
use std::path::PathBuf;

/// Reason for which a model is not there.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The text is no name of a model.
    #[error("{name} is no model of the Hub: {reason}; write org/name, org/name@revision or org/name:file")]
    Name {
        /// The text.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// There is no such path, and it is no name either.
    #[error("{path}: there is no such directory or file{hint}")]
    NoPath {
        /// The path.
        path: String,
        /// What was meant, perhaps.
        hint: String,
    },
    /// There is no such model, or it is private.
    #[error(
        "{repo} is not on {endpoint}, or is private{hint}; there is no directory {repo} here either. Check the name, and set HF_TOKEN \
         for a private model"
    )]
    NoModel {
        /// `org/name`.
        repo: String,
        /// Address of the Hub.
        endpoint: String,
        /// Whether a token was sent.
        hint: &'static str,
    },
    /// Its owners let only some accounts have it.
    #[error(
        "{repo} is gated: accept its conditions at {endpoint}/{repo} with your account, and set HF_TOKEN to a token of that account"
    )]
    Gated {
        /// `org/name`.
        repo: String,
        /// Address of the Hub.
        endpoint: String,
    },
    /// There is no such revision.
    #[error("{repo} has no revision {revision}{near}")]
    NoRevision {
        /// `org/name`.
        repo: String,
        /// The revision.
        revision: String,
        /// Names of others that are near.
        near: String,
    },
    /// The repository does not have what was asked for.
    #[error("{repo}: {reason}")]
    Files {
        /// `org/name`.
        repo: String,
        /// What is missing.
        reason: String,
    },
    /// The Hub is not to be asked, and the cache lacks something.
    #[error(
        "{name} is not in the cache {cache}, and HF_HUB_OFFLINE forbids downloads; fetch it with `inflight pull {name}` \
         where there is a network"
    )]
    Offline {
        /// The model.
        name: String,
        /// Directory of the cache.
        cache: String,
    },
    /// The Hub does not answer as it should.
    #[error("{url}: {reason}")]
    Hub {
        /// Address.
        url: String,
        /// Reason.
        reason: String,
    },
    /// The bytes that arrived are not those that were promised.
    #[error(
        "{file} arrived with the {kind} {actual}, not {expected}, and was deleted; a proxy or a mirror changed it, try again or set \
         HF_ENDPOINT"
    )]
    WrongBytes {
        /// File.
        file: String,
        /// Kind of the digest.
        kind: &'static str,
        /// Digest that the Hub says.
        expected: String,
        /// Digest of what arrived.
        actual: String,
    },
    /// There is too little space.
    #[error(
        "{file} needs {needed} more bytes, and {directory} has {free} free; free some, or set HF_HUB_CACHE to another disk"
    )]
    Space {
        /// File.
        file: String,
        /// Bytes that are missing.
        needed: u64,
        /// Bytes that are free.
        free: u64,
        /// Directory of the cache.
        directory: PathBuf,
    },
    /// A model in use is not removed.
    #[error("{repo} is being downloaded by another process; end it first")]
    InUse {
        /// `org/name`.
        repo: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {path}: {source}{}", remedy(source))]
    File {
        /// What failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Says what helps against a failed file operation, where that is known.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space and repeat the command: what has arrived is kept"
        }
        _ => "",
    }
}

impl HubError {
    /// Returns the error of a file operation, for use with `map_err`.
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }
}

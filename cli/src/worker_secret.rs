//! Flags of the secret that routers and workers share.

use std::path::PathBuf;

use inflight_net::SecretFile;

use crate::exit::CommandError;

/// Option of those who call workers.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Workers")]
pub struct WorkerSecretArgs {
    /// File with the secret of the workers, reread when it changes: the first line is proved to workers, which
    /// have to prove it too
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_SECRET_FILE")]
    pub worker_secret_file: Option<PathBuf>,
}

impl WorkerSecretArgs {
    /// Reads the file; `None` if none is given.
    ///
    /// # Errors
    /// The file cannot be read, has no secret or a short one.
    pub fn open(&self) -> Result<Option<SecretFile>, CommandError> {
        let opened = self.worker_secret_file.as_deref().map(SecretFile::open).transpose();
        opened.map_err(|error| CommandError::chain("--worker-secret-file", &error))
    }
}

//! Files of secrets, one on each line, reread when they change.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::file_watcher::FileState;
use crate::metrics;
use crate::private_file::warn_if_readable_by_all;

/// Minimum length of a secret in bytes: 32 random hexadecimal digits are 128 bits.
pub const SECRET_BYTES_MIN: usize = 32;

/// Secrets of a file in order: the first is the one to use, all are accepted, so that a secret can be replaced
/// step by step without an interruption.
pub type Secrets = Arc<[Vec<u8>]>;

/// Error of a file of secrets.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// The file has no secret.
    #[error("{} has no secret; write a line of {SECRET_BYTES_MIN} random characters or more", path.display())]
    Empty {
        /// Path of the file.
        path: PathBuf,
    },
    /// A secret is too short.
    #[error("secret {number} of {} has {bytes} bytes; it needs {SECRET_BYTES_MIN} or more", path.display())]
    Short {
        /// Path of the file.
        path: PathBuf,
        /// Number of the secret, from 1.
        number: usize,
        /// Its length.
        bytes: usize,
    },
}

/// Reads the secrets of a file; warns if every user of the machine can.
///
/// # Errors
/// [`SecretError`].
pub fn read_secrets(path: &Path) -> Result<Secrets, SecretError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| SecretError::Read { path: path.to_owned(), source })?;
    let secrets: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if secrets.is_empty() {
        return Err(SecretError::Empty { path: path.to_owned() });
    }
    if let Some(at) = secrets.iter().position(|secret| secret.len() < SECRET_BYTES_MIN) {
        let (number, bytes) = (at + 1, secrets[at].len());
        return Err(SecretError::Short { path: path.to_owned(), number, bytes });
    }
    warn_if_readable_by_all(path, "secrets");
    Ok(secrets.into_iter().map(|secret| secret.as_bytes().to_vec()).collect())
}

/// Secrets that may change while they are in use. Cheap to clone.
#[derive(Clone)]
pub struct SecretFile(Arc<Source>);

enum Source {
    Fixed(Secrets),
    File { path: PathBuf, read: Mutex<(FileState, Secrets)> },
}

impl fmt::Debug for SecretFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_tuple("SecretFile");
        match &*self.0 {
            Source::Fixed(_) => out.finish_non_exhaustive(),
            Source::File { path, .. } => out.field(path).finish(),
        }
    }
}

impl SecretFile {
    /// Reads a file.
    ///
    /// # Errors
    /// [`SecretError`].
    pub fn open(path: &Path) -> Result<Self, SecretError> {
        // Before the file is read: a change in between is seen at the next use.
        let state = FileState::of(path);
        let read = Mutex::new((state, read_secrets(path)?));
        Ok(Self(Arc::new(Source::File { path: path.to_owned(), read })))
    }

    /// Creates secrets without a file, which never change.
    pub fn fixed(secrets: Secrets) -> Self {
        Self(Arc::new(Source::Fixed(secrets)))
    }

    /// Returns the secrets, from the file's current content. If that is invalid, the previous ones remain in
    /// force, with an error in the log.
    pub fn secrets(&self) -> Secrets {
        let (path, read) = match &*self.0 {
            Source::Fixed(secrets) => return secrets.clone(),
            Source::File { path, read } => (path, read),
        };
        let mut read = read.lock().unwrap_or_else(PoisonError::into_inner);
        let state = FileState::of(path);
        if read.0 != state {
            let reread = read_secrets(path);
            metrics::reloaded("secret", reread.is_ok());
            match reread {
                Ok(secrets) => {
                    tracing::info!(path = %path.display(), secrets = secrets.len(), "secrets reloaded");
                    read.1 = secrets;
                }
                Err(error) => {
                    tracing::error!(%error, "the file of secrets changed but is invalid; keeping the previous ones")
                }
            }
            read.0 = state;
        }
        read.1.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_a_secret_and_short_ones_are_rejected() {
        let folder = std::env::temp_dir().join(format!("inflight-secrets-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("secrets");
        let error = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_secrets(&path).unwrap_err().to_string()
        };
        let (one, two) = ("a".repeat(32), "b".repeat(40));
        assert!(error("\n").contains("has no secret"));
        assert!(error(&format!("{one}\nshort")).contains("secret 2 of"));
        std::fs::write(&path, format!("{one}\n\n {two} \n")).unwrap();
        let file = SecretFile::open(&path).unwrap();
        assert_eq!(*file.secrets(), [one.clone().into_bytes(), two.clone().into_bytes()]);

        // A change is followed, an invalid one is not.
        std::fs::write(&path, &two).unwrap();
        assert_eq!(*file.secrets(), [two.clone().into_bytes()]);
        std::fs::write(&path, "short").unwrap();
        assert_eq!(*file.secrets(), [two.into_bytes()]);
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(matches!(read_secrets(&path), Err(SecretError::Read { .. })));
    }
}

//! Files with random secrets for the processes that `inflight up` starts.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::exit::CommandError;

/// File with a random secret, readable by this user only, which is removed on drop.
#[derive(Debug)]
pub struct TemporarySecret(PathBuf);

impl TemporarySecret {
    /// Creates the file; `what` is part of its name.
    ///
    /// # Errors
    /// I/O error.
    pub fn create(what: &str) -> io::Result<Self> {
        let name = format!("inflight-{what}-{:032x}", rand::random::<u128>());
        let create = |path: PathBuf| {
            let mut options = fs::OpenOptions::new();
            options.write(true).create_new(true).mode(0o600).open(&path).map(|file| (path, file))
        };
        // Files in a folder of temporary files may be removed by age, while processes that restart need them.
        let runtime =
            std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let folders = runtime.into_iter().chain([PathBuf::from("/dev/shm")]);
        let created = folders.map(|folder| create(folder.join(&name))).find_map(Result::ok);
        let (path, mut file) = match created {
            Some(created) => created,
            None => create(std::env::temp_dir().join(&name))?,
        };
        let created = Self(path);
        writeln!(file, "{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>())?;
        Ok(created)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporarySecret {
    fn drop(&mut self) {
        // A file that is left behind does no harm.
        let _ = fs::remove_file(&self.0);
    }
}

/// File with a secret: the user's, or a random one until `up` ends.
#[derive(Debug)]
pub enum SecretPath {
    /// File of the user.
    Given(PathBuf),
    /// File that is removed on drop.
    Temporary(TemporarySecret),
}

impl SecretPath {
    /// Returns the user's file or creates one; `what` is part of its name.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn new(given: Option<&Path>, what: &str) -> Result<Self, CommandError> {
        match given {
            Some(path) => Ok(Self::Given(path.to_owned())),
            None => TemporarySecret::create(what)
                .map(Self::Temporary)
                .map_err(|error| CommandError::chain(&format!("cannot write a file for the {what}"), &error)),
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        match self {
            Self::Given(path) => path,
            Self::Temporary(secret) => secret.path(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_secret_is_valid_private_and_removed() {
        use std::os::unix::fs::PermissionsExt as _;
        let path = {
            let secret = TemporarySecret::create("test").unwrap();
            assert_eq!(inflight_net::read_secrets(secret.path()).unwrap().len(), 1);
            let mode = fs::metadata(secret.path()).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            secret.path().to_owned()
        };
        assert!(!path.exists());
    }
}

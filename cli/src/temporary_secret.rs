//! Files with random secrets for the processes that `inflight up` starts.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::exit::CommandError;

/// Age below which a file without a lock may be one that is just being created.
const CREATION_TIME: Duration = Duration::from_secs(60);

/// File with a secret, readable by this user only, which is removed on drop. It is locked until then: files
/// that killed processes have left behind are not, and the next process removes them.
#[derive(Debug)]
pub struct TemporarySecret {
    path: PathBuf,
    /// Holds the lock.
    file: File,
}

impl TemporarySecret {
    /// Creates the file with a random secret; `what` is part of its name.
    ///
    /// # Errors
    /// I/O error.
    pub fn create(what: &str) -> io::Result<Self> {
        Self::create_with(what, &format!("{:032x}{:032x}\n", rand::random::<u128>(), rand::random::<u128>()))
    }

    /// Creates the file with this text; `what` is part of its name.
    ///
    /// # Errors
    /// I/O error.
    pub fn create_with(what: &str, text: &str) -> io::Result<Self> {
        let prefix = format!("inflight-{what}-");
        // Files in a folder of temporary files may be removed by age, while processes that restart need them.
        let runtime =
            std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let folders = runtime.into_iter().chain([PathBuf::from("/dev/shm")]);
        match folders.map(|folder| Self::create_in(&folder, &prefix, text)).find_map(Result::ok) {
            Some(created) => Ok(created),
            None => Self::create_in(&std::env::temp_dir(), &prefix, text),
        }
    }

    fn create_in(folder: &Path, prefix: &str, text: &str) -> io::Result<Self> {
        remove_abandoned(folder, prefix);
        let path = folder.join(format!("{prefix}{:032x}", rand::random::<u128>()));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let mut created = Self { path, file };
        created.file.lock()?;
        created.file.write_all(text.as_bytes())?;
        Ok(created)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Removes the files of processes that were killed.
fn remove_abandoned(folder: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)) {
        let settled = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        // Files of other users cannot be opened.
        if settled().is_some_and(|age| age > CREATION_TIME)
            && let Ok(file) = options.open(entry.path())
            && file.try_lock().is_ok()
        {
            // Another process may have removed it.
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Drop for TemporarySecret {
    fn drop(&mut self) {
        // A file that is left behind does no harm.
        let _ = fs::remove_file(&self.path);
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
    use std::time::SystemTime;

    use inflight_fixtures::TempDir;

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

    #[test]
    fn files_of_killed_processes_are_removed_and_no_others() {
        let folder = TempDir::new("inflight-secrets").unwrap();
        let live = TemporarySecret::create_in(folder.path(), "inflight-a-", "text").unwrap();
        let past = SystemTime::now() - 2 * CREATION_TIME;
        live.file.set_modified(past).unwrap();
        let [killed, other, new] = ["inflight-a-1", "inflight-b-1", "inflight-a-2"].map(|name| {
            let path = folder.path().join(name);
            let file = File::create(&path).unwrap();
            file.set_modified(if name == "inflight-a-2" { SystemTime::now() } else { past }).unwrap();
            path
        });
        let _second = TemporarySecret::create_in(folder.path(), "inflight-a-", "text").unwrap();
        assert!(!killed.exists());
        assert!(other.exists() && new.exists() && live.path().exists());
    }
}

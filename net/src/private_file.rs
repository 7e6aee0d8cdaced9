//! Files that only their owner can read.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Creates a file with mode 0600. A file that exists is truncated and keeps its permissions.
///
/// # Errors
/// I/O error.
pub fn create_private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

/// Warns if every user of the machine may read a file, as far as its own permissions say. `what` is in it.
pub(crate) fn warn_if_readable_by_all(path: &Path, what: &str) {
    if is_readable_by_all(path) {
        tracing::warn!(path = %path.display(), "every user of this machine can read the {what}: chmod 600, or 640 with a group of its readers");
    }
}

fn is_readable_by_all(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.permissions().mode() & 0o004 != 0)
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::TempDir;

    use super::*;

    #[test]
    fn only_the_user_can_read_a_new_file_and_one_that_exists_keeps_its_permissions() {
        let folder = TempDir::new("private-file").unwrap();
        let path = folder.path().join("recording");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        drop(create_private_file(&path).unwrap());
        assert_eq!(mode(), 0o600);
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(create_private_file(&path).unwrap().metadata().unwrap().len(), 0);
        assert_eq!(mode(), 0o640);
        assert!(!is_readable_by_all(&path) && !is_readable_by_all(&folder.path().join("missing")));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o604)).unwrap();
        assert!(is_readable_by_all(&path));
    }
}

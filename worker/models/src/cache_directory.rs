//! Cache directory: files that speed up the next start, which only this user and root can have written.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Directory of cached files, created at the first write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheDirectory {
    path: PathBuf,
    /// Option that names the directory, for errors.
    option: &'static str,
}

impl CacheDirectory {
    /// Names a directory; `option` is the one that another directory is given by.
    pub fn new(path: PathBuf, option: &'static str) -> Self {
        Self { path, option }
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a file of at most `bytes_max` bytes; `None` if there is none.
    ///
    /// # Errors
    /// I/O error, or the directory or the file can be written by other users than this one and root.
    pub fn read(&self, name: &str, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
        let path = self.path.join(name);
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        self.check_owner(&fs::metadata(&self.path)?, &self.path)?;
        self.check_owner(&file.metadata()?, &path)?;
        let mut bytes = Vec::new();
        file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > bytes_max {
            let reason = format!("it is broken: it has more than {bytes_max} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(Some(bytes))
    }

    /// Writes or replaces a file at once: readers see all of it or the previous one.
    ///
    /// # Errors
    /// I/O error, or the directory can be written by other users than this one and root.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
        self.check_owner(&fs::metadata(&self.path)?, &self.path)?;
        // Workers of one host, and ranks of one worker, may write the same file: each write renames one of its own.
        static WRITES: AtomicU64 = AtomicU64::new(0);
        let number = WRITES.fetch_add(1, Ordering::Relaxed);
        let path = self.path.join(name);
        let temporary = path.with_extension(format!("{}-{number}.new", std::process::id()));
        let written = || {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            file.write_all(bytes)?;
            fs::rename(&temporary, &path)
        };
        written().inspect_err(|_| {
            // It may not exist.
            let _ = fs::remove_file(&temporary);
        })
    }

    /// Checks that a file or directory can be written by this user and root alone.
    fn check_owner(&self, metadata: &Metadata, path: &Path) -> io::Result<()> {
        // SAFETY: geteuid has no preconditions.
        let user = unsafe { libc::geteuid() };
        if [user, 0].contains(&metadata.uid()) && metadata.mode() & 0o022 == 0 {
            return Ok(());
        }
        let reason = format!(
            "{} can be written by other users than {user}; change its owner or mode, or give another {}",
            path.display(),
            self.option
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
    }
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::TempDir;

    use super::*;

    #[test]
    fn concurrent_writers_of_one_file_leave_one_of_their_contents_whole() {
        let folder = TempDir::new("inflight-cache").unwrap();
        let cache = CacheDirectory::new(folder.path().join("cache"), "--cache");
        let whole = |bytes: &[u8]| bytes.len() == 100_000 && bytes.iter().all(|byte| *byte == bytes[0]);
        std::thread::scope(|scope| {
            for content in 0..4u8 {
                let cache = &cache;
                scope.spawn(move || {
                    for _ in 0..50 {
                        cache.write("file.json", &vec![content; 100_000]).unwrap();
                        assert!(whole(&cache.read("file.json", 200_000).unwrap().unwrap()));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1, "temporary files are left");
        let error = cache.read("file.json", 99_999).unwrap_err();
        assert!(error.to_string().contains("more than 99999 bytes"), "{error}");
        assert!(cache.read("other.json", 1).unwrap().is_none());
    }
}

//! Weight file: an open file whose identity is known, or bytes embedded in the binary.
//!
//! Files are read by `pread` into memory of the process and never mapped: a file that is truncated ends a read
//! with an error, where a mapping would raise SIGBUS, and what was read can't change any more.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::error::Error;

/// Identity of a file and of its content, as the file system reports them. Every write to the file changes it;
/// the change time can't be set back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileIdentity {
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) bytes: u64,
    /// Seconds and nanoseconds since the epoch.
    modified: (i64, i64),
    /// Seconds and nanoseconds since the epoch.
    changed: (i64, i64),
}

impl FileIdentity {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Returns what has changed since, if anything.
    fn difference(&self, now: &Self) -> Option<String> {
        if self.bytes != now.bytes {
            return Some(format!("its size went from {} to {} bytes", self.bytes, now.bytes));
        }
        if self.modified != now.modified {
            return Some("it was written to".to_owned());
        }
        (self != now).then(|| "its times, links, owner or permissions were changed".to_owned())
    }

    /// Time between the last change and `now`; `None` if the last change is later.
    fn age(&self, now: SystemTime) -> Option<Duration> {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        let (seconds, nanoseconds) = self.changed.max(self.modified);
        now.checked_sub(Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanoseconds).ok()?))
    }
}

/// Open weight file, with its identity before the first read.
#[derive(Debug)]
pub(super) struct WeightFile {
    label: String,
    source: Source,
}

#[derive(Debug)]
enum Source {
    File { file: File, identity: FileIdentity, opened: SystemTime },
    Embedded(&'static [u8]),
}

impl WeightFile {
    pub(super) fn new(label: String, file: File) -> io::Result<Self> {
        let identity = FileIdentity::of(&file)?;
        Ok(Self { label, source: Source::File { file, identity, opened: SystemTime::now() } })
    }

    pub(super) fn embedded(label: String, bytes: &'static [u8]) -> Self {
        Self { label, source: Source::Embedded(bytes) }
    }

    /// Label of the file for messages.
    pub(super) fn label(&self) -> &str {
        &self.label
    }

    /// Size in bytes when the file was opened.
    pub(super) fn len(&self) -> u64 {
        match &self.source {
            Source::File { identity, .. } => identity.bytes,
            Source::Embedded(bytes) => bytes.len() as u64,
        }
    }

    /// Content of an embedded file.
    pub(super) fn in_memory(&self) -> Option<&'static [u8]> {
        match &self.source {
            Source::File { .. } => None,
            Source::Embedded(bytes) => Some(bytes),
        }
    }

    /// Identity before the first read; `None` for an embedded file.
    pub(super) fn identity(&self) -> Option<&FileIdentity> {
        match &self.source {
            Source::File { identity, .. } => Some(identity),
            Source::Embedded(_) => None,
        }
    }

    /// Returns whether the file had not changed for `age` when it was opened.
    pub(super) fn unchanged_for(&self, age: Duration) -> bool {
        match &self.source {
            Source::File { identity, opened, .. } => identity.age(*opened).is_some_and(|now| now >= age),
            Source::Embedded(_) => true,
        }
    }

    /// Fills `out` from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Changed`] if the file ends earlier, [`Error::Read`].
    pub(super) fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        match &self.source {
            Source::File { file, identity, .. } => match file.read_exact_at(out, offset) {
                Ok(()) => Ok(()),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    self.verify()?;
                    let end = offset + out.len() as u64;
                    Err(self
                        .changed(format!("it ended before byte {end} of {} for a moment", identity.bytes)))
                }
                Err(source) => Err(Error::Read { file: self.label.clone(), source }),
            },
            Source::Embedded(bytes) => {
                // Callers keep within `len`, and embedded bytes do not change.
                out.copy_from_slice(&bytes[offset as usize..offset as usize + out.len()]);
                Ok(())
            }
        }
    }

    /// Checks that the file is the one that was opened, unchanged. To be called after the last read.
    ///
    /// # Errors
    /// [`Error::Changed`] with the difference, [`Error::Read`].
    pub(super) fn verify(&self) -> Result<(), Error> {
        let Source::File { file, identity, .. } = &self.source else { return Ok(()) };
        let now =
            FileIdentity::of(file).map_err(|source| Error::Read { file: self.label.clone(), source })?;
        identity.difference(&now).map_or(Ok(()), |change| Err(self.changed(change)))
    }

    /// Error for a file that changed while it was read.
    pub(super) fn changed(&self, change: String) -> Error {
        Error::Changed { file: self.label.clone(), change }
    }
}

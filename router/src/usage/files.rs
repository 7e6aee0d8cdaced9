//! Files of the usage log: rotation by size, removal of the oldest.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::clock;
use crate::metrics as names;
use crate::options::{UsageLogExcess, UsageLogOptions};

use super::timestamp;

/// File that one process locks, so that no two routers rotate the files of a directory.
const LOCK: &str = "lock";
const PREFIX: &str = "usage-";
const SUFFIX: &str = ".jsonl";

/// Failure to open the usage log.
#[derive(Debug, thiserror::Error)]
pub enum UsageLogError {
    /// The directory or a file of it cannot be written.
    #[error("cannot write the usage log {}: {source}", path.display())]
    Write {
        /// Path of the directory.
        path: PathBuf,
        /// I/O error.
        source: io::Error,
    },
    /// Another process writes to the directory.
    #[error(
        "the usage log {} is in use by another process; give each router a directory of its own", path.display()
    )]
    InUse {
        /// Path of the directory.
        path: PathBuf,
    },
    /// Usage of today cannot be read.
    #[error(transparent)]
    Read(#[from] super::UsageReadError),
}

/// Append-only storage of lines.
pub(super) trait UsageStorage: Send {
    /// Appends whole lines. On an error, any line since the last sync may be lost or kept.
    fn append(&mut self, lines: &[u8]) -> io::Result<()>;

    /// Makes all appended lines durable. On an error, any line since the last sync may be lost or kept.
    fn sync(&mut self) -> io::Result<()>;
}

/// Returns the paths of a log's files, oldest first.
pub(super) fn list(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name();
        let is_log = |name: &str| name.starts_with(PREFIX) && name.ends_with(SUFFIX);
        if name.to_str().is_some_and(is_log) {
            found.push(directory.join(name));
        }
    }
    // Names are times.
    found.sort_unstable();
    Ok(found)
}

/// Files of a usage log.
#[derive(Debug)]
pub(super) struct UsageFiles {
    directory: PathBuf,
    options: UsageLogOptions,
    /// Holds the lock of the directory.
    _lock: File,
    /// Files, oldest first.
    paths: VecDeque<PathBuf>,
    current: Option<CurrentFile>,
}

/// File that lines are appended to.
#[derive(Debug)]
struct CurrentFile {
    file: File,
    /// Length in bytes.
    length: u64,
    /// Length at the last sync.
    synced: u64,
}

impl UsageFiles {
    /// Creates the directory and the first file.
    pub(super) fn open(directory: &Path, options: UsageLogOptions) -> Result<Self, UsageLogError> {
        let failed = |source| UsageLogError::Write { path: directory.to_owned(), source };
        std::fs::create_dir_all(directory).map_err(failed)?;
        let lock = File::create(directory.join(LOCK)).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(UsageLogError::InUse { path: directory.to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let paths = list(directory).map_err(failed)?.into();
        let mut files = Self { directory: directory.to_owned(), options, _lock: lock, paths, current: None };
        // A new file, because the last one may end with a torn line.
        files.start_file().map_err(failed)?;
        Ok(files)
    }

    /// Starts a new file.
    fn start_file(&mut self) -> io::Result<()> {
        self.current = None;
        let mut now = clock::since_unix_epoch();
        let (file, path) = loop {
            let path = self.directory.join(file_name(now));
            // Names of tenants and ids that clients chose are for its user and group.
            match OpenOptions::new().append(true).create_new(true).mode(0o640).open(&path) {
                Ok(file) => break (file, path),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    now += Duration::from_micros(1);
                }
                Err(error) => return Err(error),
            }
        };
        // Makes the new name durable.
        #[cfg(unix)]
        if let Err(error) = File::open(&self.directory).and_then(|directory| directory.sync_all()) {
            // Fails on the same fault; the empty file does no harm.
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        self.paths.push_back(path);
        self.current = Some(CurrentFile { file, length: 0, synced: 0 });
        Ok(())
    }

    /// Checks that files which are kept leave room for another one.
    fn check_room(&mut self) -> io::Result<()> {
        if self.options.excess == UsageLogExcess::Remove {
            return Ok(());
        }
        // Files may have been taken away since.
        self.paths = list(&self.directory)?.into();
        // One that is taken away meanwhile has no size.
        let kept = self.paths.iter().map(|path| std::fs::metadata(path).map_or(0, |file| file.len()));
        let (kept, UsageLogOptions { files_max, file_bytes_max, .. }) = (kept.sum::<u64>(), self.options);
        if kept < file_bytes_max.saturating_mul(files_max as u64) {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::StorageFull,
            format!(
                "its files have {kept} bytes, --usage-log-files ({files_max}) times --usage-log-bytes ({file_bytes_max}): take the oldest \
                 away, or raise a limit"
            ),
        ))
    }

    /// Removes the oldest files beyond the limit, unless they are kept.
    fn remove_oldest(&mut self) {
        if self.options.excess == UsageLogExcess::Keep {
            return;
        }
        while self.paths.len() > self.options.files_max {
            let Some(oldest) = self.paths.pop_front() else { break };
            match std::fs::remove_file(&oldest) {
                Ok(()) => {
                    tracing::info!(file = %oldest.display(), "oldest usage file removed");
                    metrics::counter!(names::USAGE_FILES_REMOVED).increment(1);
                }
                Err(error) => {
                    tracing::warn!(%error, file = %oldest.display(), "cannot remove the oldest usage file");
                }
            }
        }
    }

    /// Removes what was written since the last sync, a part of a line perhaps, or continues in a new file.
    fn discard_unsynced(&mut self) {
        let Some(current) = &mut self.current else { return };
        match current.file.set_len(current.synced) {
            Ok(()) => current.length = current.synced,
            Err(_) => self.current = None,
        }
    }

    fn try_append(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.current.as_ref().is_some_and(|current| current.length >= self.options.file_bytes_max) {
            self.try_sync()?;
            self.check_room()?;
            self.start_file()?;
        }
        if self.current.as_ref().is_none_or(|current| current.length == 0) {
            self.check_room()?;
        }
        if self.current.is_none() {
            self.start_file()?;
        }
        let Some(current) = &mut self.current else { return Err(io::ErrorKind::NotFound.into()) };
        current.file.write_all(lines)?;
        current.length += lines.len() as u64;
        Ok(())
    }

    fn try_sync(&mut self) -> io::Result<()> {
        if let Some(current) = &mut self.current {
            current.file.sync_data()?;
            current.synced = current.length;
        }
        // Only when their successors are durable.
        self.remove_oldest();
        Ok(())
    }
}

fn file_name(since_epoch: Duration) -> String {
    // Without the separators of RFC 3339, and with all six digits of the microseconds.
    let seconds = timestamp(Duration::from_secs(since_epoch.as_secs()));
    let seconds: String = seconds.chars().filter(|character| !matches!(character, '-' | ':' | 'Z')).collect();
    format!("{PREFIX}{seconds}.{:06}Z{SUFFIX}", since_epoch.subsec_micros())
}

impl UsageStorage for UsageFiles {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        self.try_append(lines).inspect_err(|_| self.discard_unsynced())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.try_sync().inspect_err(|_| self.discard_unsynced())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::{UsageReading, UsageRecord, read_usage};

    #[test]
    fn names_of_files_sort_by_time() {
        let names = [0, 1_000_001, 999_999_999_999_999, 1_700_000_000_000_000].map(Duration::from_micros);
        let names = names.map(file_name);
        assert_eq!(names[1], "usage-19700101T000001.000001Z.jsonl");
        assert!(names.is_sorted(), "{names:?}");
    }

    #[test]
    fn files_that_are_kept_fill_the_log_until_one_is_taken_away() {
        let directory = std::env::temp_dir().join(format!("inflight-usage-{:016x}", rand::random::<u64>()));
        let options = UsageLogOptions {
            file_bytes_max: 10,
            files_max: 3,
            excess: UsageLogExcess::Keep,
            ..UsageLogOptions::default()
        };
        let mut log = UsageFiles::open(&directory, options).unwrap();
        for _ in 0..3 {
            log.append(b"ten bytes\n").unwrap();
            log.sync().unwrap();
        }
        let full = log.append(b"ten bytes\n").unwrap_err().to_string();
        assert!(full.contains("its files have 30 bytes, --usage-log-files (3)"), "{full}");
        // A restart gains nothing.
        drop(log);
        let mut log = UsageFiles::open(&directory, options).unwrap();
        assert!(log.append(b"ten bytes\n").is_err());
        let files = list(&directory).unwrap();
        assert_eq!(files.len(), 4);
        std::fs::remove_file(&files[0]).unwrap();
        log.append(b"ten bytes\n").unwrap();
        log.sync().unwrap();
        assert!(log.append(b"ten bytes\n").is_err());
        let kept: u64 = list(&directory).unwrap().iter().map(|path| path.metadata().unwrap().len()).sum();
        assert_eq!(kept, 30);
        drop(log);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn files_rotate_by_size_the_oldest_are_removed_and_torn_lines_are_skipped() {
        let directory = std::env::temp_dir().join(format!("inflight-usage-{:016x}", rand::random::<u64>()));
        let options = UsageLogOptions { file_bytes_max: 1, files_max: 3, ..UsageLogOptions::default() };
        let line = |number: u64| {
            let record =
                UsageRecord { id: format!("log-{number}"), completion_tokens: number, ..Default::default() };
            serde_json::to_vec(&record).unwrap().into_iter().chain(*b"\n").collect::<Vec<u8>>()
        };
        let mut log = UsageFiles::open(&directory, options).unwrap();
        assert!(matches!(UsageFiles::open(&directory, options), Err(UsageLogError::InUse { .. })));
        for number in 0..5 {
            log.append(&line(number)).unwrap();
            log.sync().unwrap();
        }
        drop(log);
        let read = || {
            let mut numbers = Vec::new();
            let reading = read_usage(std::slice::from_ref(&directory), None, |record| {
                numbers.push(record.completion_tokens)
            })
            .unwrap();
            (reading, numbers)
        };
        assert_eq!(read(), (UsageReading { files: 3, lines: 3, ..UsageReading::default() }, vec![2, 3, 4]));

        // A crash tears the last line; the next process starts a new file. A line may be written twice.
        let paths = list(&directory).unwrap();
        let last = paths.last().unwrap();
        let torn = [line(4), b"no line\n".to_vec(), line(5)[..20].to_vec()].concat();
        std::fs::write(last, torn).unwrap();
        let mut log = UsageFiles::open(&directory, UsageLogOptions { files_max: 4, ..options }).unwrap();
        log.append(&[line(4), line(5)].concat()).unwrap();
        log.sync().unwrap();
        let reading = UsageReading { files: 4, lines: 4, duplicates: 1, torn: 1, damaged: 1, resumed: 0 };
        assert_eq!(read(), (reading, vec![2, 3, 4, 5]));
        drop(log);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

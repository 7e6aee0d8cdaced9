//! Reader of the usage log's files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::summary::SeenLines;
use super::{UsageRecord, files, timestamp};

/// Maximum length of a line, in bytes; a longer one is damaged.
const LINE_BYTES_MAX: u64 = 64 << 10;
const DAY_SECONDS: u64 = 86_400;

/// Usage log that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the usage log {}: {source}", path.display())]
pub struct UsageReadError {
    /// Path of the directory or file.
    path: PathBuf,
    /// I/O error.
    source: io::Error,
}

/// Counts of a read of the usage log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageReading {
    /// Files read.
    pub files: u64,
    /// Whole lines, each once.
    pub lines: u64,
    /// Lines that were written twice, after a failed sync. The second ones are skipped.
    pub duplicates: u64,
    /// Incomplete last lines of files, after a crash or while they are written.
    pub torn: u64,
    /// Other lines that are no usage lines.
    pub damaged: u64,
}

/// Reads the files of a usage log in the order of their creation, without those last written before `since`,
/// and passes each line to `visit` once.
///
/// # Errors
/// The directory or a file cannot be read.
pub fn read_usage(
    directory: &Path,
    since: Option<SystemTime>,
    mut visit: impl FnMut(UsageRecord),
) -> Result<UsageReading, UsageReadError> {
    let failed = |path: &Path, source| UsageReadError { path: path.to_owned(), source };
    let mut reading = UsageReading::default();
    let mut seen = SeenLines::default();
    let paths = files::list(directory).map_err(|error| failed(directory, error))?;
    for path in paths {
        let file = match File::open(&path) {
            Ok(file) => file,
            // Removed by a rotation.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(&path, error)),
        };
        let modified = file.metadata().and_then(|metadata| metadata.modified());
        let modified = modified.map_err(|error| failed(&path, error))?;
        if since.is_some_and(|since| modified < since) {
            continue;
        }
        reading.files += 1;
        read_file(file, &mut seen, &mut reading, &mut visit).map_err(|error| failed(&path, error))?;
    }
    Ok(reading)
}

fn read_file(
    file: File,
    seen: &mut SeenLines,
    reading: &mut UsageReading,
    visit: &mut impl FnMut(UsageRecord),
) -> io::Result<()> {
    let mut file = BufReader::new(file);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = io::Read::take(&mut file, LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        let whole = line.last() == Some(&b'\n');
        match serde_json::from_slice::<UsageRecord>(&line) {
            Ok(record) if whole => {
                if seen.insert(&record.id) {
                    reading.lines += 1;
                    visit(record);
                } else {
                    reading.duplicates += 1;
                }
            }
            _ if !whole && (read as u64) < LINE_BYTES_MAX => reading.torn += 1,
            _ => {
                reading.damaged += 1;
                if !whole {
                    file.skip_until(b'\n')?;
                }
            }
        }
    }
}

/// Returns the tokens that tenants have used on the UTC day of `now`, a time since the Unix epoch.
pub(crate) fn tokens_used_today(
    directory: &Path,
    now: Duration,
) -> Result<BTreeMap<String, u64>, UsageReadError> {
    let midnight = Duration::from_secs(now.as_secs() / DAY_SECONDS * DAY_SECONDS);
    let today = timestamp(midnight);
    let today = today.split('T').next().unwrap_or_default();
    let mut used: BTreeMap<String, u64> = BTreeMap::new();
    read_usage(directory, Some(UNIX_EPOCH + midnight), |record| {
        if record.ended.starts_with(today) {
            *used.entry(record.tenant).or_default() += record.prompt_tokens + record.completion_tokens;
        }
    })?;
    Ok(used)
}

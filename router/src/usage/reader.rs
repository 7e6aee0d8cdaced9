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
    /// Lines of calls whose streams were resumed by later calls, which count their tokens too.
    pub resumed: u64,
}

/// Reads the usage logs of routers, without files last written before `since`, and passes each request to
/// `visit` once: the line of a stream that was resumed, at these routers, is that of the call that got
/// furthest.
///
/// # Errors
/// A directory or a file cannot be read.
pub fn read_usage(
    directories: &[PathBuf],
    since: Option<SystemTime>,
    mut visit: impl FnMut(UsageRecord),
) -> Result<UsageReading, UsageReadError> {
    // Few streams are resumed, so only their lines are kept in memory.
    let mut streams: BTreeMap<(String, String), Option<UsageRecord>> = BTreeMap::new();
    read_lines(directories, since, |record| {
        if let (Some(stream), Some(_)) = (record.stream, record.resumed_tokens) {
            streams.insert((record.tenant, stream), None);
        }
    })?;
    let mut resumed = 0;
    let mut reading = read_lines(directories, since, |record| {
        let key = record.stream.as_ref().map(|stream| (record.tenant.clone(), stream.clone()));
        let Some(last) = key.and_then(|key| streams.get_mut(&key)) else { return visit(record) };
        resumed += u64::from(last.is_some());
        let progress = |record: &UsageRecord| (record.completion_tokens, record.outcome == "completed");
        if last.as_ref().is_none_or(|last| progress(last) <= progress(&record)) {
            *last = Some(record);
        }
    })?;
    streams.into_values().flatten().for_each(visit);
    reading.lines -= resumed;
    reading.resumed = resumed;
    Ok(reading)
}

/// Passes each line to `visit` once, by directory in the order of the files' creation.
fn read_lines(
    directories: &[PathBuf],
    since: Option<SystemTime>,
    mut visit: impl FnMut(UsageRecord),
) -> Result<UsageReading, UsageReadError> {
    let failed = |path: &Path, source| UsageReadError { path: path.to_owned(), source };
    let mut reading = UsageReading::default();
    let mut seen = SeenLines::default();
    let mut paths = Vec::new();
    for directory in directories {
        paths.extend(files::list(directory).map_err(|error| failed(directory, error))?);
    }
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
    read_usage(&[directory.to_owned()], Some(UNIX_EPOCH + midnight), |record| {
        if record.ended.starts_with(today) {
            *used.entry(record.tenant).or_default() += record.prompt_tokens + record.completion_tokens;
        }
    })?;
    Ok(used)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Writes lines to the log of a router.
    fn write(directory: &Path, records: &[UsageRecord]) {
        std::fs::create_dir_all(directory).unwrap();
        let lines: Vec<String> =
            records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect();
        std::fs::write(directory.join("usage-1.jsonl"), lines.concat()).unwrap();
    }

    proptest! {
        /// Calls of a stream end at any token, and with any router; each counts the tokens since the first.
        #[test]
        fn a_resumed_stream_counts_once_however_many_calls_it_had(
            streams in proptest::collection::vec(proptest::collection::vec((0u64..50, 0usize..3), 1..5), 1..8),
        ) {
            let folder = std::env::temp_dir().join(format!("inflight-reader-{}", std::process::id()));
            let mut logs = [const { Vec::new() }; 3];
            let mut expected = 0;
            for (stream, calls) in streams.iter().enumerate() {
                let mut received = 0;
                for (call, (tokens, router)) in calls.iter().enumerate() {
                    // What the client received of the call before is at most what that one generated.
                    let completion_tokens = received + tokens;
                    let log: &mut Vec<UsageRecord> = &mut logs[*router];
                    log.push(UsageRecord {
                        id: format!("log{router}-{}", log.len()),
                        tenant: format!("tenant-{}", stream % 2),
                        stream: Some(stream.to_string()),
                        resumed_tokens: (call > 0).then_some(received),
                        completion_tokens,
                        ..UsageRecord::default()
                    });
                    received += tokens / 2;
                }
                let longest = |records: &[UsageRecord]| {
                    let of = records.iter().filter(|record| record.stream == Some(stream.to_string()));
                    of.map(|record| record.completion_tokens).max().unwrap_or(0)
                };
                expected += logs.iter().map(|records| longest(records)).max().unwrap_or(0);
            }
            let directories: Vec<PathBuf> = (0..3).map(|router| folder.join(router.to_string())).collect();
            directories.iter().zip(&logs).for_each(|(directory, records)| write(directory, records));
            let (mut requests, mut tokens) = (0, 0);
            let reading = read_usage(&directories, None, |record| {
                requests += 1;
                tokens += record.completion_tokens;
            });
            let reading = reading.unwrap();
            std::fs::remove_dir_all(&folder).unwrap();
            prop_assert_eq!((requests, tokens), (streams.len() as u64, expected));
            prop_assert_eq!(reading.lines + reading.resumed, logs.iter().map(Vec::len).sum::<usize>() as u64);
        }
    }
}

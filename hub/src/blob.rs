//! Download of one blob: in parts over several connections, hashed while they arrive.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use crate::journal::Journal;
use crate::listing::Blob;
use crate::transport::{ATTEMPTS, Failure, Transport};
use crate::{HubError, Progress};

/// Bytes that are read and hashed at a time.
const CHUNK: usize = 1 << 18;
/// Space that stays free on the disk.
const MARGIN: u64 = 64 << 20;

/// File to fetch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    /// Name, for messages.
    pub(crate) file: &'a str,
    /// Address.
    pub(crate) url: &'a str,
    /// What it is.
    pub(crate) blob: &'a Blob,
}

/// State that the connections of a download share.
struct Shared {
    journal: Journal,
    waiting: VecDeque<usize>,
    /// First failure, which ends the others.
    failure: Option<HubError>,
    /// Address to which the Hub redirected, until it is good no more.
    direct: Option<String>,
}

struct Download<'a> {
    transport: &'a Transport,
    source: Source<'a>,
    progress: &'a dyn Progress,
    file: File,
    path: &'a Path,
    shared: Mutex<Shared>,
    /// A part has arrived, or the download has failed.
    changed: Condvar,
}

/// Downloads a blob into a file beside `target`, and renames that file to `target` once its digest is checked.
pub(crate) fn fetch(
    transport: &Transport,
    source: Source<'_>,
    target: &Path,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    let beside = |ending: &str| target.with_file_name(format!("{}.{ending}", source.blob.etag));
    // Other tools continue `.incomplete` at its end.
    let (path, journal_path) = (beside("parts"), beside("parts-present"));
    let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
    let file = file.map_err(HubError::file("write", &path))?;
    let bytes = source.blob.bytes;
    let is_new = file.metadata().map_err(HubError::file("read", &path))?.len() != bytes;
    if is_new {
        _ = std::fs::remove_file(&journal_path);
    }
    let journal = Journal::open(&journal_path, bytes, transport.settings().part_bytes.max(1))?;
    check_space(source.file, &path, bytes - journal.present())?;
    file.set_len(bytes).map_err(HubError::file("write", &path))?;
    progress.begin(source.file, bytes, journal.present());
    let waiting = journal.missing().into();
    let shared = Mutex::new(Shared { journal, waiting, failure: None, direct: None });
    let download =
        Download { transport, source, progress, file, path: &path, shared, changed: Condvar::new() };
    let digest = download.run();
    let failure = download.lock().failure.take();
    let outcome = match (failure, digest) {
        (Some(error), _) => Err(error),
        (None, digest) => digest.and_then(|()| {
            download.file.sync_all().map_err(HubError::file("write", &path))?;
            std::fs::rename(&path, target).map_err(HubError::file("rename", &path))
        }),
    };
    if matches!(outcome, Ok(()) | Err(HubError::WrongBytes { .. })) {
        _ = std::fs::remove_file(&journal_path);
    }
    if let Err(HubError::WrongBytes { .. }) = outcome {
        _ = std::fs::remove_file(&path);
    }
    if outcome.is_ok() {
        progress.end(source.file);
    }
    outcome
}

/// Checks the free space of the disk.
fn check_space(file: &str, path: &Path, needed: u64) -> Result<(), HubError> {
    let directory = path.parent().unwrap_or(path);
    let Ok(disk) = rustix::fs::statvfs(directory) else { return Ok(()) };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if needed + MARGIN.min(needed) > free {
        let directory = directory.to_owned();
        return Err(HubError::Space { file: file.to_owned(), needed, free, directory });
    }
    Ok(())
}

/// Digest of a blob by the form of its name.
enum Digest {
    Sha256(Sha256),
    /// Of git: over the length, too.
    Git(Sha1),
    /// Of an unknown form.
    None,
}

impl Digest {
    fn of(blob: &Blob) -> Self {
        let is_hex = blob.etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        match blob.etag.len() {
            64 if is_hex => Self::Sha256(Sha256::new()),
            40 if is_hex => Self::Git(Sha1::new_with_prefix(format!("blob {}\0", blob.bytes))),
            _ => Self::None,
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(digest) => digest.update(bytes),
            Self::Git(digest) => digest.update(bytes),
            Self::None => {}
        }
    }

    /// Compares the digest with the etag.
    fn check(self, source: Source<'_>) -> Result<(), HubError> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let (kind, actual) = match self {
            Self::Sha256(digest) => ("SHA-256", hex(&digest.finalize())),
            Self::Git(digest) => ("git digest", hex(&digest.finalize())),
            Self::None => return Ok(()),
        };
        let expected = source.blob.etag.to_lowercase();
        if actual == expected {
            return Ok(());
        }
        Err(HubError::WrongBytes { file: source.file.to_owned(), kind, expected, actual })
    }
}

/// Ends the download if a thread of it panics: the one that hashes would wait for its part for ever.
struct EndOfPanic<'a>(&'a Download<'a>);

impl Drop for EndOfPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let reason = "the download failed on a fault of this program".to_owned();
            let error = HubError::Hub { url: self.0.source.url.to_owned(), reason };
            self.0.lock().failure.get_or_insert(error);
            self.0.changed.notify_all();
        }
    }
}

impl Download<'_> {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches all parts, and checks the digest.
    fn run(&self) -> Result<(), HubError> {
        let connections = self.transport.settings().connections.clamp(1, self.lock().waiting.len().max(1));
        std::thread::scope(|scope| {
            for _ in 0..connections {
                scope.spawn(|| self.fetch_parts());
            }
            self.digest()
        })
    }

    /// Hashes parts in their order as they arrive.
    fn digest(&self) -> Result<(), HubError> {
        let mut digest = Digest::of(self.source.blob);
        let parts = self.lock().journal.parts();
        let mut chunk = vec![0; CHUNK];
        for part in 0..parts {
            let (mut from, to) = {
                let mut shared = self.lock();
                while !shared.journal.has(part) {
                    if shared.failure.is_some() {
                        return Ok(());
                    }
                    shared = self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner);
                }
                shared.journal.range(part)
            };
            while from < to {
                let chunk = &mut chunk[..CHUNK.min((to - from) as usize)];
                self.file.read_exact_at(chunk, from).map_err(HubError::file("read", self.path))?;
                digest.update(chunk);
                from += chunk.len() as u64;
            }
        }
        digest.check(self.source)
    }

    /// Fetches parts until there are none, or one has failed.
    fn fetch_parts(&self) {
        let _guard = EndOfPanic(self);
        loop {
            let (part, range) = {
                let mut shared = self.lock();
                let next = if shared.failure.is_some() { None } else { shared.waiting.pop_front() };
                let Some(part) = next else { return };
                (part, shared.journal.range(part))
            };
            let outcome = self.fetch_part(range);
            let mut shared = self.lock();
            let outcome = match outcome {
                Ok(true) => shared.journal.add(part).map_err(HubError::file("write", self.path)),
                Ok(false) => return,
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                shared.failure.get_or_insert(error);
            }
            self.changed.notify_all();
        }
    }

    /// Fetches one part, again while that may succeed. Returns whether it has arrived; another failure may have ended the download.
    fn fetch_part(&self, (from, to): (u64, u64)) -> Result<bool, HubError> {
        let (mut at, mut attempts) = (from, 0);
        loop {
            let before = at;
            let failure = match self.fetch_range(&mut at, to) {
                Ok(()) => return Ok(true),
                Err(failure) => failure,
            };
            // A connection that brings something is worth another one.
            attempts = if at > before { 1 } else { attempts + 1 };
            let (error, pause) = match failure {
                Failure::Passing(error, pause) if attempts < ATTEMPTS => (error, pause),
                Failure::Unreached(error) if attempts < ATTEMPTS => (error, None),
                failure => return Err(failure.into_error()),
            };
            self.progress.note(&format!("{}: {error}; trying again", self.source.file));
            let pause = self.transport.pause(attempts - 1, pause);
            // The failure of another part ends the pause.
            let wait = self.changed.wait_timeout_while(self.lock(), pause, |shared| shared.failure.is_none());
            if wait.unwrap_or_else(PoisonError::into_inner).0.failure.is_some() {
                return Ok(false);
            }
        }
    }

    /// Fetches the bytes from `at` to `to`; `at` follows what has arrived.
    fn fetch_range(&self, at: &mut u64, to: u64) -> Result<(), Failure> {
        let is_whole = (*at, to) == (0, self.source.blob.bytes);
        let direct = self.lock().direct.clone();
        let url = direct.as_deref().unwrap_or(self.source.url);
        let head = match self.transport.get_once(url, (!is_whole).then_some((*at, to))) {
            // Its signature has expired, say.
            Err(Failure::Final(error)) if direct.is_some() => {
                self.lock().direct = None;
                return Err(Failure::Passing(error, None));
            }
            head => head?,
        };
        if head.url != self.source.url {
            self.lock().direct = Some(head.url.clone());
        }
        let refused = |reason: String| HubError::Hub { url: self.source.url.to_owned(), reason };
        // A server without ranges sends the file from its begin.
        let mut skipped = if !is_whole && head.status.as_u16() != 206 { *at } else { 0 };
        let total = head.header("content-range").and_then(|range| range.rsplit_once('/')?.1.parse().ok());
        if total.is_some_and(|total: u64| total != self.source.blob.bytes) {
            let reason =
                format!("the file has {} bytes now, not {}", total.unwrap_or(0), self.source.blob.bytes);
            return Err(Failure::Final(refused(reason)));
        }
        let mut reader = head.into_reader();
        let mut chunk = vec![0; CHUNK];
        while *at < to {
            let wanted = CHUNK.min(if skipped > 0 { skipped as usize } else { (to - *at) as usize });
            let read = reader.read(&mut chunk[..wanted]);
            let read = read.map_err(|error| {
                Failure::Passing(refused(format!("the connection was lost: {error}")), None)
            })?;
            if read == 0 {
                return Err(Failure::Passing(refused("the connection ended early".to_owned()), None));
            }
            if skipped > 0 {
                skipped -= read as u64;
                continue;
            }
            let written = self.file.write_all_at(&chunk[..read], *at);
            written.map_err(|error| Failure::Final(HubError::file("write", self.path)(error)))?;
            *at += read as u64;
            self.progress.advance(self.source.file, read as u64);
        }
        // The end of the body lets the connection be used again.
        if skipped == 0 && reader.read(&mut chunk[..1]).is_ok_and(|read| read > 0) && total.is_some() {
            return Err(Failure::Final(refused("it sends more bytes than were asked for".to_owned())));
        }
        Ok(())
    }
}

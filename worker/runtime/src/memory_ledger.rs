//! Ledger of the memory that the workers of one host have promised: weights and pools, which take memory at first
//! use.
//!
//! The ledger is a directory with one file per reservation, which its worker holds under flock(2) for as long as
//! it lives: the kernel releases the lock of a worker that was killed, and the next one to look removes the file.
//! Checking the others' sum and adding to it is one step, under the lock of the file `lock`. Only files of the own
//! user in a directory that no other user can write to are trusted, and symbolic links are not followed.

use std::fmt;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::host_memory::{HostMemory, MemoryGroup, Readable};

/// Name of the gauge of promised bytes.
pub const PROMISED_BYTES: &str = "inflight_worker_promised_bytes";

/// Timeout of the ledger's lock, which is held for some milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of attempts to lock the ledger.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum length of a reservation's file; paths of control groups have at most 4 KiB.
const FILE_BYTES_MAX: u64 = 8 << 10;
/// First line of a reservation's file.
const HEADER: &str = "inflight memory reservation 1";

/// Reservation that does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverLimit {
    /// Bytes to reserve.
    pub bytes: u64,
    /// Sum of the other workers' reservations in bytes.
    pub others_bytes: u64,
    /// Number of the other reservations.
    pub others: usize,
    /// Limit in bytes.
    pub limit: u64,
    /// Control group of the limit; `None`: the machine's memory.
    pub group: Option<PathBuf>,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, others_bytes, others, limit, group } = self;
        match others {
            0 => write!(f, "{} in all", Readable(*bytes))?,
            1 => write!(
                f,
                "{} in all, and another worker of this host has promised {}",
                Readable(*bytes),
                Readable(*others_bytes)
            )?,
            _ => write!(
                f,
                "{} in all, and {others} other workers of this host have promised {}",
                Readable(*bytes),
                Readable(*others_bytes)
            )?,
        }
        match group {
            Some(group) => {
                write!(f, ", but the control group {} may use {}", group.display(), Readable(*limit))
            }
            None => write!(f, ", but this machine has {}", Readable(*limit)),
        }
    }
}

/// Directory that cannot be used, or an error in it.
#[derive(Debug, thiserror::Error)]
enum LedgerError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} belongs to another user, {owner}", path.display())]
    Owner { path: PathBuf, owner: u32 },
    #[error("{} can be written by other users (mode {mode:o}); chmod 700 it", path.display())]
    Mode { path: PathBuf, mode: u32 },
    #[error("{} stayed locked for {LOCK_TIMEOUT:?}; is the process that holds it stopped?", path.display())]
    Locked { path: PathBuf },
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> LedgerError {
    let path = path.to_owned();
    move |source| LedgerError::Io { path, source }
}

/// Reservations of this worker, beside those of the other workers of the host. Dropping it releases them.
#[derive(Debug)]
pub struct MemoryLedger {
    /// `None`: reservations are checked against the limits alone.
    directory: Option<PathBuf>,
    /// Limits; `None` if the system does not report them.
    host: Option<HostMemory>,
    held: Mutex<Vec<Reservation>>,
}

/// File of a reservation, locked until it is dropped.
#[derive(Debug)]
struct Reservation {
    path: PathBuf,
    _locked: File,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // A file that is left behind is void without its lock.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl MemoryLedger {
    /// Creates a ledger that sees no other worker.
    pub fn alone() -> Self {
        Self { directory: None, host: HostMemory::read(), held: Mutex::default() }
    }

    /// Opens the ledger in `directory`, or in the default one: `/dev/shm/inflight-UID`, else `inflight` in
    /// `XDG_RUNTIME_DIR`, else `inflight-UID` in the directory of temporary files. If it cannot be used, a warning
    /// is logged and other workers are not seen.
    pub fn open(directory: Option<&Path>) -> Self {
        let usable = match directory {
            Some(directory) => prepare(directory).map(|()| directory.to_owned()),
            None => prepare_default(),
        };
        let directory = usable
            .inspect_err(|error| {
                tracing::warn!(%error, "memory that other workers of this host promise is not seen; name a directory with --reservation-dir");
            })
            .ok();
        Self { directory, ..Self::alone() }
    }

    /// Limits that reservations are checked against; `None` if the system does not report them.
    pub fn host(&self) -> Option<&HostMemory> {
        self.host.as_ref()
    }

    /// Reserves memory until the ledger is dropped.
    ///
    /// # Errors
    /// [`OverLimit`] if the own reservations and those of the other workers exceed a limit.
    pub fn reserve(&self, bytes: u64) -> Result<(), OverLimit> {
        metrics::gauge!(PROMISED_BYTES).increment(bytes as f64);
        let Some(host) = &self.host else { return Ok(()) };
        let Some(directory) = &self.directory else { return check(host, bytes, &[]) };
        match reserve_in(directory, host, bytes) {
            Ok(reserved) => {
                self.held.lock().unwrap_or_else(PoisonError::into_inner).push(reserved?);
                Ok(())
            }
            Err(error) => {
                tracing::warn!(%error, "cannot reserve memory beside the other workers of this host; they are not seen");
                check(host, bytes, &[])
            }
        }
    }
}

/// Checks own bytes and those of other workers against all limits.
fn check(host: &HostMemory, bytes: u64, others: &[(u64, PathBuf)]) -> Result<(), OverLimit> {
    for limit in &host.limits {
        let covered = others.iter().filter(|(_, group)| limit.covers(group));
        let (count, sum) =
            covered.fold((0, 0u64), |(count, sum), (bytes, _)| (count + 1, sum.saturating_add(*bytes)));
        if bytes.saturating_add(sum) > limit.bytes {
            let group = limit.group.clone();
            return Err(OverLimit { bytes, others_bytes: sum, others: count, limit: limit.bytes, group });
        }
    }
    Ok(())
}

/// Returns the effective user id of this process.
fn user() -> u32 {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() }
}

/// Prepares the first of the default directories that can be used.
fn prepare_default() -> Result<PathBuf, LedgerError> {
    let name = format!("inflight-{}", user());
    // The same for all processes of a user comes first; the others depend on the environment.
    let shared = Path::new("/dev/shm").join(&name);
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
    let runtime = runtime.map(|path| Path::new(&path).join("inflight"));
    let temporary = std::env::temp_dir().join(&name);
    let mut outcome = prepare(&shared).map(|()| shared);
    if let Err(error) = &outcome {
        tracing::warn!(%error, "workers that use another reservation directory are not seen; name one with --reservation-dir");
    }
    for path in runtime.into_iter().chain([temporary]) {
        outcome = outcome.or_else(|_| prepare(&path).map(|()| path));
    }
    outcome
}

/// Creates a directory if it is absent, and checks that only this user can write to it.
fn prepare(path: &Path) -> Result<(), LedgerError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(io_error(path)(error)),
        _ => {}
    }
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let directory = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(io_error(path))?;
    let metadata = directory.metadata().map_err(io_error(path))?;
    if metadata.uid() != user() {
        return Err(LedgerError::Owner { path: path.to_owned(), owner: metadata.uid() });
    }
    if metadata.mode() & 0o022 != 0 {
        return Err(LedgerError::Mode { path: path.to_owned(), mode: metadata.mode() & 0o7777 });
    }
    // Also tells whether files can be created.
    open_lock(path).map(drop)
}

/// Opens the file whose lock serializes reservations.
fn open_lock(directory: &Path) -> Result<File, LedgerError> {
    let path = directory.join("lock");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options.open(&path).map_err(io_error(&path))
}

/// Checks a reservation beside those in a directory, and adds it if it fits.
fn reserve_in(
    directory: &Path,
    host: &HostMemory,
    bytes: u64,
) -> Result<Result<Reservation, OverLimit>, LedgerError> {
    let lock = open_lock(directory)?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match lock.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(LOCK_RETRY_INTERVAL);
            }
            Err(TryLockError::WouldBlock) => {
                return Err(LedgerError::Locked { path: directory.join("lock") });
            }
            Err(TryLockError::Error(error)) => return Err(io_error(directory)(error)),
        }
    }
    let others = other_reservations(directory, &host.group)?;
    match check(host, bytes, &others) {
        Ok(()) => add(directory, &host.group, bytes).map(Ok),
        Err(over) => Ok(Err(over)),
    }
}

/// Returns bytes and control groups of the live reservations in the own namespace; removes void ones.
fn other_reservations(directory: &Path, own: &MemoryGroup) -> Result<Vec<(u64, PathBuf)>, LedgerError> {
    let mut others = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(io_error(directory))? {
        let path = entry.map_err(io_error(directory))?.path();
        if path.extension().is_none_or(|extension| extension != "reservation") {
            continue;
        }
        match read_reservation(&path, own) {
            Ok(reserved) => others.extend(reserved),
            // Also a link, or the file of a worker that has just ended.
            Err(error) => tracing::debug!(path = %path.display(), %error, "reservation ignored"),
        }
    }
    Ok(others)
}

/// Reads a reservation; `None` if it is void, not of this user or of another namespace.
fn read_reservation(path: &Path, own: &MemoryGroup) -> io::Result<Option<(u64, PathBuf)>> {
    // A pipe must not block.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != user() {
        return Ok(None);
    }
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
        Ok(()) => {
            // Its worker has ended without removing it. No other process locks it now: that needs the ledger's lock.
            std::fs::remove_file(path)?;
            return Ok(None);
        }
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    let parsed = parse(&text);
    if parsed.is_none() {
        tracing::warn!(path = %path.display(), "reservation of another version of this program; its memory is not counted");
    }
    Ok(parsed.filter(|(_, group)| group.namespace == own.namespace).map(|(bytes, group)| (bytes, group.path)))
}

/// Adds a reservation.
fn add(directory: &Path, group: &MemoryGroup, bytes: u64) -> Result<Reservation, LedgerError> {
    let pid = std::process::id();
    let mut number = 0u32;
    let (path, mut file) = loop {
        let path = directory.join(format!("{pid}-{number}.reservation"));
        let mut options = OpenOptions::new();
        match options.write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => break (path, file),
            // A reservation of this process, or of a process with this number in another namespace.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(io_error(&path)(error)),
        }
    };
    let written = file.lock().and_then(|()| file.write_all(render(group, bytes).as_bytes()));
    let reservation = Reservation { path, _locked: file };
    written.map_err(io_error(&reservation.path))?;
    Ok(reservation)
}

/// Renders the file of a reservation; the control group comes last, as its path may hold any character.
fn render(group: &MemoryGroup, bytes: u64) -> String {
    let MemoryGroup { namespace, path } = group;
    format!("{HEADER}\nbytes {bytes}\nnamespace {namespace}\ngroup {}", path.display())
}

fn parse(text: &str) -> Option<(u64, MemoryGroup)> {
    let rest = text.strip_prefix(HEADER)?.strip_prefix("\nbytes ")?;
    let (bytes, rest) = rest.split_once("\nnamespace ")?;
    let (namespace, path) = rest.split_once("\ngroup ")?;
    let group = MemoryGroup { namespace: namespace.to_owned(), path: PathBuf::from(path) };
    Some((bytes.parse().ok()?, group))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;
    use crate::host_memory::MemoryLimit;

    /// Directory of one test, removed on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("inflight-ledger-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
            Self(path)
        }

        /// Ledger of a worker in `group` on a machine of 100 bytes, whose group `/limited` may use 50.
        fn ledger(&self, group: &str) -> MemoryLedger {
            let mut limits = vec![MemoryLimit { bytes: 100, group: None }];
            if group.starts_with("/limited") {
                limits.push(MemoryLimit { bytes: 50, group: Some("/limited".into()) });
            }
            let group = MemoryGroup { namespace: "here".to_owned(), path: group.into() };
            prepare(&self.0).unwrap();
            MemoryLedger {
                directory: Some(self.0.clone()),
                host: Some(HostMemory { available: 100, limits, group }),
                held: Mutex::default(),
            }
        }

        /// Names of the reservations.
        fn reservations(&self) -> Vec<PathBuf> {
            let paths = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
            paths.filter(|path| path.extension().is_some()).collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_reservation_that_does_not_fit_beside_the_others_is_refused_until_they_end() {
        let folder = Folder::new("fits");
        let (first, second, third) = (folder.ledger("/a"), folder.ledger("/b"), folder.ledger("/c"));
        first.reserve(40).unwrap();
        second.reserve(40).unwrap();
        let refused = third.reserve(21).unwrap_err();
        let expected = OverLimit { bytes: 21, others_bytes: 80, others: 2, limit: 100, group: None };
        assert_eq!(refused, expected);
        let text = refused.to_string();
        assert!(text.contains("2 other workers of this host have promised 80 bytes"), "{text}");
        assert!(text.contains("this machine has 100 bytes"), "{text}");
        third.reserve(20).unwrap();
        drop(first);
        assert_eq!(folder.reservations().len(), 2);
        folder.ledger("/a").reserve(40).unwrap();
    }

    #[test]
    fn a_group_limit_counts_its_members_and_other_namespaces_are_not_seen() {
        let folder = Folder::new("groups");
        let outside = folder.ledger("/elsewhere");
        outside.reserve(45).unwrap();
        let member = folder.ledger("/limited/a");
        member.reserve(30).unwrap();
        let refused = folder.ledger("/limited/b").reserve(21).unwrap_err();
        assert_eq!((refused.others, refused.others_bytes, refused.limit), (1, 30, 50));
        assert!(refused.to_string().contains("the control group /limited may use 50 bytes"), "{refused}");
        let mut contained = folder.ledger("/elsewhere");
        contained.host.as_mut().unwrap().group.namespace = "container".to_owned();
        contained.reserve(100).unwrap();
        let refused = folder.ledger("/elsewhere").reserve(26).unwrap_err();
        assert_eq!((refused.others, refused.others_bytes), (2, 75));
    }

    #[test]
    fn the_reservation_of_a_killed_worker_is_void_and_removed() {
        let folder = Folder::new("killed");
        let group = MemoryGroup { namespace: "here".to_owned(), path: "/a".into() };
        // What remains after a kill: the file without its lock.
        std::fs::write(folder.0.join("1-0.reservation"), render(&group, 90)).unwrap();
        folder.ledger("/a").reserve(100).unwrap();
        assert!(folder.reservations().is_empty());
    }

    #[test]
    fn concurrent_reservations_never_exceed_the_limit() {
        let folder = Folder::new("concurrent");
        let ledgers: Vec<_> = (0..16).map(|_| folder.ledger("/a")).collect();
        let reserved = std::thread::scope(|scope| {
            let threads: Vec<_> =
                ledgers.iter().map(|ledger| scope.spawn(|| ledger.reserve(15).is_ok())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).filter(|ok| *ok).count()
        });
        assert_eq!(reserved, 6, "6 times 15 of 100");
    }

    #[test]
    fn links_pipes_and_directories_of_others_are_not_trusted() {
        let folder = Folder::new("trust");
        let holder = folder.ledger("/a");
        holder.reserve(60).unwrap();
        let outside = Folder::new("trust-outside");
        let other = outside.ledger("/a");
        other.reserve(60).unwrap();
        // A link to a live reservation elsewhere adds nothing, and is not removed through.
        symlink(&outside.reservations()[0], folder.0.join("link.reservation")).unwrap();
        let pipe = std::ffi::CString::new(folder.0.join("pipe.reservation").to_str().unwrap()).unwrap();
        // SAFETY: `pipe` is a string that ends with zero.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        folder.ledger("/a").reserve(40).unwrap();
        assert_eq!(outside.reservations().len(), 1);

        let link = outside.0.join("folder");
        symlink(&folder.0, &link).unwrap();
        assert!(matches!(prepare(&link), Err(LedgerError::Io { .. })));
        std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(prepare(&folder.0), Err(LedgerError::Mode { mode: 0o777, .. })));
    }

    #[test]
    fn a_directory_that_cannot_be_used_leaves_the_own_check() {
        let folder = Folder::new("unusable");
        let file = folder.0.join("file");
        std::fs::write(&file, "").unwrap();
        let ledger = MemoryLedger::open(Some(&file.join("below")));
        assert_eq!(ledger.directory, None);
        ledger.reserve(1).unwrap();
        let refused = ledger.reserve(u64::MAX).unwrap_err();
        assert_eq!(refused.others, 0);
    }
}

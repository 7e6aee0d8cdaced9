//! Limit of the process's open files, connections included (`RLIMIT_NOFILE`).

use std::io;

/// Files that a process opens beside its connections: libraries, logs, event queues, model files.
const BESIDE_CONNECTIONS: u64 = 64;

/// Limit of open files in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenFileLimit(u64);

/// Reads the limit of open files.
fn read_limit() -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for writing, and RLIMIT_NOFILE is a resource.
    let read = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    (read == 0).then_some(limit)
}

/// Raises the soft limit of open files to the hard limit; child processes inherit it. On an error the limit
/// stays.
pub fn raise_open_file_limit() -> Option<OpenFileLimit> {
    let limit = read_limit()?;
    let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
    // SAFETY: `raised` is valid for reading, and RLIMIT_NOFILE is a resource.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) };
    Some(OpenFileLimit(if set == 0 { raised } else { limit }.rlim_cur))
}

impl OpenFileLimit {
    /// Returns the limit in force; `None` if the system does not report it.
    pub fn current() -> Option<Self> {
        read_limit().map(|limit| Self(limit.rlim_cur))
    }

    /// Number of files.
    pub fn files(self) -> u64 {
        self.0
    }

    /// Checks that `connections` may be open at once, all listeners and outgoing ones together.
    ///
    /// # Errors
    /// The number of files that are needed.
    pub fn check(self, connections: u64) -> Result<(), u64> {
        let needed = connections.saturating_add(BESIDE_CONNECTIONS);
        if needed <= self.0 { Ok(()) } else { Err(needed) }
    }
}

/// Returns the number of open files of the process.
///
/// # Errors
/// The system does not report them.
pub fn open_files() -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    // Linux 6.2 and later: the size of the folder is the number of its entries.
    match std::fs::metadata("/proc/self/fd")?.size() {
        0 => Ok(std::fs::read_dir("/proc/self/fd")?.count() as u64),
        size => Ok(size),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_the_connections_and_the_files_beside_them_names_what_is_needed() {
        assert_eq!(OpenFileLimit(164).check(100), Ok(()));
        assert_eq!(OpenFileLimit(163).check(100), Err(164));
        assert_eq!(OpenFileLimit(u64::MAX).check(u64::MAX), Ok(()));
    }

    #[test]
    fn the_limit_is_raised_to_the_hard_limit_and_open_files_are_counted() {
        let raised = raise_open_file_limit().unwrap();
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        let fields: Vec<&str> = line.split_whitespace().collect();
        assert_eq!((fields[3], fields[4]), (&*raised.files().to_string(), fields[3]), "{line}");
        let before = open_files().unwrap();
        let opened: Vec<_> = (0..50).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        assert!(open_files().unwrap() >= before.max(50), "{before} open, then 50 more");
        drop(opened);
    }
}

//! Process tags, liveness and signals, through `/proc` and `kill`.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail, ensure};

/// Variable that bounds the host cache of workers without a flag for it: all workers of a machine reserve their
/// memory beside each other, and many clusters run at once.
pub(crate) const HOST_CACHE_BYTES: (&str, &str) = ("INFLIGHT_WORKER_HOST_CACHE_BYTES", "64MiB");

/// Environment variable with the tag; child processes inherit it.
const VARIABLE: &str = "INFLIGHT_TEST_MARK";

/// Tag that identifies the processes started by a test and all their descendants.
#[derive(Debug, Clone)]
pub struct ProcessTag(String);

impl ProcessTag {
    /// Creates a tag unique among the tests of this machine.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// Returns name and value of the environment variable to set on the first process.
    pub fn variable(&self) -> (&'static str, &str) {
        (VARIABLE, &self.0)
    }

    /// Returns the ids of the running processes with this tag.
    pub fn processes(&self) -> Vec<u32> {
        let wanted = format!("{VARIABLE}={}", self.0);
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
            .filter(|pid| {
                let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                environment.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes()) && is_alive(*pid)
            })
            .collect()
    }

    /// Checks that no process with this tag runs.
    ///
    /// # Errors
    /// Lists the processes that still run.
    pub fn check_gone(&self) -> Result<()> {
        let left = self.processes();
        ensure!(left.is_empty(), "processes {left:?} still run");
        Ok(())
    }
}

impl Default for ProcessTag {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns whether a process runs; zombies do not count.
pub fn is_alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // "pid (name) state …", where the name may contain any character, also ')'.
    let state = stat.rsplit(')').next().unwrap_or_default().trim_start().chars().next();
    !matches!(state, Some('Z' | 'X') | None)
}

/// Sends a signal to a process.
///
/// # Errors
/// The process does not exist.
pub fn kill(pid: u32, signal: i32) -> Result<()> {
    let Ok(id) = libc::pid_t::try_from(pid) else { bail!("{pid} is no process id") };
    // SAFETY: `kill` takes two integers and accesses no memory of this process.
    let sent = unsafe { libc::kill(id, signal) };
    ensure!(sent == 0, "cannot signal process {pid}: {}", std::io::Error::last_os_error());
    Ok(())
}

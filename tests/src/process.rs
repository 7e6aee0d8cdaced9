use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail, ensure};

/// Environment variable that processes of a test inherit from one another.
const VARIABLE: &str = "INFLIGHT_TEST_MARK";

/// Tells the processes that a test started, with all their descendants, from all others.
#[derive(Debug, Clone)]
pub struct Mark(String);

impl Mark {
    /// A mark that no other test has.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// The variable to set on the first process.
    pub fn variable(&self) -> (&'static str, &str) {
        (VARIABLE, &self.0)
    }

    /// Ids of the marked processes that run now.
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

    /// Checks that nothing is left.
    ///
    /// # Errors
    /// The processes that still run.
    pub fn check_gone(&self) -> Result<()> {
        let left = self.processes();
        ensure!(left.is_empty(), "processes {left:?} still run");
        Ok(())
    }
}

impl Default for Mark {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether a process runs; one that has ended and was not yet reaped does not.
pub fn is_alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // "pid (name) state …", and the name may hold anything.
    let state = stat.rsplit(')').next().unwrap_or_default().trim_start().chars().next();
    !matches!(state, Some('Z' | 'X') | None)
}

/// Sends a signal.
///
/// # Errors
/// There is no such process.
pub fn kill(pid: u32, signal: i32) -> Result<()> {
    let Ok(id) = libc::pid_t::try_from(pid) else { bail!("{pid} is no process id") };
    // SAFETY: kill touches no memory of ours.
    let sent = unsafe { libc::kill(id, signal) };
    ensure!(sent == 0, "cannot signal process {pid}: {}", std::io::Error::last_os_error());
    Ok(())
}

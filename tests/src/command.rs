use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::DEADLINE;
use crate::process::Mark;

/// A command that ended.
#[derive(Debug)]
pub struct Finished {
    /// Its exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
    /// What it and its children were marked with.
    pub mark: Mark,
}

/// Runs a command to its end, with `input` on its standard input.
///
/// # Errors
/// It cannot be started or takes longer than [`DEADLINE`].
pub async fn run(program: &Path, arguments: &[&str], input: &str) -> Result<Finished> {
    run_in(program, arguments, input, &[]).await
}

/// The same, with these variables in its environment.
///
/// # Errors
/// As [`run`].
pub async fn run_in(
    program: &Path,
    arguments: &[&str],
    input: &str,
    environment: &[(&str, OsString)],
) -> Result<Finished> {
    let mark = Mark::new();
    let (name, value) = mark.variable();
    let mut child = Command::new(program)
        .args(arguments)
        .env(name, value)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that takes no input may have closed it.
        let _ = stdin.write_all(input.as_bytes()).await;
    }
    let output = tokio::time::timeout(DEADLINE, child.wait_with_output())
        .await
        .with_context(|| format!("{arguments:?} did not end within {DEADLINE:?}"))??;
    Ok(Finished {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        mark,
    })
}

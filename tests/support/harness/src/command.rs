//! Commands run to their end.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::DEADLINE;
use crate::process::ProcessTag;

/// Exit code and output of a finished command.
#[derive(Debug)]
pub struct CommandOutput {
    /// Exit code; `None` if a signal ended the process.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Tag of the process and its descendants.
    pub tag: ProcessTag,
}

/// Runs a command to its end, with `input` on its standard input.
///
/// # Errors
/// The command cannot be started or takes longer than [`DEADLINE`].
pub async fn run(program: &Path, arguments: &[&str], input: &str) -> Result<CommandOutput> {
    run_with_env(program, arguments, input, &[]).await
}

/// Runs a command to its end, with `input` on its standard input and `environment` added to its environment.
///
/// # Errors
/// The command cannot be started or takes longer than [`DEADLINE`].
pub async fn run_with_env(
    program: &Path,
    arguments: &[&str],
    input: &str,
    environment: &[(&str, OsString)],
) -> Result<CommandOutput> {
    let tag = ProcessTag::new();
    let (name, value) = tag.variable();
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
        // The write fails if the command has closed its standard input.
        let _ = stdin.write_all(input.as_bytes()).await;
    }
    let output = tokio::time::timeout(DEADLINE, child.wait_with_output())
        .await
        .with_context(|| format!("{arguments:?} did not end within {DEADLINE:?}"))??;
    Ok(CommandOutput {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        tag,
    })
}

//! `inflight completions`: completions of the command line for a shell.

use std::io::Write as _;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::Cli;
use crate::exit::CommandError;

/// Options of `inflight completions`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Shell, such as bash; for this session: source <(inflight completions bash)
    pub shell: Shell,
}

/// Prints the completions.
///
/// # Errors
/// Standard output cannot be written.
pub fn run(args: &Args) -> Result<(), CommandError> {
    // First into memory: the generator panics if a pipe is closed.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "inflight", &mut script);
    std::io::stdout().lock().write_all(&script).map_err(|error| CommandError::chain("cannot write", &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_completes_every_command_and_option() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "inflight", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["diagnose", "replay", "slo-gap", "tensor-parallel", "resume-key-file"] {
                assert!(script.contains(word), "{shell}: no {word}");
            }
        }
    }
}

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
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn every_shell_completes_every_command_and_option() {
        let mut cli = Cli::command();
        cli.build();
        let commands = || cli.get_subcommands().filter(|command| command.get_name() != "help");
        let options =
            commands().flat_map(|command| command.get_arguments()).filter(|option| !option.is_hide_set());
        let words: Vec<String> = commands()
            .map(|command| command.get_name().to_owned())
            .chain(options.filter_map(|option| option.get_long().map(str::to_owned)))
            .collect();
        assert!(words.len() > 100, "{words:?}");
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "inflight", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in &words {
                assert!(script.contains(word), "{shell}: no {word}");
            }
        }
    }
}

//! Entry point for fuzzing: any bytes as the configuration file of a role.

use std::ffi::OsString;
use std::path::Path;
use std::sync::OnceLock;

use clap::{ArgMatches, Command, CommandFactory as _, FromArgMatches as _};

use crate::Cli;
use crate::config::{Error, text_options};

const ROLES: [&str; 4] = ["router", "worker", "up", "bench"];

/// Configuration file: a refusal names a line of it, and flags from an accepted one are those of the role. Returns whether a
/// role accepts it.
///
/// # Panics
/// If one of these does not hold.
pub fn configuration(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    let mut accepted = false;
    let lines = text.matches('\n').count() + 1;
    for (role, matches) in roles() {
        match text_options(Path::new("config.toml"), text, role, matches) {
            Ok(file) => accepted |= check_flags(role, file.flags),
            Err(
                Error::UnknownKey { line, .. } | Error::RenamedKey { line, .. } | Error::Value { line, .. },
            ) => assert!((1..=lines).contains(&line), "line {line} of {lines}"),
            Err(Error::Syntax { message, .. }) => assert!(!message.is_empty()),
            Err(Error::Read { .. }) => {}
        }
    }
    accepted
}

/// Checks that each flag is an option of the role, and that what the parser accepts becomes arguments.
fn check_flags(role: &Command, flags: Vec<OsString>) -> bool {
    for flag in &flags {
        let flag = flag.to_string_lossy();
        let name = flag.strip_prefix("--").and_then(|flag| flag.split('=').next());
        let known = role.get_arguments().filter_map(clap::Arg::get_long);
        assert!(known.into_iter().any(|long| name == Some(long)), "{flag}");
    }
    let words = ["inflight", role.get_name()].map(OsString::from).into_iter().chain(flags);
    let Ok(matches) = Cli::command().try_get_matches_from(words) else { return false };
    let arguments = Cli::from_arg_matches(&matches);
    assert!(arguments.is_ok(), "{:?}", arguments.err().map(|error| error.to_string()));
    true
}

/// Returns the roles' commands, and their matches without flags.
fn roles() -> &'static [(Command, ArgMatches)] {
    static COMMANDS: OnceLock<Vec<(Command, ArgMatches)>> = OnceLock::new();
    COMMANDS.get_or_init(|| {
        let command = Cli::command();
        let role = |name: &str| {
            let role = command.find_subcommand(name).expect("a role is a subcommand").clone();
            // Without the arguments that the role requires.
            let words = command.clone().ignore_errors(true).try_get_matches_from(["inflight", name]);
            let matches = words.expect("errors are ignored").subcommand_matches(name).cloned();
            (role, matches.expect("the role was named"))
        };
        ROLES.map(role).into()
    })
}

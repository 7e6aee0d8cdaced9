//! Flags, environment and configuration file become one set of arguments.
//!
//! A role's options are declared once, as clap arguments: names, types, defaults, environment variables and
//! help. The keys of a configuration file are the same names. They are turned into flags and put where the
//! command line and the environment are silent, so that there is one parser and one validation, and the
//! precedence is flag, environment, file, default.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory as _, FromArgMatches as _};
use toml::{Spanned, Value};

use crate::Cli;
use crate::exit::{Exit, Failure};
use crate::renamed;

/// Name of the flag that names the file.
const CONFIG: &str = "config";

/// A parsed command line.
#[derive(Debug)]
pub struct Invocation {
    /// The typed arguments.
    pub cli: Cli,
    /// The subcommand's raw matches, from which `up` passes options on.
    pub matches: ArgMatches,
}

/// Why a configuration file was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML.
    #[error("{}: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser says, with line and column.
        message: String,
    },
    /// A key names no option.
    #[error("{}:{line}: unknown key `{key}`; `inflight {role}` knows: {known}", path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The key.
        key: String,
        /// The subcommand.
        role: String,
        /// All valid keys.
        known: String,
    },
    /// A key was renamed.
    #[error("{}:{line}: key `{old}` was renamed to `{new}`; use the new name", path.display())]
    RenamedKey {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The key.
        old: String,
        /// What it is called now.
        new: &'static str,
    },
    /// A value does not fit its key.
    #[error("{}:{line}: key `{key}`: {message}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The key.
        key: String,
        /// What is wrong with it.
        message: String,
    },
}

/// Parses the process's arguments, the program's name first.
///
/// # Errors
/// clap's own, or [`Error`] as a message with exit code 2.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Invocation, Failure> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    renamed::check(&arguments, std::env::vars_os())?;
    let first = Cli::command().try_get_matches_from(&arguments).map_err(Failure::Clap)?;
    if let Some((role, matches)) = first.subcommand()
        && let Some(path) = configuration_file(matches)
    {
        let command = Cli::command();
        let Some(subcommand) = command.find_subcommand(role) else {
            return Err(Failure::new(Exit::Usage, format!("unknown command `{role}`")));
        };
        let flags =
            file_flags(&path, subcommand, matches).map_err(|e| Failure::new(Exit::Usage, e.to_string()))?;
        // No global option takes a value, so the subcommand's name is the first argument that equals it.
        let at = arguments.iter().position(|argument| argument == role).map_or(arguments.len(), |at| at + 1);
        arguments.splice(at..at, flags);
    }
    let matches = Cli::command().try_get_matches_from(&arguments).map_err(Failure::Clap)?;
    let cli = Cli::from_arg_matches(&matches).map_err(Failure::Clap)?;
    let matches = matches.subcommand().map(|(_, matches)| matches.clone()).unwrap_or_default();
    Ok(Invocation { cli, matches })
}

/// The flags, with their values, that the user set for the arguments of `group`: what one process passes on
/// to another. Defaults are left out.
pub fn given_flags(group: &Command, matches: &ArgMatches) -> Vec<OsString> {
    let mut flags = Vec::new();
    for argument in group.get_arguments() {
        let id = argument.get_id().as_str();
        let Some(long) = argument.get_long() else { continue };
        let given =
            matches!(matches.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable));
        if !given {
            continue;
        }
        match argument.get_action() {
            ArgAction::SetTrue => {
                if matches.get_flag(id) {
                    flags.push(OsString::from(format!("--{long}")));
                }
            }
            _ => {
                for value in matches.get_raw(id).into_iter().flatten() {
                    flags.push(flag(long, value));
                }
            }
        }
    }
    flags
}

fn flag(long: &str, value: impl AsRef<std::ffi::OsStr>) -> OsString {
    let mut flag = OsString::from(format!("--{long}="));
    flag.push(value);
    flag
}

fn configuration_file(matches: &ArgMatches) -> Option<PathBuf> {
    matches.try_get_one::<PathBuf>(CONFIG).ok().flatten().cloned()
}

/// Reads the file and yields flags for the keys on which command line and environment are silent.
fn file_flags(path: &Path, role: &Command, matches: &ArgMatches) -> Result<Vec<OsString>, Error> {
    let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let entries: BTreeMap<Spanned<String>, Spanned<Value>> = toml::from_str(&text).map_err(|error| {
        Error::Syntax { path: path.to_owned(), message: error.to_string().trim_end().to_owned() }
    })?;
    let mut flags = Vec::new();
    for (key, value) in entries {
        let line = text[..key.span().start].matches('\n').count() + 1;
        let name = key.get_ref().replace('_', "-");
        let Some(argument) = options(role).find(|argument| argument.get_long() == Some(&name)) else {
            if let Some(new) = renamed::key(role.get_name(), &name) {
                return Err(Error::RenamedKey { path: path.to_owned(), line, old: key.into_inner(), new });
            }
            let mut known: Vec<&str> = options(role).filter_map(Arg::get_long).collect();
            known.sort_unstable();
            return Err(Error::UnknownKey {
                path: path.to_owned(),
                line,
                key: key.into_inner(),
                role: role.get_name().to_owned(),
                known: known.join(", "),
            });
        };
        let refuse = |message: String| Error::Value {
            path: path.to_owned(),
            line,
            key: key.get_ref().clone(),
            message,
        };
        let given = key_flags(argument, &name, value.get_ref()).map_err(refuse)?;
        check(role, &given).map_err(refuse)?;
        let silent = !matches!(
            matches.value_source(argument.get_id().as_str()),
            Some(ValueSource::CommandLine | ValueSource::EnvVariable)
        );
        if silent {
            flags.extend(given);
        }
    }
    Ok(flags)
}

/// The options a file may set: those with a long name, the file's own and the hidden ones aside.
fn options(role: &Command) -> impl Iterator<Item = &Arg> {
    role.get_arguments().filter(|argument| {
        argument.get_long().is_some_and(|long| long != CONFIG)
            && !argument.is_hide_set()
            && !matches!(
                argument.get_action(),
                ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
            )
    })
}

/// A key as flags; an error says which type of value the key takes.
fn key_flags(argument: &Arg, name: &str, value: &Value) -> Result<Vec<OsString>, String> {
    match (argument.get_action(), value) {
        (ArgAction::SetTrue, Value::Boolean(true)) => Ok(vec![OsString::from(format!("--{name}"))]),
        (ArgAction::SetTrue, Value::Boolean(false)) => Ok(Vec::new()),
        (ArgAction::SetTrue, other) => Err(format!("expected true or false, found {}", describe(other))),
        (ArgAction::Append, Value::Array(values)) => {
            values.iter().map(|value| Ok(flag(name, scalar(argument, value)?))).collect()
        }
        (_, value) => Ok(vec![flag(name, scalar(argument, value)?)]),
    }
}

fn scalar(argument: &Arg, value: &Value) -> Result<String, String> {
    let parsed = argument.get_value_parser().type_id();
    let is = |types: &[TypeId]| types.iter().any(|id| parsed == *id);
    let integer = is(&[
        TypeId::of::<u16>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<usize>(),
        TypeId::of::<i32>(),
        TypeId::of::<i64>(),
    ]);
    let float = is(&[TypeId::of::<f32>(), TypeId::of::<f64>()]);
    let quantity = is(&[TypeId::of::<crate::units::Bytes>()]);
    let boolean = is(&[TypeId::of::<bool>()]);
    match value {
        Value::Boolean(truth) if boolean => Ok(truth.to_string()),
        Value::Integer(number) if integer || float || quantity => Ok(number.to_string()),
        Value::Float(number) if float => Ok(number.to_string()),
        Value::String(text) if !integer && !float && !boolean => Ok(text.clone()),
        other => {
            let kinds = [
                (integer, "an integer"),
                (float, "a number"),
                (quantity, "an integer or a string"),
                (boolean, "true or false"),
            ];
            let expected = kinds.iter().find(|(is, _)| *is).map_or("a string", |(_, name)| *name);
            Err(format!("expected {expected}, found {}", describe(other)))
        }
    }
}

fn describe(value: &Value) -> String {
    match value {
        Value::String(text) => format!("the string {text:?}"),
        Value::Integer(number) => format!("the integer {number}"),
        Value::Float(number) => format!("the float {number}"),
        Value::Boolean(truth) => format!("{truth}"),
        Value::Datetime(_) => "a date".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Table(_) => "a table".to_owned(),
    }
}

/// Lets clap look at one key alone, so that its complaint can be put beside the key's line.
fn check(role: &Command, flags: &[OsString]) -> Result<(), String> {
    let mut words = vec![OsString::from(role.get_name())];
    words.extend_from_slice(flags);
    match role.clone().no_binary_name(false).try_get_matches_from(words) {
        Ok(_) => Ok(()),
        Err(error) => {
            let text = error.render().to_string();
            let first = text.lines().next().unwrap_or_default();
            Err(first.trim_start_matches("error: ").to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Role;

    fn worker(file: &str, flags: &[&str]) -> Result<crate::worker::Args, String> {
        let directory = inflight_fixtures::TempDir::new("config").unwrap();
        let path = directory.path().join("worker.toml");
        fs::write(&path, file).unwrap();
        let words = ["inflight", "worker", "--config", path.to_str().unwrap()];
        let arguments = words.iter().chain(flags).map(OsString::from);
        match parse(arguments) {
            Ok(Invocation { cli: Cli { role: Role::Worker(args) }, .. }) => Ok(*args),
            Ok(other) => panic!("parsed as {other:?}"),
            Err(failure) => Err(failure.to_string()),
        }
    }

    #[test]
    fn a_file_fills_in_what_flags_leave_open_and_flags_win() {
        let file =
            "block_tokens = 32\nmax-sequences = 7\nkv-cache-bytes = \"64MiB\"\nheartbeat = \"250ms\"\n";
        let args = worker(file, &["--max-sequences", "9"]).unwrap();
        assert_eq!(args.engine.block_tokens, 32);
        assert_eq!(args.engine.max_sequences, 9);
        assert_eq!(args.engine.kv_cache_bytes.0, 64 << 20);
        assert_eq!(args.heartbeat.0.as_millis(), 250);
    }

    #[test]
    fn a_file_is_refused_by_line_and_key() {
        let unknown = worker("block-tokens = 16\n\nmax_sequence = 7\n", &[]).unwrap_err();
        assert!(unknown.contains(":3: unknown key `max_sequence`"), "{unknown}");
        assert!(unknown.contains("max-sequences"), "the valid keys are listed: {unknown}");
        let mistyped = worker("\nmax-sequences = \"many\"\n", &[]).unwrap_err();
        assert!(mistyped.contains(":2: key `max-sequences`: expected an integer"), "{mistyped}");
        let negative = worker("max-sequences = -1\n", &[]).unwrap_err();
        assert!(negative.contains(":1: key `max-sequences`") && negative.contains("-1"), "{negative}");
        let overridden = worker("max-sequences = true\n", &["--max-sequences", "3"]).unwrap_err();
        assert!(overridden.contains("expected an integer, found true"), "{overridden}");
        let broken = worker("max-sequences 3\n", &[]).unwrap_err();
        assert!(broken.contains("line 1"), "{broken}");
        let hidden = worker("supervised = true\n", &[]).unwrap_err();
        assert!(hidden.contains("unknown key `supervised`"), "{hidden}");
    }

    #[test]
    fn only_what_was_given_is_passed_on() {
        let words = ["inflight", "up", "--max-sequences", "5", "--model", "/m"].map(OsString::from);
        let invocation = parse(words).unwrap();
        let group = <crate::worker::EngineArgs as clap::Args>::augment_args(Command::new("group"));
        let flags = given_flags(&group, &invocation.matches);
        assert_eq!(flags, ["--model=/m", "--max-sequences=5"].map(OsString::from));
    }
}

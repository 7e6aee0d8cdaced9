//! Merges flags, environment variables and the configuration file into one set of arguments.
//!
//! The options of a role are declared once, as clap arguments with names, types, defaults, environment
//! variables and help. Keys of a configuration file have the names of the flags. Those that neither command
//! line nor environment set are converted to flags, so that clap is the only parser and validator.
//! Precedence: flag, environment, file, default.

use std::any::TypeId;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory as _, FromArgMatches as _};
use toml::{Spanned, Value};

use crate::Cli;
use crate::exit::{CommandError, Exit};
use crate::foreign;
use crate::renamed;

/// Value name with which options of byte sizes are shown in the usage text.
const SIZE: &str = "BYTES";
/// Name of the flag of the model, for which `up` takes tables, too.
const MODEL: &str = "model";
/// Name of the flag of the configuration file.
const CONFIG: &str = "config";

/// Parsed command line.
#[derive(Debug)]
pub struct Invocation {
    /// Typed arguments.
    pub cli: Cli,
    /// Raw matches of the subcommand, from which `up` forwards options to its children.
    pub matches: ArgMatches,
    /// `[[model]]` tables of the configuration file of `up`, unless command line or environment name a model.
    pub models: Vec<ModelTable>,
}

/// `[[model]]` table of a configuration file: a model with options of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelTable {
    /// Path of the file.
    path: PathBuf,
    /// Line of each key, key and value.
    entries: Vec<(usize, String, Value)>,
}

impl ModelTable {
    /// Returns the table as flags of `command`, whose options have the names of the keys, and these names.
    ///
    /// # Errors
    /// [`Error`] with the line of the key.
    pub fn flags(&self, command: &Command) -> Result<(Vec<OsString>, BTreeSet<String>), Error> {
        let (mut flags, mut keys) = (Vec::new(), BTreeSet::new());
        for (line, key, value) in &self.entries {
            let name = key.replace('_', "-");
            let refuse = |message: String| Error::Value {
                path: self.path.clone(),
                line: *line,
                key: key.clone(),
                message,
            };
            let Some(argument) = options(command).find(|argument| argument.get_long() == Some(&name)) else {
                let mut known: Vec<&str> = options(command).filter_map(Arg::get_long).collect();
                known.sort_unstable();
                let message = format!("a [[model]] table has no such key; it knows: {}", known.join(", "));
                return Err(refuse(message));
            };
            let given = key_flags(argument, &name, value).map_err(refuse)?;
            check(command, &given).map_err(refuse)?;
            flags.extend(given);
            keys.insert(name);
        }
        Ok((flags, keys))
    }

    /// Returns where the table begins, as FILE:LINE of its first key.
    pub fn place(&self) -> String {
        let line = self.entries.iter().map(|(line, ..)| *line).min().unwrap_or(1);
        format!("{}:{line}", self.path.display())
    }
}

/// What a configuration file says, as far as neither command line nor environment say it.
#[derive(Debug, Default)]
pub(crate) struct FileOptions {
    /// Flags of the role.
    pub flags: Vec<OsString>,
    /// Models with options of their own.
    pub models: Vec<ModelTable>,
}

/// Reason for which a configuration file was rejected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// The file is not valid TOML.
    #[error("{}: {message}", path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Message of the parser, with line and column.
        message: String,
    },
    /// A key is not the name of an option.
    #[error("{}:{line}: unknown key `{key}`; `inflight {role}` knows: {known}", path.display())]
    UnknownKey {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Key in the file.
        key: String,
        /// Name of the subcommand.
        role: String,
        /// All valid keys, separated by commas.
        known: String,
    },
    /// A key was renamed.
    #[error("{}:{line}: key `{old}` was renamed to `{new}`; use the new name", path.display())]
    RenamedKey {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Key in the file.
        old: String,
        /// Current name of the key.
        new: &'static str,
    },
    /// A value is invalid for its key.
    #[error("{}:{line}: key `{key}`: {message}", path.display())]
    Value {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Key in the file.
        key: String,
        /// Description of the problem.
        message: String,
    },
}

/// Parses the arguments of the process, starting with the program name.
///
/// # Errors
/// The error of clap, or [`Error`] as a message with exit code 2.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Invocation, CommandError> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    foreign::replace_command(&mut arguments);
    renamed::check(&arguments, std::env::vars_os())?;
    let refused = |error| foreign::explain(error, &arguments, &Cli::command());
    let mut models = Vec::new();
    let first = Cli::command().try_get_matches_from(&arguments).map_err(refused)?;
    if let Some((role, matches)) = first.subcommand()
        && let Some(path) = configuration_file(matches)
    {
        let command = Cli::command();
        let Some(subcommand) = command.find_subcommand(role) else {
            return Err(CommandError::new(Exit::Usage, format!("unknown command `{role}`")));
        };
        let file = file_options(&path, subcommand, matches)
            .map_err(|e| CommandError::new(Exit::Usage, e.to_string()))?;
        models = file.models;
        // No global option takes a value, so the subcommand's name is the first argument that equals it.
        let at = arguments.iter().position(|argument| argument == role).map_or(arguments.len(), |at| at + 1);
        arguments.splice(at..at, file.flags);
    }
    let matches = Cli::command().try_get_matches_from(&arguments).map_err(CommandError::Clap)?;
    let cli = Cli::from_arg_matches(&matches).map_err(CommandError::Clap)?;
    let matches = matches.subcommand().map(|(_, matches)| matches.clone()).unwrap_or_default();
    Ok(Invocation { cli, matches, models })
}

/// Returns the flags with values that command line or environment set for the arguments of `group`, to
/// forward them to a child process. Defaults are left out.
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

/// Reads the file and returns what neither command line nor environment set.
fn file_options(path: &Path, role: &Command, matches: &ArgMatches) -> Result<FileOptions, Error> {
    let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    text_options(path, &text, role, matches)
}

/// Returns what the text of the file sets and neither command line nor environment do.
pub(crate) fn text_options(
    path: &Path,
    text: &str,
    role: &Command,
    matches: &ArgMatches,
) -> Result<FileOptions, Error> {
    let entries: BTreeMap<Spanned<String>, Spanned<Value>> = toml::from_str(text).map_err(|error| {
        Error::Syntax { path: path.to_owned(), message: error.to_string().trim_end().to_owned() }
    })?;
    let mut options_of_file = FileOptions::default();
    for (key, value) in entries {
        let line = line_of(text, &key);
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
        let takes_tables = role.get_name() == "up" && name == MODEL;
        let is_table = |value: &Value| matches!(value, Value::Table(_));
        let tables = match value.get_ref() {
            Value::Array(values) if takes_tables && !values.is_empty() && values.iter().all(is_table) => {
                Some(model_tables(path, text)?)
            }
            Value::Table(_) if takes_tables => {
                return Err(refuse(
                    "write [[model]], with two brackets, above the keys of each model".into(),
                ));
            }
            _ => None,
        };
        let given = match tables {
            Some(_) => Vec::new(),
            None => key_flags(argument, &name, value.get_ref()).map_err(refuse)?,
        };
        check(role, &given).map_err(refuse)?;
        let id = argument.get_id().as_str();
        // `up` takes its model without a flag, too.
        let positional = format!("{id}_argument");
        let positional = role.get_arguments().any(|other| *other.get_id() == positional.as_str())
            && matches.contains_id(&positional);
        let unset = !positional
            && !matches!(matches.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable));
        if unset {
            options_of_file.flags.extend(given);
            options_of_file.models.extend(tables.into_iter().flatten());
        }
    }
    Ok(options_of_file)
}

fn line_of(text: &str, key: &Spanned<String>) -> usize {
    text[..key.span().start].matches('\n').count() + 1
}

/// Returns the `[[model]]` tables of a file.
fn model_tables(path: &Path, text: &str) -> Result<Vec<ModelTable>, Error> {
    #[derive(serde::Deserialize)]
    struct File {
        model: Vec<BTreeMap<Spanned<String>, Spanned<Value>>>,
    }
    let file: File = toml::from_str(text).map_err(|error| Error::Syntax {
        path: path.to_owned(),
        message: error.to_string().trim_end().to_owned(),
    })?;
    let entry = |(key, value): (Spanned<String>, Spanned<Value>)| {
        (line_of(text, &key), key.into_inner(), value.into_inner())
    };
    let tables = file.model.into_iter();
    let table = |table: BTreeMap<_, _>| ModelTable {
        path: path.to_owned(),
        entries: table.into_iter().map(entry).collect(),
    };
    Ok(tables.map(table).collect())
}

/// Returns the options that a file may set: those with a long name, except `--config` and hidden ones.
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

/// Converts a key and its value to flags.
///
/// # Errors
/// The value has the wrong type; the message names the expected one.
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
    let boolean = is(&[TypeId::of::<bool>()]);
    // A size is written as a number or with its unit.
    let quantity = argument.get_value_names().is_some_and(|names| names.iter().any(|name| name == SIZE));
    let integer = integer && !quantity;
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

/// Validates the flags of one key with clap, so that its error can be reported with the key's line.
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
    use crate::Subcommand;

    fn worker(file: &str, flags: &[&str]) -> Result<crate::worker::Args, String> {
        let directory = inflight_fixtures::TempDir::new("config").unwrap();
        let path = directory.path().join("worker.toml");
        fs::write(&path, file).unwrap();
        let words = ["inflight", "worker", "--config", path.to_str().unwrap()];
        let arguments = words.iter().chain(flags).map(OsString::from);
        match parse(arguments) {
            Ok(Invocation { cli: Cli { subcommand: Subcommand::Worker(args) }, .. }) => Ok(*args),
            Ok(other) => panic!("parsed as {other:?}"),
            Err(failure) => Err(failure.to_string()),
        }
    }

    #[test]
    fn a_file_sets_what_flags_leave_unset_and_flags_take_precedence() {
        let file =
            "block_tokens = 32\nmax-sequences = 7\nkv-cache-bytes = \"64MiB\"\nheartbeat = \"250ms\"\n";
        let args = worker(file, &["--max-sequences", "9"]).unwrap();
        assert_eq!(args.worker.compute.block_tokens, 32);
        assert_eq!(args.worker.compute.max_sequences, 9);
        assert_eq!(args.worker.compute.kv_cache_bytes, 64 << 20);
        assert_eq!(args.worker.heartbeat.as_millis(), 250);
    }

    #[test]
    fn a_file_gives_sizes_as_numbers_and_with_their_units() {
        let mut sizes = 0;
        for role in Cli::command().get_subcommands() {
            let is_size = |argument: &&Arg| {
                argument.get_value_names().is_some_and(|names| names.iter().any(|name| name == SIZE))
            };
            for argument in options(role).filter(is_size) {
                let name = argument.get_long().unwrap();
                for value in [Value::Integer(1 << 20), Value::String("1MiB".to_owned())] {
                    let flags = key_flags(argument, name, &value).unwrap();
                    assert_eq!(check(role, &flags), Ok(()), "{} --{name}", role.get_name());
                }
                let refused = key_flags(argument, name, &Value::Boolean(true)).unwrap_err();
                assert_eq!(refused, "expected an integer or a string, found true");
                sizes += 1;
            }
        }
        assert!(sizes > 10, "{sizes} options are sizes");
    }

    #[test]
    fn an_invalid_file_is_rejected_with_line_and_key() {
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
    fn only_flags_that_were_given_are_forwarded() {
        let words = ["inflight", "up", "--max-sequences", "5", "--model", "/m"].map(OsString::from);
        let invocation = parse(words).unwrap();
        let group = <inflight_worker::ComputeOptions as clap::Args>::augment_args(Command::new("group"));
        let flags = given_flags(&group, &invocation.matches);
        assert_eq!(flags, ["--model=/m", "--max-sequences=5"].map(OsString::from));
    }
}

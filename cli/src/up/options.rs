//! Options of the router and of the workers that `inflight up` takes, and passes to them.
//!
//! They are those of the two roles, as declared there. Where both roles have an option,
//!
//! - one with the same meaning, such as those of telemetry, is given to all processes;
//! - one of two queues has its plain name for the workers, and `--router-NAME` for the router;
//! - the certificates of `--tls-*` are those of the router, as workers listen on the loopback address.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::builder::Resettable;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use inflight_worker::ComputeOptions;

use crate::config::given_flags;
use crate::set_by_up::set_by_up;
use crate::{foreign, role, router, telemetry, worker};

/// Options of the router's queue whose names are those of the workers' queue: their names for `up`.
const ROUTER_QUEUE: [(&str, &str); 4] = [
    ("aging-threshold", "router-aging-threshold"),
    ("aging-tokens-per-second", "router-aging-tokens-per-second"),
    ("aging-tokens-max", "router-aging-tokens-max"),
    ("bypass-max", "router-bypass-max"),
];
/// Maximum number of workers.
pub(super) const WORKERS_MAX: u32 = 256;
/// Maximum share of the memory, relative to the others.
const MEMORY_SHARE_MAX: f64 = 1e6;
/// Options that are shown first, each with an example.
const FIRST: [(&str, &str); 12] = [
    ("model", "--model Qwen/Qwen3-0.6B; several times for several models, each also as NAME,...=MODEL"),
    ("model-name", "--model-name qwen3,gpt-4o"),
    ("device", "--device cpu"),
    ("workers", "--workers 1"),
    ("port", "--port 9000"),
    ("http-port", "--http-port 8000"),
    ("max-context-tokens", "--max-context-tokens 4096"),
    ("max-sequences", "--max-sequences 32"),
    ("kv-cache-bytes", "--kv-cache-bytes 4GiB"),
    ("tool-call-format", "--tool-call-format hermes"),
    ("tenants-file", "--tenants-file tenants.toml"),
    ("api-key", "--api-key my-secret"),
];
/// Variables that both roles read, and that mean the router alone here.
pub(super) const ROUTER_VARIABLES: [&str; 4] =
    ["INFLIGHT_TLS_CERT", "INFLIGHT_TLS_KEY", "INFLIGHT_TLS_CLIENT_CA", "INFLIGHT_TLS_CLIENT_OPTIONAL"];

/// Options of the roles beyond those that `up` reads itself. They are in the matches alone.
#[derive(Debug, Clone, Copy)]
pub struct RoleOptions;

impl FromArgMatches for RoleOptions {
    fn from_arg_matches(_: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self)
    }

    fn update_from_arg_matches(&mut self, _: &ArgMatches) -> Result<(), clap::Error> {
        Ok(())
    }
}

impl clap::Args for RoleOptions {
    fn augment_args(command: Command) -> Command {
        let command = command.args(router_arguments().map(|argument| argument.help_heading("Router")));
        let command = command.args(worker_arguments().map(|argument| argument.help_heading("Worker")));
        command.args(shared_arguments().map(|argument| argument.help_heading("Worker")))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Flags of the processes, as far as they were given.
#[derive(Debug)]
pub(super) struct RoleFlags {
    pub(super) router: Vec<OsString>,
    pub(super) worker: Vec<OsString>,
    /// Of every process.
    pub(super) shared: Vec<OsString>,
}

impl RoleFlags {
    /// Returns the flags that command line, environment or file gave.
    pub(super) fn given(matches: &ArgMatches) -> Self {
        let given = |arguments: Vec<Arg>| given_flags(&Command::new("group").args(arguments), matches);
        let workers = compute_arguments().chain(worker_arguments());
        let everyone = group::<telemetry::Args>().chain(shared_arguments());
        Self {
            router: given(router_arguments().collect()).into_iter().map(name_at_router).collect(),
            worker: given(workers.collect()),
            shared: given(everyone.filter(|argument| argument.get_long() != Some("log-format")).collect()),
        }
    }
}

/// Replaces the name that an option of the router has for `up` by that for the router.
fn name_at_router(flag: OsString) -> OsString {
    let Some(text) = flag.to_str() else { return flag };
    let name = text.trim_start_matches("--").split('=').next().unwrap_or_default();
    match ROUTER_QUEUE.iter().find(|(_, here)| *here == name) {
        Some((there, here)) => OsString::from(text.replacen(here, there, 1)),
        None => flag,
    }
}

fn group<T: clap::Args>() -> impl Iterator<Item = Arg> {
    let command = T::augment_args(Command::new("group"));
    command.get_arguments().cloned().collect::<Vec<_>>().into_iter()
}

fn is_in<T: clap::Args>(argument: &Arg) -> bool {
    group::<T>().any(|other| other.get_id() == argument.get_id())
}

/// Options of a role alone that `up` passes to it.
fn own_arguments<T: clap::Args>() -> impl Iterator<Item = Arg> {
    group::<T>().filter(|argument| {
        let set = argument.get_long().is_none_or(|long| set_by_up(long).is_some());
        !set && !is_in::<telemetry::Args>(argument) && !is_in::<role::Args>(argument)
    })
}

fn router_arguments() -> impl Iterator<Item = Arg> {
    own_arguments::<router::Args>().map(|argument| {
        let name = ROUTER_QUEUE.iter().find(|(there, _)| argument.get_long() == Some(there));
        match name {
            Some((_, here)) => argument.id(*here).long(*here),
            None => argument,
        }
    })
}

/// Returns the options of the workers of one model: those of a worker, its names, and the number of workers. They ignore the
/// environment, whose values are those of all models.
pub(super) fn model_command() -> Command {
    let names = |argument: Arg| match argument.get_long() {
        Some("model-name") => argument.long("names").alias("model-name"),
        _ => argument,
    };
    let arguments = compute_arguments().chain(worker_arguments()).map(names);
    let workers = Arg::new("workers").long("workers").value_name("N");
    let workers = workers.value_parser(clap::value_parser!(u32).range(1..=WORKERS_MAX.into()));
    let share = Arg::new("memory_share").long("memory-share").value_name("PART").value_parser(memory_share);
    let command = Command::new("up").args(arguments).arg(workers).arg(share);
    command.mut_args(|argument| argument.env(Resettable::Reset))
}

/// Reads a share of the memory.
fn memory_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= MEMORY_SHARE_MAX => Ok(share),
        _ => Err(format!("{text} is no number above 0 and up to {MEMORY_SHARE_MAX}")),
    }
}

/// Returns the flags of a worker that the options of a model set.
pub(super) fn model_flags(matches: &ArgMatches) -> Vec<OsString> {
    given_flags(&Command::new("group").args(compute_arguments().chain(worker_arguments())), matches)
}

/// Returns the environment variables of the options of a worker with these names.
pub(super) fn variables_of(keys: &BTreeSet<String>) -> Vec<OsString> {
    let named = |argument: &Arg| argument.get_long().is_some_and(|long| keys.contains(long));
    let arguments = compute_arguments().chain(worker_arguments()).filter(named);
    arguments.filter_map(|argument| argument.get_env().map(OsStr::to_owned)).collect()
}

fn compute_arguments() -> impl Iterator<Item = Arg> {
    group::<ComputeOptions>()
}

/// Options of a worker beside [`ComputeOptions`].
fn worker_arguments() -> impl Iterator<Item = Arg> {
    let tls = |argument: &Arg| argument.get_long().is_some_and(|long| long.starts_with("tls-"));
    let beside = own_arguments::<worker::Args>().filter(move |argument| !tls(argument));
    beside.filter(|argument| !is_in::<ComputeOptions>(argument))
}

/// Options of the process of either role.
fn shared_arguments() -> impl Iterator<Item = Arg> {
    group::<role::Args>().filter(|argument| argument.get_long().is_some_and(|long| set_by_up(long).is_none()))
}

/// Whether an argument is the flag of this name, with or without a value.
pub(super) fn is_flag(argument: &OsStr, name: &str) -> bool {
    argument.to_string_lossy().strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
}

/// Sets a flag to a path, whatever it was.
pub(super) fn replace_flag(flags: &mut Vec<OsString>, name: &str, path: &Path) {
    flags.retain(|flag| !is_flag(flag, name));
    flags.push(path_flag(&format!("{name}="), path));
}

/// Returns a flag, whose name ends with `=`, with a path as its value.
pub(super) fn path_flag(name: &str, path: &Path) -> OsString {
    let mut flag = OsString::from(name);
    flag.push(path);
    flag
}

/// Puts an option of `up` in its place in the help: first those that most users need, with an example; those of `up` itself; then the
/// others, which only the long help shows.
pub fn arrange(argument: Arg) -> Arg {
    let Some(long) = argument.get_long().map(str::to_owned) else { return argument };
    let argument = foreign::alias_of_up(argument);
    if let Some(at) = FIRST.iter().position(|(first, _)| *first == long) {
        let example =
            format!("{}; example: {}", argument.get_help().cloned().unwrap_or_default(), FIRST[at].1);
        let argument = argument.help(example).help_heading(None::<&str>).display_order(at);
        return if long == "model" { argument.action(ArgAction::Append) } else { argument };
    }
    let argument = match long.as_str() {
        "resume-key-file" => with_note(argument, "[default: a random one until `up` ends]"),
        "worker-secret-file" => with_note(argument, "[default: a random one until `up` ends]"),
        "admin" => with_note(
            argument,
            "[default for `up`: on, but read-only on an address of the network without --tenants-file and --api-key]",
        ),
        _ => argument,
    };
    match long.as_str() {
        _ if long.starts_with("http-") => argument.help_heading("HTTP APIs").hide_short_help(true),
        _ if long.starts_with("tls-") => argument.help_heading("TLS").hide_short_help(true),
        // Of `up` itself.
        _ if argument.get_help_heading().is_none() => argument.help_heading("Cluster"),
        _ => argument.hide_short_help(true),
    }
}

fn with_note(argument: Arg, note: &str) -> Arg {
    let help = format!("{} {note}", argument.get_help().cloned().unwrap_or_default());
    argument.help(help)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::CommandFactory as _;

    use super::*;
    use crate::Cli;
    use crate::config::parse;
    use crate::set_by_up::SET_BY_UP;

    fn longs(arguments: impl Iterator<Item = Arg>) -> BTreeSet<String> {
        arguments
            .filter(|argument| !argument.is_hide_set())
            .filter_map(|argument| argument.get_long().map(str::to_owned))
            .collect()
    }

    #[test]
    fn up_has_every_option_of_the_roles_that_it_does_not_set_and_passes_each_to_its_role() {
        let up = Cli::command().find_subcommand("up").unwrap().clone();
        let of_up = longs(up.get_arguments().cloned());
        let [router, worker] = [longs(group::<router::Args>()), longs(group::<worker::Args>())];
        for long in router.union(&worker) {
            assert!(of_up.contains(long) || set_by_up(long).is_some(), "--{long}");
        }
        for (long, _) in SET_BY_UP {
            let hidden = ["supervised", "supervisor"].contains(&long);
            assert!(hidden || router.contains(long) || worker.contains(long), "no role has --{long}");
        }
        // One flag for both: of all processes, of the router alone, or of two queues.
        let compute = longs(compute_arguments());
        let both: Vec<&str> = router
            .intersection(&worker)
            .map(String::as_str)
            .filter(|long| set_by_up(long).is_none())
            .collect();
        let shared = longs(group::<telemetry::Args>().chain(shared_arguments()));
        let queue = |long: &str| {
            ROUTER_QUEUE
                .iter()
                .any(|(there, here)| *there == long && of_up.contains(*here) && compute.contains(long))
        };
        for long in both {
            assert!(
                shared.contains(long) || long.starts_with("tls-") || queue(long),
                "--{long} of both roles"
            );
        }
    }

    #[test]
    fn flags_variables_and_keys_reach_the_role_that_has_the_option() {
        let words = [
            "inflight",
            "serve",
            "models/a",
            "--tool-call-format=hermes",
            "--http-cors=https://a,https://b",
            "--bypass-max=3",
            "--router-bypass-max=4",
            "--max-model-len=99",
            "--tp",
            "2",
            "--served-model-name=a,b",
            "--model-name=c",
            "--tls-cert=t",
            "--http-timings=true",
            "--grammar-memory-max=1GiB",
            "--heartbeat=1s",
            "--log=warn",
            "--dp-size=3",
            "--no-enable-prefix-caching",
        ];
        let invocation = parse(words.map(OsString::from)).unwrap();
        let crate::Subcommand::Up(args) = invocation.cli.subcommand else { panic!() };
        assert_eq!((args.model_arguments, args.workers), (vec![PathBuf::from("models/a")], Some(3)));
        let RoleFlags { router, worker, shared } = RoleFlags::given(&invocation.matches);
        let sorted = |mut flags: Vec<OsString>| {
            flags.sort();
            flags.into_iter().map(|flag| flag.into_string().unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            sorted(router),
            "--bypass-max=4 --http-cors=https://a --http-cors=https://b --http-timings=true --tls-cert=t --tool-call-format=hermes"
        );
        assert_eq!(
            sorted(worker),
            "--bypass-max=3 --heartbeat=1s --max-context-tokens=99 --model-name=a --model-name=b --model-name=c --no-prefix-cache \
             --tensor-parallel=2"
        );
        assert_eq!(sorted(shared), "--grammar-memory-max=1GiB --log=warn");
    }

    #[test]
    fn the_short_help_shows_what_most_users_need_first_and_the_long_help_everything() {
        let mut up = Cli::command().find_subcommand("up").unwrap().clone();
        let (short, long) = (up.render_help().to_string(), up.render_long_help().to_string());
        let lines = short.lines().count();
        let short = short.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut last = 0;
        for (name, example) in FIRST {
            let at = short.find(&format!("example: {example}")).unwrap_or_else(|| panic!("{name}: {short}"));
            assert!(at > last, "--{name} comes too early");
            last = at;
        }
        assert!(lines < 90 && !short.contains("--kv-watermark"), "{short}");
        for option in longs(up.get_arguments().cloned()) {
            assert!(long.contains(&format!("--{option}")), "{option}");
        }
    }

    /// Names of the options in the text of a source file that stand in string literals.
    fn options_in_strings(text: &str) -> BTreeSet<String> {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let literals = lines.flat_map(|line| line.split('"').skip(1).step_by(2));
        let words =
            literals.flat_map(|literal| literal.match_indices("--").map(|(at, _)| &literal[at + 2..]));
        let name = |word: &str| {
            word.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).next().unwrap_or_default().to_owned()
        };
        words.map(name).filter(|name| name.len() > 1 && !name.ends_with('-')).collect()
    }

    #[test]
    fn every_option_that_an_error_of_router_or_worker_names_can_be_typed_with_up() {
        let up = Cli::command().find_subcommand("up").unwrap().clone();
        let of_up = longs(up.get_arguments().cloned());
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let (mut folders, mut named) = (vec![root.join("router/src"), root.join("worker")], BTreeSet::new());
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                if path.is_dir() {
                    folders.extend(
                        (!["tests", "benches", "demo", "examples"].contains(&name.as_str())).then_some(path),
                    );
                } else if name.ends_with(".rs") {
                    named.extend(options_in_strings(&std::fs::read_to_string(&path).unwrap()));
                }
            }
        }
        assert!(named.contains("tool-call-format") && named.contains("kv-cache-bytes"), "{named:?}");
        // Of other programs or commands.
        let foreign = ["merge"];
        let unknown = named.iter().filter(|name| !of_up.contains(*name) && set_by_up(name).is_none());
        let unknown: Vec<&String> = unknown.filter(|name| !foreign.contains(&name.as_str())).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}

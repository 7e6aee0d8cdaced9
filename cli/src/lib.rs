//! The `inflight` command: every role of the cluster in one binary.

#![forbid(unsafe_code)]

mod bench;
mod chat;
mod chat_template;
mod child_log;
mod completions;
mod config;
mod control_socket;
mod diagnose;
#[cfg(test)]
mod documents;
mod event;
mod exit;
mod exposition;
mod foreign;
#[doc(hidden)]
pub mod fuzz;
mod generate;
mod gpus;
mod grammar_helper;
mod hub;
mod key;
mod man;
mod memory_plan;
mod memory_share;
mod metrics_compat;
mod metrics_endpoint;
mod otlp_metrics;
mod quick_build;
mod recording_dir;
mod renamed;
mod replay;
mod role;
mod router;
mod sampling;
mod set_by_up;
mod signals;
mod supervisor;
mod telemetry;
mod temporary_secret;
mod tls;
mod tool_file;
mod top;
mod trace_sampler;
mod transcript;
mod up;
mod usage;
mod worker;
mod worker_secret;

use std::process::ExitCode;

use clap::Parser;

use crate::config::Invocation;

/// Serves large language models from a cluster: routers, workers, streaming gRPC
#[derive(Debug, Parser)]
#[command(name = "inflight", version, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    subcommand: Subcommand,
}

#[derive(Debug, clap::Subcommand)]
enum Subcommand {
    /// Starts a router and workers on this machine
    #[command(visible_aliases = ["run", "serve"])]
    Up(Box<up::Args>),
    /// Generates text, streaming it to the terminal
    Generate(Box<generate::Args>),
    /// Converses with a model in the terminal
    Chat(Box<chat::Args>),
    /// Generates load against routers or OpenAI-compatible servers and reports throughput and latency
    Bench(Box<bench::Args>),
    /// Prints completions of the command line for a shell
    Completions(completions::Args),
    /// Reports the bottlenecks of workers and how to relieve them
    Diagnose(diagnose::Args),
    /// Generates an API key and its digest for the tenants file
    Key(key::Args),
    /// Writes manual pages
    Man(man::Args),
    /// Lists the models of the Hugging Face Hub that are on this machine
    Models(hub::models::Args),
    /// Fetches a model from the Hugging Face Hub
    Pull(hub::pull::Args),
    /// Replays the scheduler of a worker that ran with --record
    Replay(replay::Args),
    /// Removes models of the Hugging Face Hub from this machine
    Rm(hub::rm::Args),
    /// Runs a router: admits, queues and dispatches requests, streams tokens to clients
    Router(Box<router::Args>),
    /// Shows what a cluster does now: workers, tenants and requests, in the terminal
    Top(Box<top::Args>),
    /// Sums the usage logs of routers by tenant, model or day
    Usage(usage::Args),
    /// Runs a worker: loads a model and generates tokens on one device or tensor-parallel group
    Worker(Box<worker::Args>),
}

/// Runs the command that the arguments of the process name.
pub fn main() -> ExitCode {
    if let Some(ended) = grammar_helper::run() {
        return ended;
    }
    let outcome = config::parse(std::env::args_os()).and_then(|Invocation { cli, matches, models }| {
        match cli.subcommand {
            Subcommand::Up(args) => role::block_on(None, up::run(*args, &matches, &models)),
            Subcommand::Generate(args) => role::block_on(Some(1), generate::run(*args)),
            Subcommand::Chat(args) => role::block_on(Some(1), chat::run(*args, &matches)),
            // One thread, to leave the cores to a server on the same machine.
            Subcommand::Bench(args) => role::block_on(Some(1), bench::run(*args)),
            Subcommand::Completions(args) => completions::run(&args),
            Subcommand::Diagnose(args) => role::block_on(Some(1), diagnose::run(args)),
            Subcommand::Key(args) => key::run(&args),
            Subcommand::Man(args) => man::run(&args),
            Subcommand::Models(args) => hub::models::run(&args),
            Subcommand::Pull(args) => hub::pull::run(&args),
            Subcommand::Rm(args) => hub::rm::run(&args),
            Subcommand::Replay(args) => replay::run(&args),
            Subcommand::Router(args) => {
                // Before the runtime's threads.
                inflight_net::bound_free_memory();
                role::block_on(None, router::run(*args))
            }
            Subcommand::Top(args) => role::block_on(Some(1), top::run(*args)),
            Subcommand::Usage(args) => usage::run(&args),
            // The engine has its own threads; the session service needs few.
            Subcommand::Worker(args) => role::block_on(Some(2), worker::run(*args)),
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_well_formed_and_help_shows_every_default() {
        Cli::command().debug_assert();
        for role in ["router", "worker", "up", "bench"] {
            let command = Cli::command();
            let help = command.find_subcommand(role).unwrap().clone().render_long_help().to_string();
            for argument in
                command.find_subcommand(role).unwrap().get_arguments().filter(|a| !a.is_hide_set())
            {
                for default in argument.get_default_values() {
                    let shown = format!("[default: {}", default.to_str().unwrap());
                    assert!(help.contains(&shown), "{role}: {} does not show {shown}", argument.get_id());
                }
            }
        }
    }
}

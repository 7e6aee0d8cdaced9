//! Options of `inflight up`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use inflight_options::{OptionalPort, Span};
use inflight_worker::ComputeOptions;

use super::options::{RoleOptions, arrange};
use crate::telemetry;

/// Text at the end of `inflight up --help`: examples.
const EXAMPLES: &str = "Examples:
  inflight up                                        the embedded demo model, on two workers without a GPU
  inflight up Qwen/Qwen3-0.6B --workers 1            a model of the Hugging Face Hub, or a path
  inflight up Qwen/Qwen3-0.6B chat,gpt-4o=models/b   two models, the second one under two names of its own
  inflight up models/qwen3 --max-context-tokens 8192 --tool-call-format hermes --http-cors '*'

Options of the router and the workers beyond these: inflight up --help";
/// Options of `inflight up`: its own, and those of the router and the workers.
#[derive(Debug, Clone, clap::Args)]
#[command(mut_args = arrange, after_help = EXAMPLES)]
pub struct Args {
    /// Models to serve, as --model takes them
    #[arg(id = "model_argument", value_name = "MODEL")]
    pub model_arguments: Vec<PathBuf>,
    /// Number of workers to start, of each model [default: one per GPU, 2 without GPUs; of several models one each, and one for each
    /// GPU that is left]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), env = "INFLIGHT_UP_WORKERS")]
    pub workers: Option<u32>,
    /// IP address on which the router listens
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), env = "INFLIGHT_UP_HOST")]
    pub host: IpAddr,
    /// Port of the router; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value_t = 8650, env = "INFLIGHT_UP_PORT")]
    pub port: u16,
    /// Port of the router's HTTP APIs, or `off`; 0 picks a free one [default: --port - 10]
    #[arg(long, value_name = "PORT", env = "INFLIGHT_UP_HTTP_PORT")]
    pub http_port: Option<OptionalPort>,
    /// Port of the router's Prometheus endpoint; the workers use the ports after it; 0 picks free ones
    /// [default: --port + 1]
    #[arg(long, value_name = "PORT", env = "INFLIGHT_UP_METRICS_PORT")]
    pub metrics_port: Option<u16>,
    /// IP address of the Prometheus endpoints, which need no key and name tenants
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), env = "INFLIGHT_UP_METRICS_HOST")]
    pub metrics_host: IpAddr,
    /// API keys of clients, separated by commas or in several flags: one tenant without limits has them. Other users of this machine
    /// can read a command line, but no environment variables
    #[arg(
        id = "api_key",
        long = "api-key",
        value_name = "KEY,...",
        value_delimiter = ',',
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        env = "INFLIGHT_UP_API_KEY",
        hide_env_values = true
    )]
    pub api_keys: Vec<String>,
    /// Directory in which router and workers record their decisions, for `inflight replay`; a process that is started
    /// again begins a new file there
    #[arg(long, value_name = "DIR", env = "INFLIGHT_UP_RECORD")]
    pub record: Option<PathBuf>,
    /// Time for open streams to finish after Ctrl-C; a second Ctrl-C ends at once
    #[arg(long, value_name = "DURATION", default_value = "30s", env = "INFLIGHT_DRAIN_TIMEOUT")]
    pub drain_timeout: Span,
    /// Show informational logs of the child processes too, not only warnings and errors
    #[arg(long, short)]
    pub verbose: bool,
    /// Print events as JSON lines instead of text
    #[arg(long)]
    pub json: bool,
    /// TOML configuration file; its keys are the names of these flags. Flags and environment variables
    /// override it. [[model]] tables have options of single models
    #[arg(long, value_name = "FILE", env = "INFLIGHT_UP_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub compute: ComputeOptions,
    #[command(flatten)]
    pub telemetry: telemetry::Args,
    #[command(flatten)]
    pub roles: RoleOptions,
}

//! Options of `inflight bench`.

use std::path::PathBuf;

use super::client::PromptForm;
use super::endpoint::Endpoint;
use super::lengths::Lengths;
use super::load::Load;
use super::measure::Quota;
use super::tenants::Tenant;
use crate::units::Span;

/// Streams at once if nothing says how requests follow one another.
pub const STREAMS_DEFAULT: u32 = 4;
/// Requests that count in a round, at least and for each stream.
const REQUESTS_DEFAULT: u64 = 64;
const REQUESTS_PER_STREAM: u64 = 4;
/// Rounds where servers are compared.
const ROUNDS_COMPARED: u32 = 3;

const EXIT_CODES: &str = "Exit codes: 0 done, also if a part of the requests was refused; 1 requests failed; 2 bad flags, or a trace \
that is none; 3 nobody answers at an endpoint; 4 no such model; 5 all requests were refused; 130 interrupted.";

/// Options of `inflight bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub struct Args {
    /// A server, as [NAME=]URL: a router (http://HOST:PORT), or with a path an OpenAI-compatible API (http://HOST:PORT/v1); several take turns
    /// and are compared with the first
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8650", env = "INFLIGHT_ENDPOINT")]
    pub endpoint: Vec<Endpoint>,
    /// Name of the model [default: the only one each server has]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Closed loop: streams at once, each sending its next request at the end of the one before; several are measured one after
    /// another [default: 4]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub concurrency: Vec<u32>,
    /// Open loop: requests a second, as a Poisson process, whether or not the server keeps up
    #[arg(long, value_name = "R,…", value_delimiter = ',', value_parser = positive, conflicts_with = "concurrency")]
    pub rate: Vec<f64>,
    /// With --rate: at equal distances instead
    #[arg(long, requires = "rate")]
    pub evenly: bool,
    /// Lengths, and arrivals and tenants where it has them, from a file: Azure's or VTC's CSV, a CSV of lengths, Mooncake's JSON lines. Without
    /// --concurrency and --rate, its arrivals are replayed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt_tokens", "output_tokens"])]
    pub trace: Option<PathBuf>,
    /// How many times as fast the trace is replayed
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = positive, requires = "trace")]
    pub speed: f64,
    /// Put each arrival of the trace off by up to this much: for traces whose times are rounded
    #[arg(long, value_name = "DURATION", default_value = "0s", requires = "trace")]
    pub arrival_jitter: Span,
    /// Tokens of a prompt: N, LEAST..MOST or lognormal:mean=M,sigma=S[,max=N]
    #[arg(long, value_name = "LENGTHS", default_value = "128")]
    pub prompt_tokens: Lengths,
    /// Tokens to generate, likewise
    #[arg(long, value_name = "LENGTHS", default_value = "64")]
    pub output_tokens: Lengths,
    /// Cut longer prompts [default: none]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_prompt_tokens: Option<u32>,
    /// Cut longer outputs [default: none]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_output_tokens: Option<u32>,
    /// Tokens that all prompts of a tenant begin with
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub shared_prefix: u32,
    /// Who sends, as NAME[,share=S][,weight=W][,priority=P]; may be repeated [default: the trace's tenants, else the default tenant]
    #[arg(long, value_name = "TENANT")]
    pub tenant: Vec<Tenant>,
    /// Requests that count in each round [default: 64, or 4 for each stream]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub requests: Option<u64>,
    /// Count instead those that begin within this time
    #[arg(long, value_name = "DURATION", conflicts_with = "requests")]
    pub duration: Option<Span>,
    /// Requests before those that count [default: as many as streams; in an open loop an eighth of --requests, or 8]
    #[arg(long, value_name = "N")]
    pub warmup: Option<u64>,
    /// Rounds, of which medians are shown [default: 1, or 3 with several endpoints]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Key of all random choices: the same requests again [default: drawn and told, so that no run meets its own prompts in a prefix cache]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// How prompts are sent
    #[arg(long, value_enum, default_value_t = PromptForm::Auto)]
    pub prompt: PromptForm,
    /// Prompts are made of token ids below this [default: what a router says, else 10000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub vocab_size: Option<u32>,
    /// Divides the logits; 0 always takes the most probable token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// Let the model end before it has generated all that was asked for
    #[arg(long)]
    pub allow_eos: bool,
    /// Longest time for one request
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    pub timeout: Span,
    /// Open loop: most requests in flight; further ones wait, and their time counts
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub in_flight_max: u32,
    /// A good request has its first token within this time
    #[arg(long, value_name = "DURATION")]
    pub slo_ttft: Option<Span>,
    /// A good request's mean time between tokens is at most this
    #[arg(long, value_name = "DURATION")]
    pub slo_tpot: Option<Span>,
    /// A good request is over within this time
    #[arg(long, value_name = "DURATION")]
    pub slo_e2e: Option<Span>,
    /// Write every figure of every round as JSON; `-` is the standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (1e-6..=1e6).contains(number));
    number.ok_or_else(|| "not a number from 0.000001 to 1000000".to_owned())
}

impl Args {
    /// Rounds for this many servers.
    pub fn rounds(&self, servers: usize) -> u32 {
        self.rounds.unwrap_or(if servers > 1 { ROUNDS_COMPARED } else { 1 })
    }

    /// Which requests of a round count.
    pub fn quota(&self, load: Load) -> Quota {
        match (self.duration, self.requests, load) {
            (Some(duration), ..) => Quota::Duration(duration.0),
            (None, Some(requests), _) => Quota::Requests(requests),
            (None, None, Load::Open { .. }) => Quota::Requests(REQUESTS_DEFAULT),
            (None, None, Load::Closed { streams }) => {
                Quota::Requests(REQUESTS_DEFAULT.max(REQUESTS_PER_STREAM * u64::from(streams)))
            }
        }
    }

    /// Requests before those that count.
    pub fn warmup(&self, load: Load) -> u64 {
        self.warmup.unwrap_or(match (load, self.requests) {
            (Load::Closed { streams }, _) => u64::from(streams),
            (Load::Open { .. }, Some(requests)) => requests / 8,
            (Load::Open { .. }, None) => REQUESTS_DEFAULT / 8,
        })
    }
}

//! Options of `inflight bench` and their defaults.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use inflight_bench::{Endpoint, Lengths, LoadPattern, PromptForm, Quota, Tenant};

use inflight_options::{ServerAddress, Span};

/// Concurrent streams of the default closed loop.
pub const STREAMS_DEFAULT: u32 = 4;
/// Default number of measured requests of a round, or minimum in a closed loop.
const REQUESTS_DEFAULT: u64 = 64;
/// Factor of the closed-loop default: max(REQUESTS_DEFAULT, REQUESTS_PER_STREAM * streams) per round.
const REQUESTS_PER_STREAM: u64 = 4;
/// Default time for which a search measures each rate.
const SEARCH_DURATION: Duration = Duration::from_secs(30);
/// Default number of rounds with several servers.
const ROUNDS_COMPARED: u32 = 3;

const EXIT_CODES: &str = "Exit codes: 0 done, also if a part of the requests was refused; 1 requests failed; 2 bad flags, or a trace \
that cannot be read; 3 an endpoint is unreachable; 4 no such model; 5 all requests were refused; 130 interrupted.";

/// Options of `inflight bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXIT_CODES)]
#[command(group = clap::ArgGroup::new("slo").multiple(true), group = clap::ArgGroup::new("open_loop"))]
pub struct Args {
    /// Server under test, as [NAME=]ADDRESS: a router (HOST:PORT) or, with a path, an OpenAI-compatible
    /// API (http://HOST:PORT/v1). Several are measured in turns and compared with the first
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "http://127.0.0.1:8650",
        value_parser = endpoint,
        env = "INFLIGHT_ENDPOINT"
    )]
    pub endpoint: Vec<Endpoint>,
    /// Model name [default: the only one served]
    #[arg(long, short, value_name = "NAME")]
    pub model: Option<String>,
    /// Closed loop with this many concurrent streams; a list is measured one by one [default: 4]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub concurrency: Vec<u32>,
    /// Open loop at this request rate per second, as a Poisson process; a list is measured one by one
    #[arg(long, value_name = "R,…", value_delimiter = ',', value_parser = positive, conflicts_with = "concurrency", group = "open_loop")]
    pub rate: Vec<f64>,
    /// Search for the highest rate, within these bounds, at which --slo-share of the requests meets --slo-ttft, --slo-tpot and
    /// --slo-e2e: doubles the rate until it is too high, then bisects until the rates differ by less than 10 %. Without
    /// --duration and --requests, each rate is measured for 30s after the warm-up
    #[arg(long, value_name = "MIN..MAX", value_parser = rate_bounds, conflicts_with_all = ["rate", "concurrency"], requires = "slo", group = "open_loop")]
    pub find_rate: Option<(f64, f64)>,
    /// With --find-rate: share of the requests that must meet the objectives
    #[arg(long, value_name = "SHARE", default_value_t = 0.99, value_parser = share, requires = "find_rate")]
    pub slo_share: f64,
    /// With --rate or --find-rate: constant intervals instead of a Poisson process
    #[arg(long, requires = "open_loop")]
    pub constant_rate: bool,
    /// Trace with lengths, and optionally arrivals and tenants: Azure's or VTC's CSV, a CSV of lengths,
    /// Mooncake's JSON lines. Without --concurrency and --rate its arrivals are replayed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt_tokens", "output_tokens"])]
    pub trace: Option<PathBuf>,
    /// Replay speed of the trace, relative to its own
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = positive, requires = "trace")]
    pub speed: f64,
    /// Random delay added to each arrival of the trace, for traces with rounded times
    #[arg(long, value_name = "DURATION", default_value = "0s", requires = "trace")]
    pub arrival_jitter: Span,
    /// Prompt lengths in tokens: N, MIN..MAX or lognormal:mean=M,sigma=S[,max=N]
    #[arg(long, value_name = "LENGTHS", default_value = "128")]
    pub prompt_tokens: Lengths,
    /// Output lengths in tokens, in the same forms
    #[arg(long, value_name = "LENGTHS", default_value = "64")]
    pub output_tokens: Lengths,
    /// Truncate longer prompts to this many tokens [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_prompt_tokens: Option<u32>,
    /// Truncate longer outputs to this many tokens [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_output_tokens: Option<u32>,
    /// Length in tokens of a common prefix of each tenant's prompts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub shared_prefix: u32,
    /// Tenant, as NAME[,share=S][,weight=W][,priority=P]; repeatable [default: the trace's tenants, else the
    /// default tenant]
    #[arg(long, value_name = "TENANT")]
    pub tenant: Vec<Tenant>,
    /// Requests measured in each round [default: 64, or 4 per stream]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub requests: Option<u64>,
    /// Measure the requests that start within this time instead of --requests
    #[arg(long, value_name = "DURATION", conflicts_with = "requests")]
    pub duration: Option<Span>,
    /// Warm-up requests before those measured [default: one per stream; in an open loop an eighth of
    /// --requests, or 8]
    #[arg(long, value_name = "N")]
    pub warmup: Option<u64>,
    /// Rounds; medians over rounds are reported [default: 1, or 3 with several endpoints]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Seed of lengths, arrivals and tenants [default: random, reported]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Nonce of the prompts: with the same --seed, --nonce and options the same prompts are sent again. Each
    /// run draws a new one, so that its prompts hit no prefix cache filled by an earlier run [default:
    /// random, reported]
    #[arg(long, value_name = "N")]
    pub nonce: Option<u64>,
    /// Form in which prompts are sent
    #[arg(long, value_name = "FORM", default_value = FORMS[0].0, value_parser = prompt_form())]
    pub prompt: PromptForm,
    /// Vocabulary size: prompts are drawn from token ids below it [default: the router's answer, else 10000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub vocab_size: Option<u32>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// Let outputs end at the EOS token, before their full length
    #[arg(long)]
    pub allow_eos: bool,
    /// Continue streams of a router that break off, as its clients can; otherwise they count as failed
    #[arg(long)]
    pub resume: bool,
    /// Timeout of a request
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    pub timeout: Span,
    /// Open loop: maximum requests in flight; the queueing time of further ones is measured too
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub in_flight_max: u32,
    /// Goodput: maximum time to first token
    #[arg(long, value_name = "DURATION", group = "slo")]
    pub slo_ttft: Option<Span>,
    /// Goodput: maximum mean time per output token
    #[arg(long, value_name = "DURATION", group = "slo")]
    pub slo_tpot: Option<Span>,
    /// Goodput: maximum end-to-end latency
    #[arg(long, value_name = "DURATION", group = "slo")]
    pub slo_e2e: Option<Span>,
    /// Write all figures of all rounds as JSON to FILE; `-` prints JSON instead of the table
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Names of the forms of prompts, and their help.
const FORMS: [(&str, PromptForm, &str); 3] = [
    ("auto", PromptForm::Auto, "As token ids where the server takes them, else as text"),
    ("ids", PromptForm::Ids, "As token ids"),
    ("text", PromptForm::Text, "As text of about as many tokens"),
];

fn prompt_form() -> impl TypedValueParser<Value = PromptForm> {
    let names = FORMS.map(|(name, _, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(names).map(|given| {
        FORMS.iter().find(|(name, ..)| *name == given).map_or(PromptForm::Auto, |(_, form, _)| *form)
    })
}

/// Returns the name of a form of prompts.
pub fn form_name(form: PromptForm) -> &'static str {
    FORMS.iter().find(|(_, known, _)| *known == form).map_or("auto", |(name, ..)| name)
}

/// Parses `[NAME=]ADDRESS`.
fn endpoint(text: &str) -> Result<Endpoint, String> {
    let (name, address) = match text.split_once('=') {
        Some((name, address)) if !name.contains("://") => (format!("{name}="), address),
        _ => (String::new(), text),
    };
    format!("{name}{}", ServerAddress::url_with_path(address)?).parse()
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (1e-6..=1e6).contains(number));
    number.ok_or_else(|| "not a number from 0.000001 to 1000000".to_owned())
}

fn rate_bounds(text: &str) -> Result<(f64, f64), String> {
    let (from, to) = text.split_once("..").ok_or_else(|| "not of the form MIN..MAX".to_owned())?;
    let (from, to) = (positive(from)?, positive(to)?);
    if from > to { Err(format!("{from} is more than {to}")) } else { Ok((from, to)) }
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "not a share above 0 and up to 1".to_owned())
}

impl Args {
    /// Returns the number of rounds for `servers` servers.
    pub fn rounds(&self, servers: usize) -> u32 {
        self.rounds.unwrap_or(if servers > 1 { ROUNDS_COMPARED } else { 1 })
    }

    /// Returns the quota of measured requests of a round.
    pub fn quota(&self, load: LoadPattern) -> Quota {
        match (self.duration, self.requests, load) {
            (Some(duration), ..) => Quota::Duration(duration.0),
            (None, Some(requests), _) => Quota::Requests(requests),
            // Long enough for a queue to grow.
            (None, None, _) if self.find_rate.is_some() => Quota::Duration(SEARCH_DURATION),
            (None, None, LoadPattern::Open { .. }) => Quota::Requests(REQUESTS_DEFAULT),
            (None, None, LoadPattern::Closed { streams }) => {
                Quota::Requests(REQUESTS_DEFAULT.max(REQUESTS_PER_STREAM * u64::from(streams)))
            }
        }
    }

    /// Returns the number of warm-up requests of a round.
    pub fn warmup(&self, load: LoadPattern) -> u64 {
        self.warmup.unwrap_or(match (load, self.requests) {
            (LoadPattern::Closed { streams }, _) => u64::from(streams),
            (LoadPattern::Open { .. }, Some(requests)) => requests / 8,
            (LoadPattern::Open { .. }, None) => REQUESTS_DEFAULT / 8,
        })
    }
}

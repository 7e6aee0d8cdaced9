//! `inflight bench`: the load generator.
//!
//! A [`workload`] is a pure function of its seed. [`load`] sends it to one server at a time, in rounds that take turns between the
//! servers; [`measure`] keeps what came of it and [`report`] shows it.

mod args;
mod client;
mod endpoint;
mod grpc;
mod lengths;
mod load;
mod measure;
mod openai;
mod report;
mod sse;
mod tenants;
#[cfg(test)]
mod tests;
mod workload;

use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use inflight_simulator::trace::{TracedRequest, read_trace};
use serde_json::json;

pub use args::Args;

use self::client::{Client, Greeting, Manner};
use self::load::{Load, Round};
use self::measure::{Measured, Meter, Quota, Slo};
use self::report::{Point, Report};
use self::tenants::Tenant;
use self::workload::{Arrivals, PromptKeys, Source, Workload};
use crate::exit::{Exit, Failure, say};

/// Token ids of prompts are below this where no server tells its vocabulary: few models have less.
const VOCAB_SIZE_ASSUMED: u32 = 10_000;
/// Requests looked at beforehand where it is not known how many there will be.
const PLANNED_MAX: u64 = 1000;
/// How often the progress bar moves.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Measures, and shows what it measured.
///
/// # Errors
/// A server that is not there or does not know the model, a workload that it cannot take, or requests that failed.
pub async fn run(args: Args) -> Result<(), Failure> {
    tokio::select! {
        done = bench(args) => done,
        _ = tokio::signal::ctrl_c() => Err(Failure::Silent(Exit::Interrupted)),
    }
}

async fn bench(mut args: Args) -> Result<(), Failure> {
    let trace = match &args.trace {
        Some(path) => read_trace(path).map_err(|error| Failure::new(Exit::Usage, error.to_string()))?,
        None => Vec::new(),
    };
    let loads = loads(&args, &trace)?;
    if matches!(loads[..], [Load::Open { arrivals: Arrivals::Trace { .. }, .. }]) && args.duration.is_none() {
        // A trace is replayed to its end.
        let whole = (trace.len() as u64).saturating_sub(args.warmup.unwrap_or(0)).max(1);
        args.requests = Some(args.requests.map_or(whole, |requests| requests.min(whole)));
        args.warmup.get_or_insert(0);
    }
    let mut clients: Vec<Client> = args.endpoint.iter().map(endpoint::Endpoint::client).collect();
    let mut greetings = Vec::new();
    for client in &mut clients {
        greetings.push(client.greet(args.model.as_deref(), args.prompt).await?);
    }
    let seed = args.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let nonce = args.nonce.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let keys = PromptKeys::new(&options(&args), nonce);
    let workload = Arc::new(workload(&args, trace, seed, &greetings)?);
    let names: Vec<String> = args.endpoint.iter().map(|endpoint| endpoint.name.clone()).collect();
    let context = greetings.iter().filter_map(|greeting| greeting.context_tokens).min();
    for load in &loads {
        fits(&args, &workload, *load, context)?;
    }
    let clients: Vec<Arc<Client>> = clients.into_iter().map(Arc::new).collect();
    let plan = Plan { args: &args, workload: &workload, keys, clients: &clients, names: &names };
    let mut points = Vec::new();
    for (place, load) in (0u64..).zip(loads) {
        points.push(plan.point(place, load).await?);
    }
    let slo = slo(&args);
    let report = Report {
        has_slo: slo.is_set(),
        setting: setting(&args, &workload, nonce, &clients, &greetings),
        tenants: workload.tenants.iter().map(|tenant| tenant.name.clone()).collect(),
        names,
        points,
    };
    show(&args, &report, seed, nonce)
}

/// The options that decide what is sent: all but the servers, the report, and the seed, which has a say of its own.
fn options(args: &Args) -> String {
    let args = Args { endpoint: Vec::new(), seed: None, nonce: None, json: None, ..args.clone() };
    format!("{args:?}")
}

/// What is measured and where, for each point.
struct Plan<'a> {
    args: &'a Args,
    workload: &'a Arc<Workload>,
    keys: PromptKeys,
    clients: &'a [Arc<Client>],
    names: &'a [String],
}

impl Plan<'_> {
    /// Rounds of one load. The servers take turns, and who goes first changes with each round.
    async fn point(&self, place: u64, load: Load) -> Result<Point, Failure> {
        let mut rounds: Vec<Vec<Measured>> = vec![Vec::new(); self.clients.len()];
        let all = self.args.rounds(self.clients.len());
        for round in 0..all {
            for turn in 0..self.clients.len() {
                let server = (turn + round as usize) % self.clients.len();
                // The same prompts for all servers, and others in each round.
                let key = self.keys.key(place, round);
                let meter = Meter::new(
                    self.args.warmup(load),
                    self.args.quota(load),
                    slo(self.args),
                    self.workload.tenants.len(),
                );
                let session = Round {
                    client: Arc::clone(&self.clients[server]),
                    workload: Arc::clone(self.workload),
                    key,
                    manner: Manner { temperature: self.args.temperature, allow_eos: self.args.allow_eos },
                    timeout: self.args.timeout.0,
                    meter: meter.clone(),
                };
                let title = format!("{}: {}, round {} of {all}", self.names[server], load.short(), round + 1);
                let progress = tokio::spawn(progress(title, meter, self.args.quota(load)));
                let measured = load::run(Arc::new(session), load, self.args.quota(load)).await;
                progress.abort();
                let _ = progress.await;
                let measured = measured.map_err(|failure| failure.at(&self.names[server]))?;
                if measured.started == 0 {
                    let message = "no request counted: the trace has no more than the requests to warm up";
                    return Err(Failure::new(Exit::Usage, message));
                }
                rounds[server].push(measured);
            }
        }
        Ok(Point { load, rounds })
    }
}

/// Shows how far a round is until it is aborted.
async fn progress(title: String, meter: Meter, quota: Quota) {
    let length = match quota {
        Quota::Requests(all) => all,
        Quota::Duration(time) => time.as_millis() as u64,
    };
    let template = "{msg} [{bar:30}] {percent}% {elapsed}{prefix}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = Cleared(ProgressBar::new(length).with_style(style.progress_chars("=> ")).with_message(title));
    let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
    loop {
        ticks.tick().await;
        let (ended, tokens) = meter.progress();
        let open = meter.opened().map(|opened| opened.elapsed());
        match (quota, open) {
            (Quota::Requests(_), _) => bar.0.set_position(ended),
            (Quota::Duration(_), Some(open)) => bar.0.set_position((open.as_millis() as u64).min(length)),
            (Quota::Duration(_), None) => {}
        }
        if let Some(seconds) = open.map(|open| open.as_secs_f64()).filter(|seconds| *seconds > 0.0) {
            bar.0.set_prefix(format!(", {:.0} tokens/s", tokens as f64 / seconds));
        }
        bar.0.tick();
    }
}

/// A bar that leaves no trace of itself.
struct Cleared(ProgressBar);

impl Drop for Cleared {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn loads(args: &Args, trace: &[TracedRequest]) -> Result<Vec<Load>, Failure> {
    let open = |arrivals| Load::Open { arrivals, in_flight_max: args.in_flight_max as usize };
    if !args.rate.is_empty() {
        let arrivals = |rate: &f64| {
            if args.constant_rate { Arrivals::Constant(*rate) } else { Arrivals::Poisson(*rate) }
        };
        return Ok(args.rate.iter().map(|rate| open(arrivals(rate))).collect());
    }
    if !args.concurrency.is_empty() {
        return Ok(args.concurrency.iter().map(|streams| Load::Closed { streams: *streams }).collect());
    }
    let timed = trace.first().is_some_and(|first| first.arrival_s.is_some());
    if timed {
        return Ok(vec![open(Arrivals::Trace { speed: args.speed, jitter: args.arrival_jitter.0 })]);
    }
    if args.trace.is_some() {
        let message = "the trace has lengths but no times; say how requests follow one another with --concurrency or --rate";
        return Err(Failure::new(Exit::Usage, message));
    }
    Ok(vec![Load::Closed { streams: args::STREAMS_DEFAULT }])
}

fn workload(
    args: &Args,
    trace: Vec<TracedRequest>,
    seed: u64,
    greetings: &[Greeting],
) -> Result<Workload, Failure> {
    let traced = trace.iter().filter_map(|request| request.tenant).max();
    let tenants = match (args.tenant.as_slice(), traced) {
        ([], Some(last)) => (0..=last).map(|tenant| Tenant::named(format!("tenant-{tenant}"))).collect(),
        ([], None) => vec![Tenant::named("")],
        (given, _) => given.to_vec(),
    };
    let told = greetings.iter().filter_map(|greeting| greeting.vocab_size).min();
    let vocab = args.vocab_size.or(told).unwrap_or(VOCAB_SIZE_ASSUMED);
    if let Some(told) = told.filter(|told| *told < vocab) {
        let message =
            format!("--vocab-size {vocab} is more than the {told} tokens of the model's vocabulary");
        return Err(Failure::new(Exit::Usage, message));
    }
    let source = match args.trace {
        Some(_) => Source::Trace(trace),
        None => Source::Drawn { prompt: args.prompt_tokens, output: args.output_tokens },
    };
    Ok(Workload {
        seed,
        source,
        caps: (args.max_prompt_tokens.unwrap_or(u32::MAX), args.max_output_tokens.unwrap_or(u32::MAX)),
        tenants,
        shared_prefix: args.shared_prefix,
        // The first ids are often special tokens, which a prompt may not hold or which mean something.
        ids: (vocab / 100).min(1000)..vocab,
    })
}

/// Refuses a workload of which the servers would refuse a part.
fn fits(args: &Args, workload: &Workload, load: Load, context: Option<u32>) -> Result<(), Failure> {
    let Some(context) = context else { return Ok(()) };
    let places = match args.quota(load) {
        Quota::Requests(all) => args.warmup(load) + all,
        Quota::Duration(_) => PLANNED_MAX,
    };
    let Some((first, count)) = workload.too_long(places, context) else { return Ok(()) };
    let message = format!(
        "{count} of the first {places} requests do not fit into the model's context of {context} tokens (the first asks for {} after \
         a prompt of {}); cut them with --max-prompt-tokens and --max-output-tokens",
        first.output_tokens, first.prompt_tokens,
    );
    Err(Failure::new(Exit::Usage, message))
}

fn slo(args: &Args) -> Slo {
    let bound = |span: Option<crate::units::Span>| span.map(|span| span.0);
    Slo { ttft: bound(args.slo_ttft), tpot: bound(args.slo_tpot), e2e: bound(args.slo_e2e) }
}

fn setting(
    args: &Args,
    workload: &Workload,
    nonce: u64,
    clients: &[Arc<Client>],
    greetings: &[Greeting],
) -> serde_json::Value {
    let servers = args.endpoint.iter().zip(clients).zip(greetings).map(|((endpoint, client), greeting)| {
        json!({
            "name": endpoint.name,
            "url": endpoint.url,
            "protocol": client.protocol(),
            "model": greeting.model,
            "prompts": if greeting.text { "text" } else { "token ids" },
        })
    });
    let drawn = |lengths: lengths::Lengths| args.trace.is_none().then(|| lengths.to_string());
    let tenants = workload.tenants.iter().map(|tenant| {
        json!({ "name": tenant.name, "share": tenant.share, "weight": tenant.weight, "priority": tenant.priority })
    });
    let slo = slo(args);
    let ms = |bound: Option<Duration>| bound.map(|bound| bound.as_secs_f64() * 1e3);
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "endpoints": servers.collect::<Vec<_>>(),
        "seed": workload.seed,
        "nonce": nonce,
        "rounds": args.rounds(clients.len()),
        "trace": args.trace,
        "prompt_tokens": drawn(args.prompt_tokens),
        "output_tokens": drawn(args.output_tokens),
        "max_prompt_tokens": args.max_prompt_tokens,
        "max_output_tokens": args.max_output_tokens,
        "shared_prefix": args.shared_prefix,
        "tenants": tenants.collect::<Vec<_>>(),
        "temperature": args.temperature,
        "allow_eos": args.allow_eos,
        "slo_ms": { "ttft": ms(slo.ttft), "tpot": ms(slo.tpot), "e2e": ms(slo.e2e) },
    })
}

/// Writes the report where it is wanted, and fails if requests did.
fn show(args: &Args, report: &Report, seed: u64, nonce: u64) -> Result<(), Failure> {
    use std::io::Write as _;
    let to_stdout = |text: &str| {
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            // The reader left, as `head` does.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            written => written.map_err(|error| Failure::chain("cannot write", &error)),
        }
    };
    let json = || format!("{:#}\n", report.json());
    match &args.json {
        Some(path) if path.as_os_str() == "-" => to_stdout(&json())?,
        Some(path) => {
            to_stdout(&report.table())?;
            std::fs::write(path, json())
                .map_err(|error| Failure::chain(&format!("cannot write {}", path.display()), &error))?;
        }
        None => to_stdout(&report.table())?,
    }
    if args.seed.is_none() || args.nonce.is_none() {
        say(format_args!("to send the same requests again: --seed {seed} --nonce {nonce}"));
    }
    match report.failures() {
        (_, 0, 0, _) => Ok(()),
        (all, 0, refused, _) if refused == all => {
            Err(Failure::new(Exit::Exhausted, format!("all {all} requests were refused")))
        }
        // A server that refuses what it cannot serve in time does its work.
        (_, 0, _, _) => Ok(()),
        (all, failed, _, example) => {
            let message =
                format!("{failed} of {all} requests failed, such as with {}", example.unwrap_or_default());
            Err(Failure::new(Exit::Failure, message))
        }
    }
}

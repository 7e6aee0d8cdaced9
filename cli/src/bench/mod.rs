//! `inflight bench`: load generator for routers and OpenAI-compatible servers.
//!
//! A [`workload`] is a pure function of its seed. [`load`] sends it to one server at a time, in rounds that
//! alternate between the servers; [`measure`] records latencies and counts, and [`report`] renders them.

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

use self::client::{BenchClient, GenerationSettings, ServerInfo};
use self::load::{BenchRound, LoadPattern};
use self::measure::{Meter, Quota, RoundMeasurements, Slo};
use self::report::{BenchReport, LoadPoint};
use self::tenants::Tenant;
use self::workload::{Arrivals, BenchWorkload, LengthSource, PromptKeys};
use crate::exit::{CommandError, Exit, print_stderr};

/// Assumed vocabulary size if no server reports one: few models have a smaller one.
const VOCAB_SIZE_ASSUMED: u32 = 10_000;
/// Number of requests checked against the context if the number to be sent is unknown.
const PLANNED_MAX: u64 = 1000;
/// Interval of progress bar updates.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Runs the benchmark and writes its report.
///
/// # Errors
/// A server is unreachable or does not serve the model, the workload exceeds its context, or requests failed.
pub async fn run(args: Args) -> Result<(), CommandError> {
    tokio::select! {
        done = bench(args) => done,
        _ = tokio::signal::ctrl_c() => Err(CommandError::Silent(Exit::Interrupted)),
    }
}

async fn bench(mut args: Args) -> Result<(), CommandError> {
    let trace = match &args.trace {
        Some(path) => read_trace(path).map_err(|error| CommandError::new(Exit::Usage, error.to_string()))?,
        None => Vec::new(),
    };
    let loads = loads(&args, &trace)?;
    if matches!(loads[..], [LoadPattern::Open { arrivals: Arrivals::Trace { .. }, .. }])
        && args.duration.is_none()
    {
        // A trace is replayed to its end.
        let traced_requests = (trace.len() as u64).saturating_sub(args.warmup.unwrap_or(0)).max(1);
        args.requests = Some(args.requests.map_or(traced_requests, |requests| requests.min(traced_requests)));
        args.warmup.get_or_insert(0);
    }
    let mut clients: Vec<BenchClient> = args.endpoint.iter().map(endpoint::Endpoint::client).collect();
    let mut servers = Vec::new();
    for client in &mut clients {
        servers.push(client.probe(args.model.as_deref(), args.prompt).await?);
    }
    let seed = args.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let nonce = args.nonce.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let keys = PromptKeys::new(&options(&args), nonce);
    let workload = Arc::new(workload(&args, trace, seed, &servers)?);
    let names: Vec<String> = args.endpoint.iter().map(|endpoint| endpoint.name.clone()).collect();
    let context = servers.iter().filter_map(|server| server.context_tokens).min();
    for load in &loads {
        check_context(&args, &workload, *load, context)?;
    }
    let clients: Vec<Arc<BenchClient>> = clients.into_iter().map(Arc::new).collect();
    let plan = BenchPlan { args: &args, workload: &workload, keys, clients: &clients, names: &names };
    let mut points = Vec::new();
    for (index, load) in (0u64..).zip(loads) {
        points.push(plan.point(index, load).await?);
    }
    let slo = slo(&args);
    let report = BenchReport {
        has_slo: slo.is_set(),
        setting: setting(&args, &workload, nonce, &clients, &servers),
        tenants: workload.tenants.iter().map(|tenant| tenant.name.clone()).collect(),
        names,
        points,
    };
    write_report(&args, &report, seed, nonce)
}

/// Returns the options that determine the requests, as text: all except servers, seed, nonce and report file.
fn options(args: &Args) -> String {
    let args = Args { endpoint: Vec::new(), seed: None, nonce: None, json: None, ..args.clone() };
    format!("{args:?}")
}

/// Configuration of all load points of a run.
struct BenchPlan<'a> {
    args: &'a Args,
    workload: &'a Arc<BenchWorkload>,
    keys: PromptKeys,
    clients: &'a [Arc<BenchClient>],
    names: &'a [String],
}

impl BenchPlan<'_> {
    /// Runs the rounds of one load pattern. Each round visits every server, starting with another one.
    async fn point(&self, index: u64, load: LoadPattern) -> Result<LoadPoint, CommandError> {
        let mut rounds: Vec<Vec<RoundMeasurements>> = vec![Vec::new(); self.clients.len()];
        let all = self.args.rounds(self.clients.len());
        for round in 0..all {
            for offset in 0..self.clients.len() {
                let server = (offset + round as usize) % self.clients.len();
                // The same prompts for all servers, different ones in each round.
                let key = self.keys.key(index, round);
                let meter = Meter::new(
                    self.args.warmup(load),
                    self.args.quota(load),
                    slo(self.args),
                    self.workload.tenants.len(),
                );
                let bench_round = BenchRound {
                    client: Arc::clone(&self.clients[server]),
                    workload: Arc::clone(self.workload),
                    key,
                    settings: GenerationSettings {
                        temperature: self.args.temperature,
                        allow_eos: self.args.allow_eos,
                    },
                    timeout: self.args.timeout.0,
                    meter: meter.clone(),
                };
                let title = format!("{}: {}, round {} of {all}", self.names[server], load.short(), round + 1);
                let progress = tokio::spawn(progress(title, meter, self.args.quota(load)));
                let measured = load::run(Arc::new(bench_round), load, self.args.quota(load)).await;
                progress.abort();
                let _ = progress.await;
                let measured = measured.map_err(|failure| failure.at(&self.names[server]))?;
                if measured.started == 0 {
                    let message = "no request counted: the trace has no more than the requests to warm up";
                    return Err(CommandError::new(Exit::Usage, message));
                }
                rounds[server].push(measured);
            }
        }
        Ok(LoadPoint { load, rounds })
    }
}

/// Shows the progress of a round until the task is aborted.
async fn progress(title: String, meter: Meter, quota: Quota) {
    let length = match quota {
        Quota::Requests(all) => all,
        Quota::Duration(time) => time.as_millis() as u64,
    };
    let template = "{msg} [{bar:30}] {percent}% {elapsed}{prefix}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar =
        TransientBar(ProgressBar::new(length).with_style(style.progress_chars("=> ")).with_message(title));
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

/// Progress bar that is cleared when dropped.
struct TransientBar(ProgressBar);

impl Drop for TransientBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn loads(args: &Args, trace: &[TracedRequest]) -> Result<Vec<LoadPattern>, CommandError> {
    let open = |arrivals| LoadPattern::Open { arrivals, in_flight_max: args.in_flight_max as usize };
    if !args.rate.is_empty() {
        let arrivals = |rate: &f64| {
            if args.constant_rate { Arrivals::Constant(*rate) } else { Arrivals::Poisson(*rate) }
        };
        return Ok(args.rate.iter().map(|rate| open(arrivals(rate))).collect());
    }
    if !args.concurrency.is_empty() {
        return Ok(args
            .concurrency
            .iter()
            .map(|streams| LoadPattern::Closed { streams: *streams })
            .collect());
    }
    let timed = trace.first().is_some_and(|first| first.arrival_s.is_some());
    if timed {
        return Ok(vec![open(Arrivals::Trace { speed: args.speed, jitter: args.arrival_jitter.0 })]);
    }
    if args.trace.is_some() {
        let message = "the trace has lengths but no times; say how requests follow one another with --concurrency or --rate";
        return Err(CommandError::new(Exit::Usage, message));
    }
    Ok(vec![LoadPattern::Closed { streams: args::STREAMS_DEFAULT }])
}

fn workload(
    args: &Args,
    trace: Vec<TracedRequest>,
    seed: u64,
    servers: &[ServerInfo],
) -> Result<BenchWorkload, CommandError> {
    let traced = trace.iter().filter_map(|request| request.tenant).max();
    let tenants = match (args.tenant.as_slice(), traced) {
        ([], Some(last)) => (0..=last).map(|tenant| Tenant::named(format!("tenant-{tenant}"))).collect(),
        ([], None) => vec![Tenant::named("")],
        (given, _) => given.to_vec(),
    };
    let reported = servers.iter().filter_map(|server| server.vocab_size).min();
    let vocab = args.vocab_size.or(reported).unwrap_or(VOCAB_SIZE_ASSUMED);
    if let Some(reported) = reported.filter(|reported| *reported < vocab) {
        let message =
            format!("--vocab-size {vocab} is more than the {reported} tokens of the model's vocabulary");
        return Err(CommandError::new(Exit::Usage, message));
    }
    let source = match args.trace {
        Some(_) => LengthSource::Trace(trace),
        None => LengthSource::Drawn { prompt: args.prompt_tokens, output: args.output_tokens },
    };
    Ok(BenchWorkload {
        seed,
        source,
        caps: (args.max_prompt_tokens.unwrap_or(u32::MAX), args.max_output_tokens.unwrap_or(u32::MAX)),
        tenants,
        shared_prefix: args.shared_prefix,
        // The lowest ids are often special tokens, which prompts may not contain or which alter the output.
        ids: (vocab / 100).min(1000)..vocab,
    })
}

/// Rejects a workload with requests that exceed the smallest context of the servers.
fn check_context(
    args: &Args,
    workload: &BenchWorkload,
    load: LoadPattern,
    context: Option<u32>,
) -> Result<(), CommandError> {
    let Some(context) = context else { return Ok(()) };
    let requests = match args.quota(load) {
        Quota::Requests(all) => args.warmup(load) + all,
        Quota::Duration(_) => PLANNED_MAX,
    };
    let Some((first, count)) = workload.exceeding_context(requests, context) else { return Ok(()) };
    let message = format!(
        "{count} of the first {requests} requests do not fit into the model's context of {context} tokens (the first asks for {} after \
         a prompt of {}); cut them with --max-prompt-tokens and --max-output-tokens",
        first.output_tokens, first.prompt_tokens,
    );
    Err(CommandError::new(Exit::Usage, message))
}

fn slo(args: &Args) -> Slo {
    let bound = |span: Option<crate::units::Span>| span.map(|span| span.0);
    Slo { ttft: bound(args.slo_ttft), tpot: bound(args.slo_tpot), e2e: bound(args.slo_e2e) }
}

fn setting(
    args: &Args,
    workload: &BenchWorkload,
    nonce: u64,
    clients: &[Arc<BenchClient>],
    infos: &[ServerInfo],
) -> serde_json::Value {
    let servers = args.endpoint.iter().zip(clients).zip(infos).map(|((endpoint, client), info)| {
        json!({
            "name": endpoint.name,
            "url": endpoint.url,
            "protocol": client.protocol(),
            "model": info.model,
            "prompts": if info.text { "text" } else { "token ids" },
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

/// Writes the report to standard output and the JSON file.
///
/// # Errors
/// The report cannot be written, a request failed, or all requests were refused.
fn write_report(args: &Args, report: &BenchReport, seed: u64, nonce: u64) -> Result<(), CommandError> {
    use std::io::Write as _;
    let to_stdout = |text: &str| {
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            // The pipe is closed, as by `head`.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            written => written.map_err(|error| CommandError::chain("cannot write", &error)),
        }
    };
    let json = || format!("{:#}\n", report.json());
    match &args.json {
        Some(path) if path.as_os_str() == "-" => to_stdout(&json())?,
        Some(path) => {
            to_stdout(&report.table())?;
            std::fs::write(path, json())
                .map_err(|error| CommandError::chain(&format!("cannot write {}", path.display()), &error))?;
        }
        None => to_stdout(&report.table())?,
    }
    if args.seed.is_none() || args.nonce.is_none() {
        print_stderr(format_args!("to send the same requests again: --seed {seed} --nonce {nonce}"));
    }
    match report.failures() {
        (_, 0, 0, _) => Ok(()),
        (all, 0, refused, _) if refused == all => {
            Err(CommandError::new(Exit::Exhausted, format!("all {all} requests were refused")))
        }
        // Refusing some requests under overload is not a failure of the server.
        (_, 0, _, _) => Ok(()),
        (all, failed, _, example) => {
            let message =
                format!("{failed} of {all} requests failed, such as with {}", example.unwrap_or_default());
            Err(CommandError::new(Exit::Failure, message))
        }
    }
}

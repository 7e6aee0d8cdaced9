//! `inflight bench`: flags, progress bars and reports of the load generator.

mod args;

use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use inflight_bench::{
    Arrivals, BenchClient, BenchError, BenchReport, BenchWorkload, Comparison, ErrorKind, GenerationSettings,
    LengthSource, Lengths, LoadPattern, Meter, PlannedLoad, PromptKeys, Quota, RateSearch, ServerInfo, Slo,
    Tenant,
};
use inflight_traces::{TracedRequest, read_trace};
use serde_json::{Value, json};
use tokio::task::AbortHandle;

pub use args::Args;

use crate::exit::{CommandError, Exit, print_stderr};
use crate::generate::exit_code;
use crate::quick_build;

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
    if let Some(notice) = quick_build::notice() {
        print_stderr(format_args!("{notice}; the load generator, too, takes more of the processor"));
    }
    if args.find_rate.is_some()
        && let [_, second, ..] = &args.endpoint[..]
    {
        let message = format!(
            "--find-rate measures one server, but there are several, such as {}; run the command once for each",
            second.name
        );
        return Err(CommandError::new(Exit::Usage, message));
    }
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
    let mut clients: Vec<BenchClient> =
        args.endpoint.iter().map(|endpoint| endpoint.client(args.resume)).collect();
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
    let comparison = Comparison {
        clients: clients.clone(),
        names: names.clone(),
        workload: Arc::clone(&workload),
        keys,
        settings: GenerationSettings { temperature: args.temperature, allow_eos: args.allow_eos },
        timeout: args.timeout.0,
        slo: slo(&args),
        rounds: args.rounds(clients.len()),
    };
    let mut points = Vec::new();
    let planned = |load| PlannedLoad { load, warmup: args.warmup(load), quota: args.quota(load) };
    let mut search = None;
    if let Some((from, to)) = args.find_rate {
        let mut rates = RateSearch::new(from, to);
        while let Some(rate) = rates.next_rate() {
            let load = open_loop(&args, arrivals(&args, rate));
            check_context(&args, &workload, load, context)?;
            let planned = planned(load);
            let watch = |title, meter| Progress::show(title, meter, planned.quota);
            let point = match comparison.point(points.len() as u64, planned, watch).await {
                Ok(point) => point,
                // Many failures in a row: far too high. At the lowest rate, the server is not well.
                Err(error) if rates.met().is_some() => {
                    print_stderr(format_args!("{rate} requests/s: {}", error.message));
                    rates.record(rate, false);
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            rates.record(rate, point.attainment().is_some_and(|share| share >= args.slo_share));
            points.push(point);
        }
        search = Some((rates, args.slo_share));
    } else {
        for (index, load) in (0u64..).zip(loads) {
            let planned = planned(load);
            let watch = |title, meter| Progress::show(title, meter, planned.quota);
            points.push(comparison.point(index, planned, watch).await?);
        }
    }
    let slo = slo(&args);
    let report = BenchReport {
        has_slo: slo.is_set(),
        setting: setting(&args, &workload, nonce, &clients, &servers),
        tenants: workload.tenants.iter().map(|tenant| tenant.name.clone()).collect(),
        names,
        points,
        search,
    };
    write_report(&args, &report, seed, nonce)
}

impl From<BenchError> for CommandError {
    fn from(error: BenchError) -> Self {
        let exit = match error.kind {
            ErrorKind::Failure => Exit::Failure,
            ErrorKind::Usage => Exit::Usage,
            ErrorKind::Unavailable => Exit::Unavailable,
            ErrorKind::Refused => Exit::Refused,
            ErrorKind::Exhausted => Exit::Exhausted,
            ErrorKind::Status(code) => exit_code(code),
        };
        Self::new(exit, error.message)
    }
}

/// Returns the options that determine the requests, by name: all except servers, seed, nonce and report file.
fn options(args: &Args) -> Vec<(&'static str, Value)> {
    // Without `..`, so that a new option is decided on here.
    let Args {
        endpoint: _,
        seed: _,
        nonce: _,
        json: _,
        model,
        concurrency,
        rate,
        find_rate,
        slo_share,
        constant_rate,
        trace,
        speed,
        arrival_jitter,
        prompt_tokens,
        output_tokens,
        max_prompt_tokens,
        max_output_tokens,
        shared_prefix,
        tenant,
        requests,
        duration,
        warmup,
        rounds,
        prompt,
        vocab_size,
        temperature,
        allow_eos,
        resume,
        timeout,
        in_flight_max,
        slo_ttft,
        slo_tpot,
        slo_e2e,
    } = args;
    let span = |span: &Option<inflight_options::Span>| json!(span.map(|span| span.to_string()));
    vec![
        ("model", json!(model)),
        ("concurrency", json!(concurrency)),
        ("rate", json!(rate)),
        ("find_rate", json!(find_rate)),
        ("slo_share", json!(slo_share)),
        ("constant_rate", json!(constant_rate)),
        ("trace", json!(trace)),
        ("speed", json!(speed)),
        ("arrival_jitter", json!(arrival_jitter.to_string())),
        ("prompt_tokens", json!(prompt_tokens.to_string())),
        ("output_tokens", json!(output_tokens.to_string())),
        ("max_prompt_tokens", json!(max_prompt_tokens)),
        ("max_output_tokens", json!(max_output_tokens)),
        ("shared_prefix", json!(shared_prefix)),
        ("tenant", tenants(tenant)),
        ("requests", json!(requests)),
        ("duration", span(duration)),
        ("warmup", json!(warmup)),
        ("rounds", json!(rounds)),
        ("prompt", json!(args::form_name(*prompt))),
        ("vocab_size", json!(vocab_size)),
        ("temperature", json!(temperature)),
        ("allow_eos", json!(allow_eos)),
        ("resume", json!(resume)),
        ("timeout", json!(timeout.to_string())),
        ("in_flight_max", json!(in_flight_max)),
        ("slo_ttft", span(slo_ttft)),
        ("slo_tpot", span(slo_tpot)),
        ("slo_e2e", span(slo_e2e)),
    ]
}

/// Returns the tenants as JSON.
fn tenants(tenants: &[Tenant]) -> Value {
    let tenant = |tenant: &Tenant| {
        let Tenant { name, share, weight, priority } = tenant;
        json!({ "name": name, "share": share, "weight": weight, "priority": priority })
    };
    tenants.iter().map(tenant).collect()
}

/// Progress bar of a round, shown until it is dropped.
struct Progress(AbortHandle);

impl Progress {
    fn show(title: String, meter: Meter, quota: Quota) -> Self {
        Self(tokio::spawn(progress(title, meter, quota)).abort_handle())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.abort();
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

fn arrivals(args: &Args, rate: f64) -> Arrivals {
    if args.constant_rate { Arrivals::Constant(rate) } else { Arrivals::Poisson(rate) }
}

fn open_loop(args: &Args, arrivals: Arrivals) -> LoadPattern {
    LoadPattern::Open { arrivals, in_flight_max: args.in_flight_max as usize }
}

fn loads(args: &Args, trace: &[TracedRequest]) -> Result<Vec<LoadPattern>, CommandError> {
    if args.find_rate.is_some() {
        return Ok(Vec::new());
    }
    if !args.rate.is_empty() {
        return Ok(args.rate.iter().map(|rate| open_loop(args, arrivals(args, *rate))).collect());
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
        return Ok(vec![open_loop(
            args,
            Arrivals::Trace { speed: args.speed, jitter: args.arrival_jitter.0 },
        )]);
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
    let bound = |span: Option<inflight_options::Span>| span.map(|span| span.0);
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
    let drawn = |lengths: Lengths| args.trace.is_none().then(|| lengths.to_string());
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
        "tenants": tenants(&workload.tenants),
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

//! `inflight up`: one router and its workers on this machine, as children of this process.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgMatches, Command};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use inflight_proto::v1::{ListModelsRequest, Model, inference_client::InferenceClient};
use inflight_worker::Device;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::config::given_flags;
use crate::event::{self, ClusterEvent, Member};
use crate::exit::{self, Exit, Failure};
use crate::gpus;
use crate::relay;
use crate::signals::{self, Stop};
use crate::supervisor::{Event, Keeper, Show, Spec};
use crate::telemetry;
use crate::units::Span;
use crate::worker::EngineArgs;

/// The router's index among the members; workers follow.
const ROUTER: usize = 0;
/// How long the router may take to reach every worker once all of them run.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Events of the children that may wait to be handled.
const EVENTS_MAX: usize = 64;

/// Options of `inflight up`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Number of workers to start [default: one per GPU; 2 without GPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), env = "INFLIGHT_UP_WORKERS")]
    pub workers: Option<u32>,
    /// IP address on which the router listens
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), env = "INFLIGHT_UP_HOST")]
    pub host: IpAddr,
    /// Port of the router; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value_t = 8650, env = "INFLIGHT_UP_PORT")]
    pub port: u16,
    /// Port of the router's Prometheus endpoint; the workers use the ports after it; 0 picks free ones [default: --port + 1]
    #[arg(long, value_name = "PORT", env = "INFLIGHT_UP_METRICS_PORT")]
    pub metrics_port: Option<u16>,
    /// File of tenants with their API keys and limits; without it no authentication is required
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_TENANTS_FILE")]
    pub tenants_file: Option<PathBuf>,
    /// Time for open streams to finish after Ctrl-C; a second Ctrl-C ends at once
    #[arg(long, value_name = "DURATION", default_value = "30s", env = "INFLIGHT_DRAIN_TIMEOUT")]
    pub drain_timeout: Span,
    /// Show informational logs of the child processes too, not only warnings and errors
    #[arg(long, short)]
    pub verbose: bool,
    /// Print events as JSON lines instead of text
    #[arg(long)]
    pub json: bool,
    /// TOML configuration file; its keys are the names of these flags. Flags and environment variables override it
    #[arg(long, value_name = "FILE", env = "INFLIGHT_UP_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub telemetry: telemetry::Args,
}

/// Starts the cluster and stays until it is told to stop.
///
/// # Errors
/// A taken port, a missing model, a member that does not start. No child is left then.
pub async fn run(args: Args, matches: &ArgMatches) -> Result<(), Failure> {
    let plan = Plan::new(&args, matches)?;
    let stop = signals::watch(false).map_err(|error| Failure::chain("cannot watch for signals", &error))?;
    let bars = MultiProgress::new();
    let show = shower(bars.clone(), args.verbose);
    let (events, inbox) = mpsc::channel(EVENTS_MAX);
    let mut cluster = Cluster {
        plan,
        json: args.json,
        stop,
        show,
        bars,
        loading: BTreeMap::new(),
        abort: CancellationToken::new(),
        events,
        inbox,
        keepers: BTreeMap::new(),
        members: BTreeMap::new(),
    };
    let outcome = cluster.run().await;
    let cut_short = cluster.end().await;
    // By now all children are gone.
    if outcome.is_ok() && cut_short { Err(Failure::Silent(Exit::Interrupted)) } else { outcome }
}

/// What to start, with every flag.
#[derive(Debug)]
struct Plan {
    workers: usize,
    router_address: SocketAddr,
    router_metrics: SocketAddr,
    worker_metrics: Vec<SocketAddr>,
    worker_flags: Vec<OsString>,
    /// Those of each worker alone.
    gpu_flags: Vec<Vec<OsString>>,
    router_flags: Vec<OsString>,
    telemetry_flags: Vec<OsString>,
    drain_timeout: Duration,
}

impl Plan {
    fn new(args: &Args, matches: &ArgMatches) -> Result<Self, Failure> {
        if let Some(model) = &args.engine.model
            && !model.exists()
        {
            let message = format!("--model {}: there is no such directory or file", model.display());
            return Err(Failure::new(Exit::Failure, message));
        }
        // A driver is asked only where it matters.
        let device = args.engine.device;
        let spread = matches!(device, Device::Auto | Device::Cuda(None));
        let usable = if spread { inflight_worker::usable_gpus() } else { Vec::new() };
        let number = args.workers.map(|workers| workers as usize);
        let gpus = gpus::assign(device, number, &usable, args.engine.tensor_parallel);
        let workers = gpus.len();
        let base = match (args.metrics_port, args.port) {
            (Some(port), _) => u32::from(port),
            (None, 0) => 0,
            (None, port) => u32::from(port) + 1,
        };
        let metrics = |member: u32| -> Result<SocketAddr, Failure> {
            let port = if base == 0 { 0 } else { base + member };
            let port = u16::try_from(port).map_err(|_| {
                let message = format!("metrics port {port} is above 65535; choose a lower --metrics-port");
                Failure::new(Exit::Usage, message)
            })?;
            Ok(SocketAddr::new(args.host, port))
        };
        let router_address = SocketAddr::new(args.host, args.port);
        let router_metrics = metrics(0)?;
        let worker_metrics = (1..=workers as u32).map(metrics).collect::<Result<Vec<_>, _>>()?;
        // Known at once rather than after the model was loaded.
        let mut held = vec![try_port(router_address, "--port")?];
        for address in std::iter::once(&router_metrics).chain(&worker_metrics) {
            held.push(try_port(*address, "--metrics-port")?);
        }
        drop(held);
        let group = |augment: fn(Command) -> Command| given_flags(&augment(Command::new("group")), matches);
        let mut worker_flags = group(<EngineArgs as clap::Args>::augment_args);
        if args.engine.threads.is_none() {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let threads = (cores / workers).max(args.engine.tensor_parallel).max(1);
            worker_flags.push(format!("--threads={threads}").into());
        }
        let router_flags = args.tenants_file.iter().map(|file| {
            let mut flag = OsString::from("--tenants-file=");
            flag.push(file);
            flag
        });
        let router_flags = router_flags.collect();
        let given = |flag: &OsString| flag.to_string_lossy().starts_with("--gpu-memory-utilization");
        let divided = !worker_flags.iter().any(given);
        let gpu_flags = (0..workers).map(|worker| -> Vec<OsString> {
            let part = args.engine.gpu_memory_utilization * gpus::share(&gpus, worker);
            let part = divided.then(|| format!("--gpu-memory-utilization={part}").into());
            let list = gpus[worker].iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let named = (spread && !list.is_empty()).then(|| format!("--gpu={list}").into());
            part.into_iter().chain(named).collect()
        });
        let gpu_flags = gpu_flags.collect();
        let mut telemetry_flags = group(<telemetry::Args as clap::Args>::augment_args);
        telemetry_flags.retain(|flag| !flag.to_string_lossy().starts_with("--log-format"));
        telemetry_flags.push("--log-format=json".into());
        telemetry_flags.push(format!("--drain-timeout={}", args.drain_timeout).into());
        Ok(Self {
            workers,
            router_address,
            router_metrics,
            worker_metrics,
            worker_flags,
            gpu_flags,
            router_flags,
            telemetry_flags,
            drain_timeout: args.drain_timeout.0,
        })
    }

    fn worker(&self, number: usize) -> Spec {
        let name = format!("worker-{number}");
        let mut arguments: Vec<OsString> = vec!["worker".into(), format!("--worker-id={name}").into()];
        let own = &self.gpu_flags[number];
        arguments.extend(self.worker_flags.iter().chain(own).chain(&self.telemetry_flags).cloned());
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Spec {
            name,
            arguments,
            listen,
            metrics: self.worker_metrics[number],
            drain_timeout: self.drain_timeout,
        }
    }

    fn router(&self, workers: &[SocketAddr]) -> Spec {
        let workers: Vec<String> = workers.iter().map(ToString::to_string).collect();
        let mut arguments: Vec<OsString> =
            vec!["router".into(), format!("--workers={}", workers.join(",")).into()];
        arguments.extend(self.router_flags.iter().chain(&self.telemetry_flags).cloned());
        Spec {
            name: "router".to_owned(),
            arguments,
            listen: self.router_address,
            metrics: self.router_metrics,
            drain_timeout: self.drain_timeout,
        }
    }
}

fn try_port(address: SocketAddr, flag: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).map_err(|error| {
        let context = format!("cannot listen on {address}; choose another with {flag}");
        Failure::chain(&context, &error)
    })
}

fn shower(bars: MultiProgress, verbose: bool) -> Show {
    Arc::new(move |name: &str, line: &relay::Line| {
        if verbose || line.urgent {
            bars.suspend(|| exit::say(format_args!("{name} │ {}", line.text)));
        }
    })
}

struct Cluster {
    plan: Plan,
    json: bool,
    stop: Stop,
    show: Show,
    bars: MultiProgress,
    loading: BTreeMap<usize, ProgressBar>,
    abort: CancellationToken,
    events: mpsc::Sender<(usize, Event)>,
    inbox: mpsc::Receiver<(usize, Event)>,
    keepers: BTreeMap<usize, Keeper>,
    /// Those that run, by index.
    members: BTreeMap<usize, Member>,
}

impl Cluster {
    async fn run(&mut self) -> Result<(), Failure> {
        if !self.json {
            self.say(&format!("starting {} and a router …", workers(self.plan.workers)));
        }
        for number in 0..self.plan.workers {
            self.start(number + 1, self.plan.worker(number));
        }
        while self.members.len() < self.plan.workers {
            if self.next().await?.is_none() {
                return Ok(());
            }
        }
        let addresses: Vec<SocketAddr> = self.members.values().map(|member| member.address).collect();
        self.start(ROUTER, self.plan.router(&addresses));
        // The router is ready once it can use what a worker serves, its tokenizer and template included.
        let by = tokio::time::Instant::now() + CONNECT_TIMEOUT;
        while !self.members.contains_key(&ROUTER) {
            let next = tokio::time::timeout_at(by, self.next()).await.map_err(|_| {
                let message = format!(
                    "the router could use no worker within {} s; its warnings above say why",
                    CONNECT_TIMEOUT.as_secs()
                );
                Failure::new(Exit::Failure, message)
            })?;
            if next?.is_none() {
                return Ok(());
            }
        }
        let Some(models) = self.wait_until_connected().await? else { return Ok(()) };
        self.announce(&models);
        while self.next().await?.is_some() {}
        Ok(())
    }

    fn start(&mut self, index: usize, spec: Spec) {
        let keeper =
            Keeper::start(index, spec, self.events.clone(), Arc::clone(&self.show), self.abort.clone());
        self.keepers.insert(index, keeper);
    }

    fn say(&self, text: &str) {
        self.bars.suspend(|| exit::say(format_args!("{text}")));
    }

    /// Handles the next event; `None` when it is time to stop.
    async fn next(&mut self) -> Result<Option<()>, Failure> {
        let (index, event) = tokio::select! {
            () = self.stop.drain.cancelled() => return Ok(None),
            event = self.inbox.recv() => match event {
                Some(event) => event,
                None => return Ok(None),
            },
        };
        match event {
            Event::Failed { cause } => return Err(Failure::new(Exit::Failure, cause)),
            Event::Loading { done, total } => self.progress(index, done, total),
            Event::Ready(member) => self.ready(index, member),
            Event::Lost { status, retry_in } => self.lost(index, &status, retry_in),
        }
        Ok(Some(()))
    }

    fn progress(&mut self, index: usize, done: u64, total: u64) {
        let bars = &self.bars;
        let bar = self.loading.entry(index).or_insert_with(|| {
            let style = ProgressStyle::with_template("{prefix} {bar:40} {bytes}/{total_bytes}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(total).with_style(style).with_prefix(format!("worker-{}", index - 1));
            bars.add(bar)
        });
        bar.set_length(total);
        bar.set_position(done);
    }

    fn ready(&mut self, index: usize, member: Member) {
        if let Some(bar) = self.loading.remove(&index) {
            bar.finish_and_clear();
        }
        if self.members.contains_key(&index) {
            if self.json {
                event::emit(&ClusterEvent::Restarted { member: &member });
            } else {
                self.say(&format!("{} runs again as process {}", member.name, member.pid));
            }
        }
        self.members.insert(index, member);
    }

    fn lost(&self, index: usize, status: &str, retry_in: Duration) {
        let Some(member) = self.members.get(&index) else { return };
        if self.json {
            event::emit(&ClusterEvent::Lost { name: &member.name, status });
        } else {
            let seconds = retry_in.as_secs_f64();
            self.say(&format!("{} ended: {status}; starting it again in {seconds:.1} s", member.name));
        }
    }

    /// Where clients on this machine reach the router.
    fn endpoint(&self) -> String {
        let address = self.members.get(&ROUTER).map_or(self.plan.router_address, |router| router.address);
        let ip = match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
            ip => ip,
        };
        SocketAddr::new(ip, address.port()).to_string()
    }

    /// Waits until the router has a session with every worker; `None` when it is time to stop.
    async fn wait_until_connected(&mut self) -> Result<Option<Vec<Model>>, Failure> {
        let endpoint = format!("http://{}", self.endpoint());
        let wanted = self.plan.workers as u32;
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connected(endpoint, wanted));
        tokio::pin!(connected);
        loop {
            tokio::select! {
                models = &mut connected => {
                    return models.map(Some).map_err(|_| {
                        let seconds = CONNECT_TIMEOUT.as_secs();
                        let message = format!("the router did not reach {} within {seconds} s", workers(self.plan.workers));
                        Failure::new(Exit::Failure, message)
                    });
                }
                next = self.next() => if next?.is_none() { return Ok(None) },
            }
        }
    }

    fn announce(&self, models: &[Model]) {
        let endpoint = self.endpoint();
        let Some(router) = self.members.get(&ROUTER) else { return };
        let others: Vec<&Member> = self.members.range(ROUTER + 1..).map(|(_, member)| member).collect();
        if self.json {
            event::emit(&ClusterEvent::Ready {
                endpoint: &format!("http://{endpoint}"),
                router,
                workers: &others,
            });
            return;
        }
        let command = own_command();
        let place = if endpoint == "127.0.0.1:8650" {
            String::new()
        } else {
            format!("--endpoint http://{endpoint} ")
        };
        let mut text = String::from("\ninflight is ready\n\n");
        for model in models {
            let Model { name, architecture, context_tokens, .. } = model;
            text.push_str(&format!(
                "  model    {name} ({architecture}, context of {context_tokens} tokens)\n"
            ));
        }
        text.push_str(&format!("  gRPC     {endpoint}\n"));
        for worker in &others {
            text.push_str(&format!("  worker   {} ({})\n", worker.address, worker.name));
        }
        for member in std::iter::once(&router).chain(&others) {
            if let Some(metrics) = member.metrics {
                text.push_str(&format!("  metrics  http://{metrics}/metrics ({})\n", member.name));
            }
        }
        text.push_str(&format!(
            "\nTry, from another terminal:\n\n  {command} generate {place}\"What is continuous batching?\"\n  \
             grpcurl -plaintext -d '{{\"text\": \"Once upon a time\"}}' {endpoint} inflight.v1.Inference/Generate\n\n\
             Stop it with Ctrl-C here, or with:\n\n  kill {}\n",
            std::process::id()
        ));
        // Nobody may be reading any more; the cluster runs all the same.
        let _ = std::io::Write::write_all(&mut std::io::stdout().lock(), text.as_bytes());
    }

    /// Drains: the router first, which refuses new requests and finishes its streams, then the workers.
    /// Whether a second signal cut that short.
    async fn end(self) -> bool {
        let Self { stop, abort, keepers, inbox, json, .. } = self;
        // Children that still have something to tell must not wait for a reader.
        drop(inbox);
        let by_request = stop.drain.is_cancelled();
        if by_request && json {
            event::emit(&ClusterEvent::Stopping {});
        } else if by_request {
            exit::say(format_args!("stopping: streams in flight finish; once more ends at once"));
        } else {
            // Something failed; nobody waits for streams.
            abort.cancel();
        }
        let second = stop.abort.clone();
        let kill = abort.clone();
        let watch = tokio::spawn(async move {
            second.cancelled().await;
            kill.cancel();
        });
        let mut rest = keepers;
        if let Some(router) = rest.remove(&ROUTER) {
            router.stop().await;
        }
        futures::future::join_all(rest.into_values().map(Keeper::stop)).await;
        watch.abort();
        stop.abort.is_cancelled()
    }
}

fn workers(count: usize) -> String {
    if count == 1 { "1 worker".to_owned() } else { format!("{count} workers") }
}

/// Asks the router until as many workers serve as were started. Where it asks for keys, it is not for this process to know
/// one: then the router's word that it is ready has to do.
async fn connected(endpoint: String, wanted: u32) -> Vec<Model> {
    let mut pause = Duration::from_millis(5);
    loop {
        if let Ok(mut client) = InferenceClient::connect(endpoint.clone()).await {
            match client.list_models(ListModelsRequest {}).await {
                Ok(response) => {
                    let models = response.into_inner().models;
                    if models.iter().map(|model| model.workers).sum::<u32>() >= wanted {
                        return models;
                    }
                }
                Err(status) if status.code() == tonic::Code::Unauthenticated => return Vec::new(),
                Err(_) => {}
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

/// How to call this program from a shell in this directory.
fn own_command() -> String {
    let Ok(program) = std::env::current_exe() else { return "inflight".to_owned() };
    let on_path = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path)
            .any(|place| place.join("inflight").canonicalize().is_ok_and(|p| p == program))
    });
    if on_path {
        return "inflight".to_owned();
    }
    let here = std::env::current_dir().ok();
    match here.and_then(|here| program.strip_prefix(here).map(|relative| relative.to_owned()).ok()) {
        Some(relative) => format!("./{}", relative.display()),
        None => program.display().to_string(),
    }
}

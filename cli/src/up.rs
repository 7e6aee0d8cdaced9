//! `inflight up`: a router and workers on this machine, as supervised child processes.

mod announcement;
mod options;
mod secrets;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ArgMatches;
use clap::parser::ValueSource;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use inflight_proto::v1::{ListModelsRequest, Model, inference_client::InferenceClient};
use inflight_worker::{ComputeOptions, Device};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::chat_template;
use crate::child_log;
use crate::control_socket::{self, ControlSocket};
use crate::event::{self, ClusterEvent, ClusterMember};
use crate::exit::{self, CommandError, Exit};
use crate::gpus;
use crate::hub;
use crate::memory_share;
use crate::recording_dir::RecordingDir;
use crate::signals::{self, Stop};
use crate::supervisor::{ChildEvent, ChildSpec, ChildSupervisor, LogSink};
use crate::telemetry;
use announcement::Announcement;
use inflight_options::{OptionalPort, Span};
use options::{ROUTER_VARIABLES, RoleFlags, RoleOptions, is_flag, path_flag, replace_flag};
use secrets::Secrets;

/// Index of the router among the members; worker N has index N + 1.
const ROUTER: usize = 0;
/// Timeout of the router's start, and of its connecting to all workers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Difference of the router's port and that of its HTTP APIs.
const HTTP_PORT_OFFSET: u16 = 10;
/// What the help shows after the options.
const EXAMPLES: &str = "Examples:
  inflight up                                        the embedded demo model, on two workers without a GPU
  inflight up Qwen/Qwen3-0.6B --workers 1            a model of the Hugging Face Hub, or a path
  inflight up models/qwen3 --max-context-tokens 8192 --tool-call-format hermes --http-cors '*'

Options of the router and the workers beyond these: inflight up --help";
/// Capacity of the channel of child events.
const EVENTS_MAX: usize = 64;

/// Options of `inflight up`: its own, and those of the router and the workers.
#[derive(Debug, Clone, clap::Args)]
#[command(mut_args = options::arrange, after_help = EXAMPLES)]
pub struct Args {
    /// Model to serve, as --model takes it
    #[arg(id = "model_argument", value_name = "MODEL")]
    pub model_argument: Option<PathBuf>,
    /// Number of workers to start [default: one per GPU; 2 without GPUs]
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
    /// override it
    #[arg(long, value_name = "FILE", env = "INFLIGHT_UP_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub compute: ComputeOptions,
    #[command(flatten)]
    pub telemetry: telemetry::Args,
    #[command(flatten)]
    pub roles: RoleOptions,
}

impl Args {
    /// Takes the model that was given without a flag. It goes before the one of environment and file.
    ///
    /// # Errors
    /// --model is on the command line, too.
    fn take_model_argument(&mut self, matches: &ArgMatches) -> Result<(), CommandError> {
        let Some(model) = self.model_argument.take() else { return Ok(()) };
        if matches.value_source("model") == Some(ValueSource::CommandLine) {
            let message =
                format!("the model is given twice, as {} and with --model: leave one out", model.display());
            return Err(CommandError::new(Exit::Usage, message));
        }
        self.compute.model = Some(model);
        Ok(())
    }
}

/// Starts the cluster and runs until it is signalled to stop.
///
/// # Errors
/// A port is taken, the model is missing, or a member does not start. All children have exited then.
pub async fn run(mut args: Args, matches: &ArgMatches) -> Result<(), CommandError> {
    args.take_model_argument(matches)?;
    // The children inherit it.
    inflight_net::raise_open_file_limit();
    // Once, and not by each worker; before signals are watched, so that Ctrl-C ends a download at once.
    hub::resolve(&mut args.compute, &hub::Display::of_command())?;
    let plan = ClusterPlan::new(&args, matches)?;
    let stop =
        signals::watch(false).map_err(|error| CommandError::chain("cannot watch for signals", &error))?;
    let bars = MultiProgress::new();
    let log_sink = log_sink(bars.clone(), args.verbose);
    let (events, receiver) = mpsc::channel(EVENTS_MAX);
    let mut cluster = LocalCluster {
        plan,
        json: args.json,
        stop,
        log_sink,
        bars,
        loading: BTreeMap::new(),
        abort: CancellationToken::new(),
        events,
        receiver,
        supervisors: BTreeMap::new(),
        members: BTreeMap::new(),
    };
    let outcome = cluster.run().await;
    let aborted = cluster.shut_down().await;
    // All children have exited.
    if outcome.is_ok() && aborted { Err(CommandError::Silent(Exit::Interrupted)) } else { outcome }
}

/// Addresses and flags of the processes to start.
#[derive(Debug)]
struct ClusterPlan {
    workers: usize,
    router_address: SocketAddr,
    router_metrics: SocketAddr,
    router_http: Option<SocketAddr>,
    worker_metrics: Vec<SocketAddr>,
    /// Flags of every worker.
    worker_flags: Vec<OsString>,
    /// Additional flags of each worker: its GPUs and fraction of their memory.
    gpu_flags: Vec<Vec<OsString>>,
    router_flags: Vec<OsString>,
    /// Flags of every process.
    shared_flags: Vec<OsString>,
    /// Scheme of the router's addresses: https with TLS.
    scheme: &'static str,
    drain_timeout: Duration,
    /// Where the processes record, if they do.
    record: Option<RecordingDir>,
    secrets: Secrets,
    /// Socket over which the router has workers killed.
    control: ControlSocket,
}

impl ClusterPlan {
    fn new(args: &Args, matches: &ArgMatches) -> Result<Self, CommandError> {
        chat_template::check(args.compute.chat_template.as_deref())?;
        // The driver is queried only where the assignment depends on it.
        let device = args.compute.device;
        let over_gpus = matches!(device, Device::Auto | Device::Cuda(None));
        let usable = if over_gpus { inflight_worker::usable_gpus() } else { Vec::new() };
        let number = args.workers.map(|workers| workers as usize);
        let gpus = gpus::assign(device, number, &usable, args.compute.tensor_parallel);
        let workers = gpus.len();
        let base = match (args.metrics_port, args.port) {
            (Some(port), _) => u32::from(port),
            (None, 0) => 0,
            (None, port) => u32::from(port) + 1,
        };
        let metrics = |member: u32| -> Result<SocketAddr, CommandError> {
            let port = if base == 0 { 0 } else { base + member };
            let port = u16::try_from(port).map_err(|_| {
                let message = format!("metrics port {port} is above 65535; choose a lower --metrics-port");
                CommandError::new(Exit::Usage, message)
            })?;
            Ok(SocketAddr::new(args.metrics_host, port))
        };
        let router_address = SocketAddr::new(args.host, args.port);
        let router_metrics = metrics(0)?;
        let http_port = match args.http_port {
            Some(OptionalPort::Off) => None,
            Some(OptionalPort::Port(port)) => Some(port),
            None => Some(args.port.saturating_sub(HTTP_PORT_OFFSET)),
        };
        let router_http = http_port.map(|port| SocketAddr::new(args.host, port));
        let worker_metrics = (1..=workers as u32).map(metrics).collect::<Result<Vec<_>, _>>()?;
        // Report taken ports now rather than after the model was loaded.
        let mut probes = vec![probe_port(router_address, "--port")?];
        probes.extend(router_http.map(|address| probe_port(address, "--http-port")).transpose()?);
        for address in std::iter::once(&router_metrics).chain(&worker_metrics) {
            probes.push(probe_port(*address, "--metrics-port")?);
        }
        drop(probes);
        let record = args.record.as_deref().map(RecordingDir::open).transpose()?;
        let RoleFlags { router: mut router_flags, worker: mut worker_flags, shared: mut shared_flags } =
            RoleFlags::given(matches);
        if let Some(model) = &args.compute.model {
            // As it was found, and not as it was named.
            replace_flag(&mut worker_flags, "--model", model);
        }
        if !worker_flags.iter().any(|flag| flag.to_string_lossy().starts_with("--model-name=")) {
            worker_flags
                .extend(args.compute.model_names.iter().map(|name| format!("--model-name={name}").into()));
        }
        if args.compute.threads.is_none() {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let threads = (cores / workers).max(args.compute.tensor_parallel).max(1);
            worker_flags.push(format!("--threads={threads}").into());
        }
        worker_flags.extend(memory_share::flags(&args.compute, &worker_flags, workers));
        let secrets = Secrets::new(args, matches)?;
        secrets.add_to(&mut router_flags, &mut worker_flags, args.host.is_loopback());
        let control = ControlSocket::create()
            .map_err(|error| CommandError::chain("cannot create a folder for the control socket", &error))?;
        router_flags.push(path_flag("--supervisor=", control.path()));
        let divide_memory = !worker_flags.iter().any(|flag| is_flag(flag, "--gpu-memory-utilization"));
        let gpu_flags = (0..workers).map(|worker| -> Vec<OsString> {
            let utilization = args.compute.gpu_memory_utilization * gpus::share(&gpus, worker);
            let memory_flag = divide_memory.then(|| format!("--gpu-memory-utilization={utilization}").into());
            let list = gpus[worker].iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let gpu_flag = (over_gpus && !list.is_empty()).then(|| format!("--gpu={list}").into());
            memory_flag.into_iter().chain(gpu_flag).collect()
        });
        let gpu_flags = gpu_flags.collect();
        shared_flags.push("--log-format=json".into());
        shared_flags.push(format!("--drain-timeout={}", args.drain_timeout).into());
        Ok(Self {
            workers,
            router_address,
            router_metrics,
            router_http,
            worker_metrics,
            worker_flags,
            gpu_flags,
            router_flags,
            shared_flags,
            scheme: if matches.contains_id("tls_cert") { "https" } else { "http" },
            drain_timeout: args.drain_timeout.0,
            record,
            secrets,
            control,
        })
    }

    fn worker(&self, number: usize) -> ChildSpec {
        let name = format!("worker-{number}");
        let mut arguments: Vec<OsString> = vec!["worker".into(), format!("--worker-id={name}").into()];
        let own = &self.gpu_flags[number];
        arguments.extend(self.worker_flags.iter().chain(own).chain(&self.shared_flags).cloned());
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        ChildSpec {
            name,
            arguments,
            listen,
            metrics: self.worker_metrics[number],
            http: None,
            drain_timeout: self.drain_timeout,
            record: self.record.clone(),
            unset: &ROUTER_VARIABLES,
        }
    }

    fn router(&self, workers: &[SocketAddr]) -> ChildSpec {
        let workers: Vec<String> = workers.iter().map(ToString::to_string).collect();
        let mut arguments: Vec<OsString> =
            vec!["router".into(), format!("--workers={}", workers.join(",")).into()];
        arguments.extend(self.router_flags.iter().chain(&self.shared_flags).cloned());
        ChildSpec {
            name: "router".to_owned(),
            arguments,
            listen: self.router_address,
            metrics: self.router_metrics,
            http: self.router_http,
            drain_timeout: self.drain_timeout,
            record: self.record.clone(),
            unset: &[],
        }
    }
}

fn probe_port(address: SocketAddr, flag: &str) -> Result<TcpListener, CommandError> {
    TcpListener::bind(address).map_err(|error| {
        let context = format!("cannot listen on {address}; choose another with {flag}");
        CommandError::chain(&context, &error)
    })
}

fn log_sink(bars: MultiProgress, verbose: bool) -> LogSink {
    Arc::new(move |name: &str, line: &child_log::LogLine| {
        if verbose || line.urgent {
            bars.suspend(|| exit::print_stderr(format_args!("{name} │ {}", line.text)));
        }
    })
}

struct LocalCluster {
    plan: ClusterPlan,
    json: bool,
    stop: Stop,
    log_sink: LogSink,
    bars: MultiProgress,
    loading: BTreeMap<usize, ProgressBar>,
    abort: CancellationToken,
    events: mpsc::Sender<(usize, ChildEvent)>,
    receiver: mpsc::Receiver<(usize, ChildEvent)>,
    supervisors: BTreeMap<usize, ChildSupervisor>,
    /// Members that have been ready, by index.
    members: BTreeMap<usize, ClusterMember>,
}

impl LocalCluster {
    async fn run(&mut self) -> Result<(), CommandError> {
        if !self.json {
            self.print(&format!("starting {} and a router …", workers(self.plan.workers)));
        }
        for number in 0..self.plan.workers {
            self.start(number + 1, self.plan.worker(number));
        }
        while self.members.len() < self.plan.workers {
            if self.next().await?.is_none() {
                return Ok(());
            }
        }
        let listener = self.plan.control.listen();
        let listener =
            listener.map_err(|error| CommandError::chain("cannot listen on the control socket", &error))?;
        let killers = self.supervisors.iter().map(|(number, supervisor)| (*number, supervisor.killer()));
        let control = control_socket::serve(listener, killers.collect());
        let _control = AbortOnDropHandle::new(tokio::spawn(control));
        let addresses: Vec<SocketAddr> = self.members.values().map(|member| member.address).collect();
        self.start(ROUTER, self.plan.router(&addresses));
        // The router is ready once it has a worker's model bundle (tokenizer, chat template).
        let deadline = tokio::time::Instant::now() + CONNECT_TIMEOUT;
        while !self.members.contains_key(&ROUTER) {
            let next = tokio::time::timeout_at(deadline, self.next()).await.map_err(|_| {
                let message = format!(
                    "the router could use no worker within {} s; its warnings above say why",
                    CONNECT_TIMEOUT.as_secs()
                );
                CommandError::new(Exit::Failure, message)
            })?;
            if next?.is_none() {
                return Ok(());
            }
        }
        let Some(models) = self.wait_until_connected().await? else { return Ok(()) };
        self.print_ready(&models);
        while self.next().await?.is_some() {}
        Ok(())
    }

    fn start(&mut self, index: usize, spec: ChildSpec) {
        let supervisor = ChildSupervisor::start(
            index,
            spec,
            self.events.clone(),
            Arc::clone(&self.log_sink),
            self.abort.clone(),
        );
        self.supervisors.insert(index, supervisor);
    }

    fn print(&self, text: &str) {
        self.bars.suspend(|| exit::print_stderr(format_args!("{text}")));
    }

    /// Handles the next event; returns `None` when the cluster is to stop.
    async fn next(&mut self) -> Result<Option<()>, CommandError> {
        let (index, event) = tokio::select! {
            () = self.stop.drain.cancelled() => return Ok(None),
            event = self.receiver.recv() => match event {
                Some(event) => event,
                None => return Ok(None),
            },
        };
        match event {
            ChildEvent::Failed { cause } => return Err(CommandError::new(Exit::Failure, cause)),
            ChildEvent::Loading { done, total } => self.progress(index, done, total),
            ChildEvent::Ready(member) => self.ready(index, member),
            ChildEvent::Lost { status, retry_in } => self.lost(index, &status, retry_in),
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

    fn ready(&mut self, index: usize, member: ClusterMember) {
        if let Some(bar) = self.loading.remove(&index) {
            bar.finish_and_clear();
        }
        if self.members.contains_key(&index) {
            if self.json {
                event::emit(&ClusterEvent::Restarted { member: &member });
            } else {
                self.print(&format!("{} runs again as process {}", member.name, member.pid));
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
            self.print(&format!("{} ended: {status}; starting it again in {seconds:.1} s", member.name));
        }
    }

    /// Returns `HOST:PORT` of the router for clients on this machine.
    fn endpoint(&self) -> String {
        let address = self.members.get(&ROUTER).map_or(self.plan.router_address, |router| router.address);
        from_here(address).to_string()
    }

    /// Waits until the router has a session with every worker; returns `None` when the cluster is to stop.
    async fn wait_until_connected(&mut self) -> Result<Option<Vec<Model>>, CommandError> {
        if self.plan.scheme == "https" {
            // Its certificate may be for a name alone, or clients need one: the router's readiness must suffice.
            return Ok(Some(Vec::new()));
        }
        let endpoint = format!("http://{}", self.endpoint());
        let wanted = self.plan.workers as u32;
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, wait_for_workers(endpoint, wanted));
        tokio::pin!(connected);
        loop {
            tokio::select! {
                models = &mut connected => {
                    return models.map(Some).map_err(|_| {
                        let seconds = CONNECT_TIMEOUT.as_secs();
                        let message = format!("the router did not reach {} within {seconds} s", workers(self.plan.workers));
                        CommandError::new(Exit::Failure, message)
                    });
                }
                next = self.next() => if next?.is_none() { return Ok(None) },
            }
        }
    }

    fn print_ready(&self, models: &[Model]) {
        let endpoint = self.endpoint();
        let Some(router) = self.members.get(&ROUTER) else { return };
        let workers: Vec<&ClusterMember> =
            self.members.range(ROUTER + 1..).map(|(_, member)| member).collect();
        let scheme = self.plan.scheme;
        let http = router.http.map(|address| format!("{scheme}://{}", from_here(address)));
        if self.json {
            event::emit(&ClusterEvent::Ready {
                endpoint: &format!("{scheme}://{endpoint}"),
                http: http.as_deref(),
                router,
                workers: &workers,
                worker_secret_file: self.plan.secrets.worker(),
            });
            return;
        }
        let worker_secret = self.plan.secrets.worker();
        let text =
            Announcement { endpoint, scheme, http, models, router, workers: &workers, worker_secret }.text();
        // A closed pipe is ignored: the cluster runs without a reader.
        let _ = std::io::Write::write_all(&mut std::io::stdout().lock(), text.as_bytes());
    }

    /// Drains the router, which rejects new requests and finishes its streams, and then the workers. Returns
    /// whether a second signal aborted that.
    async fn shut_down(self) -> bool {
        let Self { stop, abort, supervisors, receiver, json, .. } = self;
        // Otherwise supervisors could block on the full channel.
        drop(receiver);
        let by_request = stop.drain.is_cancelled();
        if by_request && json {
            event::emit(&ClusterEvent::Stopping {});
        } else if by_request {
            exit::print_stderr(format_args!("stopping: streams in flight finish; once more ends at once"));
        } else {
            // A member failed: kill the others without draining.
            abort.cancel();
        }
        let second = stop.abort.clone();
        let kill = abort.clone();
        let watch = tokio::spawn(async move {
            second.cancelled().await;
            kill.cancel();
        });
        let mut rest = supervisors;
        if let Some(router) = rest.remove(&ROUTER) {
            router.stop().await;
        }
        futures::future::join_all(rest.into_values().map(ChildSupervisor::stop)).await;
        watch.abort();
        stop.abort.is_cancelled()
    }
}

/// Returns an address as clients on this machine reach it.
fn from_here(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn workers(count: usize) -> String {
    if count == 1 { "1 worker".to_owned() } else { format!("{count} workers") }
}

/// Polls the router until `wanted` workers serve and returns the models. Returns no models if the router
/// requires an API key, as this process has none; its readiness must suffice then.
async fn wait_for_workers(endpoint: String, wanted: u32) -> Vec<Model> {
    let mut delay = Duration::from_millis(5);
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
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(Duration::from_millis(200));
    }
}

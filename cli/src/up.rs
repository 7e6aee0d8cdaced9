//! `inflight up`: a router and workers on this machine, as supervised child processes.

mod announcement;
mod args;
mod models;
mod options;
mod plan;
mod secrets;
mod sizing;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use clap::ArgMatches;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use inflight_proto::v1::{ListModelsRequest, Model, inference_client::InferenceClient};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::child_log;
use crate::config::ModelTable;
use crate::control_socket;
use crate::event::{self, ClusterEvent, ClusterMember};
use crate::exit::{self, CommandError, Exit};
use crate::signals::{self, Stop};
use crate::supervisor::{ChildEvent, ChildSpec, ChildSupervisor, LogSink};
use announcement::Announcement;
pub use args::Args;
use plan::ClusterPlan;

/// Index of the router among the members; worker N has index N + 1.
const ROUTER: usize = 0;
/// Timeout of the router's start, and of its connecting to all workers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Capacity of the channel of child events.
const EVENTS_MAX: usize = 64;

/// Starts the cluster and runs until it is signalled to stop.
///
/// # Errors
/// A port is taken, a model is missing, the models do not fit, or a member does not start. All children have exited then.
pub async fn run(args: Args, matches: &ArgMatches, tables: &[ModelTable]) -> Result<(), CommandError> {
    let mut models = models::given(&args, matches, tables)?;
    // The children inherit it.
    inflight_net::raise_open_file_limit();
    // Once, and not by each worker; before signals are watched, so that Ctrl-C ends a download at once.
    for model in &mut models {
        model.resolve()?;
    }
    let plan = ClusterPlan::new(&args, matches, &models)?;
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
        self.print_plan();
        for number in 0..self.plan.workers() {
            self.start(number + 1, self.plan.worker(number));
        }
        while self.members.len() < self.plan.workers() {
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

    /// Says what is started: with several models, what each of them takes.
    fn print_plan(&self) {
        let models = &self.plan.models;
        let is_several = models.len() > 1;
        if self.json {
            let mut first = 0;
            let planned = models.iter().map(|model| {
                let event = model.event(first);
                first += event.workers.len();
                event
            });
            let planned: Vec<_> = planned.collect();
            if is_several {
                event::emit(&ClusterEvent::Planned { models: &planned });
            }
            return;
        }
        for model in models.iter().filter(|_| is_several) {
            self.print(&model.line());
        }
        self.print(&format!("starting {} and a router …", workers(self.plan.workers())));
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
        let wanted = self.plan.workers() as u32;
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, wait_for_workers(endpoint, wanted));
        tokio::pin!(connected);
        loop {
            tokio::select! {
                models = &mut connected => {
                    return models.map(Some).map_err(|_| {
                        let seconds = CONNECT_TIMEOUT.as_secs();
                        let message = format!("the router did not reach {} within {seconds} s", workers(self.plan.workers()));
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
        let model_of: Vec<Option<&str>> =
            (0..workers.len()).map(|worker| self.plan.model_of(worker)).collect();
        let names: Vec<&[String]> = self.plan.models.iter().map(|model| model.names.as_slice()).collect();
        let announcement = Announcement {
            endpoint,
            scheme,
            http,
            models,
            names: &names,
            router,
            workers: &workers,
            model_of: &model_of,
            worker_secret,
        };
        let text = announcement.text();
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

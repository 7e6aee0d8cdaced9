//! Addresses and flags of the processes that `inflight up` starts.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use clap::ArgMatches;
use inflight_options::OptionalPort;

use super::args::Args;
use super::models::ModelPlan;
use super::options::{ROUTER_VARIABLES, RoleFlags, path_flag};
use super::secrets::Secrets;
use super::sizing::{PlacedModel, place};
use crate::chat_template;
use crate::control_socket::ControlSocket;
use crate::exit::{CommandError, Exit};
use crate::recording_dir::RecordingDir;
use crate::supervisor::ChildSpec;

/// Difference of the router's port and that of its HTTP APIs.
const HTTP_PORT_OFFSET: u16 = 10;

/// Worker to start.
#[derive(Debug)]
struct PlannedWorker {
    /// Index of its model.
    model: usize,
    flags: Vec<OsString>,
    /// Environment variables that it does not inherit.
    unset: Vec<OsString>,
    metrics: SocketAddr,
}

/// Addresses and flags of the processes to start.
#[derive(Debug)]
pub(super) struct ClusterPlan {
    pub(super) models: Vec<PlacedModel>,
    workers: Vec<PlannedWorker>,
    pub(super) router_address: SocketAddr,
    router_metrics: SocketAddr,
    router_http: Option<SocketAddr>,
    router_flags: Vec<OsString>,
    /// Flags of every process.
    shared_flags: Vec<OsString>,
    /// Scheme of the router's addresses: https with TLS.
    pub(super) scheme: &'static str,
    drain_timeout: Duration,
    /// Where the processes record, if they do.
    record: Option<RecordingDir>,
    pub(super) secrets: Secrets,
    /// Socket over which the router has workers killed.
    pub(super) control: ControlSocket,
}

impl ClusterPlan {
    /// Plans the processes that serve these models.
    ///
    /// # Errors
    /// A port is taken, a file cannot be used, or the models do not fit into this machine.
    pub(super) fn new(args: &Args, matches: &ArgMatches, models: &[ModelPlan]) -> Result<Self, CommandError> {
        for model in models {
            chat_template::check(model.compute.chat_template.as_deref())?;
        }
        let placed = place(models)?;
        let number = placed.iter().map(|model| model.workers.len()).sum::<usize>();
        let router_address = SocketAddr::new(args.host, args.port);
        let http_port = match args.http_port {
            Some(OptionalPort::Off) => None,
            Some(OptionalPort::Port(port)) => Some(port),
            None => Some(args.port.saturating_sub(HTTP_PORT_OFFSET)),
        };
        let router_http = http_port.map(|port| SocketAddr::new(args.host, port));
        let metrics = metrics_addresses(args, number)?;
        // Report taken ports now rather than after the model was loaded.
        let mut probes = vec![probe_port(router_address, "--port")?];
        probes.extend(router_http.map(|address| probe_port(address, "--http-port")).transpose()?);
        for address in &metrics {
            probes.push(probe_port(*address, "--metrics-port")?);
        }
        drop(probes);
        let record = args.record.as_deref().map(RecordingDir::open).transpose()?;
        let RoleFlags { router: mut router_flags, shared: mut shared_flags, .. } = RoleFlags::given(matches);
        let secrets = Secrets::new(args, matches)?;
        let mut secret_flags = Vec::new();
        secrets.add_to(&mut router_flags, &mut secret_flags, args.host.is_loopback());
        let control = ControlSocket::create()
            .map_err(|error| CommandError::chain("cannot create a folder for the control socket", &error))?;
        router_flags.push(path_flag("--supervisor=", control.path()));
        shared_flags.push("--log-format=json".into());
        shared_flags.push(format!("--drain-timeout={}", args.drain_timeout).into());
        let of_model = placed
            .iter()
            .enumerate()
            .flat_map(|(model, placed)| placed.workers.iter().map(move |(_, flags)| (model, flags)));
        let workers = of_model.zip(&metrics[1..]).map(|((model, own), metrics)| {
            let ModelPlan { flags, unset, .. } = &models[model];
            let mut flags = flags.clone();
            flags.extend(threads_flag(&models[model], number));
            flags.extend(own.iter().chain(&secret_flags).cloned());
            let variables = ROUTER_VARIABLES.iter().map(OsString::from).chain(unset.iter().cloned());
            PlannedWorker { model, flags, unset: variables.collect(), metrics: *metrics }
        });
        Ok(Self {
            workers: workers.collect(),
            models: placed,
            router_address,
            router_metrics: metrics[0],
            router_http,
            router_flags,
            shared_flags,
            scheme: if matches.contains_id("tls_cert") { "https" } else { "http" },
            drain_timeout: args.drain_timeout.0,
            record,
            secrets,
            control,
        })
    }

    /// Number of workers.
    pub(super) fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Returns the first name of a worker's model if there are several models.
    pub(super) fn model_of(&self, worker: usize) -> Option<&str> {
        let model = self.models.get(self.workers.get(worker)?.model)?;
        model.names.first().map(String::as_str).filter(|_| self.models.len() > 1)
    }

    /// Returns the command line of a worker.
    pub(super) fn worker(&self, number: usize) -> ChildSpec {
        let name = format!("worker-{number}");
        let mut arguments: Vec<OsString> = vec!["worker".into(), format!("--worker-id={name}").into()];
        let worker = &self.workers[number];
        arguments.extend(worker.flags.iter().chain(&self.shared_flags).cloned());
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        ChildSpec {
            name,
            arguments,
            listen,
            metrics: worker.metrics,
            http: None,
            drain_timeout: self.drain_timeout,
            record: self.record.clone(),
            unset: worker.unset.clone(),
        }
    }

    /// Returns the command line of the router of these workers.
    pub(super) fn router(&self, workers: &[SocketAddr]) -> ChildSpec {
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
            unset: Vec::new(),
        }
    }
}

/// Returns the flag with a worker's part of the cores, unless the number of threads was given.
fn threads_flag(model: &ModelPlan, workers: usize) -> Option<OsString> {
    let compute = &model.compute;
    compute.threads.is_none().then(|| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / workers.max(1)).max(compute.tensor_parallel).max(1);
        format!("--threads={threads}").into()
    })
}

/// Returns the addresses of the Prometheus endpoints of the router and of this number of workers.
fn metrics_addresses(args: &Args, workers: usize) -> Result<Vec<SocketAddr>, CommandError> {
    let base = match (args.metrics_port, args.port) {
        (Some(port), _) => u32::from(port),
        (None, 0) => 0,
        (None, port) => u32::from(port) + 1,
    };
    let address = |member: u32| -> Result<SocketAddr, CommandError> {
        let port = if base == 0 { 0 } else { base + member };
        let port = u16::try_from(port).map_err(|_| {
            let message = format!("metrics port {port} is above 65535; choose a lower --metrics-port");
            CommandError::new(Exit::Usage, message)
        })?;
        Ok(SocketAddr::new(args.metrics_host, port))
    };
    (0..=workers as u32).map(address).collect()
}

fn probe_port(address: SocketAddr, flag: &str) -> Result<TcpListener, CommandError> {
    TcpListener::bind(address).map_err(|error| {
        let context = format!("cannot listen on {address}; choose another with {flag}");
        CommandError::chain(&context, &error)
    })
}

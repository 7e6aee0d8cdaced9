//! `inflight worker`: flags of a worker, and its process.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use inflight_net::SecretFile;
use inflight_worker::metrics::BUCKETS;
use inflight_worker::{CONNECTIONS_MAX, Options, Worker};

use crate::chat_template;
use crate::event::{self, RoleEvent};
use crate::exit::{CommandError, Exit};
use crate::foreign;
use crate::grammar_helper;
use crate::hub;
use crate::metrics_endpoint;
use crate::quick_build;
use crate::role;
use crate::signals;
use crate::telemetry;
use crate::tls;
use crate::trace_sampler::RemoteParent;
use inflight_options::ListenAt;

/// Time for closing connections in addition to the drain timeout.
const CLOSE_MARGIN: Duration = Duration::from_secs(1);
/// Minimum interval of load progress events.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Options of `inflight worker`: those of the worker, and those of its process.
#[derive(Debug, Clone, clap::Args)]
#[command(mut_args = foreign::alias)]
pub struct Args {
    #[command(flatten)]
    pub worker: Options,
    /// Address of the Prometheus endpoint, or `off`
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:8653",
        env = "INFLIGHT_WORKER_METRICS_LISTEN", help_heading = None::<&str>)]
    pub metrics_listen: ListenAt,
    /// File with the secret that routers must prove, and that the worker proves to them, one on each line: all
    /// are accepted, so that a secret can be replaced step by step. Reread when it changes
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_SECRET_FILE", help_heading = None::<&str>)]
    pub secret_file: Option<PathBuf>,
    #[command(flatten)]
    pub tls: tls::ServerArgs,
    #[command(flatten)]
    pub telemetry: telemetry::Args,
    /// TOML configuration file; its keys are the names of these flags. Flags and environment variables
    /// override it
    #[arg(long, value_name = "FILE", env = "INFLIGHT_WORKER_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub role: role::Args,
}

impl Args {
    /// Returns the options of the worker with what the process brings: files that were read, and the program of grammar helpers.
    fn options(&self) -> Result<Options, CommandError> {
        let secret = self.secret_file.as_deref().map(SecretFile::open).transpose();
        let options = Options {
            tls: self.tls.files()?,
            secret: secret.map_err(|error| CommandError::chain("--secret-file", &error))?,
            grammar_confinement: Some(grammar_helper::confinement(self.role.grammar_memory_max.0)),
            drain_timeout: self.role.drain_timeout.0,
            ..self.worker.clone()
        };
        options.validate().map_err(|error| CommandError::new(Exit::Usage, error.to_string()))?;
        chat_template::check(options.compute.chat_template.as_deref())?;
        Ok(options)
    }
}

/// Runs a worker until it is signalled to stop.
///
/// # Errors
/// An option is invalid, the model does not load, a port is taken, or the worker did not drain in time.
pub async fn run(args: Args) -> Result<(), CommandError> {
    let stop = signals::watch(args.role.supervised)
        .map_err(|error| CommandError::chain("cannot watch for signals", &error))?;
    signals::exit_on_abort(&stop);
    let options = args.options()?;
    let worker_id = options.worker_id();
    let telemetry = telemetry::start(
        &args.telemetry,
        "inflight-worker",
        &worker_id,
        args.metrics_listen,
        BUCKETS,
        // Its callers are routers, which have drawn.
        RemoteParent::Decides,
    )
    .await?;
    let metrics = telemetry.metrics;
    quick_build::log(args.role.supervised);
    role::check_open_files(CONNECTIONS_MAX, "start fewer routers");
    let outcome = Box::pin(async {
        let progress = LoadProgressDisplay::new(args.role.supervised);
        let loading = tokio::task::spawn_blocking(move || {
            let mut options = options;
            hub::resolve(&mut options.compute, &hub::Display::of_service())?;
            let loaded = Worker::load(&options, &|done, total| progress.show(done, total));
            loaded.map_err(|error| CommandError::chain("", &error))
        });
        let worker = tokio::select! {
            loaded = loading => match loaded {
                Ok(loaded) => loaded?,
                Err(panic) => return Err(CommandError::chain("loading the model", &panic)),
            },
            () = stop.drain.cancelled() => return Ok(()),
        };
        let address = worker.address();
        let drain = stop.drain.clone();
        metrics_endpoint::ready_when(move || !drain.is_cancelled());
        tracing::info!(%address, worker = worker_id, "ready");
        event::emit(&RoleEvent::Ready { address, metrics, http: None });
        let drain_timeout = args.role.drain_timeout.0 + CLOSE_MARGIN;
        let serving = Box::pin(worker.serve(stop.drain.clone()));
        role::within_drain(serving, &stop.drain, drain_timeout).await
    })
    .await;
    telemetry.stop().await;
    outcome
}

/// Display of load progress: a bar on a terminal, events for a supervisor, nothing otherwise.
enum LoadProgressDisplay {
    Bar(ProgressBar),
    Events(Mutex<Instant>),
    Silent,
}

impl LoadProgressDisplay {
    fn new(supervised: bool) -> Self {
        if supervised {
            return Self::Events(Mutex::new(Instant::now()));
        }
        if !std::io::stderr().is_terminal() {
            return Self::Silent;
        }
        let style = ProgressStyle::with_template("loading {bar:40} {bytes}/{total_bytes}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        Self::Bar(ProgressBar::no_length().with_style(style))
    }

    fn show(&self, done: u64, total: u64) {
        match self {
            Self::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done);
                if done >= total {
                    bar.finish_and_clear();
                }
            }
            Self::Events(last) => {
                let Ok(mut last) = last.lock() else { return };
                if last.elapsed() >= PROGRESS_INTERVAL {
                    *last = Instant::now();
                    event::emit(&RoleEvent::Loading { done, total });
                }
            }
            Self::Silent => {}
        }
    }
}

//! `inflight router`: flags of a router, and its process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use inflight_options::ListenAt;
use inflight_router::metrics::{METRICS, MetricKind};
use inflight_router::{Options, Router};

use crate::event::{self, RoleEvent};
use crate::exit::{CommandError, Exit};
use crate::foreign;
use crate::grammar_helper;
use crate::metrics_endpoint;
use crate::quick_build;
use crate::role;
use crate::signals;
use crate::telemetry;
use crate::tls;
use crate::worker_secret::WorkerSecretArgs;

/// Time for closing connections in addition to the drain timeout.
const CLOSE_MARGIN: Duration = Duration::from_secs(1);

/// Options of `inflight router`: those of the router, and those of its process.
#[derive(Debug, Clone, clap::Args)]
#[command(mut_args = foreign::alias)]
pub struct Args {
    #[command(flatten)]
    pub router: Options,
    /// Address of the Prometheus endpoint, or `off`
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:8651",
        env = "INFLIGHT_ROUTER_METRICS_LISTEN"
    )]
    pub metrics_listen: ListenAt,
    /// File with the secrets that sign the cursors of streams, from which clients resume them at any router; the
    /// same for all routers. One key of 32 characters or more on each line: the first signs, all verify. Without
    /// it, streams can be resumed at this process only
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_RESUME_KEY_FILE")]
    pub resume_key_file: Option<PathBuf>,
    #[command(flatten)]
    pub tls: tls::ServerArgs,
    #[command(flatten)]
    pub worker_tls: tls::WorkerClientArgs,
    #[command(flatten)]
    pub worker_secret: WorkerSecretArgs,
    #[command(flatten)]
    pub telemetry: telemetry::Args,
    /// TOML configuration file; its keys are the names of these flags. Flags and environment variables
    /// override it
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub role: role::Args,
}

impl Args {
    fn resume_keys(&self) -> Result<Vec<Vec<u8>>, CommandError> {
        let Some(path) = &self.resume_key_file else { return Ok(Vec::new()) };
        let secrets = inflight_net::read_secrets(path);
        secrets
            .map(|secrets| secrets.to_vec())
            .map_err(|error| CommandError::chain("--resume-key-file", &error))
    }

    /// Returns the options of the router with what the process brings: files that were read, and the program of grammar helpers.
    fn options(&self) -> Result<Options, CommandError> {
        let options = Options {
            incarnation: incarnation(),
            grammar_confinement: Some(grammar_helper::confinement(self.role.grammar_memory_max.0)),
            resume_keys: self.resume_keys()?,
            tls: self.tls.files()?,
            worker_tls: self.worker_tls.tls()?,
            worker_secret: self.worker_secret.open()?,
            ..self.router.clone()
        };
        options.validate().map_err(|error| CommandError::new(Exit::Usage, error.to_string()))?;
        Ok(options)
    }
}

/// Returns the names and buckets of the router's histograms.
fn buckets() -> Vec<(&'static str, &'static [f64])> {
    let histogram = |metric: &inflight_router::metrics::Metric| match metric.kind {
        MetricKind::Histogram(buckets) => Some((metric.name, buckets)),
        MetricKind::Counter | MetricKind::Gauge => None,
    };
    METRICS.iter().filter_map(histogram).collect()
}

/// Runs a router until it is signalled to stop.
///
/// # Errors
/// An option is invalid, a port is taken, or streams did not finish within the drain timeout.
pub async fn run(args: Args) -> Result<(), CommandError> {
    let stop = signals::watch(args.role.supervised)
        .map_err(|error| CommandError::chain("cannot watch for signals", &error))?;
    signals::exit_on_abort(&stop);
    let options = args.options()?;
    let router_id = options.router_id();
    let telemetry = telemetry::start(
        &args.telemetry,
        "inflight-router",
        &router_id,
        args.metrics_listen,
        &buckets(),
        args.telemetry.client_sampling(),
    )
    .await?;
    let metrics = telemetry.metrics;
    quick_build::log(args.role.supervised);
    let listeners = 1 + usize::from(options.http.listen.address().is_some());
    let connections = options.connections.connections_max.saturating_mul(listeners);
    role::check_open_files(connections.saturating_add(options.workers.len()), "lower --connections-max");
    let outcome = Box::pin(async {
        let mut router = Router::bind(options).await.map_err(|error| CommandError::chain("", &error))?;
        if metrics.is_some() {
            router = router.with_metrics(Arc::new(metrics_endpoint::render));
        }
        let http = router.http_address();
        let address = router.address();
        let handle = router.handle();
        let (probed, drain) = (router.handle(), stop.drain.clone());
        metrics_endpoint::ready_when(move || probed.is_ready() && !drain.is_cancelled());
        tracing::info!(%address, "listening");
        event::emit(&RoleEvent::Listening { address, metrics });
        let announced = tokio::spawn(async move {
            handle.ready().await;
            tracing::info!(%address, "ready");
            event::emit(&RoleEvent::Ready { address, metrics, http });
        });
        let serving = Box::pin(router.serve(stop.drain.clone()));
        let drain_timeout = args.role.drain_timeout.0 + CLOSE_MARGIN;
        let served = role::within_drain(serving, &stop.drain, drain_timeout).await;
        announced.abort();
        served
    })
    .await;
    telemetry.stop().await;
    outcome
}

/// Returns a random id of this process. Address and process id are not unique: in pods, routers share both.
fn incarnation() -> String {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id());
    format!("{:x}-{random:x}", since_epoch.as_nanos())
}

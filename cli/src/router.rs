//! `inflight router`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use inflight_router::metrics::{Kind, METRICS};
use inflight_router::{Options, PlacementKind, Router};
use inflight_transport::Limits as ConnectionLimits;

use crate::event::{self, RoleEvent};
use crate::exit::{Exit, Failure};
use crate::metrics_endpoint;
use crate::role;
use crate::signals;
use crate::telemetry;
use crate::tls;
use crate::units::{Bytes, ListenAt, Span};

/// What closing connections gets beyond the drain timeout.
const CLOSE_MARGIN: Duration = Duration::from_secs(1);

/// Options of `inflight router`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Address for clients; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8650", env = "INFLIGHT_ROUTER_LISTEN")]
    pub listen: SocketAddr,
    /// Workers, separated by commas: HOST:PORT, dns://NAME:PORT or kubernetes://NAMESPACE/SERVICE:PORT
    #[arg(long, value_name = "SOURCE", value_delimiter = ',', env = "INFLIGHT_ROUTER_WORKERS")]
    pub workers: Vec<String>,
    /// Address of the Prometheus endpoint, or `off`
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:8651",
        env = "INFLIGHT_ROUTER_METRICS_LISTEN"
    )]
    pub metrics_listen: ListenAt,
    /// Name of this router in the workers' logs [default: router@ADDRESS]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_ROUTER_ID")]
    pub router_id: Option<String>,
    /// Where requests run: cost, prefix, power-of-two, least-loaded or round-robin
    #[arg(long, value_name = "NAME", default_value_t = Options::default().placement, env = "INFLIGHT_ROUTER_PLACEMENT")]
    pub placement: PlacementKind,
    /// Most requests that wait for a worker
    #[arg(long, value_name = "N", default_value_t = Options::default().queue_requests_max, env = "INFLIGHT_ROUTER_QUEUE_REQUESTS_MAX")]
    pub queue_requests_max: usize,
    /// Most tokens, prompts and what they may generate, that the waiting requests may come to hold
    #[arg(long, value_name = "N", default_value_t = Options::default().queue_tokens_max, env = "INFLIGHT_ROUTER_QUEUE_TOKENS_MAX")]
    pub queue_tokens_max: u64,
    /// Largest message taken from a client
    #[arg(long, value_name = "BYTES", default_value_t = Bytes(Options::default().message_bytes_max as u64), env = "INFLIGHT_ROUTER_MESSAGE_BYTES_MAX")]
    pub message_bytes_max: Bytes,
    /// Most tokens of a request that names no max_tokens
    #[arg(long, value_name = "N", default_value_t = Options::default().default_max_tokens, env = "INFLIGHT_ROUTER_DEFAULT_MAX_TOKENS")]
    pub default_max_tokens: u32,
    /// Most calls open at once, waiting and streaming together
    #[arg(long, value_name = "N", default_value_t = Options::default().streams_max, env = "INFLIGHT_ROUTER_STREAMS_MAX")]
    pub streams_max: usize,
    /// How long to try to connect to a worker
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().connect_timeout), env = "INFLIGHT_ROUTER_CONNECT_TIMEOUT")]
    pub connect_timeout: Span,
    /// Longest wait before the next try to reach a worker
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().reconnect_backoff_max), env = "INFLIGHT_ROUTER_RECONNECT_BACKOFF_MAX")]
    pub reconnect_backoff_max: Span,
    /// A worker that names no heartbeat interval is taken for lost after this long without a word
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().worker_silence_max), env = "INFLIGHT_ROUTER_WORKER_SILENCE_MAX")]
    pub worker_silence_max: Span,
    /// How long requests wait for a model whose last worker was lost
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().unserved_wait_max), env = "INFLIGHT_ROUTER_UNSERVED_WAIT_MAX")]
    pub unserved_wait_max: Span,
    /// What a client is told to wait when a queue is full
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().retry_delay), env = "INFLIGHT_ROUTER_RETRY_DELAY")]
    pub retry_delay: Span,
    /// How often an idle client connection is probed
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().keepalive_interval), env = "INFLIGHT_ROUTER_KEEPALIVE_INTERVAL")]
    pub keepalive_interval: Span,
    /// How often the names of workers are looked up again
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().discovery_interval), env = "INFLIGHT_ROUTER_DISCOVERY_INTERVAL")]
    pub discovery_interval: Span,
    /// Resubmissions a second after workers were lost, over all requests; the rest waits
    #[arg(long, value_name = "N", default_value_t = Options::default().retry_rate, env = "INFLIGHT_ROUTER_RETRY_RATE")]
    pub retry_rate: u32,
    /// Resubmissions that go at once, after a while without
    #[arg(long, value_name = "N", default_value_t = Options::default().retry_burst, env = "INFLIGHT_ROUTER_RETRY_BURST")]
    pub retry_burst: u32,
    /// How long the streams of a draining worker may go on there before they move to another
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().drain_grace), env = "INFLIGHT_ROUTER_DRAIN_GRACE")]
    pub drain_grace: Span,
    /// Most tokens that one request may come to hold, prompt and all choices together
    #[arg(long, value_name = "N", default_value_t = Options::default().journal_tokens_max, env = "INFLIGHT_ROUTER_JOURNAL_TOKENS_MAX")]
    pub journal_tokens_max: u64,
    /// Tokens that a client may be behind before its request pauses until it reads again
    #[arg(long, value_name = "N", default_value_t = Options::default().client_buffer_tokens, env = "INFLIGHT_ROUTER_CLIENT_BUFFER_TOKENS")]
    pub client_buffer_tokens: usize,
    /// How long a client may take nothing of its stream before its call is ended
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().stall_timeout), env = "INFLIGHT_ROUTER_STALL_TIMEOUT")]
    pub stall_timeout: Span,
    /// File of tenants with their API keys and limits; without it everybody is let in. Read again when it changes
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_TENANTS_FILE")]
    pub tenants_file: Option<PathBuf>,
    /// Past this time in the queue a request goes first in its tenant and counts as most important
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().queue_wait_max), env = "INFLIGHT_ROUTER_QUEUE_WAIT_MAX")]
    pub queue_wait_max: Span,
    /// Tokens of service forgiven to the tenant of a waiting request for each second
    #[arg(long, value_name = "TOKENS", default_value_t = Options::default().aged_tokens_per_second, env = "INFLIGHT_ROUTER_AGED_TOKENS_PER_SECOND")]
    pub aged_tokens_per_second: f64,
    /// Tokens of service forgiven at most
    #[arg(long, value_name = "TOKENS", default_value_t = Options::default().aged_tokens_max, env = "INFLIGHT_ROUTER_AGED_TOKENS_MAX")]
    pub aged_tokens_max: f64,
    /// How often a request that fits nowhere now may be overtaken by smaller ones
    #[arg(long, value_name = "N", default_value_t = Options::default().overtakes_max, env = "INFLIGHT_ROUTER_OVERTAKES_MAX")]
    pub overtakes_max: u32,
    /// How long a model whose workers are gone is unavailable, before it is unknown
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().model_memory), env = "INFLIGHT_ROUTER_MODEL_MEMORY")]
    pub model_memory: Span,
    /// Most client connections at once
    #[arg(long, value_name = "N", default_value_t = Options::default().connections.connections_max, env = "INFLIGHT_ROUTER_CONNECTIONS_MAX")]
    pub connections_max: usize,
    /// Most calls open at once on one connection
    #[arg(long, value_name = "N", default_value_t = Options::default().connection_streams_max, env = "INFLIGHT_ROUTER_CONNECTION_STREAMS_MAX")]
    pub connection_streams_max: u32,
    /// Largest list of headers taken from a client
    #[arg(long, value_name = "BYTES", default_value_t = Options::default().header_bytes_max, env = "INFLIGHT_ROUTER_HEADER_BYTES_MAX")]
    pub header_bytes_max: u32,
    /// How long a call may take to bring its message, from its headers
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().message_time_max), env = "INFLIGHT_ROUTER_MESSAGE_TIMEOUT")]
    pub message_timeout: Span,
    /// How long a TLS handshake may take
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().connections.handshake_max), env = "INFLIGHT_ROUTER_HANDSHAKE_TIMEOUT")]
    pub handshake_timeout: Span,
    /// How long a connection may stay without the headers of its first call
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().connections.first_call_max), env = "INFLIGHT_ROUTER_FIRST_CALL_TIMEOUT")]
    pub first_call_timeout: Span,
    /// How long a connection may stay without a call
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().connections.idle_max), env = "INFLIGHT_ROUTER_IDLE_TIMEOUT")]
    pub idle_timeout: Span,
    /// Whether clients may ask for the API's description
    #[arg(long, value_name = "BOOL", default_value_t = Options::default().reflection, action = clap::ArgAction::Set, env = "INFLIGHT_ROUTER_REFLECTION")]
    pub reflection: bool,
    #[command(flatten)]
    pub tls: tls::ServerArgs,
    #[command(flatten)]
    pub worker_tls: tls::WorkerClientArgs,
    #[command(flatten)]
    pub telemetry: telemetry::Args,
    /// TOML file whose keys are the names of these flags; flags and environment win over it
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub role: role::Args,
}

impl Args {
    fn options(&self) -> Result<Options, Failure> {
        let options = Options {
            listen: self.listen,
            workers: self.workers.clone(),
            router_id: self.router_id.clone().unwrap_or_else(|| format!("router@{}", self.listen)),
            incarnation: incarnation(),
            placement: self.placement,
            queue_requests_max: self.queue_requests_max,
            queue_tokens_max: self.queue_tokens_max,
            message_bytes_max: usize::try_from(self.message_bytes_max.0).unwrap_or(usize::MAX),
            default_max_tokens: self.default_max_tokens,
            streams_max: self.streams_max,
            connect_timeout: self.connect_timeout.0,
            reconnect_backoff_max: self.reconnect_backoff_max.0,
            worker_silence_max: self.worker_silence_max.0,
            unserved_wait_max: self.unserved_wait_max.0,
            discovery_interval: self.discovery_interval.0,
            retry_rate: self.retry_rate,
            retry_burst: self.retry_burst,
            drain_grace: self.drain_grace.0,
            journal_tokens_max: self.journal_tokens_max,
            client_buffer_tokens: self.client_buffer_tokens,
            stall_timeout: self.stall_timeout.0,
            retry_delay: self.retry_delay.0,
            queue_wait_max: self.queue_wait_max.0,
            aged_tokens_per_second: self.aged_tokens_per_second,
            aged_tokens_max: self.aged_tokens_max,
            overtakes_max: self.overtakes_max,
            tenants_file: self.tenants_file.clone(),
            tls: self.tls.files()?,
            worker_tls: self.worker_tls.tls()?,
            connections: ConnectionLimits {
                connections_max: self.connections_max,
                handshake_max: self.handshake_timeout.0,
                first_call_max: self.first_call_timeout.0,
                idle_max: self.idle_timeout.0,
            },
            header_bytes_max: self.header_bytes_max,
            message_time_max: self.message_timeout.0,
            connection_streams_max: self.connection_streams_max,
            model_memory: self.model_memory.0,
            keepalive_interval: self.keepalive_interval.0,
            reflection: self.reflection,
        };
        options.validate().map_err(|error| Failure::new(Exit::Usage, error.to_string()))?;
        Ok(options)
    }
}

/// Buckets of the router's histograms, by name.
fn buckets() -> Vec<(&'static str, &'static [f64])> {
    let histogram = |metric: &inflight_router::metrics::Metric| match metric.kind {
        Kind::Histogram(buckets) => Some((metric.name, buckets)),
        Kind::Counter | Kind::Gauge => None,
    };
    METRICS.iter().filter_map(histogram).collect()
}

/// Runs a router until it is told to stop.
///
/// # Errors
/// A bad option or a taken port.
pub async fn run(args: Args) -> Result<(), Failure> {
    let stop = signals::watch(args.role.supervised)
        .map_err(|error| Failure::chain("cannot watch for signals", &error))?;
    signals::exit_on_abort(&stop);
    let options = args.options()?;
    let router_id = options.router_id.clone();
    let telemetry =
        telemetry::start(&args.telemetry, "inflight-router", &router_id, args.metrics_listen, &buckets())
            .await?;
    let metrics = telemetry.metrics;
    let outcome = Box::pin(async {
        let router = Router::bind(options).await.map_err(|error| Failure::chain("", &error))?;
        let address = router.address();
        let handle = router.handle();
        let (seen, drain) = (router.handle(), stop.drain.clone());
        metrics_endpoint::ready_when(move || seen.is_ready() && !drain.is_cancelled());
        tracing::info!(%address, "listening");
        event::emit(&RoleEvent::Listening { address, metrics });
        let announced = tokio::spawn(async move {
            handle.ready().await;
            tracing::info!(%address, "ready");
            event::emit(&RoleEvent::Ready { address, metrics });
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

/// Different after each restart, and from every other router's: in pods that listen at the same address too, whose process ids
/// are the same.
fn incarnation() -> String {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id());
    format!("{:x}-{random:x}", since_epoch.as_nanos())
}

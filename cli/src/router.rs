//! `inflight router`: flags of a router, and its process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use inflight_net::ConnectionLimits;
use inflight_router::metrics::{METRICS, MetricKind};
use inflight_router::{
    Admin, FormatChoice, HttpOptions, Options, PlacementKind, ReasoningFormat, Router, ToolCallFormat,
    UsageLogExcess, UsageLogOptions, UsageLogPolicy,
};

use crate::event::{self, RoleEvent};
use crate::exit::{CommandError, Exit};
use crate::grammar_helper;
use crate::metrics_endpoint;
use crate::quick_build;
use crate::role;
use crate::signals;
use crate::telemetry;
use crate::tls;
use crate::units::{ByteSize, ListenAt, Span};
use crate::worker_secret::WorkerSecretArgs;

/// Time for closing connections in addition to the drain timeout.
const CLOSE_MARGIN: Duration = Duration::from_secs(1);

/// Options of `inflight router`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Address on which to listen for clients; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8650", env = "INFLIGHT_ROUTER_LISTEN")]
    pub listen: SocketAddr,
    /// Address on which to listen for HTTP clients (OpenAI's and Anthropic's APIs), or `off`; port 0 picks a
    /// free one
    #[arg(long, value_name = "ADDRESS", default_value = "off", env = "INFLIGHT_ROUTER_HTTP_LISTEN")]
    pub http_listen: ListenAt,
    /// Origins of browsers that may call the HTTP APIs, separated by commas; `*` is any
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',', env = "INFLIGHT_ROUTER_HTTP_CORS")]
    pub http_cors: Vec<String>,
    /// Names under which callers without a key reach the HTTP APIs on a loopback address, beside localhost and addresses, separated
    /// by commas; `*` is any. For a reverse proxy on the same machine that passes on the host
    #[arg(long, value_name = "NAME", value_delimiter = ',', env = "INFLIGHT_ROUTER_HTTP_HOSTS")]
    pub http_hosts: Vec<String>,
    /// Serve /metrics on the address of the HTTP APIs too, to every client
    #[arg(long, value_name = "BOOL", default_value_t = HttpOptions::default().metrics, action = clap::ArgAction::Set, env = "INFLIGHT_ROUTER_HTTP_METRICS")]
    pub http_metrics: bool,
    /// Add the timings of each request to its HTTP response
    #[arg(long, value_name = "BOOL", default_value_t = HttpOptions::default().timings, action = clap::ArgAction::Set, env = "INFLIGHT_ROUTER_HTTP_TIMINGS")]
    pub http_timings: bool,
    /// Time without output after which an HTTP stream gets a comment that keeps its connection alive
    #[arg(long, value_name = "DURATION", default_value_t = Span(HttpOptions::default().keepalive), env = "INFLIGHT_ROUTER_HTTP_KEEPALIVE")]
    pub http_keepalive: Span,
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
    /// Name of this router in logs of the workers [default: router@ADDRESS]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_ROUTER_ID")]
    pub router_id: Option<String>,
    /// Placement policy (load balancing): cost, prefix, power-of-two, least-loaded or round-robin
    #[arg(long, value_name = "NAME", default_value_t = Options::default().placement, env = "INFLIGHT_ROUTER_PLACEMENT")]
    pub placement: PlacementKind,
    /// Maximum requests in the queue
    #[arg(long, value_name = "N", default_value_t = Options::default().queue_requests_max, env = "INFLIGHT_ROUTER_QUEUE_REQUESTS_MAX")]
    pub queue_requests_max: usize,
    /// Maximum tokens in the queue, counting each request's prompt and max_tokens of all its choices
    #[arg(long, value_name = "N", default_value_t = Options::default().queue_tokens_max, env = "INFLIGHT_ROUTER_QUEUE_TOKENS_MAX")]
    pub queue_tokens_max: u64,
    /// Maximum size of a request message
    #[arg(long, value_name = "BYTES", default_value_t = ByteSize(Options::default().message_bytes_max as u64), env = "INFLIGHT_ROUTER_MESSAGE_BYTES_MAX")]
    pub message_bytes_max: ByteSize,
    /// Maximum bytes of all request messages that are being received or tokenized
    #[arg(long, value_name = "BYTES", default_value_t = ByteSize(Options::default().receive_bytes_max), env = "INFLIGHT_ROUTER_RECEIVE_BYTES_MAX")]
    pub receive_bytes_max: ByteSize,
    /// Maximum bytes of response data that clients have not read; beyond it, the connection with the most unread data is closed
    #[arg(long, value_name = "BYTES", default_value_t = ByteSize(Options::default().unread_bytes_max), env = "INFLIGHT_ROUTER_UNREAD_BYTES_MAX")]
    pub unread_bytes_max: ByteSize,
    /// max_tokens of requests that do not set it
    #[arg(long, value_name = "N", default_value_t = Options::default().default_max_tokens, env = "INFLIGHT_ROUTER_DEFAULT_MAX_TOKENS")]
    pub default_max_tokens: u32,
    /// Maximum open Generate and Tokenize calls, queued and streaming
    #[arg(long, value_name = "N", default_value_t = Options::default().streams_max, env = "INFLIGHT_ROUTER_STREAMS_MAX")]
    pub streams_max: usize,
    /// Maximum requests with large prompts (over 16 KiB of text) that are being tokenized or wait for it
    #[arg(long, value_name = "N", default_value_t = Options::default().tokenize_queue_max, env = "INFLIGHT_ROUTER_TOKENIZE_QUEUE_MAX")]
    pub tokenize_queue_max: usize,
    /// Maximum tokens of a text that Tokenize, /tokenize, /detokenize or count_tokens takes
    #[arg(long, value_name = "N", default_value_t = Options::default().tokenize_tokens_max, env = "INFLIGHT_ROUTER_TOKENIZE_TOKENS_MAX")]
    pub tokenize_tokens_max: usize,
    /// Recognise special tokens in the messages of conversations, which can then end or forge a message; false: they
    /// are plain text
    #[arg(long, value_name = "BOOL", default_value_t = Options::default().special_tokens_in_chat, action = clap::ArgAction::Set, env = "INFLIGHT_ROUTER_SPECIAL_TOKENS_IN_CHAT")]
    pub special_tokens_in_chat: bool,
    /// Format of the models' tool calls: llama3, hermes, qwen-xml or mistral; auto: that of the chat template; none:
    /// tools are refused. MODEL=FORMAT, separated by commas, for single models
    #[arg(long, value_name = "FORMAT", default_value_t = Options::default().tool_call_format, env = "INFLIGHT_ROUTER_TOOL_CALL_FORMAT")]
    pub tool_call_format: FormatChoice<ToolCallFormat>,
    /// Format of the models' reasoning: think or mistral; auto: that of the chat template; none: reasoning is part of
    /// the text. MODEL=FORMAT, separated by commas, for single models
    #[arg(long, value_name = "FORMAT", default_value_t = Options::default().reasoning_format, env = "INFLIGHT_ROUTER_REASONING_FORMAT")]
    pub reasoning_format: FormatChoice<ReasoningFormat>,
    /// Maximum messages that wait for a worker to read them; beyond, its session is closed and its streams move
    #[arg(long, value_name = "N", default_value_t = Options::default().worker_commands_max, env = "INFLIGHT_ROUTER_WORKER_COMMANDS_MAX")]
    pub worker_commands_max: usize,
    /// Timeout of connecting to a worker
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().connect_timeout), env = "INFLIGHT_ROUTER_CONNECT_TIMEOUT")]
    pub connect_timeout: Span,
    /// Maximum backoff between attempts to connect to a worker
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().reconnect_backoff_max), env = "INFLIGHT_ROUTER_RECONNECT_BACKOFF_MAX")]
    pub reconnect_backoff_max: Span,
    /// Session timeout for workers that announce no heartbeat interval
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().session_timeout), env = "INFLIGHT_ROUTER_SESSION_TIMEOUT")]
    pub session_timeout: Span,
    /// How long requests wait for a model without connected workers before they fail
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().no_worker_timeout), env = "INFLIGHT_ROUTER_NO_WORKER_TIMEOUT")]
    pub no_worker_timeout: Span,
    /// Models that may have no workers now, such as those scaled to zero: requests for them are held until a worker
    /// serves them
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = clap::builder::NonEmptyStringValueParser::new(), env = "INFLIGHT_ROUTER_EXPECT_MODELS")]
    pub expect_models: Vec<String>,
    /// With --expect-models: how long a request is held
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().cold_start_timeout), env = "INFLIGHT_ROUTER_COLD_START_TIMEOUT")]
    pub cold_start_timeout: Span,
    /// Retry delay that clients are told when the queue is full
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().retry_delay), env = "INFLIGHT_ROUTER_RETRY_DELAY")]
    pub retry_delay: Span,
    /// Interval of HTTP/2 keep-alive pings to clients
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().keepalive_interval), env = "INFLIGHT_ROUTER_KEEPALIVE_INTERVAL")]
    pub keepalive_interval: Span,
    /// Interval of DNS lookups of workers
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().discovery_interval), env = "INFLIGHT_ROUTER_DISCOVERY_INTERVAL")]
    pub discovery_interval: Span,
    /// Retry budget: requests resubmitted per second after worker failures; more wait
    #[arg(long, value_name = "N", default_value_t = Options::default().retry_rate, env = "INFLIGHT_ROUTER_RETRY_RATE")]
    pub retry_rate: u32,
    /// Retry budget: burst of resubmissions
    #[arg(long, value_name = "N", default_value_t = Options::default().retry_burst, env = "INFLIGHT_ROUTER_RETRY_BURST")]
    pub retry_burst: u32,
    /// How long streams stay on a draining worker before they move to another
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().drain_grace), env = "INFLIGHT_ROUTER_DRAIN_GRACE")]
    pub drain_grace: Span,
    /// Maximum tokens of one request: prompt plus max_tokens of all its choices
    #[arg(long, value_name = "N", default_value_t = Options::default().request_tokens_max, env = "INFLIGHT_ROUTER_REQUEST_TOKENS_MAX")]
    pub request_tokens_max: u64,
    /// Tokens buffered for a slow client before its request is paused until it reads again
    #[arg(long, value_name = "N", default_value_t = Options::default().client_buffer_tokens, env = "INFLIGHT_ROUTER_CLIENT_BUFFER_TOKENS")]
    pub client_buffer_tokens: usize,
    /// How long a client may read nothing of its stream before the call is ended
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().stall_timeout), env = "INFLIGHT_ROUTER_STALL_TIMEOUT")]
    pub stall_timeout: Span,
    /// File of tenants with their API keys and limits, reloaded when it changes; without it no authentication
    /// is required
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_TENANTS_FILE")]
    pub tenants_file: Option<PathBuf>,
    /// Failed API keys per minute from one IP address (one /64 for IPv6) that are answered UNAUTHENTICATED; further
    /// ones are answered RESOURCE_EXHAUSTED. Valid keys are not affected
    #[arg(long, value_name = "N", default_value_t = Options::default().key_failures_per_minute, env = "INFLIGHT_ROUTER_KEY_FAILURES_PER_MINUTE")]
    pub key_failures_per_minute: u64,
    /// Maximum client addresses whose failed API keys are counted
    #[arg(long, value_name = "N", default_value_t = Options::default().key_failure_addresses_max, env = "INFLIGHT_ROUTER_KEY_FAILURE_ADDRESSES_MAX")]
    pub key_failure_addresses_max: usize,
    /// Without --tenants-file: schedule requests by the weight and priority that they give, which are ignored
    /// otherwise
    #[arg(long, value_name = "BOOL", default_value_t = Options::default().anonymous_weights, action = clap::ArgAction::Set, env = "INFLIGHT_ROUTER_ANONYMOUS_WEIGHTS")]
    pub anonymous_weights: bool,
    /// Record all events of the dispatcher to this file, for `inflight replay`. It holds names of tenants and
    /// generated token ids, but no prompts
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_RECORD")]
    pub record: Option<PathBuf>,
    /// Directory of the usage log, one line per request, for billing; each router needs its own
    #[arg(long, value_name = "DIR", env = "INFLIGHT_ROUTER_USAGE_LOG")]
    pub usage_log: Option<PathBuf>,
    /// Size of a usage file after which a new one is started
    #[arg(long, value_name = "BYTES", default_value = "64MiB", env = "INFLIGHT_ROUTER_USAGE_LOG_BYTES")]
    pub usage_log_bytes: ByteSize,
    /// Maximum usage files; --usage-log-excess says what happens beyond them
    #[arg(long, value_name = "N", default_value_t = 64, env = "INFLIGHT_ROUTER_USAGE_LOG_FILES")]
    pub usage_log_files: usize,
    /// The oldest usage files beyond --usage-log-files: remove, or keep (at --usage-log-files times --usage-log-bytes
    /// the log cannot be written until files are taken away, and --usage-log-on-error decides)
    #[arg(long, value_name = "WHAT", default_value_t = UsageLogExcess::Remove, env = "INFLIGHT_ROUTER_USAGE_LOG_EXCESS")]
    pub usage_log_excess: UsageLogExcess,
    /// Requests while the usage log cannot be written: refuse, or serve (lost lines are logged and counted)
    #[arg(long, value_name = "POLICY", default_value_t = UsageLogPolicy::Refuse, env = "INFLIGHT_ROUTER_USAGE_LOG_ON_ERROR")]
    pub usage_log_on_error: UsageLogPolicy,
    /// File with the secrets that sign the cursors of streams, from which clients resume them at any router; the
    /// same for all routers. One key of 32 characters or more on each line: the first signs, all verify. Without
    /// it, streams can be resumed at this process only
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_RESUME_KEY_FILE")]
    pub resume_key_file: Option<PathBuf>,
    /// Time after its last message in which a stream can be resumed
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().resume_age_max), env = "INFLIGHT_ROUTER_RESUME_MAX_AGE")]
    pub resume_max_age: Span,
    /// Queueing time after which a request goes first within its tenant, at the highest priority
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().aging_threshold), env = "INFLIGHT_ROUTER_AGING_THRESHOLD")]
    pub aging_threshold: Span,
    /// Ageing: service, in tokens of weight 1, forgiven per second of queueing
    #[arg(long, value_name = "TOKENS", default_value_t = Options::default().aging_tokens_per_second, env = "INFLIGHT_ROUTER_AGING_TOKENS_PER_SECOND")]
    pub aging_tokens_per_second: f64,
    /// Ageing: maximum service forgiven
    #[arg(long, value_name = "TOKENS", default_value_t = Options::default().aging_tokens_max, env = "INFLIGHT_ROUTER_AGING_TOKENS_MAX")]
    pub aging_tokens_max: f64,
    /// Head-of-line bypass: how many later requests may be dispatched ahead of one that fits on no worker now
    #[arg(long, value_name = "N", default_value_t = Options::default().bypass_max, env = "INFLIGHT_ROUTER_BYPASS_MAX")]
    pub bypass_max: u32,
    /// How long a model whose workers are gone stays UNAVAILABLE before it is NOT_FOUND
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().model_retention), env = "INFLIGHT_ROUTER_MODEL_RETENTION")]
    pub model_retention: Span,
    /// Maximum client connections
    #[arg(long, value_name = "N", default_value_t = Options::default().connections.connections_max, env = "INFLIGHT_ROUTER_CONNECTIONS_MAX")]
    pub connections_max: usize,
    /// Maximum client connections from one IP address (one /64 for IPv6)
    #[arg(long, value_name = "N", default_value_t = Options::default().connections.per_address_max, env = "INFLIGHT_ROUTER_ADDRESS_CONNECTIONS_MAX")]
    pub address_connections_max: usize,
    /// Maximum open calls on one connection
    #[arg(long, value_name = "N", default_value_t = Options::default().connection_streams_max, env = "INFLIGHT_ROUTER_CONNECTION_STREAMS_MAX")]
    pub connection_streams_max: u32,
    /// Maximum size of a call's headers
    #[arg(long, value_name = "BYTES", default_value_t = Options::default().header_bytes_max, env = "INFLIGHT_ROUTER_HEADER_BYTES_MAX")]
    pub header_bytes_max: u32,
    /// Timeout of receiving a call's message, from its headers
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().message_time_max), env = "INFLIGHT_ROUTER_MESSAGE_TIMEOUT")]
    pub message_timeout: Span,
    /// Timeout of the TLS handshake
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().connections.handshake_max), env = "INFLIGHT_ROUTER_HANDSHAKE_TIMEOUT")]
    pub handshake_timeout: Span,
    /// Timeout of a connection's first call
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().connections.first_call_max), env = "INFLIGHT_ROUTER_FIRST_CALL_TIMEOUT")]
    pub first_call_timeout: Span,
    /// Idle timeout of connections that have shown no API key or certificate
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().connections.unauthenticated_idle_max), env = "INFLIGHT_ROUTER_UNAUTHENTICATED_IDLE_TIMEOUT")]
    pub unauthenticated_idle_timeout: Span,
    /// Idle timeout of connections
    #[arg(long, value_name = "DURATION", default_value_t = Span(Options::default().connections.idle_max), env = "INFLIGHT_ROUTER_IDLE_TIMEOUT")]
    pub idle_timeout: Span,
    /// Serve gRPC server reflection
    #[arg(long, value_name = "BOOL", default_value_t = Options::default().reflection, action = clap::ArgAction::Set, env = "INFLIGHT_ROUTER_REFLECTION")]
    pub reflection: bool,
    /// Serve operators: gRPC's Admin service and, over HTTP, the live view at /ui: off, read-only, or on
    #[arg(long, value_name = "MODE", default_value_t = Options::default().admin, env = "INFLIGHT_ROUTER_ADMIN")]
    pub admin: Admin,
    /// Maximum viewers of the live view
    #[arg(long, value_name = "N", default_value_t = Options::default().viewers_max, env = "INFLIGHT_ROUTER_VIEWERS_MAX")]
    pub viewers_max: u32,
    /// Bytes a second that a viewer of the live view is sent
    #[arg(long, value_name = "BYTES", default_value_t = ByteSize(Options::default().viewer_bytes_per_second), env = "INFLIGHT_ROUTER_VIEWER_BYTES_PER_SECOND")]
    pub viewer_bytes_per_second: ByteSize,
    /// Socket of the supervisor, which kills workers for the live view; set by `inflight up`
    #[arg(long, hide = true)]
    pub supervisor: Option<PathBuf>,
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
    fn http(&self) -> Option<HttpOptions> {
        let ListenAt::Address(listen) = self.http_listen else { return None };
        Some(HttpOptions {
            listen,
            cors_origins: self.http_cors.clone(),
            hosts: self.http_hosts.clone(),
            metrics: self.http_metrics,
            timings: self.http_timings,
            keepalive: self.http_keepalive.0,
        })
    }

    fn resume_keys(&self) -> Result<Vec<Vec<u8>>, CommandError> {
        let Some(path) = &self.resume_key_file else { return Ok(Vec::new()) };
        let secrets = inflight_net::read_secrets(path);
        secrets
            .map(|secrets| secrets.to_vec())
            .map_err(|error| CommandError::chain("--resume-key-file", &error))
    }

    fn options(&self) -> Result<Options, CommandError> {
        let options = Options {
            listen: self.listen,
            http: self.http(),
            workers: self.workers.clone(),
            router_id: self.router_id.clone().unwrap_or_else(|| format!("router@{}", self.listen)),
            incarnation: incarnation(),
            placement: self.placement,
            queue_requests_max: self.queue_requests_max,
            queue_tokens_max: self.queue_tokens_max,
            message_bytes_max: usize::try_from(self.message_bytes_max.0).unwrap_or(usize::MAX),
            receive_bytes_max: self.receive_bytes_max.0,
            unread_bytes_max: self.unread_bytes_max.0,
            default_max_tokens: self.default_max_tokens,
            streams_max: self.streams_max,
            tokenize_queue_max: self.tokenize_queue_max,
            grammar_confinement: Some(grammar_helper::confinement(self.role.grammar_memory_max.0)),
            tokenize_tokens_max: self.tokenize_tokens_max,
            special_tokens_in_chat: self.special_tokens_in_chat,
            tool_call_format: self.tool_call_format.clone(),
            reasoning_format: self.reasoning_format.clone(),
            worker_commands_max: self.worker_commands_max,
            connect_timeout: self.connect_timeout.0,
            reconnect_backoff_max: self.reconnect_backoff_max.0,
            session_timeout: self.session_timeout.0,
            no_worker_timeout: self.no_worker_timeout.0,
            expected_models: self.expect_models.clone(),
            cold_start_timeout: self.cold_start_timeout.0,
            discovery_interval: self.discovery_interval.0,
            retry_rate: self.retry_rate,
            retry_burst: self.retry_burst,
            drain_grace: self.drain_grace.0,
            request_tokens_max: self.request_tokens_max,
            client_buffer_tokens: self.client_buffer_tokens,
            stall_timeout: self.stall_timeout.0,
            retry_delay: self.retry_delay.0,
            aging_threshold: self.aging_threshold.0,
            aging_tokens_per_second: self.aging_tokens_per_second,
            aging_tokens_max: self.aging_tokens_max,
            bypass_max: self.bypass_max,
            tenants_file: self.tenants_file.clone(),
            key_failures_per_minute: self.key_failures_per_minute,
            key_failure_addresses_max: self.key_failure_addresses_max,
            anonymous_weights: self.anonymous_weights,
            record: self.record.clone(),
            usage_log: self.usage_log.clone().map(|directory| UsageLogOptions {
                directory,
                file_bytes_max: self.usage_log_bytes.0,
                files_max: self.usage_log_files,
                excess: self.usage_log_excess,
                on_error: self.usage_log_on_error,
            }),
            resume_keys: self.resume_keys()?,
            resume_age_max: self.resume_max_age.0,
            tls: self.tls.files()?,
            worker_tls: self.worker_tls.tls()?,
            worker_secret: self.worker_secret.open()?,
            connections: ConnectionLimits {
                connections_max: self.connections_max,
                per_address_max: self.address_connections_max,
                handshake_max: self.handshake_timeout.0,
                unauthenticated_idle_max: self.unauthenticated_idle_timeout.0,
                first_call_max: self.first_call_timeout.0,
                idle_max: self.idle_timeout.0,
            },
            header_bytes_max: self.header_bytes_max,
            message_time_max: self.message_timeout.0,
            connection_streams_max: self.connection_streams_max,
            model_retention: self.model_retention.0,
            keepalive_interval: self.keepalive_interval.0,
            reflection: self.reflection,
            admin: self.admin,
            viewers_max: self.viewers_max,
            viewer_bytes_per_second: self.viewer_bytes_per_second.0,
            supervisor: self.supervisor.clone(),
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
    let router_id = options.router_id.clone();
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
    let listeners = 1 + usize::from(options.http.is_some());
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

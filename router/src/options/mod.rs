//! Options of a router and their validation.

mod admin;
mod connections;
mod error;
mod http;
mod template_date;
mod trace_url;
mod usage_log;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use inflight_contract::JsonWhitespace;
use inflight_grammar_service::Confinement;
use inflight_net::{ClientTls, SecretFile, ServerTlsFiles};
use inflight_options::{bytes, duration};
use inflight_output_parser::{ReasoningFormat, ToolCallFormat};
use inflight_router_core::{DispatcherOptions, PlacementKind};
use tonic::transport::Endpoint;

pub use self::admin::Admin;
pub use self::connections::ConnectionOptions;
pub use self::error::OptionsError;
pub use self::http::HttpOptions;
pub use self::template_date::TemplateDate;
pub use self::trace_url::TraceUrl;
pub use self::usage_log::{UsageLogExcess, UsageLogOptions, UsageLogPolicy};
use crate::cluster::discovery::Source;
use crate::format_choice::FormatChoice;
use crate::metrics as names;

/// Options of a router, each with its name, environment variable, default and help. The defaults suit a small cluster.
///
/// What has no flag here (`skip`) is what files say and what the process brings: certificates, secrets, the program of grammar helpers.
#[derive(Debug, Clone, clap::Args)]
// Without a group, whose name would be that of the worker's options.
#[group(skip)]
#[allow(rustdoc::broken_intra_doc_links, reason = "brackets of a flag's help are no links")]
pub struct Options {
    /// Address on which to listen for clients; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8650", env = "INFLIGHT_ROUTER_LISTEN")]
    pub listen: SocketAddr,
    /// HTTP APIs; off by default.
    #[command(flatten)]
    pub http: HttpOptions,
    /// Workers, separated by commas: HOST:PORT, dns://NAME:PORT or kubernetes://NAMESPACE/SERVICE:PORT
    #[arg(long, value_name = "SOURCE", value_delimiter = ',', env = "INFLIGHT_ROUTER_WORKERS")]
    pub workers: Vec<String>,
    /// Name of this router in logs of the workers [default: router@ADDRESS]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_ROUTER_ID")]
    pub router_id: Option<String>,
    /// Random id of this process, by which workers count routers; empty if unknown.
    #[arg(skip)]
    pub incarnation: String,
    /// Placement policy (load balancing): cost, prefix, power-of-two, least-loaded or round-robin
    #[arg(
        long,
        value_name = "NAME",
        default_value_t = PlacementKind::default(),
        env = "INFLIGHT_ROUTER_PLACEMENT"
    )]
    pub placement: PlacementKind,
    /// Queue, retries and times of the dispatcher.
    #[command(flatten)]
    pub dispatcher: DispatcherOptions,
    /// Maximum size of a request message
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "4MiB",
        value_parser = bytes::<usize>,
        env = "INFLIGHT_ROUTER_MESSAGE_BYTES_MAX"
    )]
    pub message_bytes_max: usize,
    /// Maximum bytes of all request messages that are being received or tokenized
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "256MiB",
        value_parser = bytes::<u64>,
        env = "INFLIGHT_ROUTER_RECEIVE_BYTES_MAX"
    )]
    pub receive_bytes_max: u64,
    /// Maximum bytes of response data that clients have not read; beyond it, the connection with the most unread data is closed
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "256MiB",
        value_parser = bytes::<u64>,
        env = "INFLIGHT_ROUTER_UNREAD_BYTES_MAX"
    )]
    pub unread_bytes_max: u64,
    /// max_tokens of requests that do not set it
    #[arg(long, value_name = "N", default_value_t = 1024, env = "INFLIGHT_ROUTER_DEFAULT_MAX_TOKENS")]
    pub default_max_tokens: u32,
    /// Maximum open Generate and Tokenize calls, queued and streaming
    #[arg(long, value_name = "N", default_value_t = 4096, env = "INFLIGHT_ROUTER_STREAMS_MAX")]
    pub streams_max: usize,
    /// Maximum requests with large prompts (over 16 KiB of text) that are being tokenized or wait for it
    #[arg(long, value_name = "N", default_value_t = 256, env = "INFLIGHT_ROUTER_TOKENIZE_QUEUE_MAX")]
    pub tokenize_queue_max: usize,
    /// Processes that compile the grammars of requests; `None` compiles them in this one, which a hostile grammar can end.
    #[arg(skip)]
    pub grammar_confinement: Option<Confinement>,
    /// Maximum tokens of a text that Tokenize, /tokenize, /detokenize or count_tokens takes
    #[arg(long, value_name = "N", default_value_t = 256 << 10, env = "INFLIGHT_ROUTER_TOKENIZE_TOKENS_MAX")]
    pub tokenize_tokens_max: usize,
    /// Recognise special tokens in the messages of conversations, which can then end or forge a message; false: they
    /// are plain text
    #[arg(
        long,
        value_name = "BOOL",
        default_value_t = false,
        action = clap::ArgAction::Set,
        env = "INFLIGHT_ROUTER_SPECIAL_TOKENS_IN_CHAT"
    )]
    pub special_tokens_in_chat: bool,
    /// Format of the models' tool calls: llama3, hermes, qwen-xml or mistral; auto: that of the chat template; none:
    /// tools are refused. MODEL=FORMAT, separated by commas, for single models
    #[arg(
        long,
        value_name = "FORMAT",
        default_value_t = FormatChoice::default(),
        env = "INFLIGHT_ROUTER_TOOL_CALL_FORMAT"
    )]
    pub tool_call_format: FormatChoice<ToolCallFormat>,
    /// Format of the models' reasoning: think or mistral; auto: that of the chat template; none: reasoning is part of
    /// the text. MODEL=FORMAT, separated by commas, for single models
    #[arg(
        long,
        value_name = "FORMAT",
        default_value_t = FormatChoice::default(),
        env = "INFLIGHT_ROUTER_REASONING_FORMAT"
    )]
    pub reasoning_format: FormatChoice<ReasoningFormat>,
    /// Whitespace that JSON of a schema, or any JSON object, may have between its parts: one-line (none, or one space after a colon and after a
    /// comma) or any (a space, or a line break with its indentation). It does not change tool calls
    #[arg(
        long,
        value_name = "WHITESPACE",
        default_value_t = JsonWhitespace::default(),
        env = "INFLIGHT_ROUTER_JSON_WHITESPACE"
    )]
    pub json_whitespace: JsonWhitespace,
    /// Date that chat templates write into prompts: today (the UTC date at which a request starts) or a fixed date such as 2026-01-31,
    /// with which equal conversations have equal prompts on every day
    #[arg(long, value_name = "DATE", default_value_t = TemplateDate::Today, env = "INFLIGHT_ROUTER_TEMPLATE_DATE")]
    pub template_date: TemplateDate,
    /// Maximum messages that wait for a worker to read them; beyond, its session is closed and its streams move
    #[arg(long, value_name = "N", default_value_t = 16 << 10, env = "INFLIGHT_ROUTER_WORKER_COMMANDS_MAX")]
    pub worker_commands_max: usize,
    /// Timeout of connecting to a worker
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "5s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_CONNECT_TIMEOUT"
    )]
    pub connect_timeout: Duration,
    /// Maximum backoff between attempts to connect to a worker
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "5s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_RECONNECT_BACKOFF_MAX"
    )]
    pub reconnect_backoff_max: Duration,
    /// Session timeout for workers that announce no heartbeat interval
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "10s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_SESSION_TIMEOUT"
    )]
    pub session_timeout: Duration,
    /// Models that may have no workers now, such as those scaled to zero: requests for them are held until a worker
    /// serves them
    #[arg(
        id = "expect_models",
        long = "expect-models",
        value_name = "NAME,…",
        value_delimiter = ',',
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        env = "INFLIGHT_ROUTER_EXPECT_MODELS"
    )]
    pub expected_models: Vec<String>,
    /// With --expect-models: how long a request is held
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "10m",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_COLD_START_TIMEOUT"
    )]
    pub cold_start_timeout: Duration,
    /// Interval of DNS lookups of workers
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "5s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_DISCOVERY_INTERVAL"
    )]
    pub discovery_interval: Duration,
    /// Tokens buffered for a slow client before its request is paused until it reads again
    #[arg(long, value_name = "N", default_value_t = 8192, env = "INFLIGHT_ROUTER_CLIENT_BUFFER_TOKENS")]
    pub client_buffer_tokens: usize,
    /// How long a client may read nothing of its stream before the call is ended
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "1m",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_STALL_TIMEOUT"
    )]
    pub stall_timeout: Duration,
    /// Retry delay that clients are told when the queue is full
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "1s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_RETRY_DELAY"
    )]
    pub retry_delay: Duration,
    /// File of tenants with their API keys and limits, reloaded when it changes; without it no authentication
    /// is required
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_TENANTS_FILE")]
    pub tenants_file: Option<PathBuf>,
    /// Failed API keys per minute from one IP address (one /64 for IPv6) that are answered UNAUTHENTICATED; further
    /// ones are answered RESOURCE_EXHAUSTED. Valid keys are not affected
    #[arg(long, value_name = "N", default_value_t = 60, env = "INFLIGHT_ROUTER_KEY_FAILURES_PER_MINUTE")]
    pub key_failures_per_minute: u64,
    /// Maximum client addresses whose failed API keys are counted
    #[arg(
        long,
        value_name = "N",
        default_value_t = 16 << 10,
        env = "INFLIGHT_ROUTER_KEY_FAILURE_ADDRESSES_MAX"
    )]
    pub key_failure_addresses_max: usize,
    /// Without --tenants-file: schedule requests by the weight and priority that they give, which are ignored
    /// otherwise
    #[arg(
        long,
        value_name = "BOOL",
        default_value_t = false,
        action = clap::ArgAction::Set,
        env = "INFLIGHT_ROUTER_ANONYMOUS_WEIGHTS"
    )]
    pub anonymous_weights: bool,
    /// Server certificate, key and trusted client certificates; without it connections are plaintext.
    #[arg(skip)]
    pub tls: Option<ServerTlsFiles>,
    /// TLS towards workers; without it connections are plaintext.
    #[arg(skip)]
    pub worker_tls: Option<ClientTls>,
    /// Secret that the router proves to workers and requires of them; `None`: neither.
    #[arg(skip)]
    pub worker_secret: Option<SecretFile>,
    /// Limits of client connections.
    #[command(flatten)]
    pub connections: ConnectionOptions,
    /// Maximum open calls on one connection
    #[arg(long, value_name = "N", default_value_t = 1024, env = "INFLIGHT_ROUTER_CONNECTION_STREAMS_MAX")]
    pub connection_streams_max: u32,
    /// Maximum size of a call's headers
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "16384",
        value_parser = bytes::<u32>,
        env = "INFLIGHT_ROUTER_HEADER_BYTES_MAX"
    )]
    pub header_bytes_max: u32,
    /// Timeout of receiving a call's message, from its headers
    #[arg(
        id = "message_timeout",
        long = "message-timeout",
        value_name = "DURATION",
        default_value = "30s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_MESSAGE_TIMEOUT"
    )]
    pub message_time_max: Duration,
    /// Interval of HTTP/2 keep-alive pings to clients
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "10s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_KEEPALIVE_INTERVAL"
    )]
    pub keepalive_interval: Duration,
    /// Serve gRPC server reflection
    #[arg(
        long,
        value_name = "BOOL",
        default_value_t = true,
        action = clap::ArgAction::Set,
        env = "INFLIGHT_ROUTER_REFLECTION"
    )]
    pub reflection: bool,
    /// Record all events of the dispatcher to this file, for `inflight replay`. It holds names of tenants and
    /// generated token ids, but no prompts
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_RECORD")]
    pub record: Option<PathBuf>,
    /// Directory of the usage log, one line per request, for billing; each router needs its own
    #[arg(long, value_name = "DIR", env = "INFLIGHT_ROUTER_USAGE_LOG")]
    pub usage_log: Option<PathBuf>,
    /// Files of the usage log.
    #[command(flatten)]
    pub usage_files: UsageLogOptions,
    /// Secrets that sign the cursors of streams, shared by all routers: the first signs, all verify. Without one,
    /// a random one is used, and only this process resumes its streams.
    #[arg(skip)]
    pub resume_keys: Vec<Vec<u8>>,
    /// Time after its last message in which a stream can be resumed
    #[arg(
        id = "resume_max_age",
        long = "resume-max-age",
        value_name = "DURATION",
        default_value = "10m",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_RESUME_MAX_AGE"
    )]
    pub resume_age_max: Duration,
    /// Serve operators: gRPC's Admin service and, over HTTP, the live view at /ui and the chat at /chat: off, read-only, or on
    #[arg(long, value_name = "MODE", default_value_t = Admin::default(), env = "INFLIGHT_ROUTER_ADMIN")]
    pub admin: Admin,
    /// Maximum viewers of the live view
    #[arg(long, value_name = "N", default_value_t = 8, env = "INFLIGHT_ROUTER_VIEWERS_MAX")]
    pub viewers_max: u32,
    /// Bytes a second that a viewer of the live view is sent
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "1MiB",
        value_parser = bytes::<u64>,
        env = "INFLIGHT_ROUTER_VIEWER_BYTES_PER_SECOND"
    )]
    pub viewer_bytes_per_second: u64,
    /// Address of a trace in a viewer of traces, with {trace_id} in place of its id; the live view links traces by it
    #[arg(long, value_name = "URL", env = "INFLIGHT_ROUTER_TRACE_URL")]
    pub trace_url: Option<TraceUrl>,
    /// Socket of the supervisor, which kills workers for the live view; set by `inflight up`
    #[arg(long, hide = true)]
    pub supervisor: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        inflight_options::defaults()
    }
}

impl Options {
    /// Returns the name of this router, shown to workers, in logs and metrics.
    pub fn router_id(&self) -> String {
        self.router_id.clone().unwrap_or_else(|| format!("router@{}", self.listen))
    }

    /// Sets the gauges of the router's limits.
    pub(crate) fn export_limits(&self) {
        metrics::gauge!(names::QUEUE_REQUESTS_MAX).set(self.dispatcher.queue.limits.requests as f64);
        metrics::gauge!(names::QUEUE_TOKENS_MAX).set(self.dispatcher.queue.limits.tokens as f64);
        metrics::gauge!(names::STREAMS_MAX).set(self.streams_max as f64);
        metrics::gauge!(names::RECEIVE_BYTES_MAX).set(self.receive_bytes_max as f64);
        metrics::gauge!(names::UNREAD_BYTES_MAX).set(self.unread_bytes_max as f64);
        metrics::gauge!(names::TOKENIZE_WAITING_MAX).set(self.tokenize_queue_max as f64);
        metrics::gauge!(names::BYPASS_MAX).set(self.dispatcher.queue.bypass_max);
        metrics::gauge!(names::WORKER_COMMANDS_MAX).set(self.worker_commands_max as f64);
        metrics::gauge!(names::RETRY_RATE).set(self.dispatcher.retry_rate);
    }

    /// Validates the options.
    ///
    /// # Errors
    /// [`OptionsError`] of the first invalid one.
    pub fn validate(&self) -> Result<(), OptionsError> {
        if self.workers.is_empty() {
            return Err(OptionsError::NoWorkers);
        }
        for (at, address) in self.workers.iter().enumerate() {
            if self.workers[..at].contains(address) {
                return Err(OptionsError::DuplicateWorker { address: address.clone() });
            }
            address.parse::<Source>()?;
        }
        if let Some(name) = self.expected_models.iter().find(|name| name.is_empty() || name.trim() != *name) {
            return Err(OptionsError::ExpectedModel { name: name.clone() });
        }
        let queue = &self.dispatcher.queue;
        let (logs, serves_http) = (self.usage_log.is_some(), self.http.listen.address().is_some());
        let bounds = [
            ("--queue-requests-max", queue.limits.requests == 0),
            ("--queue-tokens-max", queue.limits.tokens == 0),
            ("--streams-max", self.streams_max == 0),
            ("--connections-max", self.connections.connections_max == 0),
            ("--address-connections-max", self.connections.per_address_max == 0),
            ("--unauthenticated-idle-timeout", self.connections.unauthenticated_idle_max.is_zero()),
            ("--first-call-timeout", self.connections.first_call_max.is_zero()),
            ("--idle-timeout", self.connections.idle_max.is_zero()),
            ("--handshake-timeout", self.connections.handshake_max.is_zero()),
            ("--key-failures-per-minute", self.key_failures_per_minute == 0),
            ("--key-failure-addresses-max", self.key_failure_addresses_max == 0),
            ("--header-bytes-max", self.header_bytes_max == 0),
            ("--connection-streams-max", self.connection_streams_max == 0),
            ("--aging-threshold", queue.aging_threshold.is_zero()),
            ("--message-bytes-max", self.message_bytes_max == 0),
            ("--unread-bytes-max", self.unread_bytes_max == 0),
            ("--default-max-tokens", self.default_max_tokens == 0),
            ("--tokenize-queue-max", self.tokenize_queue_max == 0),
            ("--tokenize-tokens-max", self.tokenize_tokens_max == 0),
            ("--worker-commands-max", self.worker_commands_max == 0),
            ("--retry-rate", self.dispatcher.retry_rate == 0),
            ("--request-tokens-max", self.dispatcher.request_tokens_max == 0),
            ("--client-buffer-tokens", self.client_buffer_tokens == 0),
            ("--discovery-interval", self.discovery_interval.is_zero()),
            ("--stall-timeout", self.stall_timeout.is_zero()),
            ("--viewers-max", self.viewers_max == 0),
            ("--viewer-bytes-per-second", self.viewer_bytes_per_second == 0),
            ("--connect-timeout", self.connect_timeout.is_zero()),
            ("--reconnect-backoff-max", self.reconnect_backoff_max.is_zero()),
            ("--session-timeout", self.session_timeout.is_zero()),
            ("--keepalive-interval", self.keepalive_interval.is_zero()),
            ("--usage-log-bytes", logs && self.usage_files.file_bytes_max == 0),
            ("--usage-log-files", logs && self.usage_files.files_max == 0),
            ("--http-keepalive", serves_http && self.http.keepalive.is_zero()),
        ];
        if let Some((name, _)) = bounds.into_iter().find(|(_, zero)| *zero) {
            return Err(OptionsError::Zero { name });
        }
        let (receive, message) = (self.receive_bytes_max, self.message_bytes_max);
        if receive < message as u64 {
            return Err(OptionsError::ReceiveBytes { receive, message });
        }
        Ok(())
    }
}

/// Returns the endpoint of a worker, with TLS if configured. Certificates are read on each call.
pub(crate) fn secure_endpoint(
    address: &str,
    tls: Option<&ClientTls>,
) -> Result<Endpoint, Box<dyn std::error::Error + Send + Sync>> {
    let endpoint = worker_endpoint(address)?;
    let Some(tls) = tls else { return Ok(endpoint) };
    Ok(Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls.load()?)?)
}

/// Returns the endpoint of a worker given as `host:port`.
pub(crate) fn worker_endpoint(address: &str) -> Result<Endpoint, OptionsError> {
    let refused = |reason: String| OptionsError::WorkerAddress { address: address.to_owned(), reason };
    let endpoint =
        Endpoint::from_shared(format!("http://{address}")).map_err(|error| refused(error.to_string()))?;
    let uri = endpoint.uri();
    if uri.port_u16().is_none_or(|port| port == 0) {
        return Err(refused("the port is missing".to_owned()));
    }
    if uri.path() != "/" || uri.query().is_some() {
        return Err(refused("give no scheme and no path".to_owned()));
    }
    Ok(endpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_and_a_port_make_a_worker_address() {
        let with = |workers: &[&str]| Options {
            workers: workers.iter().map(|w| (*w).to_owned()).collect(),
            ..Options::default()
        };
        assert_eq!(with(&["127.0.0.1:7001", "worker-1.workers:7001", "[::1]:7001"]).validate(), Ok(()));
        assert_eq!(with(&[]).validate(), Err(OptionsError::NoWorkers));
        for bad in ["worker", "http://worker:1", "worker:1/path", "worker:0", "worker:99999", "", "a b:1"] {
            assert!(matches!(with(&[bad]).validate(), Err(OptionsError::Source(_))), "{bad:?} was taken");
        }
        assert!(matches!(with(&["a:1", "a:1"]).validate(), Err(OptionsError::DuplicateWorker { .. })));
        let mut zero = with(&["a:1"]);
        zero.dispatcher.retry_rate = 0;
        assert_eq!(zero.validate(), Err(OptionsError::Zero { name: "--retry-rate" }));
    }
}

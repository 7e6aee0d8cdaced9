//! Options of a router and their validation.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use inflight_grammar_service::Confinement;
use inflight_net::{ClientTls, ConnectionLimits, SecretFile, ServerTlsFiles};
use inflight_output_parser::{ReasoningFormat, ToolCallFormat};
use inflight_router_core::PlacementKind;
use tonic::transport::Endpoint;

use crate::cluster::discovery::{Source, SourceError};
use crate::format_choice::FormatChoice;
use crate::metrics as names;

/// Options of the HTTP APIs.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// Address that clients connect to; port 0 chooses a free one.
    pub listen: SocketAddr,
    /// Origins of browsers that may call; `*` is any.
    pub cors_origins: Vec<String>,
    /// Names under which callers without a key reach the router on a loopback address, beside localhost and addresses; `*` is any.
    pub hosts: Vec<String>,
    /// Whether the metrics of the process are served, to every client.
    pub metrics: bool,
    /// Whether responses have the timings of their requests.
    pub timings: bool,
    /// Time without output after which a stream gets a comment, and after which its headers are sent.
    pub keepalive: Duration,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            cors_origins: Vec::new(),
            hosts: Vec::new(),
            metrics: false,
            timings: false,
            keepalive: Duration::from_secs(10),
        }
    }
}

/// Requests while the usage log cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageLogPolicy {
    /// They are refused.
    Refuse,
    /// They are served; a line that cannot be kept is logged and counted.
    Serve,
}

impl fmt::Display for UsageLogPolicy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Refuse => "refuse",
            Self::Serve => "serve",
        })
    }
}

impl FromStr for UsageLogPolicy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = [Self::Refuse, Self::Serve].into_iter().find(|policy| policy.to_string() == name);
        found.ok_or_else(|| "not refuse or serve".to_owned())
    }
}

/// Files of the usage log beyond its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageLogExcess {
    /// The oldest are removed, collected or not.
    Remove,
    /// All are kept: at the limits the log cannot be written until files are taken away.
    Keep,
}

impl fmt::Display for UsageLogExcess {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Remove => "remove",
            Self::Keep => "keep",
        })
    }
}

impl FromStr for UsageLogExcess {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = [Self::Remove, Self::Keep].into_iter().find(|excess| excess.to_string() == name);
        found.ok_or_else(|| "not remove or keep".to_owned())
    }
}

/// Options of the usage log.
#[derive(Debug, Clone)]
pub struct UsageLogOptions {
    /// Directory of its files, used by this router only.
    pub directory: PathBuf,
    /// Size in bytes after which a new file is started.
    pub file_bytes_max: u64,
    /// Maximum number of files.
    pub files_max: usize,
    /// What happens beyond them.
    pub excess: UsageLogExcess,
    /// Requests while the log cannot be written.
    pub on_error: UsageLogPolicy,
}

impl UsageLogOptions {
    /// Returns the default options of a log in `directory`: 64 files of 64 MiB, about 10 million requests.
    pub fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            file_bytes_max: 64 << 20,
            files_max: 64,
            excess: UsageLogExcess::Remove,
            on_error: UsageLogPolicy::Refuse,
        }
    }
}

/// The service for operators: gRPC's `Admin` and, over HTTP, `/ui`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Admin {
    /// Not served.
    #[default]
    Off,
    /// Served, without anything that changes the cluster.
    ReadOnly,
    /// Served.
    On,
}

impl Admin {
    /// All modes.
    const ALL: [Self; 3] = [Self::Off, Self::ReadOnly, Self::On];
}

impl fmt::Display for Admin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Off => "off",
            Self::ReadOnly => "read-only",
            Self::On => "on",
        })
    }
}

impl FromStr for Admin {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|mode| mode.to_string() == name);
        found.ok_or_else(|| "not off, read-only or on".to_owned())
    }
}

/// Options of a router. The defaults suit a small cluster.
#[derive(Debug, Clone)]
pub struct Options {
    /// Address that clients connect to; port 0 chooses a free one.
    pub listen: SocketAddr,
    /// HTTP APIs; without it gRPC only.
    pub http: Option<HttpOptions>,
    /// Discovery sources of workers; see [`Source`](crate::Source).
    pub workers: Vec<String>,
    /// Name of this router, shown to workers, in logs and metrics.
    pub router_id: String,
    /// Random id of this process, by which workers count routers; empty if unknown.
    pub incarnation: String,
    /// Placement policy.
    pub placement: PlacementKind,
    /// Maximum requests in the queue.
    pub queue_requests_max: usize,
    /// Maximum tokens (prompts and possible output) of the requests in the queue.
    pub queue_tokens_max: u64,
    /// Maximum `Generate` calls open at once, waiting and streaming.
    pub streams_max: usize,
    /// Maximum requests with large prompts that are being tokenized or wait for it, and as many whose grammars are being compiled.
    pub tokenize_queue_max: usize,
    /// Processes that compile the grammars of requests; `None` compiles them in this one, which a hostile grammar can end.
    pub grammar_confinement: Option<Confinement>,
    /// Maximum tokens of the texts that Tokenize and detokenize take.
    pub tokenize_tokens_max: usize,
    /// Whether special tokens are recognised in the messages of conversations.
    pub special_tokens_in_chat: bool,
    /// Formats of the models' tool calls.
    pub tool_call_format: FormatChoice<ToolCallFormat>,
    /// Formats of the models' reasoning.
    pub reasoning_format: FormatChoice<ReasoningFormat>,
    /// Maximum message size from a client, in bytes.
    pub message_bytes_max: usize,
    /// Maximum bytes of all messages being received, or received and not yet tokenized.
    pub receive_bytes_max: u64,
    /// Maximum bytes of response data that clients have not read; beyond it, the connection with the most unread data is closed.
    pub unread_bytes_max: u64,
    /// Default max_tokens of a request.
    pub default_max_tokens: u32,
    /// Timeout of a connection to a worker, its hello and each chunk of its bundle.
    pub connect_timeout: Duration,
    /// Maximum pause between attempts to connect to a worker; the first is 100 ms.
    pub reconnect_backoff_max: Duration,
    /// Time without an update after which a session is lost, for workers that report no heartbeat interval.
    pub session_timeout: Duration,
    /// Time that requests wait for a model whose last worker was lost.
    pub no_worker_timeout: Duration,
    /// Models that may have no workers now, such as those scaled to zero: requests for them are held until
    /// a worker serves them.
    pub expected_models: Vec<String>,
    /// Time that a request for an expected model is held.
    pub cold_start_timeout: Duration,
    /// Interval of polled discovery sources such as DNS.
    pub discovery_interval: Duration,
    /// Maximum messages to a worker that it has not read; beyond, its session is closed.
    pub worker_commands_max: usize,
    /// Retry budget: resubmissions per second after losses, over all requests.
    pub retry_rate: u32,
    /// Burst of the retry budget.
    pub retry_burst: u32,
    /// Time that streams of a draining worker may continue there before they move.
    pub drain_grace: Duration,
    /// Maximum tokens of a request: its prompt and the output of all choices.
    pub request_tokens_max: u64,
    /// Unread tokens above which a request is paused until its client reads again.
    pub client_buffer_tokens: usize,
    /// Time that a client may leave output unread before its call is ended.
    pub stall_timeout: Duration,
    /// Queueing time after which a request goes first within its tenant.
    pub aging_threshold: Duration,
    /// Service forgiven per second of queueing, in tokens of weight 1.
    pub aging_tokens_per_second: f64,
    /// Maximum service forgiven.
    pub aging_tokens_max: f64,
    /// Maximum number of bypasses of a head-of-line request that fits on no worker.
    pub bypass_max: u32,
    /// Retry delay sent to clients when a queue is full.
    pub retry_delay: Duration,
    /// File of tenants with their keys and limits; without it every call is accepted.
    pub tenants_file: Option<PathBuf>,
    /// Failed API keys per minute and client address that are answered UNAUTHENTICATED; further ones are
    /// answered RESOURCE_EXHAUSTED.
    pub key_failures_per_minute: u64,
    /// Maximum client addresses whose failed API keys are counted.
    pub key_failure_addresses_max: usize,
    /// Whether weight and priority of requests count without a tenants file.
    pub anonymous_weights: bool,
    /// Server certificate, key and trusted client certificates; without it connections are plaintext.
    pub tls: Option<ServerTlsFiles>,
    /// TLS towards workers; without it connections are plaintext.
    pub worker_tls: Option<ClientTls>,
    /// Secret that the router proves to workers and requires of them; `None`: neither.
    pub worker_secret: Option<SecretFile>,
    /// Limits of client connections.
    pub connections: ConnectionLimits,
    /// Maximum size of a client's header list, in bytes.
    pub header_bytes_max: u32,
    /// Maximum time from a call's headers to its complete message.
    pub message_time_max: Duration,
    /// Maximum calls open at once on one connection.
    pub connection_streams_max: u32,
    /// Time that a model whose last worker is gone is UNAVAILABLE before it is NOT_FOUND.
    pub model_retention: Duration,
    /// Keep-alive interval and timeout of idle client connections; an unresponsive one is closed and its
    /// requests are cancelled.
    pub keepalive_interval: Duration,
    /// Whether gRPC server reflection is served.
    pub reflection: bool,
    /// File that records all events of the dispatcher, for `inflight replay`. It holds names of tenants and
    /// generated token ids, but no prompts.
    pub record: Option<PathBuf>,
    /// Usage log; without it none is written.
    pub usage_log: Option<UsageLogOptions>,
    /// Secrets that sign the cursors of streams, shared by all routers: the first signs, all verify. Without one,
    /// a random one is used, and only this process resumes its streams.
    pub resume_keys: Vec<Vec<u8>>,
    /// Time after its last message in which a stream can be resumed.
    pub resume_age_max: Duration,
    /// The service for operators.
    pub admin: Admin,
    /// Maximum viewers of the live view, over gRPC and HTTP together.
    pub viewers_max: u32,
    /// Bytes a second that a viewer is sent.
    pub viewer_bytes_per_second: u64,
    /// Socket of the supervisor of `inflight up`, which kills workers for the live view.
    pub supervisor: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 50051)),
            http: None,
            workers: Vec::new(),
            router_id: "router".to_owned(),
            incarnation: String::new(),
            placement: PlacementKind::default(),
            queue_requests_max: 1024,
            queue_tokens_max: 4 << 20,
            streams_max: 4096,
            tokenize_queue_max: 256,
            grammar_confinement: None,
            tokenize_tokens_max: 256 << 10,
            special_tokens_in_chat: false,
            tool_call_format: FormatChoice::default(),
            reasoning_format: FormatChoice::default(),
            message_bytes_max: 4 << 20,
            receive_bytes_max: 256 << 20,
            unread_bytes_max: 256 << 20,
            default_max_tokens: 1024,
            connect_timeout: Duration::from_secs(5),
            reconnect_backoff_max: Duration::from_secs(5),
            session_timeout: Duration::from_secs(10),
            no_worker_timeout: Duration::from_secs(30),
            expected_models: Vec::new(),
            cold_start_timeout: Duration::from_secs(600),
            discovery_interval: Duration::from_secs(5),
            worker_commands_max: 16 << 10,
            retry_rate: 256,
            retry_burst: 1024,
            drain_grace: Duration::from_secs(10),
            request_tokens_max: 4 << 20,
            client_buffer_tokens: 8192,
            stall_timeout: Duration::from_secs(60),
            aging_threshold: Duration::from_secs(300),
            aging_tokens_per_second: 0.0,
            aging_tokens_max: 0.0,
            bypass_max: 16,
            retry_delay: Duration::from_secs(1),
            tenants_file: None,
            key_failures_per_minute: 60,
            key_failure_addresses_max: 16 << 10,
            anonymous_weights: false,
            tls: None,
            worker_tls: None,
            worker_secret: None,
            connections: ConnectionLimits::default(),
            header_bytes_max: 16 << 10,
            message_time_max: Duration::from_secs(30),
            connection_streams_max: 1024,
            model_retention: Duration::from_secs(600),
            keepalive_interval: Duration::from_secs(10),
            reflection: true,
            record: None,
            usage_log: None,
            resume_keys: Vec::new(),
            resume_age_max: Duration::from_secs(600),
            admin: Admin::Off,
            viewers_max: 8,
            viewer_bytes_per_second: 1 << 20,
            supervisor: None,
        }
    }
}

/// Invalid options.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// No workers.
    #[error("no workers are given; name at least one as host:port")]
    NoWorkers,
    /// An expected model without a name, or with spaces around it.
    #[error("expected_models has the name {name:?}; name models as workers do, without spaces around them")]
    ExpectedModel {
        /// The name.
        name: String,
    },
    /// Malformed address.
    #[error("the worker address {address:?} is not host:port: {reason}")]
    WorkerAddress {
        /// The given address.
        address: String,
        /// The reason.
        reason: String,
    },
    /// Invalid discovery source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// Duplicate worker.
    #[error("the worker address {address:?} is given twice; each worker has one session")]
    DuplicateWorker {
        /// The given address.
        address: String,
    },
    /// Receive budget smaller than one message.
    #[error(
        "receive_bytes_max is {receive}, less than message_bytes_max = {message}; raise the first or lower the second"
    )]
    ReceiveBytes {
        /// Receive budget in bytes.
        receive: u64,
        /// Maximum message size in bytes.
        message: usize,
    },
    /// Zero limit.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// Name of the option.
        name: &'static str,
    },
}

impl Options {
    /// Sets the gauges of the router's limits.
    pub(crate) fn export_limits(&self) {
        metrics::gauge!(names::QUEUE_REQUESTS_MAX).set(self.queue_requests_max as f64);
        metrics::gauge!(names::QUEUE_TOKENS_MAX).set(self.queue_tokens_max as f64);
        metrics::gauge!(names::STREAMS_MAX).set(self.streams_max as f64);
        metrics::gauge!(names::RECEIVE_BYTES_MAX).set(self.receive_bytes_max as f64);
        metrics::gauge!(names::UNREAD_BYTES_MAX).set(self.unread_bytes_max as f64);
        metrics::gauge!(names::TOKENIZE_WAITING_MAX).set(self.tokenize_queue_max as f64);
        metrics::gauge!(names::BYPASS_MAX).set(self.bypass_max);
        metrics::gauge!(names::WORKER_COMMANDS_MAX).set(self.worker_commands_max as f64);
        metrics::gauge!(names::RETRY_RATE).set(self.retry_rate);
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
        let bounds = [
            ("queue_requests_max", self.queue_requests_max == 0),
            ("queue_tokens_max", self.queue_tokens_max == 0),
            ("streams_max", self.streams_max == 0),
            ("connections", self.connections.connections_max == 0),
            ("address_connections_max", self.connections.per_address_max == 0),
            ("unauthenticated_idle_timeout", self.connections.unauthenticated_idle_max.is_zero()),
            ("first_call_timeout", self.connections.first_call_max.is_zero()),
            ("idle_timeout", self.connections.idle_max.is_zero()),
            ("handshake_timeout", self.connections.handshake_max.is_zero()),
            ("key_failures_per_minute", self.key_failures_per_minute == 0),
            ("key_failure_addresses_max", self.key_failure_addresses_max == 0),
            ("header_bytes_max", self.header_bytes_max == 0),
            ("connection_streams_max", self.connection_streams_max == 0),
            ("aging_threshold", self.aging_threshold.is_zero()),
            ("message_bytes_max", self.message_bytes_max == 0),
            ("unread_bytes_max", self.unread_bytes_max == 0),
            ("default_max_tokens", self.default_max_tokens == 0),
            ("tokenize_queue_max", self.tokenize_queue_max == 0),
            ("tokenize_tokens_max", self.tokenize_tokens_max == 0),
            ("worker_commands_max", self.worker_commands_max == 0),
            ("retry_rate", self.retry_rate == 0),
            ("request_tokens_max", self.request_tokens_max == 0),
            ("client_buffer_tokens", self.client_buffer_tokens == 0),
            ("discovery_interval", self.discovery_interval.is_zero()),
            ("stall_timeout", self.stall_timeout.is_zero()),
            ("viewers_max", self.viewers_max == 0),
            ("viewer_bytes_per_second", self.viewer_bytes_per_second == 0),
            ("connect_timeout", self.connect_timeout.is_zero()),
            ("reconnect_backoff_max", self.reconnect_backoff_max.is_zero()),
            ("session_timeout", self.session_timeout.is_zero()),
            ("keepalive_interval", self.keepalive_interval.is_zero()),
            ("usage_log_bytes", self.usage_log.as_ref().is_some_and(|log| log.file_bytes_max == 0)),
            ("usage_log_files", self.usage_log.as_ref().is_some_and(|log| log.files_max == 0)),
            ("http_keepalive", self.http.as_ref().is_some_and(|http| http.keepalive.is_zero())),
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
        let zero = Options { retry_rate: 0, ..with(&["a:1"]) };
        assert_eq!(zero.validate(), Err(OptionsError::Zero { name: "retry_rate" }));
    }
}

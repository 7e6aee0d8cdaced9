use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use inflight_router_core::PlacementKind;
use inflight_transport::{ClientTls, Limits as ConnectionLimits, ServerTlsFiles};
use tonic::transport::Endpoint;

use crate::cluster::discovery::{Source, SourceError};

/// How a router is set up. All durations and bounds have defaults that suit a small cluster.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where clients connect; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The workers: each a [`Source`](crate::Source) of one, `host:port`, or of many.
    pub workers: Vec<String>,
    /// Names this router to the workers, in logs and metrics.
    pub router_id: String,
    /// Different after each restart, and from every other router's; empty if nobody can tell. Workers count routers by it.
    pub incarnation: String,
    /// Where requests run.
    pub placement: PlacementKind,
    /// Most requests that wait for a worker.
    pub queue_requests_max: usize,
    /// Most tokens (prompts and what they may generate) that the waiting requests may come to hold.
    pub queue_tokens_max: u64,
    /// Most `Generate` calls open at once, waiting and streaming together.
    pub streams_max: usize,
    /// Largest message taken from a client, in bytes.
    pub message_bytes_max: usize,
    /// Most bytes of messages that are being received, or received and not yet tokenized, over all calls.
    pub receive_bytes_max: u64,
    /// Tokens generated where a request names no max_tokens.
    pub default_max_tokens: u32,
    /// How long a connection to a worker, its hello and each piece of its bundle may take.
    pub connect_timeout: Duration,
    /// Longest pause between attempts to reach a worker; the first is a hundred milliseconds.
    pub reconnect_backoff_max: Duration,
    /// A worker that names no heartbeat interval is taken for lost after this long without an update.
    pub session_timeout: Duration,
    /// How long requests wait for a model whose last worker was lost.
    pub no_worker_timeout: Duration,
    /// How often sources that are asked, such as DNS, are asked again.
    pub discovery_interval: Duration,
    /// Resubmissions a second after losses, over all requests; what is beyond waits.
    pub retry_rate: u32,
    /// Resubmissions that go at once, after a while without.
    pub retry_burst: u32,
    /// How long the streams of a draining worker may go on there before they move.
    pub drain_grace: Duration,
    /// Most tokens that a request may come to hold: its prompt and all that its choices may generate.
    pub request_tokens_max: u64,
    /// Tokens that a client may be behind before its request is taken off its worker until it reads again.
    pub client_buffer_tokens: usize,
    /// How long a client may take nothing of what is there before its call is ended.
    pub stall_timeout: Duration,
    /// Past this time in the queue a request goes first in its tenant.
    pub aging_threshold: Duration,
    /// Service forgiven a waiting request's tenant for each second, in tokens of weight 1.
    pub aging_tokens_per_second: f64,
    /// Service forgiven at most.
    pub aging_tokens_max: f64,
    /// How often a request that fits nowhere now may be overtaken, while it is first, by others that fit.
    pub bypass_max: u32,
    /// What a client is told to wait when a queue is full.
    pub retry_delay: Duration,
    /// The file of tenants with their keys and limits; without it everybody is let in.
    pub tenants_file: Option<PathBuf>,
    /// Certificate and key for clients, and whom of them to trust; without it connections are in the clear.
    pub tls: Option<ServerTlsFiles>,
    /// How workers are reached by TLS; without it in the clear.
    pub worker_tls: Option<ClientTls>,
    /// Bounds of clients' connections.
    pub connections: ConnectionLimits,
    /// Largest list of headers taken from a client, in bytes.
    pub header_bytes_max: u32,
    /// How long a call may take to bring its message, from its headers.
    pub message_time_max: Duration,
    /// Most calls open at once on one connection.
    pub connection_streams_max: u32,
    /// How long a model whose last worker is gone is UNAVAILABLE before it is NOT_FOUND.
    pub model_retention: Duration,
    /// How often an idle client connection is probed; one that does not answer for as long is closed and its
    /// requests are cancelled.
    pub keepalive_interval: Duration,
    /// Whether gRPC server reflection is served.
    pub reflection: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 50051)),
            workers: Vec::new(),
            router_id: "router".to_owned(),
            incarnation: String::new(),
            placement: PlacementKind::default(),
            queue_requests_max: 1024,
            queue_tokens_max: 4 << 20,
            streams_max: 4096,
            message_bytes_max: 4 << 20,
            receive_bytes_max: 256 << 20,
            default_max_tokens: 1024,
            connect_timeout: Duration::from_secs(5),
            reconnect_backoff_max: Duration::from_secs(5),
            session_timeout: Duration::from_secs(10),
            no_worker_timeout: Duration::from_secs(30),
            discovery_interval: Duration::from_secs(5),
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
            tls: None,
            worker_tls: None,
            connections: ConnectionLimits::default(),
            header_bytes_max: 16 << 10,
            message_time_max: Duration::from_secs(30),
            connection_streams_max: 1024,
            model_retention: Duration::from_secs(600),
            keepalive_interval: Duration::from_secs(10),
            reflection: true,
        }
    }
}

/// Options that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// There is nobody to route to.
    #[error("no workers are given; name at least one as host:port")]
    NoWorkers,
    /// An address does not parse.
    #[error("the worker address {address:?} is not host:port: {reason}")]
    WorkerAddress {
        /// What was given.
        address: String,
        /// Why not.
        reason: String,
    },
    /// An entry of the list names no workers.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A worker is named twice.
    #[error("the worker address {address:?} is given twice; each worker has one session")]
    DuplicateWorker {
        /// What was given.
        address: String,
    },
    /// No message of the largest size could be received.
    #[error(
        "receive_bytes_max is {receive}, less than message_bytes_max = {message}; raise the first or lower the second"
    )]
    ReceiveBytes {
        /// Bytes for all messages.
        receive: u64,
        /// Bytes of one.
        message: usize,
    },
    /// A bound is zero.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// The option.
        name: &'static str,
    },
}

impl Options {
    /// Checks that the options can work.
    ///
    /// # Errors
    /// [`OptionsError`] naming the first that cannot.
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
            ("header_bytes_max", self.header_bytes_max == 0),
            ("connection_streams_max", self.connection_streams_max == 0),
            ("aging_threshold", self.aging_threshold.is_zero()),
            ("message_bytes_max", self.message_bytes_max == 0),
            ("default_max_tokens", self.default_max_tokens == 0),
            ("retry_rate", self.retry_rate == 0),
            ("request_tokens_max", self.request_tokens_max == 0),
            ("client_buffer_tokens", self.client_buffer_tokens == 0),
            ("discovery_interval", self.discovery_interval.is_zero()),
            ("stall_timeout", self.stall_timeout.is_zero()),
            ("connect_timeout", self.connect_timeout.is_zero()),
            ("reconnect_backoff_max", self.reconnect_backoff_max.is_zero()),
            ("session_timeout", self.session_timeout.is_zero()),
            ("keepalive_interval", self.keepalive_interval.is_zero()),
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

/// The endpoint of a worker, with TLS where it is asked for. Certificates are read anew each time.
pub(crate) fn secure_endpoint(
    address: &str,
    tls: Option<&ClientTls>,
) -> Result<Endpoint, Box<dyn std::error::Error + Send + Sync>> {
    let endpoint = worker_endpoint(address)?;
    let Some(tls) = tls else { return Ok(endpoint) };
    Ok(Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls.load()?)?)
}

/// The endpoint of a worker given as `host:port`.
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

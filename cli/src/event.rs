//! Status events on standard output, as JSON lines: of a role to its supervisor, and of `inflight up --json`.

use std::io::Write as _;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Status event of a router or worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RoleEvent {
    /// The model is being loaded.
    Loading {
        /// Bytes loaded so far.
        done: u64,
        /// Bytes to load.
        total: u64,
    },
    /// The process accepts connections but is not ready to serve.
    Listening {
        /// gRPC listen address.
        address: SocketAddr,
        /// Listen address of the Prometheus endpoint, if enabled.
        metrics: Option<SocketAddr>,
    },
    /// The process is ready to serve.
    Ready {
        /// gRPC listen address.
        address: SocketAddr,
        /// Listen address of the Prometheus endpoint, if enabled.
        metrics: Option<SocketAddr>,
        /// Listen address of the HTTP APIs, if served.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        http: Option<SocketAddr>,
    },
}

/// Process of the cluster that `inflight up` started.
#[derive(Debug, Clone, Serialize)]
pub struct ClusterMember {
    /// Name of the member: `router`, `worker-0`, …
    pub name: String,
    /// Process id.
    pub pid: u32,
    /// gRPC listen address.
    pub address: SocketAddr,
    /// Listen address of the Prometheus endpoint, if enabled.
    pub metrics: Option<SocketAddr>,
    /// Listen address of the HTTP APIs, if served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<SocketAddr>,
}

/// Model of the cluster that `inflight up` is about to start.
#[derive(Debug, Clone, Serialize)]
pub struct PlannedModel {
    /// Name that responses have.
    pub name: String,
    /// Further names.
    pub aliases: Vec<String>,
    /// Names of its workers.
    pub workers: Vec<String>,
    /// Bytes of the weights of each worker, if they are planned.
    pub weight_bytes: Option<u64>,
    /// Bytes of the KV cache of each worker, at least.
    pub kv_cache_bytes: Option<u64>,
    /// Tokens that it holds.
    pub kv_cache_tokens: Option<u64>,
}

/// Event of `inflight up --json`.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ClusterEvent<'a> {
    /// Several models fit into this machine; their workers are started.
    Planned {
        /// The models.
        models: &'a [PlannedModel],
    },
    /// The router and all workers are ready.
    Ready {
        /// URL of the router, for clients.
        endpoint: &'a str,
        /// URL of the HTTP APIs, if served.
        http: Option<&'a str>,
        /// Router process.
        router: &'a ClusterMember,
        /// Worker processes.
        workers: &'a [&'a ClusterMember],
        /// File with the workers' secret, for tools that call workers.
        worker_secret_file: &'a std::path::Path,
    },
    /// A member died and will be restarted.
    Lost {
        /// Name of the member.
        name: &'a str,
        /// Exit status, in words.
        status: &'a str,
    },
    /// A member is ready again after a restart.
    Restarted {
        /// Restarted process.
        member: &'a ClusterMember,
    },
    /// Draining has started.
    Stopping {},
}

/// Writes an event as a JSON line to standard output.
pub fn emit(event: &impl Serialize) {
    if let Ok(mut line) = serde_json::to_string(event) {
        line.push('\n');
        let mut output = std::io::stdout().lock();
        // A closed pipe is ignored: the role runs without a reader of its events.
        let _ = output.write_all(line.as_bytes()).and_then(|()| output.flush());
    }
}

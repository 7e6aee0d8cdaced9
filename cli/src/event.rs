//! What a role tells the process that started it: one JSON object a line on its standard output.

use std::io::Write as _;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A line of a router or worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RoleEvent {
    /// A long piece of work goes on.
    Loading {
        /// Bytes done.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// It takes connections but cannot serve yet.
    Listening {
        /// Where it listens for gRPC.
        address: SocketAddr,
        /// Where its Prometheus endpoint listens, if it does.
        metrics: Option<SocketAddr>,
    },
    /// It serves.
    Ready {
        /// Where it listens for gRPC.
        address: SocketAddr,
        /// Where its Prometheus endpoint listens, if it does.
        metrics: Option<SocketAddr>,
    },
}

/// A member of the cluster, as `inflight up --json` names it.
#[derive(Debug, Clone, Serialize)]
pub struct Member {
    /// `router`, `worker-0`, …
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Where it listens for gRPC.
    pub address: SocketAddr,
    /// Where its Prometheus endpoint listens.
    pub metrics: Option<SocketAddr>,
}

/// A line of `inflight up --json`.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ClusterEvent<'a> {
    /// Everything runs.
    Ready {
        /// What clients call.
        endpoint: &'a str,
        /// The router.
        router: &'a Member,
        /// The workers.
        workers: &'a [&'a Member],
    },
    /// A member died and will be started again.
    Lost {
        /// Its name.
        name: &'a str,
        /// How it ended.
        status: &'a str,
    },
    /// A member that had died runs again.
    Restarted {
        /// Its name.
        member: &'a Member,
    },
    /// Draining began.
    Stopping {},
}

/// Writes an event to the standard output.
pub fn emit(event: &impl Serialize) {
    if let Ok(mut line) = serde_json::to_string(event) {
        line.push('\n');
        let mut output = std::io::stdout().lock();
        // Whoever read the events may have left; the role goes on without.
        let _ = output.write_all(line.as_bytes()).and_then(|()| output.flush());
    }
}

//! Metrics of connections and file reloads, exported by routers and workers.

/// Gauge of open connections, by `listener`.
pub const CONNECTIONS: &str = "inflight_connections";
/// Counter of connections closed by this side, by `listener` and `reason`.
pub const CONNECTIONS_CLOSED: &str = "inflight_connections_closed_total";
/// Counter of failed attempts to accept a connection, by `listener` and `reason`.
pub const ACCEPT_FAILURES: &str = "inflight_accept_failures_total";
/// Counter of file reloads, by `file` and `result`.
pub const RELOADS: &str = "inflight_file_reloads_total";

/// Name, help text and label names of each metric, for inventories.
pub const METRICS: [(&str, &str, &[&str]); 4] = [
    (CONNECTIONS, "Open connections, by listener", &["listener"]),
    (
        CONNECTIONS_CLOSED,
        "Connections closed by this side, by reason: slow (no call in time), idle, handshake (failed), evicted (for another connection), unread (responses beyond the limit; --unread-bytes-max of a router), full or address (rejected at the limit)",
        &["listener", "reason"],
    ),
    (
        ACCEPT_FAILURES,
        "Failed attempts to accept a connection, by reason: descriptors (no file descriptor is free) or other",
        &["listener", "reason"],
    ),
    (
        RELOADS,
        "Reloads of TLS certificates, secrets and tenants files, by file and result",
        &["file", "result"],
    ),
];

/// Registers the help texts with the installed recorder.
pub fn describe() {
    for (name, help, _) in METRICS {
        match name {
            CONNECTIONS => metrics::describe_gauge!(name, help),
            _ => metrics::describe_counter!(name, help),
        }
    }
}

/// Counts a reload of `what`: `certificate`, `secret` or `tenants`.
pub fn reloaded(what: &'static str, ok: bool) {
    metrics::counter!(RELOADS, "file" => what, "result" => if ok { "ok" } else { "error" }).increment(1);
}

/// Counts a failed attempt to accept a connection.
pub(crate) fn accept_failed(listener: &'static str, reason: &'static str) {
    metrics::counter!(ACCEPT_FAILURES, "listener" => listener, "reason" => reason).increment(1);
}

/// Counts a connection closed by this side.
pub(crate) fn closed(listener: &'static str, reason: &'static str) {
    metrics::counter!(CONNECTIONS_CLOSED, "listener" => listener, "reason" => reason).increment(1);
}

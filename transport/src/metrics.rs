//! Metrics of connections. Both kinds of process have them.

/// Connections open now.
pub const CONNECTIONS: &str = "inflight_connections";
/// Connections that were closed by this side, by `reason`.
pub const CONNECTIONS_CLOSED: &str = "inflight_connections_closed_total";
/// Times that files were read again, by `what` and `result`.
pub const RELOADS: &str = "inflight_file_reloads_total";

/// Names, meanings and labels of the metrics, for inventories.
pub const METRICS: [(&str, &str, &[&str]); 3] = [
    (CONNECTIONS, "Open connections, by listener", &["listener"]),
    (
        CONNECTIONS_CLOSED,
        "Connections closed by this side, by reason: slow (no call in time), idle, handshake (failed), evicted (for another connection), full or address (rejected at the limit)",
        &["listener", "reason"],
    ),
    (RELOADS, "Reloads of TLS certificates and tenants files, by file and result", &["file", "result"]),
];

/// Tells the installed recorder what the metrics mean.
pub fn describe() {
    for (name, help, _) in METRICS {
        match name {
            CONNECTIONS => metrics::describe_gauge!(name, help),
            _ => metrics::describe_counter!(name, help),
        }
    }
}

/// Notes that files were read again.
pub fn reloaded(what: &'static str, ok: bool) {
    metrics::counter!(RELOADS, "file" => what, "result" => if ok { "ok" } else { "error" }).increment(1);
}

pub(crate) fn closed(listener: &'static str, reason: &'static str) {
    metrics::counter!(CONNECTIONS_CLOSED, "listener" => listener, "reason" => reason).increment(1);
}

//! Metrics of connections and file reloads, exported by routers and workers.

/// Gauge of open connections, by `listener`.
pub const CONNECTIONS: &str = "inflight_connections";
/// Counter of connections closed by this side, by `listener` and `reason`.
pub const CONNECTIONS_CLOSED: &str = "inflight_connections_closed_total";
/// Counter of failed attempts to accept a connection, by `listener` and `reason`.
pub const ACCEPT_FAILURES: &str = "inflight_accept_failures_total";
/// Counter of file reloads, by `file` and `result`.
pub const RELOADS: &str = "inflight_file_reloads_total";
/// Gauge of the time at which the first certificate of a file expires, by `purpose`.
pub const CERTIFICATE_EXPIRY: &str = "inflight_tls_certificate_expiry_timestamp_seconds";

/// Gauge of the longest poll of a connection or call, by `listener`.
pub const LONGEST_POLL: &str = "inflight_longest_poll_seconds";
/// Counter of polls of connections and calls that took a runtime's thread for 50 ms and more, by `listener`.
pub const SLOW_POLLS: &str = "inflight_slow_polls_total";

/// Name, help text and label names of each metric, for inventories.
pub const METRICS: [(&str, &str, &[&str]); 7] = [
    (CONNECTIONS, "Open connections, by listener", &["listener"]),
    (
        CONNECTIONS_CLOSED,
        "Connections closed by this side, by reason: slow (no call in time), idle, handshake (failed), evicted (for another connection), control_frames (more HTTP/2 frames than calls need), unread (responses beyond the limit; --unread-bytes-max of a router), full or address (rejected at the limit)",
        &["listener", "reason"],
    ),
    (
        ACCEPT_FAILURES,
        "Failed attempts to accept a connection, by reason: descriptors (no file descriptor is free) or other",
        &["listener", "reason"],
    ),
    (
        LONGEST_POLL,
        "Longest time that a poll of a connection or call took a thread of the runtime, on which others wait, by listener",
        &["listener"],
    ),
    (
        SLOW_POLLS,
        "Polls of connections and calls that took a thread of the runtime for 50 ms and more, by listener",
        &["listener"],
    ),
    (
        RELOADS,
        "Reloads of TLS certificates, secrets and tenants files, by file and result",
        &["file", "result"],
    ),
    (
        CERTIFICATE_EXPIRY,
        "Unix time at which the first certificate of a file expires, by purpose: server (the own certificate and its chain), client_ca (that verifies clients), client (the own certificate as a client of workers), server_ca (that verifies workers)",
        &["purpose"],
    ),
];

/// Registers the help texts with the installed recorder.
pub fn describe() {
    for (name, help, _) in METRICS {
        match name {
            CONNECTIONS | LONGEST_POLL | CERTIFICATE_EXPIRY => metrics::describe_gauge!(name, help),
            _ => metrics::describe_counter!(name, help),
        }
    }
}

/// Counts a reload of `what`: `certificate`, `secret` or `tenants`.
pub fn reloaded(what: &'static str, ok: bool) {
    metrics::counter!(RELOADS, "file" => what, "result" => if ok { "ok" } else { "error" }).increment(1);
}

/// Sets the time at which the first certificate of a file expires, in seconds since the Unix epoch.
pub(crate) fn certificate_expires(purpose: &'static str, at: i64) {
    metrics::gauge!(CERTIFICATE_EXPIRY, "purpose" => purpose).set(at as f64);
}

/// Sets the longest poll.
pub(crate) fn longest_poll(listener: &'static str, took: std::time::Duration) {
    metrics::gauge!(LONGEST_POLL, "listener" => listener).set(took.as_secs_f64());
}

/// Counts slow polls.
pub(crate) fn slow_polls(listener: &'static str, count: u64) {
    metrics::counter!(SLOW_POLLS, "listener" => listener).increment(count);
}

/// Counts a failed attempt to accept a connection.
pub(crate) fn accept_failed(listener: &'static str, reason: &'static str) {
    metrics::counter!(ACCEPT_FAILURES, "listener" => listener, "reason" => reason).increment(1);
}

/// Counts a connection closed by this side.
pub(crate) fn closed(listener: &'static str, reason: &'static str) {
    metrics::counter!(CONNECTIONS_CLOSED, "listener" => listener, "reason" => reason).increment(1);
}

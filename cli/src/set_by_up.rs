//! Options of router and worker that `inflight up` sets itself.

/// Options of a role that `up` sets itself, and what its user gives instead.
pub const SET_BY_UP: [(&str, &str); 19] = [
    ("listen", "`up` listens on --host and --port"),
    ("http-listen", "the HTTP APIs of `up` are on --host and --http-port"),
    ("metrics-listen", "the metrics of `up` are on --metrics-host and --metrics-port"),
    ("workers", "the number of workers"),
    ("record", "a directory, in which each process has a file"),
    ("config", "the file of `up`"),
    ("drain-timeout", "the time of `up`"),
    ("router-id", "the router of `up` has its address as its name"),
    ("worker-id", "the workers of `up` are worker-0, worker-1 and so on"),
    ("discovery-interval", "`up` starts its workers itself; --workers is their number"),
    ("insecure", "the workers of `up` listen on the loopback address and have a secret"),
    ("secret-file", "give --worker-secret-file, which router and workers of `up` share"),
    (
        "gpu",
        "`up` divides the GPUs among its workers: --device cuda:N, --workers and --tensor-parallel say how",
    ),
    ("worker-tls-ca", WORKER_TLS),
    ("worker-tls-cert", WORKER_TLS),
    ("worker-tls-key", WORKER_TLS),
    ("worker-tls-name", WORKER_TLS),
    ("supervised", "`up` supervises its processes"),
    ("supervisor", "`up` supervises its processes"),
];
const WORKER_TLS: &str = "the workers of `up` listen on the loopback address, without TLS";

/// Returns what a user gives instead of an option of a role that `up` sets itself.
pub fn set_by_up(long: &str) -> Option<&'static str> {
    SET_BY_UP.iter().find(|(name, _)| *name == long).map(|(_, answer)| *answer)
}

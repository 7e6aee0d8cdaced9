//! Plain-text HTTP endpoint of a role: Prometheus metrics at `/metrics`, liveness at `/livez` and readiness
//! at `/readyz`, for probes without TLS.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::http::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use axum::http::{Request, StatusCode};
use axum::middleware::map_response;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures::StreamExt as _;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use inflight_net::{Acceptor, ConnectionLimits, OpenFileLimit, is_address_or_localhost, open_files};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tonic::transport::server::Connected as _;
use tower::ServiceExt as _;

use crate::exit::CommandError;
use crate::metrics_compat::{self, MetricsCompat};
use crate::renamed;

/// Maximum connections of scrapers and probes.
pub const CONNECTIONS_MAX: usize = 256;
/// Limits of connections of scrapers and probes. None counts as authenticated, so beyond the limit a new
/// connection replaces the oldest: a probe can always connect.
const LIMITS: ConnectionLimits = ConnectionLimits {
    connections_max: CONNECTIONS_MAX,
    per_address_max: CONNECTIONS_MAX,
    handshake_max: Duration::from_secs(5),
    first_call_max: REQUEST_TIMEOUT,
    unauthenticated_idle_max: Duration::from_secs(120),
    idle_max: Duration::from_secs(120),
};
/// Timeout of receiving a request's header.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum lifetime of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum concurrent scrapes; further ones wait. Probes are not limited.
const SCRAPES_MAX: usize = 4;
/// Interval of folding samples into histograms, so that they do not accumulate between scrapes.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Answer to a request that names another host.
const FOREIGN_HOST: &str = "this endpoint is for this machine alone, and the host header names another one: ask for it by its address or as localhost\n";

/// Readiness check of the process; until it is set, the process is not ready.
static READY: OnceLock<Box<dyn Fn() -> bool + Send + Sync>> = OnceLock::new();

/// Recorder of the process.
static RECORDER: OnceLock<ProcessRecorder> = OnceLock::new();

/// Recorder, and the names under which its metrics are served beside ours.
struct ProcessRecorder {
    handle: PrometheusHandle,
    compat: Option<MetricsCompat>,
}

/// Renders the metrics of the process for Prometheus; empty if no recorder was installed.
pub fn render() -> String {
    let mut text = snapshot();
    let compat = RECORDER.get().and_then(|recorder| recorder.compat);
    if let Some(compat) = compat {
        let added = metrics_compat::render(compat, &text);
        text.push_str(&added);
    }
    text + &renamed_metrics()
}

/// Renders the metrics of the process under our names only.
pub fn snapshot() -> String {
    let Some(recorder) = RECORDER.get() else { return String::new() };
    sample_process();
    recorder.handle.render()
}

/// Sets the readiness check of the process. Only the first call has an effect.
pub fn ready_when(ready: impl Fn() -> bool + Send + Sync + 'static) {
    // Fails only if it was set before; a process has one role.
    let _ = READY.set(Box::new(ready));
}

/// Installs the metrics recorder of the process. Must be called within a Tokio runtime.
///
/// # Errors
/// A recorder is already installed.
pub fn install(histograms: &[(&str, &[f64])], compat: Option<MetricsCompat>) -> Result<(), CommandError> {
    let mut builder = PrometheusBuilder::new();
    for (name, buckets) in histograms {
        builder = builder
            .set_buckets_for_metric(Matcher::Full((*name).to_owned()), buckets)
            .map_err(|error| CommandError::chain("histogram buckets", &error))?;
    }
    let recorder = builder.build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder)
        .map_err(|error| CommandError::chain("metrics recorder", &error))?;
    describe_process();
    // Fails only if it was set before; a process has one recorder.
    let _ = RECORDER.set(ProcessRecorder { handle: handle.clone(), compat });
    let upkeep = handle;
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(UPKEEP_INTERVAL);
        loop {
            ticks.tick().await;
            upkeep.run_upkeep();
        }
    });
    Ok(())
}

/// Serves the metrics of the process at `address`; returns the bound address.
///
/// # Errors
/// The port is taken.
pub async fn start(address: SocketAddr) -> Result<SocketAddr, CommandError> {
    let listener = TcpListener::bind(address).await.map_err(|error| {
        let context = format!("cannot listen on {address} for metrics; choose another with --metrics-listen");
        CommandError::chain(&context, &error)
    })?;
    let bound = listener.local_addr().map_err(|error| CommandError::chain("no metrics address", &error))?;
    tokio::spawn(serve(listener, bound.ip().is_loopback()));
    Ok(bound)
}

/// `loopback`: the listener is for this machine alone.
async fn serve(listener: TcpListener, loopback: bool) {
    let routes = routes(loopback);
    let mut connections = Acceptor::new("metrics", listener, None, LIMITS).incoming();
    while let Some(Ok(connection)) = connections.next().await {
        let (routes, peer) = (routes.clone(), connection.connect_info());
        // One task per connection, so bounded by `connections_max`.
        tokio::spawn(async move {
            let answer = service_fn(move |request: Request<Incoming>| {
                let (open, answer) = (peer.call(), routes.clone().oneshot(request));
                async move {
                    let response = answer.await;
                    drop(open);
                    response
                }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_TIMEOUT)
                .serve_connection(TokioIo::new(connection), answer);
            if let Ok(Err(error)) = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
                tracing::debug!(%error, "metrics connection ended early");
            }
        });
    }
}

/// Whether the host header is neither an address nor localhost; a request without one is from no browser.
fn names_another_host(headers: &HeaderMap) -> bool {
    headers.get(HOST).is_some_and(|host| !host.to_str().is_ok_and(is_address_or_localhost))
}

/// `loopback`: metrics are for this machine alone, so a request for them that names another host comes from the page of a web site.
fn routes(loopback: bool) -> Router {
    let scrapes = Arc::new(Semaphore::new(SCRAPES_MAX));
    let metrics = async move |headers: HeaderMap| {
        if loopback && names_another_host(&headers) {
            return (StatusCode::FORBIDDEN, FOREIGN_HOST).into_response();
        }
        // Cannot fail: the semaphore is never closed.
        let _permit = scrapes.acquire().await;
        render().into_response()
    };
    let readiness = async || match READY.get().is_some_and(|ready| ready()) {
        true => (StatusCode::OK, "ready\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
    };
    let only = async || (StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
    let known = "metrics are at /metrics, liveness at /livez, readiness at /readyz\n";
    Router::new()
        .route("/metrics", get(metrics))
        .route("/livez", get(async || "alive\n"))
        .route("/readyz", get(readiness))
        .method_not_allowed_fallback(only)
        .fallback(async move || (StatusCode::NOT_FOUND, known))
        .layer(map_response(async move |mut response: Response| {
            let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
            response.headers_mut().insert(CONTENT_TYPE, text);
            response
        }))
}

/// Returns comment lines with the old and new names of renamed metrics.
fn renamed_metrics() -> String {
    let line = |(old, new): &(&str, &str)| format!("# {old} was renamed to {new}\n");
    renamed::METRICS.iter().map(line).collect()
}

fn describe_process() {
    metrics::describe_gauge!(
        "process_open_fds",
        metrics::Unit::Count,
        "Open files now, connections included"
    );
    metrics::describe_gauge!("process_max_fds", metrics::Unit::Count, "Limit of open files");
    metrics::describe_gauge!("process_resident_memory_bytes", metrics::Unit::Bytes, "Resident memory now");
    metrics::describe_gauge!(
        "process_resident_memory_peak_bytes",
        metrics::Unit::Bytes,
        "Most resident memory since the process started"
    );
}

/// Updates the gauges of the process's open files and resident memory (Linux only).
fn sample_process() {
    if let Ok(open) = open_files() {
        metrics::gauge!("process_open_fds").set(open as f64);
    }
    if let Some(limit) = OpenFileLimit::current() {
        metrics::gauge!("process_max_fds").set(limit.files() as f64);
    }
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return };
    let kilobytes = |field: &str| -> Option<f64> {
        let line = status.lines().find_map(|line| line.strip_prefix(field))?;
        line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse().ok()
    };
    if let Some(now) = kilobytes("VmRSS") {
        metrics::gauge!("process_resident_memory_bytes").set(now * 1024.0);
    }
    if let Some(peak) = kilobytes("VmHWM") {
        metrics::gauge!("process_resident_memory_peak_bytes").set(peak * 1024.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn metrics_of_this_machine_alone_are_not_for_pages_of_other_hosts() {
        let status = async |loopback: bool, path: &str, host: &str| {
            let request = Request::builder().uri(path).header(HOST, host);
            let request = request.body(axum::body::Body::empty()).unwrap();
            routes(loopback).oneshot(request).await.unwrap().status()
        };
        for host in ["127.0.0.1:9100", "localhost", "[::1]:9100"] {
            assert_eq!(status(true, "/metrics", host).await, StatusCode::OK, "{host}");
        }
        assert_eq!(status(true, "/metrics", "rebound.example:9100").await, StatusCode::FORBIDDEN);
        assert_eq!(status(true, "/livez", "rebound.example:9100").await, StatusCode::OK);
        assert_eq!(status(false, "/metrics", "inflight.svc.cluster.local").await, StatusCode::OK);
    }
}

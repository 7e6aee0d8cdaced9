//! Health probes, version and metrics.

use std::sync::Arc;

use axum::extract::State;
use serde::Serialize;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::header::{CACHE_CONTROL, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use tonic::codegen::http::{HeaderValue, Response};

use crate::outcome::Outcome;
use crate::protocols::http::errors::refuse;
use crate::protocols::http::{AxumResponse, HttpApi, json};

#[derive(Serialize)]
struct Health {
    status: &'static str,
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
}

fn respond(answer: Result<Response<Body>, Outcome>, path: &str) -> AxumResponse {
    answer.unwrap_or_else(|outcome| refuse(path, outcome)).map(axum::body::Body::new)
}

/// 200 while a worker serves, the usage log can be written if requests need it, and the router does not drain; else 503.
pub(crate) async fn ready(State(api): State<Arc<HttpApi>>) -> AxumResponse {
    let answer = if (api.draining)() {
        Err(Outcome::Draining)
    } else if api.ingress.is_ready() {
        json(&Health { status: "ok" })
    } else {
        Err(api.ingress.unready())
    };
    respond(answer, "/health")
}

/// 200 while the process runs.
pub(crate) async fn live() -> AxumResponse {
    respond(json(&Health { status: "ok" }), "/livez")
}

pub(crate) async fn version() -> AxumResponse {
    respond(json(&Version { version: env!("CARGO_PKG_VERSION") }), "/version")
}

/// OpenAPI document of the port.
pub(crate) async fn openapi(State(api): State<Arc<HttpApi>>) -> AxumResponse {
    let mut response = Response::new(Body::new(http_body_util::Full::new(api.openapi.clone())));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response.map(axum::body::Body::new)
}

/// Metrics of the process in Prometheus' text format.
pub(crate) async fn metrics(State(api): State<Arc<HttpApi>>) -> AxumResponse {
    let Some(render) = &api.metrics else {
        return respond(Err(Outcome::unknown_path("/metrics")), "/metrics");
    };
    let mut response = Response::new(Body::new(http_body_util::Full::new(Bytes::from(render()))));
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, text);
    response.map(axum::body::Body::new)
}

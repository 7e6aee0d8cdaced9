//! Protocol of a call: gRPC or the HTTP APIs, chosen once for each by its content type, at either port.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use inflight_net::{Answer, Middleware, Next};
use tonic::body::Body;
use tonic::codegen::http::header::CONTENT_TYPE;
use tonic::codegen::http::{HeaderMap, Request, Response, Version};
use tower::{Service, ServiceExt as _};

use crate::layers::refusal;
use crate::metrics as names;
use crate::outcome::Outcome;

/// Content type of gRPC, before a format (`+proto`), and of gRPC-Web.
const GRPC: &[u8] = b"application/grpc";
const GRPC_WEB: &[u8] = b"application/grpc-web";

/// Whether the content type begins with `prefix`, in any case.
fn has_type(headers: &HeaderMap, prefix: &[u8]) -> bool {
    let value = headers.get(CONTENT_TYPE).map(|value| value.as_bytes());
    value.and_then(|value| value.get(..prefix.len())).is_some_and(|value| value.eq_ignore_ascii_case(prefix))
}

/// Service of calls with all their layers.
pub(crate) trait CallService:
    Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future = Answer<Infallible>>
    + Clone
    + Send
    + Sync
    + 'static
{
}

impl<S> CallService for S where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future = Answer<Infallible>>
        + Clone
        + Send
        + Sync
        + 'static
{
}

/// Passes each call to the service of its protocol.
pub(crate) struct ProtocolSwitch<G, H>(Arc<Services<G, H>>);

struct Services<G, H> {
    grpc: G,
    http: H,
}

impl<G, H> ProtocolSwitch<G, H> {
    pub(crate) fn new(grpc: G, http: H) -> Self {
        Self(Arc::new(Services { grpc, http }))
    }
}

impl<G, H> Clone for ProtocolSwitch<G, H> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<G: CallService, H: CallService> Service<Request<Body>> for ProtocolSwitch<G, H> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer<Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Each call asks its own service.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answer<Infallible> {
        match has_type(request.headers(), GRPC) {
            true => Box::pin(self.0.grpc.clone().oneshot(request)),
            false => Box::pin(self.0.http.clone().oneshot(request)),
        }
    }
}

/// Refuses gRPC calls that come over HTTP/1, which cannot carry their trailers, and those of gRPC-Web. Pages of browsers have nothing
/// else without TLS: so a name that was rebound to this machine's address reaches no gRPC service.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GrpcTransport;

impl Middleware for GrpcTransport {
    fn call<E: Send + 'static>(&self, request: Request<Body>, next: Next<'_, E>) -> Answer<E> {
        let reason = if has_type(request.headers(), GRPC_WEB) {
            "gRPC-Web is not served; use gRPC over HTTP/2, or the HTTP APIs with content-type: application/json"
        } else if request.version() < Version::HTTP_2 {
            "gRPC needs HTTP/2, and the call came over HTTP/1; let proxies pass HTTP/2 on (h2 or h2c)"
        } else {
            return next.call(request);
        };
        let outcome = Outcome::WrongTransport(reason);
        metrics::counter!(names::REQUESTS, "outcome" => outcome.label()).increment(1);
        let response = refusal::grpc(request.uri().path(), outcome);
        Box::pin(async move { Ok(response) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_types_of_grpc_are_told_from_others() {
        for (value, grpc, web) in [
            (Some("application/grpc"), true, false),
            (Some("application/grpc+proto"), true, false),
            (Some("Application/gRPC; charset=utf-8"), true, false),
            (Some("application/grpc-web+proto"), true, true),
            (Some("application/json"), false, false),
            (Some("application/grp"), false, false),
            (Some("text/application/grpc"), false, false),
            (Some(""), false, false),
            (None, false, false),
        ] {
            let mut headers = HeaderMap::new();
            headers.extend(value.map(|value| (CONTENT_TYPE, value.parse().unwrap())));
            assert_eq!((has_type(&headers, GRPC), has_type(&headers, GRPC_WEB)), (grpc, web), "{value:?}");
        }
    }
}

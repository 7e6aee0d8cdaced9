//! Cross-origin resource sharing, for clients in browsers.

use std::sync::Arc;

use inflight_net::{Answer, Middleware, Next, Peer};
use tonic::body::Body;
use tonic::codegen::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use tonic::codegen::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};

/// Origin that stands for all.
const ANY: &str = "*";

/// Answers preflight requests and marks responses for the allowed origins; without origins it does
/// nothing.
#[derive(Debug, Clone)]
pub(crate) struct Cors {
    pub(crate) origins: Arc<[String]>,
}

impl Cors {
    /// Returns the value of `access-control-allow-origin`, if the request's origin is allowed. The live view is for its own
    /// page only.
    fn allowed(&self, path: &str, headers: &HeaderMap) -> Option<HeaderValue> {
        if path == "/ui" || path.starts_with("/ui/") {
            return None;
        }
        let origin = headers.get(ORIGIN)?;
        if self.origins.iter().any(|allowed| allowed == ANY) {
            return Some(HeaderValue::from_static(ANY));
        }
        self.origins.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()).then(|| origin.clone())
    }
}

impl Middleware for Cors {
    fn call<E: Send + 'static>(&self, request: Request<Body>, next: Next<'_, E>) -> Answer<E> {
        let Some(origin) = self.allowed(request.uri().path(), request.headers()) else {
            return next.call(request);
        };
        if request.method() == Method::OPTIONS
            && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        {
            // Counts as a call, so that the connection is not closed for want of one.
            drop(request.extensions().get::<Peer>().map(Peer::call));
            let response = preflight(origin, request.headers());
            return Box::pin(async move { Ok(response) });
        }
        let response = next.call(request);
        Box::pin(async move {
            let mut response = response.await?;
            let headers = response.headers_mut();
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            let exposed = HeaderValue::from_static("request-id, retry-after, x-request-id");
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
            headers.append(VARY, HeaderValue::from_static("origin"));
            Ok(response)
        })
    }
}

/// Answers a preflight request: any header that the client asks for is allowed, as keys decide, not headers.
fn preflight(origin: HeaderValue, asked: &HeaderMap) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    if let Some(asked) = asked.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400"));
    headers.append(VARY, HeaderValue::from_static("origin"));
    response
}

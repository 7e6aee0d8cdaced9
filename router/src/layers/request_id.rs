//! Request ids: the client's or a random one, returned in the headers of every response.

use std::sync::{Arc, OnceLock};

use inflight_net::{Answer, Middleware, Next};
use tonic::body::Body;
use tonic::codegen::http::header::HeaderName;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request};

use crate::layers::paths::is_anthropic;
use crate::outcome::Outcome;

/// Header of OpenAI's API, and of most proxies.
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Header of Anthropic's API.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// Longest id taken from a client, in bytes, with room for the index of a prompt.
const BYTES_MAX: usize = 120;

/// Whether a client's id is short and of visible ASCII characters.
fn is_valid(id: &str) -> bool {
    !id.is_empty() && id.len() <= BYTES_MAX && id.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Checks the id in a body.
///
/// # Errors
/// It is too long, or has other characters than headers may have.
pub(crate) fn check(id: &str) -> Result<(), Outcome> {
    if is_valid(id) {
        return Ok(());
    }
    let reason =
        format!("request_id has {} bytes; it must have 1 to {BYTES_MAX} visible characters", id.len());
    Err(Outcome::field("request_id", reason))
}

/// Id of a call, in the extensions of its request: the header's, or else the body's, or else a random one.
#[derive(Debug, Clone)]
pub(crate) struct RequestId {
    /// Set until the response has its headers, which have the id.
    id: Arc<OnceLock<String>>,
}

impl RequestId {
    /// Returns the id of a call with these headers.
    fn of(headers: &HeaderMap) -> Self {
        let id = headers.get(X_REQUEST_ID).and_then(|id| id.to_str().ok()).filter(|id| is_valid(id));
        Self { id: Arc::new(id.map(|id| OnceLock::from(id.to_owned())).unwrap_or_default()) }
    }

    /// Returns an id that is not set yet.
    pub(crate) fn new() -> Self {
        Self { id: Arc::default() }
    }

    /// Sets the id in the body, which is valid, unless the header had one.
    pub(crate) fn set(&self, id: &str) {
        let _ = self.id.set(id.to_owned());
    }

    /// Returns the id; it no longer changes.
    pub(crate) fn get(&self) -> &str {
        self.id.get_or_init(|| format!("{:032x}", rand::random::<u128>()))
    }
}

/// Gives every call an id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestIds;

impl Middleware for RequestIds {
    fn call<E: Send + 'static>(&self, mut request: Request<Body>, next: Next<'_, E>) -> Answer<E> {
        let id = RequestId::of(request.headers());
        let anthropic = is_anthropic(request.uri().path());
        request.extensions_mut().insert(id.clone());
        let response = next.call(request);
        Box::pin(async move {
            let mut response = response.await?;
            if let Ok(value) = HeaderValue::from_str(id.get()) {
                if anthropic {
                    response.headers_mut().insert(REQUEST_ID, value.clone());
                }
                response.headers_mut().insert(X_REQUEST_ID, value);
            }
            Ok(response)
        })
    }
}

//! Request ids: the client's or a random one, returned in the headers of every response.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::codegen::http::header::HeaderName;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response};
use tower::{Layer, Service};

use super::errors::Dialect;

/// Header of OpenAI's API, and of most proxies.
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Header of Anthropic's API.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// Longest id taken from a client, in bytes, with room for the index of a prompt.
const BYTES_MAX: usize = 120;

/// Id of a call, in the extensions of its request.
#[derive(Debug, Clone)]
pub(super) struct RequestId(pub(super) String);

impl RequestId {
    pub(super) fn random() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    /// Returns the client's id, if it is short and of visible ASCII characters.
    fn of(headers: &HeaderMap) -> Self {
        let valid = |id: &&str| {
            !id.is_empty() && id.len() <= BYTES_MAX && id.bytes().all(|byte| byte.is_ascii_graphic())
        };
        let id = headers.get(X_REQUEST_ID).and_then(|id| id.to_str().ok()).filter(valid);
        id.map_or_else(Self::random, |id| Self(id.to_owned()))
    }
}

/// Layer that gives every call an id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestIdLayer;

impl<S> Layer<S> for RequestIdLayer {
    type Service = RequestIds<S>;

    fn layer(&self, inner: S) -> RequestIds<S> {
        RequestIds { inner }
    }
}

/// Service of [`RequestIdLayer`].
#[derive(Debug, Clone)]
pub(crate) struct RequestIds<S> {
    inner: S,
}

impl<S, B, R> Service<Request<B>> for RequestIds<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let id = RequestId::of(request.headers());
        let value = HeaderValue::from_str(&id.0).ok();
        let anthropic = Dialect::of(request.uri().path()) == Dialect::Anthropic;
        request.extensions_mut().insert(id);
        let response = self.inner.call(request);
        Box::pin(async move {
            let mut response = response.await?;
            if let Some(value) = value {
                if anthropic {
                    response.headers_mut().insert(REQUEST_ID, value.clone());
                }
                response.headers_mut().insert(X_REQUEST_ID, value);
            }
            Ok(response)
        })
    }
}

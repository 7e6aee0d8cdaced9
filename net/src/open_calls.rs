//! Tower layer that counts a connection's open calls, from request headers to the last response byte.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use crate::connection::Peer;

/// Layer that counts every call as open on its connection ([`Peer::call`]), for the idle limits.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenCallsLayer;

impl<S> Layer<S> for OpenCallsLayer {
    type Service = OpenCalls<S>;

    fn layer(&self, inner: S) -> OpenCalls<S> {
        OpenCalls { inner }
    }
}

/// Service created by [`OpenCallsLayer`].
#[derive(Debug, Clone)]
pub struct OpenCalls<S> {
    inner: S,
}

impl<S> Service<Request<Body>> for OpenCalls<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let open = request.extensions().get::<Peer>().map(Peer::call);
        let response = self.inner.call(request);
        Box::pin(async move { response.await.map(|response| hold(response, open)) })
    }
}

/// Attaches `guard` to a response body: it is dropped after the last byte was written, or with the call.
pub fn hold<T>(response: Response<Body>, guard: T) -> Response<Body>
where
    T: Send + Unpin + 'static,
{
    response.map(|body| Body::new(HoldingBody { body, _guard: guard }))
}

struct HoldingBody<T> {
    body: Body,
    _guard: T,
}

impl<T: Unpin> HttpBody for HoldingBody<T> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

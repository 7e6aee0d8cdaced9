//! Middleware that counts a connection's open calls, from request headers to the last response byte.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};

use crate::connection::Peer;
use crate::middleware::{Answer, Middleware, Next};

/// Counts every call as open on its connection ([`Peer::call`]), for the idle limits.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenCalls;

impl Middleware for OpenCalls {
    fn call<E: Send + 'static>(&self, request: Request<Body>, next: Next<'_, E>) -> Answer<E> {
        let open = request.extensions().get::<Peer>().map(Peer::call);
        let response = next.call(request);
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

//! Reading what is left of a request's body after its call was answered.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// Longest time for which the rest of a body is read.
const DRAIN_MAX: Duration = Duration::from_secs(1);

/// A request's body whose rest is read and discarded when it is dropped, for a second at most.
///
/// A server that drops a body it has not read resets the stream, and frames of it that are still on their way are then
/// errors of the peer, of which HTTP/2 implementations allow a connection only so many (a guard against clients that make
/// servers reset streams). A proxy with many clients, some of whose calls are refused, would lose its connection by it.
pub(crate) struct DrainedBody(Option<Incoming>);

impl DrainedBody {
    pub fn new(body: Incoming) -> Self {
        Self(Some(body))
    }
}

impl Drop for DrainedBody {
    fn drop(&mut self) {
        let Some(mut body) = self.0.take().filter(|body| !body.is_end_stream()) else { return };
        // There is no runtime where the process is ending.
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(timeout(DRAIN_MAX, async move { while let Some(Ok(_)) = body.frame().await {} }));
    }
}

impl HttpBody for DrainedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.0 else { return Poll::Ready(None) };
        let frame = std::task::ready!(Pin::new(body).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            // Nothing is left to read.
            this.0 = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or_else(SizeHint::default, HttpBody::size_hint)
    }
}

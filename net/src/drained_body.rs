//! Request bodies whose unread rest is drained in the background.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// Maximum time spent on reading the rest of a body.
const DRAIN_MAX: Duration = Duration::from_secs(1);

/// Request body whose unread rest is read and discarded after its drop, for [`DRAIN_MAX`] at most.
///
/// A server that drops an unread body resets the stream. Frames still in flight then count as errors of the
/// peer, and HTTP/2 implementations close a connection after a number of those (a guard against forced
/// resets). A proxy that multiplexes many clients would lose its connection to calls that were rejected.
pub(crate) struct DrainedBody(Option<Incoming>);

impl DrainedBody {
    pub fn new(body: Incoming) -> Self {
        Self(Some(body))
    }
}

impl Drop for DrainedBody {
    fn drop(&mut self) {
        let Some(mut body) = self.0.take().filter(|body| !body.is_end_stream()) else { return };
        // No runtime is left while the process exits.
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
            // The end or an error: nothing is left to drain.
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

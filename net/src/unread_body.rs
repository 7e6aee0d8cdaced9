//! Response body whose data is counted until it is written to the connection.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use hyper::body::{Body as HttpBody, Buf, Bytes, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

use crate::unread::UnreadStream;

/// Response body whose unread data counts against the budget.
pub(crate) struct UnreadBody {
    body: Body,
    stream: Arc<UnreadStream>,
}

impl UnreadBody {
    pub(crate) fn new(body: Body, stream: Arc<UnreadStream>) -> Self {
        Self { body, stream }
    }
}

impl HttpBody for UnreadBody {
    type Data = UnreadData;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<UnreadData>, Status>>> {
        let this = self.get_mut();
        this.stream.progress();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        let count = |bytes| UnreadData::new(bytes, this.stream.clone());
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(count))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Data of a frame, which h2 buffers until the client grants flow-control window for it, even after the end of the body.
pub(crate) struct UnreadData {
    bytes: Bytes,
    stream: Arc<UnreadStream>,
}

impl UnreadData {
    fn new(bytes: Bytes, stream: Arc<UnreadStream>) -> Self {
        stream.add(bytes.len());
        Self { bytes, stream }
    }
}

impl Buf for UnreadData {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        self.stream.written(count);
    }
}

impl Drop for UnreadData {
    fn drop(&mut self) {
        self.stream.remove(self.bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, Full};
    use metrics::Gauge;

    use super::*;
    use crate::unread::UnreadBudget;

    #[tokio::test]
    async fn data_is_counted_until_it_is_written_or_dropped_and_not_only_until_the_end_of_its_body() {
        let connection = UnreadBudget::new(1, Gauge::noop()).connect();
        let account = connection.account();
        for written in [0, 600, 1000] {
            let body = Body::new(Full::new(Bytes::from(vec![7; 1000])));
            let mut body = UnreadBody::new(body, account.open());
            assert_eq!(account.bytes(), 0);
            let mut data = body.frame().await.unwrap().unwrap().into_data().ok().unwrap();
            assert!(body.is_end_stream());
            drop(body);
            let counted = account.bytes();
            assert!(counted >= 1000);
            data.advance(written);
            assert_eq!(account.bytes(), counted - written as u64);
            drop(data);
            assert_eq!(account.bytes(), 0);
        }
    }
}

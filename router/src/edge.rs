use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body::{Body as HttpBody, Frame, SizeHint};
use inflight_transport::{OpenCall, Peer};
use tokio::time::Sleep;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response};
use tonic::{Code, Status};
use tower::{Layer, Service};

use crate::admission::MANY;
use crate::auth::is_open;
use crate::clock;
use crate::outcome::Outcome;

/// When a call arrived and by when it must be over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub(crate) at: Instant,
    pub(crate) deadline: Option<Instant>,
}

impl Arrival {
    pub(crate) fn now() -> Self {
        Self { at: clock::now(), deadline: None }
    }

    fn of(headers: &HeaderMap) -> Self {
        let at = clock::now();
        let timeout = headers.get("grpc-timeout").and_then(parse_timeout);
        Self { at, deadline: timeout.and_then(|timeout| at.checked_add(timeout)) }
    }
}

/// What every call passes first. It notes the call's arrival and deadline; answers DEADLINE_EXCEEDED when the
/// deadline passes before the headers (nothing below looks at it); and calls a message over the limit RESOURCE_EXHAUSTED, as gRPC
/// prescribes (the codec says OUT_OF_RANGE, which nothing else here does). A call that brings one message has a time in
/// which to bring it whole. Calls are counted open from their headers to the last byte of their answers, so that a drain
/// waits for them all; those to services beside the API, of which a health watch never ends, are not.
#[derive(Debug, Clone)]
pub(crate) struct EdgeLayer {
    /// Calls that are open.
    pub(crate) open: TaskTracker,
    /// How long a message may take to come, from the call's headers.
    pub(crate) message_time_max: Duration,
}

impl<S> Layer<S> for EdgeLayer {
    type Service = Edge<S>;

    fn layer(&self, inner: S) -> Edge<S> {
        Edge { inner, edge: self.clone() }
    }
}

/// The service that [`EdgeLayer`] makes.
#[derive(Debug, Clone)]
pub(crate) struct Edge<S> {
    inner: S,
    edge: EdgeLayer,
}

impl<S> Service<Request<Body>> for Edge<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let arrival = Arrival::of(request.headers());
        request.extensions_mut().insert(arrival);
        let counted = !is_open(request.uri().path());
        let open = Open {
            _connection: request.extensions().get::<Peer>().map(Peer::call),
            _call: counted.then(|| self.edge.open.token()),
        };
        let one = counted && request.uri().path() != MANY;
        let request = match arrival.at.checked_add(self.edge.message_time_max).filter(|_| one) {
            Some(until) => request.map(|body| Body::new(TimedBody { body, until, expiry: None })),
            None => request,
        };
        let expiry = arrival.deadline.map(|deadline| tokio::time::sleep_until(deadline.into()));
        let response = self.inner.call(request);
        Box::pin(async move {
            let Some(expiry) = expiry else {
                return response.await.map(rename_out_of_range).map(|response| held(response, open));
            };
            tokio::select! {
                biased;
                response = response => response.map(rename_out_of_range).map(|response| held(response, open)),
                () = expiry => Ok(Outcome::DeadlineExceeded.into_status().into_http()),
            }
        })
    }
}

/// Counts a call as open, on its connection and at the router.
struct Open {
    _connection: Option<OpenCall>,
    _call: Option<TaskTrackerToken>,
}

/// Counts the call as open until its last byte was written.
fn held(response: Response<Body>, open: Open) -> Response<Body> {
    response.map(|body| Body::new(HeldBody { body, _open: open }))
}

struct HeldBody {
    body: Body,
    _open: Open,
}

/// A request's body, which fails when it has not come whole in time.
struct TimedBody {
    body: Body,
    until: Instant,
    /// Made when the body is first waited for.
    expiry: Option<Pin<Box<Sleep>>>,
}

impl HttpBody for TimedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        let until = this.until;
        let expiry = this.expiry.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until.into())));
        expiry.as_mut().poll(context).map(|()| {
            Some(Err(Status::deadline_exceeded(
                "the call's message did not come in time; send it with the headers",
            )))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl HttpBody for HeldBody {
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

fn rename_out_of_range(mut response: Response<Body>) -> Response<Body> {
    const OUT_OF_RANGE: &[u8] = b"11";
    let status = response.headers_mut().get_mut(Status::GRPC_STATUS);
    if let Some(code) = status
        && code.as_bytes() == OUT_OF_RANGE
    {
        *code = HeaderValue::from(Code::ResourceExhausted as i32);
    }
    response
}

/// At most eight digits and a unit, as the gRPC protocol has it; anything else is no timeout.
fn parse_timeout(value: &HeaderValue) -> Option<Duration> {
    let text = value.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_the_protocol_writes_them() {
        let parse = |text: &'static str| parse_timeout(&HeaderValue::from_static(text));
        assert_eq!(parse("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(parse("3M"), Some(Duration::from_secs(180)));
        assert_eq!(parse("00000009S"), Some(Duration::from_secs(9)));
        assert_eq!(parse("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse("99999999u"), Some(Duration::from_micros(99_999_999)));
        assert_eq!(parse("0n"), Some(Duration::ZERO));
        for bad in ["", "S", "5", "+5S", "-1S", "123456789S", "1s", "1 S", "1.5S"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    #[tokio::test]
    async fn a_deadline_that_passes_before_the_headers_is_deadline_exceeded() {
        let never = tower::service_fn(|request: Request<Body>| async move {
            assert!(request.extensions().get::<Arrival>().unwrap().deadline.is_some());
            std::future::pending::<Result<Response<Body>, std::convert::Infallible>>().await
        });
        let mut request = Request::new(Body::empty());
        request.headers_mut().insert("grpc-timeout", HeaderValue::from_static("5m"));
        let edge = EdgeLayer { open: TaskTracker::new(), message_time_max: Duration::from_secs(60) };
        let response = edge.layer(never).call(request).await.unwrap();
        let status = Status::from_header_map(response.headers()).unwrap();
        assert_eq!(status.code(), Code::DeadlineExceeded);
    }

    /// A body of which nothing comes.
    struct Nothing;

    impl HttpBody for Nothing {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn a_message_that_does_not_come_ends_its_call_and_an_open_call_is_counted_until_its_answer_is_gone()
    {
        let reading = tower::service_fn(|request: Request<Body>| async move {
            let mut body = request.into_body();
            let frame = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
            let status = frame.unwrap().unwrap_err();
            // With an answer that goes on after the headers.
            let response: Response<Body> = status.into_http();
            Ok::<_, std::convert::Infallible>(response.map(|_| Body::new(Nothing)))
        });
        let open = TaskTracker::new();
        let edge = EdgeLayer { open: open.clone(), message_time_max: Duration::from_millis(5) };
        let mut request = Request::new(Body::new(Nothing));
        *request.uri_mut() = "/inflight.v1.Inference/Generate".parse().unwrap();
        let mut edge = edge.layer(reading);
        let call = edge.call(request);
        assert_eq!(open.len(), 1);
        let response = call.await.unwrap();
        let status = Status::from_header_map(response.headers()).unwrap();
        assert_eq!((status.code(), open.len()), (Code::DeadlineExceeded, 1));
        drop(response);
        assert!(open.is_empty());
    }
}

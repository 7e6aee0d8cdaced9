use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body::{Body as HttpBody, Frame, SizeHint};
use inflight_transport::{OpenCall, Peer};
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response};
use tonic::{Code, Status};
use tower::{Layer, Service};

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
/// deadline passes before the headers (the transport would say CANCELLED, but its own timer starts after the
/// one here and is looked at after it); and calls a message over the limit RESOURCE_EXHAUSTED, as gRPC
/// prescribes (the codec says OUT_OF_RANGE, which nothing else here does).
#[derive(Debug, Clone, Copy)]
pub(crate) struct EdgeLayer;

impl<S> Layer<S> for EdgeLayer {
    type Service = Edge<S>;

    fn layer(&self, inner: S) -> Edge<S> {
        Edge { inner }
    }
}

/// The service that [`EdgeLayer`] makes.
#[derive(Debug, Clone)]
pub(crate) struct Edge<S> {
    inner: S,
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
        let open = request.extensions().get::<Peer>().map(Peer::call);
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

/// Counts the call as open on its connection until its last byte was written.
fn held(response: Response<Body>, open: Option<OpenCall>) -> Response<Body> {
    match open {
        Some(open) => response.map(|body| Body::new(HeldBody { body, _open: open })),
        None => response,
    }
}

struct HeldBody {
    body: Body,
    _open: OpenCall,
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
        let response = EdgeLayer.layer(never).call(request).await.unwrap();
        let status = Status::from_header_map(response.headers()).unwrap();
        assert_eq!(status.code(), Code::DeadlineExceeded);
    }
}

//! Outermost layer: arrival time, deadline, and limits on receiving messages.

use std::time::{Duration, Instant};

use inflight_net::{Answer, Framing, Middleware, Next, Peer, ReceiveBudget, ReceiveLimits, hold};
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request};

use crate::clock;
use crate::layers::paths::{MODEL_STREAM_INFER, is_open};
use crate::layers::refusal::Refuse;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};

/// Arrival time and deadline of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallArrival {
    pub(crate) at: Instant,
    pub(crate) deadline: Option<Instant>,
}

impl CallArrival {
    pub(crate) fn now() -> Self {
        Self { at: clock::now(), deadline: None }
    }

    fn of(headers: &HeaderMap) -> Self {
        let at = clock::now();
        let timeout = headers.get("grpc-timeout").and_then(parse_timeout);
        Self { at, deadline: timeout.and_then(|timeout| at.checked_add(timeout)) }
    }
}

/// Records each call's arrival and deadline, and responds DEADLINE_EXCEEDED if the deadline passes
/// before the response headers. API calls count as open until the last byte of their response, so that a
/// drain waits for them; health and reflection calls, of which a health watch never ends, do not.
#[derive(Clone)]
pub(crate) struct Arrivals {
    /// Open API calls.
    pub(crate) open: TaskTracker,
    pub(crate) refuse: Refuse,
}

/// Maximum message size on paths without authentication, which carry only service names, in bytes.
const OPEN_MESSAGE_BYTES_MAX: usize = 4 << 10;
/// Maximum calls open at once on an unauthenticated connection.
const UNAUTHENTICATED_CALLS_MAX: u32 = 32;
/// Maximum calls open at once, of those that need no authentication, on a connection that has authenticated.
const PROBES_MAX: u32 = 64;

/// Returns the limits on receiving messages of a path.
pub(crate) fn receive_limits(path: &str, options: &Options, framing: Framing) -> ReceiveLimits {
    let open = is_open(path);
    ReceiveLimits {
        framing,
        message_bytes_max: if open { OPEN_MESSAGE_BYTES_MAX } else { options.message_bytes_max },
        option: (!open).then_some("--message-bytes-max"),
        time_option: Some("--message-timeout"),
        message_time_max: options.message_time_max,
        streaming: path == MODEL_STREAM_INFER || path.starts_with("/grpc.reflection."),
    }
}

/// Returns the shared budget of all messages being received.
pub(crate) fn receive_budget(options: &Options) -> ReceiveBudget {
    let (max, retry) = (options.receive_bytes_max, options.retry_delay);
    let exhausted = move || receive_budget_exhausted(max, retry).into_status();
    ReceiveBudget::new(max, metrics::gauge!(names::RECEIVE_BYTES), exhausted)
}

/// Returns the outcome of a call beyond the budget of messages being received.
pub(crate) fn receive_budget_exhausted(bytes_max: u64, retry: Duration) -> Outcome {
    let what = format!(
        "the router is receiving {bytes_max} bytes of requests, the limit (--receive-bytes-max); try again later"
    );
    Outcome::Full(Box::new(Overload::of_router(what, "receive_bytes", retry)))
}

impl Arrivals {
    /// Rejects a call without authentication above the limit of open calls on its connection.
    fn check_calls(request: &Request<Body>) -> Result<(), Outcome> {
        let Some(peer) = request.extensions().get::<Peer>().filter(|_| is_open(request.uri().path())) else {
            return Ok(());
        };
        let (open, most, what) = match peer.is_authenticated() {
            true => (peer.probes(), PROBES_MAX, "calls of health and reflection"),
            false => (peer.calls(), UNAUTHENTICATED_CALLS_MAX, "calls"),
        };
        if open < most {
            return Ok(());
        }
        let key = if peer.is_authenticated() { "" } else { " without a key" };
        let what = format!("{most} {what} are open on this connection, the limit{key}; end some");
        Err(Outcome::Full(Box::new(Overload::of_router(
            what,
            "unauthenticated_calls",
            Duration::from_secs(1),
        ))))
    }
}

impl Middleware for Arrivals {
    fn call<E: Send + 'static>(&self, mut request: Request<Body>, next: Next<'_, E>) -> Answer<E> {
        let arrival = CallArrival::of(request.headers());
        request.extensions_mut().insert(arrival);
        let refuse = self.refuse;
        if let Err(outcome) = Self::check_calls(&request) {
            let response = refuse(request.uri().path(), outcome);
            return Box::pin(async move { Ok(response) });
        }
        let is_probe = is_open(request.uri().path());
        let counted = (!is_probe).then(|| self.open.token());
        let peer = request.extensions().get::<Peer>();
        // Keeps the connection from being idle, and delays a drain for API calls.
        let open = (peer.map(if is_probe { Peer::probe } else { Peer::call }), counted);
        let path = request.uri().path().to_owned();
        let expiry = arrival.deadline.map(|deadline| tokio::time::sleep_until(deadline.into()));
        let response = next.call(request);
        Box::pin(async move {
            let response = match expiry {
                None => response.await?,
                Some(expiry) => tokio::select! {
                    biased;
                    response = response => response?,
                    () = expiry => return Ok(refuse(&path, Outcome::DeadlineExceeded)),
                },
            };
            Ok(hold(response, open))
        })
    }
}

/// Parses a gRPC timeout, at most eight digits and a unit; `None` if malformed.
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
    use inflight_net::middleware;
    use tonic::codegen::Bytes;
    use tonic::codegen::http::Response;
    use tonic::{Code, Status};
    use tower::{Layer as _, Service as _};

    use super::*;
    use crate::layers::refusal;

    #[test]
    fn grpc_timeouts_are_parsed() {
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
            assert!(request.extensions().get::<CallArrival>().unwrap().deadline.is_some());
            std::future::pending::<Result<Response<Body>, std::convert::Infallible>>().await
        });
        let mut request = Request::new(Body::empty());
        request.headers_mut().insert("grpc-timeout", HeaderValue::from_static("5m"));
        let response = middleware(Arrivals { open: TaskTracker::new(), refuse: refusal::grpc })
            .layer(never)
            .call(request)
            .await
            .unwrap();
        let status = Status::from_header_map(response.headers()).unwrap();
        assert_eq!(status.code(), Code::DeadlineExceeded);
    }

    #[tokio::test]
    async fn an_open_call_is_counted_until_its_response_is_dropped() {
        let answering = tower::service_fn(|_: Request<Body>| async {
            let body = http_body_util::Full::new(Bytes::from_static(b"answer"));
            Ok::<_, std::convert::Infallible>(Response::new(Body::new(body)))
        });
        let open = TaskTracker::new();
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = "/inflight.v1.Inference/Generate".parse().unwrap();
        let arrivals = Arrivals { open: open.clone(), refuse: refusal::grpc };
        let mut edge = middleware(arrivals).layer(answering);
        let call = edge.call(request);
        assert_eq!(open.len(), 1);
        let response = call.await.unwrap();
        assert_eq!(open.len(), 1);
        drop(response);
        assert!(open.is_empty());
    }
}

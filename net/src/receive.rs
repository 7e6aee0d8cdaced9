//! Receive limits: a deadline and a maximum size per request message, and a byte budget shared by all calls.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::{Code, Status};
use tower::{Layer, Service};

use crate::receive_budget::{ReceiveBudget, ReservedBytes};

/// Reason for which a message was not received; the source of the body's [`Status`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ReceiveError {
    /// The message is too large.
    #[error("the message has {}{bytes} bytes, more than the limit of {max}{option}", if *at_least { "at least " } else { "" })]
    TooLarge {
        /// Size of the message.
        bytes: u64,
        /// Whether the message may be larger than `bytes`.
        at_least: bool,
        /// Maximum size.
        max: usize,
        /// Command-line flag that sets the limit, as ` (--flag)`; empty without one.
        option: String,
    },
    /// The message did not arrive in time.
    #[error("the call's message did not arrive within {seconds} s{option}")]
    TooSlow {
        /// Maximum time in seconds.
        seconds: f64,
        /// Command-line flag that sets the limit, as ` (--flag)`; empty without one.
        option: String,
    },
    /// The budget of all calls is spent.
    #[error("the budget of messages in reception is spent")]
    Exhausted,
}

impl ReceiveError {
    /// Returns the reason in the sources of a request body's error, if a limit was its cause.
    pub fn of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Self> {
        std::iter::successors(Some(error), |error| error.source()).find_map(|error| error.downcast_ref())
    }

    fn into_status(self) -> Status {
        let code = match self {
            Self::TooLarge { .. } | Self::Exhausted => Code::ResourceExhausted,
            Self::TooSlow { .. } => Code::DeadlineExceeded,
        };
        let mut status = Status::new(code, self.to_string());
        status.set_source(Arc::new(self));
        status
    }
}

/// Division of a request body into messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// gRPC's length-prefixed messages.
    Grpc,
    /// The body is one message.
    Whole,
}

/// Limits of the request messages of a call.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveLimits {
    /// Division of the body into messages.
    pub framing: Framing,
    /// Maximum message size, in bytes.
    pub message_bytes_max: usize,
    /// Flag that sets `message_bytes_max`, if there is one, for the error message.
    pub option: Option<&'static str>,
    /// Flag that sets `message_time_max`, if there is one, for the error message.
    pub time_option: Option<&'static str>,
    /// Maximum time for a message to arrive: from the call's headers, or from its first byte if `streaming`.
    pub message_time_max: Duration,
    /// Whether the client may send more than one message.
    pub streaming: bool,
}

/// Layer that enforces [`ReceiveLimits`], chosen by the path of the call, and the shared [`ReceiveBudget`].
#[derive(Clone)]
pub struct ReceiveLayer<F> {
    budget: ReceiveBudget,
    limits: F,
}

impl<F> ReceiveLayer<F> {
    /// Creates the layer; `limits` maps a path to its limits.
    pub fn new(budget: ReceiveBudget, limits: F) -> Self {
        Self { budget, limits }
    }
}

impl<F: Clone, S> Layer<S> for ReceiveLayer<F> {
    type Service = Receive<F, S>;

    fn layer(&self, inner: S) -> Receive<F, S> {
        Receive { receive: self.clone(), inner }
    }
}

/// Service created by [`ReceiveLayer`].
#[derive(Clone)]
pub struct Receive<F, S> {
    receive: ReceiveLayer<F>,
    inner: S,
}

impl<F, S> Service<Request<Body>> for Receive<F, S>
where
    F: Fn(&str) -> ReceiveLimits,
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> S::Future {
        let limits = (self.receive.limits)(request.uri().path());
        let received = self.receive.budget.start_call();
        request.extensions_mut().insert(received.clone());
        self.inner.call(request.map(|body| Body::new(LimitedBody::new(body, limits, received))))
    }
}

/// Parser state of gRPC's framing: each message follows a flag byte and a 4-byte big-endian length.
#[derive(Debug, Clone, Copy)]
enum Parser {
    Prefix { bytes: [u8; 5], len: usize },
    Message { left: u64 },
}

impl Parser {
    const START: Self = Self::Prefix { bytes: [0; 5], len: 0 };
}

/// Request body that enforces [`ReceiveLimits`] and the budget.
struct LimitedBody {
    body: Body,
    limits: ReceiveLimits,
    received: Arc<ReservedBytes>,
    parser: Parser,
    /// Bytes of the body so far; counted if it is one message.
    bytes: u64,
    /// Whether the only message of a call is complete.
    complete: bool,
    /// Last frame of a unary message, held back until the client ends the stream. The service would decode it at once, but check
    /// it only at the end of the stream, and a decoded message may take many times its bytes.
    last: Option<Frame<Bytes>>,
    ended: bool,
    /// Deadline of the message in reception; `None` between the messages of a stream.
    deadline: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl LimitedBody {
    fn new(body: Body, limits: ReceiveLimits, received: Arc<ReservedBytes>) -> Self {
        let deadline =
            if limits.streaming { None } else { Instant::now().checked_add(limits.message_time_max) };
        Self {
            body,
            limits,
            received,
            parser: Parser::START,
            bytes: 0,
            complete: false,
            last: None,
            ended: false,
            deadline,
            timer: None,
        }
    }

    /// Advances the framing over the bytes of a data frame and reserves them.
    fn receive(&mut self, mut data: &[u8]) -> Result<(), Status> {
        if self.limits.framing == Framing::Whole {
            self.bytes += data.len() as u64;
            self.check_size(self.bytes, true)?;
            return self.received.reserve(data.len() as u64);
        }
        while !data.is_empty() {
            match &mut self.parser {
                Parser::Prefix { bytes, len } => {
                    if self.complete {
                        let what = "the call takes one message, and more was sent";
                        return Err(Status::invalid_argument(what));
                    }
                    if *len == 0 {
                        // A reader that polls for the next message has processed the previous one.
                        self.received.release();
                        if self.limits.streaming {
                            self.deadline = Instant::now().checked_add(self.limits.message_time_max);
                        }
                    }
                    let count = data.len().min(bytes.len() - *len);
                    bytes[*len..*len + count].copy_from_slice(&data[..count]);
                    *len += count;
                    data = &data[count..];
                    if *len == bytes.len() {
                        let [_, length @ ..] = *bytes;
                        let left = u64::from(u32::from_be_bytes(length));
                        self.check_size(left, false)?;
                        self.enter(left);
                    }
                }
                Parser::Message { left } => {
                    let count = (data.len() as u64).min(*left);
                    let left = *left - count;
                    data = &data[count as usize..];
                    self.received.reserve(count)?;
                    self.enter(left);
                }
            }
        }
        Ok(())
    }

    fn enter(&mut self, left: u64) {
        self.parser = if left > 0 { Parser::Message { left } } else { Parser::START };
        match (left, self.limits.streaming) {
            (0, true) => (self.deadline, self.timer) = (None, None),
            (0, false) => self.complete = true,
            _ => {}
        }
    }

    fn check_size(&self, bytes: u64, at_least: bool) -> Result<(), Status> {
        let ReceiveLimits { message_bytes_max: max, option, .. } = self.limits;
        if bytes <= max as u64 {
            return Ok(());
        }
        let option = in_parentheses(option);
        Err(ReceiveError::TooLarge { bytes, at_least, max, option }.into_status())
    }

    /// Checks the announced length of a body that is one message.
    fn check_announced(&self) -> Result<(), Status> {
        if self.limits.framing == Framing::Grpc || self.bytes > 0 {
            return Ok(());
        }
        self.check_size(self.body.size_hint().lower(), false)
    }
}

/// Returns a command-line flag as ` (--flag)` for an error message; empty without one.
fn in_parentheses(option: Option<&str>) -> String {
    option.map_or(String::new(), |option| format!(" ({option})"))
}

impl HttpBody for LimitedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if let Err(status) = this.check_announced() {
            return Poll::Ready(Some(Err(status)));
        }
        while !this.ended
            && let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(context)
        {
            let Some(frame) = frame else {
                this.ended = true;
                break;
            };
            let frame = match frame {
                Ok(frame) => frame,
                Err(status) => return Poll::Ready(Some(Err(status))),
            };
            let was_complete = this.complete;
            if let Some(data) = frame.data_ref()
                && let Err(status) = this.receive(data)
            {
                this.last = None;
                return Poll::Ready(Some(Err(status)));
            }
            match (was_complete, this.complete) {
                (_, false) => return Poll::Ready(Some(Ok(frame))),
                (false, true) => this.last = Some(frame),
                // An empty frame, or trailers, which gRPC requests do not have.
                (true, true) => {}
            }
        }
        if this.ended {
            return Poll::Ready(this.last.take().map(Ok));
        }
        let Some(deadline) = this.deadline else { return Poll::Pending };
        let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        timer.as_mut().poll(context).map(|()| {
            let seconds = this.limits.message_time_max.as_secs_f64();
            let option = in_parentheses(this.limits.time_option);
            Some(Err(ReceiveError::TooSlow { seconds, option }.into_status()))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.last.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::atomic::{AtomicBool, Ordering};

    use metrics::Gauge;
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;

    /// Body of these data frames that stays pending after the last, until it is closed.
    struct PendingAfterFrames(VecDeque<Bytes>, Arc<AtomicBool>);

    impl HttpBody for PendingAfterFrames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            match self.0.pop_front() {
                Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
                None if self.1.load(Ordering::Relaxed) => Poll::Ready(None),
                None => Poll::Pending,
            }
        }
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0], &length[..], message].concat()
    }

    fn budget(max: u64) -> ReceiveBudget {
        let exhausted = || Status::resource_exhausted("the budget is spent");
        ReceiveBudget::new(max, Gauge::noop(), exhausted)
    }

    fn limits(message_bytes_max: usize, streaming: bool) -> ReceiveLimits {
        let message_time_max = Duration::from_millis(50);
        let (framing, option, time_option) = (Framing::Grpc, Some("--some-option"), Some("--time-option"));
        ReceiveLimits { framing, message_bytes_max, option, time_option, message_time_max, streaming }
    }

    fn body(frames: Vec<Vec<u8>>, limits: ReceiveLimits, budget: &ReceiveBudget) -> LimitedBody {
        closable_body(frames, limits, budget, Arc::default())
    }

    fn closable_body(
        frames: Vec<Vec<u8>>,
        limits: ReceiveLimits,
        budget: &ReceiveBudget,
        closed: Arc<AtomicBool>,
    ) -> LimitedBody {
        let frames = PendingAfterFrames(frames.into_iter().map(Bytes::from).collect(), closed);
        LimitedBody::new(Body::new(frames), limits, budget.start_call())
    }

    /// Reads until the body is pending or fails.
    async fn read(body: &mut LimitedBody) -> Result<Vec<u8>, Status> {
        let mut read = Vec::new();
        loop {
            let next = std::future::poll_fn(|context| {
                let frame = Pin::new(&mut *body).poll_frame(context);
                Poll::Ready(if frame.is_pending() { None } else { Some(frame) })
            });
            match next.await {
                Some(Poll::Ready(Some(Ok(frame)))) => read.extend_from_slice(frame.data_ref().unwrap()),
                Some(Poll::Ready(Some(Err(status)))) => return Err(status),
                _ => return Ok(read),
            }
        }
    }

    proptest! {
        /// For any split into frames, only the last message stays reserved, until the body is dropped.
        #[test]
        fn all_bytes_pass_and_the_last_message_stays_reserved(
            messages in prop::collection::vec(0usize..200, 1..6), cuts in prop::collection::vec(1usize..90, 1..40)
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                let budget = budget(200);
                let bytes: Vec<u8> = messages.iter().flat_map(|len| framed(&vec![7; *len])).collect();
                let (mut frames, mut rest, mut cut) = (Vec::new(), &bytes[..], cuts.iter().cycle());
                while !rest.is_empty() {
                    let (frame, behind) = rest.split_at(rest.len().min(*cut.next().unwrap()));
                    frames.push(frame.to_vec());
                    rest = behind;
                }
                let mut body = body(frames, limits(200, true), &budget);
                assert_eq!(read(&mut body).await.unwrap(), bytes);
                assert_eq!(budget.0.pool.held(), *messages.last().unwrap() as u64);
                drop(body);
                assert_eq!(budget.0.pool.held(), 0);
            });
        }
    }

    proptest! {
        /// For any split into frames, the last frame of a unary message is held back until the client ends the stream.
        #[test]
        fn the_last_frame_of_a_unary_message_waits_for_the_end_of_the_stream(
            len in 0usize..200, cuts in prop::collection::vec(1usize..90, 1..40), more in prop::option::of(1usize..9)
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                let budget = budget(400);
                let message = framed(&vec![7; len]);
                let bytes: Vec<u8> = message.iter().copied().chain(vec![0; more.unwrap_or(0)]).collect();
                let (mut frames, mut rest, mut cut) = (vec![vec![]], &bytes[..], cuts.iter().cycle());
                while !rest.is_empty() {
                    let (frame, behind) = rest.split_at(rest.len().min(*cut.next().unwrap()));
                    frames.extend([frame.to_vec(), vec![]]);
                    rest = behind;
                }
                let closed = Arc::new(AtomicBool::new(false));
                let mut body = closable_body(frames, limits(200, false), &budget, closed.clone());
                let before = read(&mut body).await;
                if more.is_some() {
                    assert_eq!(before.unwrap_err().code(), Code::InvalidArgument);
                } else {
                    let before = before.unwrap();
                    assert!(before.len() < message.len() && !body.is_end_stream());
                    assert_eq!(budget.0.pool.held(), len as u64);
                    closed.store(true, Ordering::Relaxed);
                    assert_eq!([before, read(&mut body).await.unwrap()].concat(), message);
                    assert_eq!(budget.0.pool.held(), len as u64, "until the request is processed");
                }
                drop(body);
                assert_eq!(budget.0.pool.held(), 0);
            });
        }
    }

    #[test]
    fn a_request_of_several_in_a_call_keeps_what_its_message_has_reserved() {
        let budget = budget(100);
        let call = budget.start_call();
        call.reserve(60).unwrap();
        let request = call.split();
        assert_eq!((call.bytes(), request.bytes()), (0, 60));
        call.reserve(40).unwrap();
        call.release();
        assert_eq!(budget.0.pool.held(), 60);
        drop(request);
        assert_eq!(budget.0.pool.held(), 0);
    }

    #[tokio::test]
    async fn a_message_over_the_limit_is_rejected_by_its_length_prefix() {
        let budget = budget(1 << 20);
        let header = framed(&[0; 101])[..5].to_vec();
        let status = read(&mut body(vec![header], limits(100, false), &budget)).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.message(), "the message has 101 bytes, more than the limit of 100 (--some-option)");
    }

    #[tokio::test]
    async fn a_body_without_framing_is_one_message() {
        let budget = budget(150);
        let whole = ReceiveLimits { framing: Framing::Whole, ..limits(100, false) };
        let frames = |sizes: &[usize]| sizes.iter().map(|size| vec![b'x'; *size]).collect::<Vec<_>>();
        let mut first = body(frames(&[40, 60]), whole, &budget);
        assert_eq!(read(&mut first).await.unwrap().len(), 100);
        let status = read(&mut body(frames(&[30, 30]), whole, &budget)).await.unwrap_err();
        assert_eq!(ReceiveError::of(&status), Some(&ReceiveError::Exhausted));
        drop(first);
        let status = read(&mut body(frames(&[60, 41]), whole, &budget)).await.unwrap_err();
        assert!(matches!(ReceiveError::of(&status), Some(ReceiveError::TooLarge { bytes: 101, .. })));
        assert_eq!(budget.0.pool.held(), 0);
    }

    #[tokio::test]
    async fn a_call_beyond_the_budget_is_rejected_and_its_bytes_are_released() {
        let budget = budget(150);
        let mut first = body(vec![framed(&[0; 100])], limits(100, false), &budget);
        read(&mut first).await.unwrap();
        let mut second = body(vec![framed(&[0; 100])], limits(100, false), &budget);
        let status = read(&mut second).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.message(), "the budget is spent");
        drop((first, second));
        read(&mut body(vec![framed(&[0; 100])], limits(100, false), &budget)).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_has_a_deadline_and_a_stream_may_pause_between_messages() {
        let budget = budget(1000);
        let unfinished = framed(&[0; 100])[..50].to_vec();
        for (frames, streaming, expires) in [
            (vec![], false, true),
            (vec![unfinished.clone()], false, true),
            (vec![], true, false),
            (vec![framed(&[1])], true, false),
            (vec![framed(&[1]), unfinished], true, true),
        ] {
            let mut body = body(frames.clone(), limits(100, streaming), &budget);
            read(&mut body).await.unwrap();
            tokio::time::advance(Duration::from_secs(60)).await;
            let ended = read(&mut body).await;
            assert_eq!(ended.is_err(), expires, "{} frames, streaming: {streaming}", frames.len());
            assert!(ended.err().is_none_or(|status| {
                status.code() == Code::DeadlineExceeded
                    && status.message().ends_with("0.05 s (--time-option)")
            }));
        }
    }
}

//! Server-sent events: the body of a streamed response, with keep-alive comments while nothing is generated.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream as _, StreamExt as _};
use http_body::{Body as HttpBody, Frame};
use tokio::time::{Instant, Sleep};
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use tonic::codegen::http::{HeaderValue, Response};

use crate::outcome::Outcome;
use crate::output::event::GenerationEvent;
use crate::protocols::http::Started;
use crate::protocols::http::event_writer::EventWriter;
use crate::protocols::http::generations::Generations;

/// Converts the events of a call to the server-sent events of an API.
pub(crate) trait Encoder: Send + Unpin + 'static {
    /// Whether a resumed stream drops as many events as the client has had, if its output is parsed; else it drops those
    /// of the output that the client has had.
    const EVENTS_ARE_COUNTED: bool;

    /// Appends the events of one output.
    fn event(&mut self, prompt: usize, event: GenerationEvent, out: &mut EventWriter);

    /// Appends the last events, after the output of all prompts.
    fn end(&mut self, out: &mut EventWriter);

    /// Appends the events of a failure, after which the stream ends.
    fn failure(&mut self, outcome: &Outcome, out: &mut EventWriter);
}

/// Bytes after which a frame is sent although more events are ready.
const FRAME_BYTES: usize = 16 << 10;
/// Comment that clients ignore and proxies count as traffic.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// Starts a streamed response: at the first output, so that a failure before it has a status of its own, or
/// after `interval`, from which on comments keep the connection alive.
///
/// # Errors
/// The call failed before either.
pub(crate) async fn respond<E: Encoder>(
    started: Started,
    encoder: E,
    interval: Duration,
) -> Result<Response<Body>, Outcome> {
    let counted = E::EVENTS_ARE_COUNTED && started.is_parsed();
    let (mut generations, cursor) = started.split();
    let mut early = VecDeque::new();
    let mut ended = false;
    let first_output = async {
        while let Some(event) = generations.next().await {
            let (prompt, event) = event?;
            let output = event.is_new_output();
            early.push_back((prompt, event));
            if output {
                return Ok(false);
            }
        }
        Ok(true)
    };
    // A timeout starts the stream with a comment.
    let mut first_comment = Duration::ZERO;
    if let Ok(first) = tokio::time::timeout(interval, first_output).await {
        (ended, first_comment) = (first?, interval);
    }
    let body = EventStream {
        generations: (!ended).then_some(generations),
        early,
        encoder,
        out: EventWriter::new(cursor, counted),
        interval,
        keep_alive: Box::pin(tokio::time::sleep(first_comment)),
        over: false,
    };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would buffer the stream.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    Ok(response)
}

/// Body of a streamed response. Dropping it cancels the call.
struct EventStream<E> {
    /// `None` once all have ended.
    generations: Option<Generations>,
    /// Events read before the response started.
    early: VecDeque<(usize, GenerationEvent)>,
    encoder: E,
    out: EventWriter,
    interval: Duration,
    keep_alive: Pin<Box<Sleep>>,
    over: bool,
}

impl<E: Encoder> EventStream<E> {
    /// Appends the events that are ready.
    fn fill(&mut self, context: &mut Context<'_>) {
        let out = &mut self.out;
        while out.len() < FRAME_BYTES && !self.over {
            if let Some((prompt, event)) = self.early.pop_front() {
                out.observe(&event);
                self.encoder.event(prompt, event, out);
                continue;
            }
            let next = match &mut self.generations {
                Some(generations) => Pin::new(generations).poll_next(context),
                None => Poll::Ready(None),
            };
            match next {
                Poll::Pending => return,
                Poll::Ready(Some(Ok((prompt, event)))) => {
                    out.observe(&event);
                    self.encoder.event(prompt, event, out);
                }
                Poll::Ready(Some(Err(outcome))) => {
                    self.encoder.failure(&outcome, out);
                    (self.generations, self.over) = (None, true);
                }
                Poll::Ready(None) => {
                    out.observe_end();
                    self.encoder.end(out);
                    (self.generations, self.over) = (None, true);
                }
            }
        }
    }
}

impl<E: Encoder> HttpBody for EventStream<E> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.over {
            return Poll::Ready(None);
        }
        this.fill(context);
        if this.out.len() == 0 && this.over {
            return Poll::Ready(None);
        }
        if this.out.len() == 0 {
            if this.keep_alive.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            this.out.comment(KEEP_ALIVE);
        }
        if let Some(next) = Instant::now().checked_add(this.interval) {
            this.keep_alive.as_mut().reset(next);
        }
        Poll::Ready(Some(Ok(Frame::data(this.out.take()))))
    }
}

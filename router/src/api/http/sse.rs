//! Server-sent events: the body of a streamed response, with keep-alive comments while nothing is generated.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream as _, StreamExt as _};
use http_body::{Body as HttpBody, Frame};
use serde::Serialize;
use tokio::time::{Instant, Sleep};
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use tonic::codegen::http::{HeaderValue, Response};

use super::generations::Generations;
use crate::api::generation::GenerationEvent;
use crate::outcome::Outcome;

/// Converts the events of a call to the server-sent events of an API.
pub(super) trait Encoder: Send + Unpin + 'static {
    /// Appends the events of one output.
    fn event(&mut self, prompt: usize, event: GenerationEvent, out: &mut EventWriter);

    /// Appends the last events, after the output of all prompts.
    fn end(&mut self, out: &mut EventWriter);

    /// Appends the events of a failure, after which the stream ends.
    fn failure(&mut self, outcome: &Outcome, out: &mut EventWriter);
}

/// Buffer of server-sent events.
#[derive(Debug, Default)]
pub(super) struct EventWriter(Vec<u8>);

impl EventWriter {
    /// Appends an event without a name.
    pub(super) fn data(&mut self, data: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        self.json(data);
    }

    /// Appends an event.
    pub(super) fn event(&mut self, name: &str, data: &impl Serialize) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.extend_from_slice(b"\ndata: ");
        self.json(data);
    }

    /// Appends an event with the text of `data`, which has no line break, and an optional name.
    pub(super) fn text(&mut self, name: Option<&str>, data: &[u8]) {
        if let Some(name) = name {
            self.0.extend_from_slice(b"event: ");
            self.0.extend_from_slice(name.as_bytes());
            self.0.push(b'\n');
        }
        self.0.extend_from_slice(b"data: ");
        self.0.extend_from_slice(data);
        self.0.extend_from_slice(b"\n\n");
    }

    fn json(&mut self, data: &impl Serialize) {
        // JSON has no line breaks outside of strings, where they are escaped. A `Vec` takes every write, and
        // all keys are strings, so this cannot fail.
        let _ = serde_json::to_writer(&mut self.0, data);
        self.0.extend_from_slice(b"\n\n");
    }
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
pub(super) async fn respond<E: Encoder>(
    mut generations: Generations,
    encoder: E,
    interval: Duration,
) -> Result<Response<Body>, Outcome> {
    let mut early = VecDeque::new();
    let mut ended = false;
    let first_output = async {
        while let Some(event) = generations.next().await {
            let (prompt, event) = event?;
            let output = matches!(event, GenerationEvent::Delta(_) | GenerationEvent::Finished(_));
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
    interval: Duration,
    keep_alive: Pin<Box<Sleep>>,
    over: bool,
}

impl<E: Encoder> EventStream<E> {
    /// Appends the events that are ready.
    fn fill(&mut self, context: &mut Context<'_>, out: &mut EventWriter) {
        while out.0.len() < FRAME_BYTES && !self.over {
            if let Some((prompt, event)) = self.early.pop_front() {
                self.encoder.event(prompt, event, out);
                continue;
            }
            let next = match &mut self.generations {
                Some(generations) => Pin::new(generations).poll_next(context),
                None => Poll::Ready(None),
            };
            match next {
                Poll::Pending => return,
                Poll::Ready(Some(Ok((prompt, event)))) => self.encoder.event(prompt, event, out),
                Poll::Ready(Some(Err(outcome))) => {
                    self.encoder.failure(&outcome, out);
                    (self.generations, self.over) = (None, true);
                }
                Poll::Ready(None) => {
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
        let mut out = EventWriter::default();
        this.fill(context, &mut out);
        if out.0.is_empty() {
            if this.keep_alive.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            out.0.extend_from_slice(KEEP_ALIVE);
        }
        if let Some(next) = Instant::now().checked_add(this.interval) {
            this.keep_alive.as_mut().reset(next);
        }
        Poll::Ready(Some(Ok(Frame::data(out.0.into()))))
    }
}

//! Streamed responses of `/v1/responses`.

use std::sync::Arc;

use inflight_contract::FinishReason;
use serde::Serialize;

use super::errors::OpenAiError;
use super::event_writer::EventWriter;
use super::logprobs::PositionBody;
use super::response_object::{Ended, ErrorBody, Item, RequestEcho, ResponseObject, TextPart};
use super::sse::Encoder;
use crate::api::generation::{Delta, GenerationEvent};
use crate::cluster::bundle::Model;
use crate::outcome::Outcome;

/// Encoder of a streamed response with one message.
pub(super) struct ResponseEvents {
    echo: RequestEcho,
    /// Set if log probabilities were asked for.
    bundle: Option<Arc<Model>>,
    with_timings: bool,
    text: String,
    logprobs: Vec<PositionBody>,
    end: Ended,
}

#[derive(Serialize)]
struct ResponseEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u32,
    response: ResponseObject<'a>,
}

#[derive(Serialize)]
struct ItemEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u32,
    output_index: u32,
    item: Item<'a>,
}

#[derive(Serialize)]
struct PartEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u32,
    item_id: &'a str,
    output_index: u32,
    content_index: u32,
    part: TextPart<'a>,
}

#[derive(Serialize)]
struct TextEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u32,
    item_id: &'a str,
    output_index: u32,
    content_index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    logprobs: &'a [PositionBody],
}

#[derive(Serialize)]
struct ErrorEvent {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u32,
    code: Option<&'static str>,
    message: String,
    param: Option<()>,
}

impl ResponseEvents {
    pub(super) fn new(echo: RequestEcho, bundle: Option<Arc<Model>>, timings: bool) -> Self {
        Self {
            echo,
            bundle,
            with_timings: timings,
            text: String::new(),
            logprobs: Vec::new(),
            end: Ended::default(),
        }
    }

    /// Writes the events before the first text.
    fn open(&mut self, out: &mut EventWriter) {
        for kind in ["response.created", "response.in_progress"] {
            let sequence_number = out.written();
            let response = self.echo.response("in_progress", Vec::new());
            out.event(kind, &ResponseEvent { kind, sequence_number, response });
        }
        let (kind, sequence_number) = ("response.output_item.added", out.written());
        let item = self.echo.item("in_progress", Vec::new());
        out.event(kind, &ItemEvent { kind, sequence_number, output_index: 0, item });
        self.part("response.content_part.added", "", &[], out);
    }

    fn part(&mut self, kind: &'static str, text: &str, logprobs: &[PositionBody], out: &mut EventWriter) {
        let sequence_number = out.written();
        let (item_id, part) = (self.echo.message_id.as_str(), TextPart::new(text, logprobs));
        out.event(
            kind,
            &PartEvent { kind, sequence_number, item_id, output_index: 0, content_index: 0, part },
        );
    }

    fn text_event(
        &mut self,
        kind: &'static str,
        delta: Option<&str>,
        text: Option<&str>,
        logprobs: &[PositionBody],
        out: &mut EventWriter,
    ) {
        let sequence_number = out.written();
        let item_id = self.echo.message_id.as_str();
        let (output_index, content_index) = (0, 0);
        out.event(
            kind,
            &TextEvent { kind, sequence_number, item_id, output_index, content_index, delta, text, logprobs },
        );
    }

    fn delta(&mut self, delta: Delta, out: &mut EventWriter) {
        let logprobs: Vec<PositionBody> = self.bundle.as_ref().map_or_else(Vec::new, |model| {
            let vocabulary = model.tokenizer.vocabulary();
            delta.logprobs.iter().map(|position| PositionBody::new(position, vocabulary)).collect()
        });
        if delta.text.is_empty() && logprobs.is_empty() {
            return;
        }
        self.text_event("response.output_text.delta", Some(&delta.text), None, &logprobs, out);
        self.text.push_str(&delta.text);
        self.logprobs.extend(logprobs);
    }
}

impl Encoder for ResponseEvents {
    fn event(&mut self, _: usize, event: GenerationEvent, out: &mut EventWriter) {
        match event {
            GenerationEvent::Started(_) => self.open(out),
            GenerationEvent::FingerprintChanged { .. } | GenerationEvent::PromptLogprobs { .. } => {}
            GenerationEvent::Delta(delta) => self.delta(delta, out),
            GenerationEvent::Finished(finished) => {
                self.end.truncated = finished.reason == FinishReason::Length;
            }
            GenerationEvent::Completed(completed) => {
                self.end.usage = completed.usage;
                self.end.timings = self.with_timings.then(|| completed.timings.into());
            }
        }
    }

    fn end(&mut self, out: &mut EventWriter) {
        let (text, logprobs) = (std::mem::take(&mut self.text), std::mem::take(&mut self.logprobs));
        self.text_event("response.output_text.done", None, Some(&text), &logprobs, out);
        self.part("response.content_part.done", &text, &logprobs, out);
        let (kind, sequence_number) = ("response.output_item.done", out.written());
        let item = self.echo.item(self.end.status(), vec![TextPart::new(&text, &logprobs)]);
        out.event(kind, &ItemEvent { kind, sequence_number, output_index: 0, item });
        let sequence_number = out.written();
        let kind = if self.end.truncated { "response.incomplete" } else { "response.completed" };
        let response = self.echo.ended(&self.end, TextPart::new(&text, &logprobs));
        out.event(kind, &ResponseEvent { kind, sequence_number, response });
    }

    fn failure(&mut self, outcome: &Outcome, out: &mut EventWriter) {
        let OpenAiError { message, code, .. } = OpenAiError::new(outcome);
        let (kind, sequence_number) = ("error", out.written());
        out.failure(kind, &ErrorEvent { kind, sequence_number, code, message, param: None });
        let (kind, sequence_number) = ("response.failed", out.written());
        let mut response = self.echo.response("failed", Vec::new());
        response.error = Some(ErrorBody::new(outcome));
        out.failure(kind, &ResponseEvent { kind, sequence_number, response });
    }
}

//! Streamed responses of `/v1/responses`.

use std::sync::Arc;

use inflight_contract::FinishReason;
use inflight_output_parser::OutputEvent;
use serde::Serialize;

use crate::cluster::bundle::Model;
use crate::outcome::Outcome;
use crate::output::collected::CollectedCall;
use crate::output::event::{Delta, GenerationEvent};
use crate::protocols::http::errors::OpenAiError;
use crate::protocols::http::event_writer::EventWriter;
use crate::protocols::http::sse::Encoder;
use crate::protocols::openai::logprobs::PositionBody;
use crate::protocols::openai::response_object::{
    Ended, ErrorBody, Item, OutputItem, RequestEcho, ResponseObject, TextPart,
};

/// Encoder of a streamed response.
pub(crate) struct ResponseEvents {
    echo: RequestEcho,
    /// Set if log probabilities were asked for.
    bundle: Option<Arc<Model>>,
    with_timings: bool,
    /// Items of the output so far.
    items: Vec<OutputItem>,
    /// Whether the last item has not ended.
    open: bool,
    /// Log probabilities of the output, which the first message has.
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
    output_index: usize,
    item: Item<'a>,
}

#[derive(Serialize)]
struct ArgumentsEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u32,
    item_id: &'a str,
    output_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<&'a str>,
}

#[derive(Serialize)]
struct PartEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u32,
    item_id: &'a str,
    output_index: usize,
    content_index: u32,
    part: TextPart<'a>,
}

#[derive(Serialize)]
struct TextEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u32,
    item_id: &'a str,
    output_index: usize,
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
    pub(crate) fn new(echo: RequestEcho, bundle: Option<Arc<Model>>, timings: bool) -> Self {
        Self {
            echo,
            bundle,
            with_timings: timings,
            items: Vec::new(),
            open: false,
            logprobs: Vec::new(),
            end: Ended::default(),
        }
    }

    /// Writes the events before the first output.
    fn start(&mut self, out: &mut EventWriter) {
        for kind in ["response.created", "response.in_progress"] {
            let sequence_number = out.written();
            let response = self.echo.response("in_progress", Vec::new());
            out.event(kind, &ResponseEvent { kind, sequence_number, response });
        }
        if !self.echo.parsed {
            self.open(OutputItem::Message(String::new()), out);
        }
    }

    /// Position of the last item.
    fn last(&self) -> usize {
        self.items.len().saturating_sub(1)
    }

    /// Begins an item.
    fn open(&mut self, item: OutputItem, out: &mut EventWriter) {
        self.close("completed", out);
        self.items.push(item);
        self.open = true;
        let (kind, sequence_number) = ("response.output_item.added", out.written());
        let output_index = self.last();
        let item = &self.items[output_index];
        let body = self.echo.item(item, output_index, "in_progress", &[], true);
        out.event(kind, &ItemEvent { kind, sequence_number, output_index, item: body });
        if matches!(item, OutputItem::Message(_)) {
            self.part("response.content_part.added", "", &[], out);
        }
    }

    /// Ends the item that is open.
    fn close(&mut self, status: &'static str, out: &mut EventWriter) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let output_index = self.last();
        let is_message = |item: &OutputItem| matches!(item, OutputItem::Message(_));
        let first = self.items.iter().position(is_message) == Some(output_index);
        let logprobs: &[PositionBody] = if first { &self.logprobs } else { &[] };
        let item = &self.items[output_index];
        match item {
            OutputItem::Message(text) => {
                self.text_event("response.output_text.done", None, Some(text), logprobs, out);
                self.part("response.content_part.done", text, logprobs, out);
            }
            OutputItem::Reasoning(text) => {
                self.text_event("response.reasoning_text.done", None, Some(text), &[], out);
            }
            OutputItem::Call(call) => {
                let (kind, sequence_number) = ("response.function_call_arguments.done", out.written());
                let (item_id, delta) = (self.echo.item_id(item, output_index), None);
                let (name, arguments) = (Some(call.name.as_str()), Some(call.arguments.as_str()));
                let item_id = &item_id;
                out.event(
                    kind,
                    &ArgumentsEvent { kind, sequence_number, item_id, output_index, delta, name, arguments },
                );
            }
        }
        let (kind, sequence_number) = ("response.output_item.done", out.written());
        let body = self.echo.item(item, output_index, status, logprobs, false);
        out.event(kind, &ItemEvent { kind, sequence_number, output_index, item: body });
    }

    fn part(&self, kind: &'static str, text: &str, logprobs: &[PositionBody], out: &mut EventWriter) {
        let (sequence_number, output_index) = (out.written(), self.last());
        let item_id = &self.echo.item_id(&self.items[output_index], output_index);
        let part = TextPart::new(text, logprobs);
        out.event(kind, &PartEvent { kind, sequence_number, item_id, output_index, content_index: 0, part });
    }

    fn text_event(
        &self,
        kind: &'static str,
        delta: Option<&str>,
        text: Option<&str>,
        logprobs: &[PositionBody],
        out: &mut EventWriter,
    ) {
        let (sequence_number, output_index) = (out.written(), self.last());
        let item_id = &self.echo.item_id(&self.items[output_index], output_index);
        let content_index = 0;
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
        let mut parts = delta.into_parts();
        // Log probabilities without text go with an empty one.
        let in_message = self.open && matches!(self.items.last(), Some(OutputItem::Message(_)));
        if parts.is_empty() && !logprobs.is_empty() && in_message {
            parts.push(OutputEvent::Content(String::new()));
        }
        for part in parts {
            let of_text = matches!(part, OutputEvent::Content(_));
            self.output(part, if of_text { &logprobs } else { &[] }, out);
        }
        self.logprobs.extend(logprobs);
    }

    /// Writes a part of the output.
    fn output(&mut self, part: OutputEvent, logprobs: &[PositionBody], out: &mut EventWriter) {
        let last = self.items.last().filter(|_| self.open);
        match part {
            OutputEvent::Content(text) => {
                if !matches!(last, Some(OutputItem::Message(_))) {
                    self.open(OutputItem::Message(String::new()), out);
                }
                self.text_event("response.output_text.delta", Some(&text), None, logprobs, out);
                if let Some(OutputItem::Message(all)) = self.items.last_mut() {
                    all.push_str(&text);
                }
            }
            OutputEvent::Reasoning(text) => {
                if !matches!(last, Some(OutputItem::Reasoning(_))) {
                    self.open(OutputItem::Reasoning(String::new()), out);
                }
                self.text_event("response.reasoning_text.delta", Some(&text), None, &[], out);
                if let Some(OutputItem::Reasoning(all)) = self.items.last_mut() {
                    all.push_str(&text);
                }
            }
            OutputEvent::CallBegin { id, name, .. } => {
                self.open(OutputItem::Call(CollectedCall { id, name, arguments: String::new() }), out);
            }
            OutputEvent::CallArguments { fragment, .. } => {
                let (kind, sequence_number) = ("response.function_call_arguments.delta", out.written());
                let output_index = self.last();
                if let Some(item @ OutputItem::Call(_)) = self.items.last() {
                    let (item_id, delta) = (&self.echo.item_id(item, output_index), Some(fragment.as_str()));
                    let (name, arguments) = (None, None);
                    out.event(
                        kind,
                        &ArgumentsEvent {
                            kind,
                            sequence_number,
                            item_id,
                            output_index,
                            delta,
                            name,
                            arguments,
                        },
                    );
                }
                if let Some(OutputItem::Call(call)) = self.items.last_mut() {
                    call.arguments.push_str(&fragment);
                }
            }
            OutputEvent::CallEnd { whole, .. } => {
                self.close(if whole { "completed" } else { "incomplete" }, out);
            }
        }
    }
}

impl Encoder for ResponseEvents {
    /// A part of the output may take several events.
    const EVENTS_ARE_COUNTED: bool = true;

    fn event(&mut self, _: usize, event: GenerationEvent, out: &mut EventWriter) {
        match event {
            GenerationEvent::Started(_) => self.start(out),
            GenerationEvent::FingerprintChanged { .. } | GenerationEvent::PromptLogprobs { .. } => {}
            GenerationEvent::Delta(delta) => self.delta(delta, out),
            GenerationEvent::Finished(finished) => {
                finished.parts.into_iter().for_each(|part| self.output(part, &[], out));
                self.end.truncated = finished.reason == FinishReason::Length;
                self.end.has_cut_call = finished.cut_call;
            }
            GenerationEvent::Completed(completed) => {
                self.end.usage = completed.usage;
                self.end.timings = self.with_timings.then(|| completed.timings.into());
            }
        }
    }

    fn end(&mut self, out: &mut EventWriter) {
        self.close(self.end.status(), out);
        let sequence_number = out.written();
        let kind = if self.end.is_complete() { "response.completed" } else { "response.incomplete" };
        let response = self.echo.ended(&self.end, &self.items, &self.logprobs);
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

//! Streamed messages of Anthropic's API.

use serde::Serialize;

use super::Started;
use super::errors::{Dialect, envelope};
use super::event_writer::EventWriter;
use super::messages::{AssistantMessage, TextBlock, UsageBody, stop_reason};
use super::sse::Encoder;
use super::usage::TimingsBody;
use crate::api::generation::{Finished, GenerationEvent};
use crate::outcome::Outcome;

/// Encoder of a streamed message with one text block.
pub(super) struct MessageStream {
    id: String,
    model: String,
    with_timings: bool,
    finished: Option<Finished>,
    usage: UsageBody,
    timings: Option<TimingsBody>,
}

#[derive(Serialize)]
struct MessageStart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    message: AssistantMessage<'a>,
}

#[derive(Serialize)]
struct BlockStart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    index: u32,
    content_block: TextBlock<'a>,
}

#[derive(Serialize)]
struct BlockDelta<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    index: u32,
    delta: TextDelta<'a>,
}

#[derive(Serialize)]
struct TextDelta<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
}

#[derive(Serialize)]
struct BlockStop {
    #[serde(rename = "type")]
    kind: &'static str,
    index: u32,
}

#[derive(Serialize)]
struct MessageDelta<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    delta: StopDelta<'a>,
    usage: UsageBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
}

#[derive(Serialize)]
struct StopDelta<'a> {
    stop_reason: &'static str,
    stop_sequence: Option<&'a str>,
}

#[derive(Serialize)]
struct MessageStop {
    #[serde(rename = "type")]
    kind: &'static str,
}

impl MessageStream {
    pub(super) fn new(started: &Started, timings: bool) -> Self {
        Self {
            id: started.id("msg_"),
            model: started.model.clone(),
            with_timings: timings,
            finished: None,
            usage: UsageBody::default(),
            timings: None,
        }
    }
}

impl Encoder for MessageStream {
    fn event(&mut self, _: usize, event: GenerationEvent, out: &mut EventWriter) {
        match event {
            GenerationEvent::Started(started) => {
                // Cached tokens are known at the end; `message_delta` corrects the count.
                let usage = UsageBody { input_tokens: started.prompt_tokens, ..UsageBody::default() };
                let message = AssistantMessage {
                    id: &self.id,
                    kind: "message",
                    role: "assistant",
                    model: &self.model,
                    content: &[],
                    stop_reason: None,
                    stop_sequence: None,
                    usage,
                    timings: None,
                };
                out.event("message_start", &MessageStart { kind: "message_start", message });
                let (kind, content_block) = ("content_block_start", TextBlock::new(""));
                out.event(kind, &BlockStart { kind, index: 0, content_block });
            }
            GenerationEvent::Delta(delta) if !delta.text.is_empty() => {
                let delta = TextDelta { kind: "text_delta", text: &delta.text };
                let kind = "content_block_delta";
                out.event(kind, &BlockDelta { kind, index: 0, delta });
            }
            GenerationEvent::Delta(_)
            | GenerationEvent::FingerprintChanged { .. }
            | GenerationEvent::PromptLogprobs { .. } => {}
            GenerationEvent::Finished(finished) => self.finished = Some(finished),
            GenerationEvent::Completed(completed) => {
                self.usage = UsageBody::from(&completed.usage);
                self.timings = self.with_timings.then(|| completed.timings.into());
            }
        }
    }

    fn end(&mut self, out: &mut EventWriter) {
        let kind = "content_block_stop";
        out.event(kind, &BlockStop { kind, index: 0 });
        let (stop_reason, stop_sequence) = self.finished.as_ref().map_or(("end_turn", None), stop_reason);
        let delta = StopDelta { stop_reason, stop_sequence };
        let kind = "message_delta";
        out.event(kind, &MessageDelta { kind, delta, usage: self.usage, timings: self.timings });
        out.event("message_stop", &MessageStop { kind: "message_stop" });
    }

    fn failure(&mut self, outcome: &Outcome, out: &mut EventWriter) {
        out.text(Some("error"), &envelope(Dialect::Anthropic, outcome));
    }
}

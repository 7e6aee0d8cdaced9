//! Streamed messages of Anthropic's API.

use inflight_output_parser::OutputEvent;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::output::event::{Finished, GenerationEvent};
use crate::protocols::anthropic::message_blocks::{Block, Fragment};
use crate::protocols::anthropic::messages::{AssistantMessage, UsageBody, stop_reason};
use crate::protocols::http::Started;
use crate::protocols::http::errors::{Dialect, envelope};
use crate::protocols::http::event_writer::EventWriter;
use crate::protocols::http::sse::Encoder;
use crate::protocols::http::usage::TimingsBody;

/// Kind of the block that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenBlock {
    Text,
    Thinking,
    ToolUse,
}

/// Encoder of a streamed message.
pub(crate) struct MessageStream {
    id: String,
    model: String,
    with_timings: bool,
    open: Option<OpenBlock>,
    /// Number of blocks that were opened.
    blocks: u32,
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
    content_block: Block<'a>,
}

#[derive(Serialize)]
struct BlockDelta<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    index: u32,
    delta: Fragment<'a>,
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
    pub(crate) fn new(started: &Started, timings: bool) -> Self {
        Self {
            id: started.id("msg_"),
            model: started.model.clone(),
            with_timings: timings,
            open: None,
            blocks: 0,
            finished: None,
            usage: UsageBody::default(),
            timings: None,
        }
    }

    /// Opens a block.
    fn open(&mut self, kind: OpenBlock, content_block: Block<'_>, out: &mut EventWriter) {
        self.close(out);
        let (name, index) = ("content_block_start", self.blocks);
        out.event(name, &BlockStart { kind: name, index, content_block });
        self.blocks += 1;
        self.open = Some(kind);
    }

    /// Closes the open block.
    fn close(&mut self, out: &mut EventWriter) {
        if self.open.take().is_some() {
            let (kind, index) = ("content_block_stop", self.blocks.saturating_sub(1));
            out.event(kind, &BlockStop { kind, index });
        }
    }

    fn fragment(&self, delta: Fragment<'_>, out: &mut EventWriter) {
        let (kind, index) = ("content_block_delta", self.blocks.saturating_sub(1));
        out.event(kind, &BlockDelta { kind, index, delta });
    }

    /// Writes a part of the output.
    fn part(&mut self, part: &OutputEvent, out: &mut EventWriter) {
        match part {
            OutputEvent::Content(text) => {
                if self.open != Some(OpenBlock::Text) {
                    self.open(OpenBlock::Text, Block::Text { text: "" }, out);
                }
                self.fragment(Fragment::TextDelta { text }, out);
            }
            OutputEvent::Reasoning(text) => {
                if self.open != Some(OpenBlock::Thinking) {
                    self.open(OpenBlock::Thinking, Block::Thinking { thinking: "", signature: "" }, out);
                }
                self.fragment(Fragment::ThinkingDelta { thinking: text }, out);
            }
            OutputEvent::CallBegin { id, name, .. } => {
                let empty: &RawValue = serde_json::from_str("{}").unwrap_or(RawValue::NULL);
                self.open(OpenBlock::ToolUse, Block::ToolUse { id, name, input: empty }, out);
            }
            OutputEvent::CallArguments { fragment, .. } => {
                self.fragment(Fragment::InputJsonDelta { partial_json: fragment }, out);
            }
            OutputEvent::CallEnd { .. } => self.close(out),
        }
    }
}

impl Encoder for MessageStream {
    /// A part of the output may take several events.
    const EVENTS_ARE_COUNTED: bool = true;

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
                if !started.parsed {
                    self.open(OpenBlock::Text, Block::Text { text: "" }, out);
                }
            }
            GenerationEvent::Delta(delta) => {
                delta.into_parts().iter().for_each(|part| self.part(part, out));
            }
            GenerationEvent::FingerprintChanged { .. } | GenerationEvent::PromptLogprobs { .. } => {}
            GenerationEvent::Finished(finished) => {
                finished.parts.iter().for_each(|part| self.part(part, out));
                self.finished = Some(finished);
            }
            GenerationEvent::Completed(completed) => {
                self.usage = UsageBody::from(&completed.usage);
                self.timings = self.with_timings.then(|| completed.timings.into());
            }
        }
    }

    fn end(&mut self, out: &mut EventWriter) {
        self.close(out);
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

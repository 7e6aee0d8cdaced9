//! Streamed chat completions.

use std::sync::Arc;

use inflight_output_parser::OutputEvent;
use serde::Serialize;

use crate::cluster::bundle::Model;
use crate::outcome::Outcome;
use crate::output::event::{Delta, Finished, GenerationEvent};
use crate::protocols::http::Started;
use crate::protocols::http::errors::{Dialect, envelope};
use crate::protocols::http::event_writer::EventWriter;
use crate::protocols::http::sampling::StreamOptions;
use crate::protocols::http::sse::Encoder;
use crate::protocols::openai::chat::{ReasoningBody, finish_reason};
use crate::protocols::openai::chunk_writer::{ChunkWriter, Place};
use crate::protocols::openai::logprobs::ChatLogprobs;

/// Encoder of a streamed chat completion.
pub(crate) struct ChatStream {
    chunks: ChunkWriter<Finished>,
    bundle: Option<Arc<Model>>,
    /// Number of choices.
    choices: u32,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    delta: DeltaBody<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct DeltaBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(flatten)]
    reasoning: Option<ReasoningBody<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallDelta<'a>>,
}

/// Fragment of a tool call; id, type and name are in the first one.
#[derive(Serialize)]
struct CallDelta<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: String,
}

/// Parts of an output, as a chunk has them.
#[derive(Default)]
struct ChunkParts {
    content: String,
    reasoning: String,
    /// Begins and arguments of calls.
    others: Vec<OutputEvent>,
}

impl ChunkParts {
    fn new(parts: Vec<OutputEvent>) -> Self {
        let mut chunk = Self::default();
        for part in parts {
            match part {
                OutputEvent::Content(text) => chunk.content.push_str(&text),
                OutputEvent::Reasoning(text) => chunk.reasoning.push_str(&text),
                OutputEvent::CallEnd { .. } => {}
                part => chunk.others.push(part),
            }
        }
        chunk
    }

    fn is_empty(&self) -> bool {
        self.content.is_empty() && self.reasoning.is_empty() && self.others.is_empty()
    }

    /// Returns the body of the chunk; each call has one entry.
    fn body(&self) -> DeltaBody<'_> {
        let mut tool_calls: Vec<CallDelta<'_>> = Vec::new();
        for part in &self.others {
            match part {
                OutputEvent::CallBegin { index, id, name } => tool_calls.push(CallDelta {
                    index: *index,
                    id: Some(id),
                    kind: Some("function"),
                    function: FunctionDelta { name: Some(name), arguments: String::new() },
                }),
                OutputEvent::CallArguments { index, fragment } => {
                    let open = tool_calls.last_mut().filter(|call| call.index == *index);
                    match open {
                        Some(call) => call.function.arguments.push_str(fragment),
                        None => tool_calls.push(CallDelta {
                            index: *index,
                            id: None,
                            kind: None,
                            function: FunctionDelta { name: None, arguments: fragment.clone() },
                        }),
                    }
                }
                _ => {}
            }
        }
        DeltaBody {
            role: None,
            content: Some(self.content.as_str()).filter(|text| !text.is_empty()),
            reasoning: ReasoningBody::new(&self.reasoning),
            tool_calls,
        }
    }
}

impl ChatStream {
    pub(crate) fn new(started: &Started, options: StreamOptions, logprobs: bool, timings: bool) -> Self {
        let kind = ("chatcmpl-", "chat.completion.chunk");
        Self {
            chunks: ChunkWriter::new(started, kind, options, timings),
            bundle: started.bundle().filter(|_| logprobs),
            choices: started.choices(),
        }
    }

    /// Writes the last chunk of a choice.
    fn finish(&mut self, finished: Finished, place: Place, out: &mut EventWriter) {
        let (index, reason) = (finished.choice, finish_reason(finished.reason, finished.called));
        let parts = ChunkParts::new(finished.parts);
        let choice = Choice { index, delta: parts.body(), logprobs: None, finish_reason: Some(reason) };
        self.chunks.choice(choice, place, out);
    }

    /// Sends the role of each choice, before any output.
    fn open(&mut self, out: &mut EventWriter) {
        for index in 0..self.choices {
            let delta = DeltaBody { role: Some("assistant"), content: Some(""), ..DeltaBody::default() };
            let choice = Choice { index, delta, logprobs: None, finish_reason: None };
            self.chunks.choice(choice, Place::Within, out);
        }
    }

    fn delta(&mut self, delta: Delta, out: &mut EventWriter) {
        self.chunks.count(&delta);
        let logprobs = self.bundle.as_ref();
        let logprobs = logprobs.map(|model| ChatLogprobs::new(&delta.logprobs, model.tokenizer.vocabulary()));
        let (index, has_logprobs) = (delta.choice, !delta.logprobs.is_empty());
        let parts = ChunkParts::new(delta.into_parts());
        if parts.is_empty() && !has_logprobs {
            return;
        }
        let mut body = parts.body();
        if parts.is_empty() {
            body.content = Some("");
        }
        let choice = Choice { index, delta: body, logprobs, finish_reason: None };
        self.chunks.choice(choice, Place::Within, out);
    }
}

impl Encoder for ChatStream {
    const EVENTS_ARE_COUNTED: bool = false;

    fn event(&mut self, prompt: usize, event: GenerationEvent, out: &mut EventWriter) {
        match event {
            GenerationEvent::Started(started) => {
                self.chunks.start(started);
                self.open(out);
            }
            GenerationEvent::FingerprintChanged { fingerprint, .. } => {
                self.chunks.change_fingerprint(fingerprint);
            }
            // Refused with `stream`.
            GenerationEvent::PromptLogprobs { .. } => {}
            GenerationEvent::Delta(delta) => self.delta(delta, out),
            GenerationEvent::Finished(finished) => {
                if let Some(finished) = self.chunks.finish(finished) {
                    self.finish(finished, Place::End, out);
                }
            }
            GenerationEvent::Completed(completed) => {
                if let Some(finished) = self.chunks.complete(prompt, completed) {
                    self.finish(finished, Place::Last, out);
                }
            }
        }
    }

    fn end(&mut self, out: &mut EventWriter) {
        self.chunks.end(out);
    }

    fn failure(&mut self, outcome: &Outcome, out: &mut EventWriter) {
        out.text(None, &envelope(Dialect::OpenAi, outcome));
    }
}

//! Streamed chat completions.

use std::sync::Arc;

use serde::Serialize;

use super::Started;
use super::chat::finish_reason;
use super::errors::{Dialect, envelope};
use super::event_writer::EventWriter;
use super::logprobs::ChatLogprobs;
use super::sampling::StreamOptions;
use super::sse::Encoder;
use super::usage::{TimingsBody, UsageBody};
use crate::api::generation::{Delta, Finished, GenerationEvent};
use crate::cluster::bundle::Model;
use crate::outcome::Outcome;

/// Encoder of a streamed chat completion.
pub(super) struct ChatStream {
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    bundle: Option<Arc<Model>>,
    options: StreamOptions,
    logprobs: bool,
    with_timings: bool,
    /// Number of choices.
    choices: u32,
    /// Choices that have not ended.
    open: u32,
    /// Last end of a choice, whose chunk waits for the timings.
    last: Option<Finished>,
    prompt_tokens: u32,
    completion_tokens: u32,
    usage: UsageBody,
    timings: Option<TimingsBody>,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [Choice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
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
}

impl ChatStream {
    pub(super) fn new(started: &Started, options: StreamOptions, logprobs: bool, timings: bool) -> Self {
        Self {
            id: started.id("chatcmpl-"),
            created: started.created,
            model: started.model.clone(),
            fingerprint: String::new(),
            bundle: started.bundle().filter(|_| logprobs),
            options,
            logprobs,
            with_timings: timings,
            choices: started.choices(),
            open: started.choices(),
            last: None,
            prompt_tokens: 0,
            completion_tokens: 0,
            usage: UsageBody::default(),
            timings: None,
        }
    }

    /// Writes a chunk of one choice.
    fn choice(&self, choice: Choice<'_>, timings: Option<TimingsBody>, out: &mut EventWriter) {
        let so_far = || UsageBody::so_far(self.prompt_tokens, self.completion_tokens);
        self.chunk(&[choice], self.options.of_chunk(so_far), timings, out);
    }

    /// Writes the last chunk of a choice.
    fn finish(&self, finished: &Finished, timings: Option<TimingsBody>, out: &mut EventWriter) {
        let (index, finish_reason) = (finished.choice, Some(finish_reason(finished.reason)));
        self.choice(
            Choice { index, delta: DeltaBody::default(), logprobs: None, finish_reason },
            timings,
            out,
        );
    }

    fn chunk(
        &self,
        choices: &[Choice<'_>],
        usage: Option<Option<UsageBody>>,
        timings: Option<TimingsBody>,
        out: &mut EventWriter,
    ) {
        let (id, model, system_fingerprint) = (&*self.id, &*self.model, &*self.fingerprint);
        let (object, created) = ("chat.completion.chunk", self.created);
        out.data(&Chunk { id, object, created, model, system_fingerprint, choices, usage, timings });
    }

    /// Sends the role of each choice, before any output.
    fn open(&self, out: &mut EventWriter) {
        for index in 0..self.choices {
            let delta = DeltaBody { role: Some("assistant"), content: Some("") };
            self.choice(Choice { index, delta, logprobs: None, finish_reason: None }, None, out);
        }
    }

    fn delta(&mut self, delta: Delta, out: &mut EventWriter) {
        self.completion_tokens += delta.token_ids.len() as u32;
        if delta.text.is_empty() && delta.logprobs.is_empty() {
            return;
        }
        let logprobs = self.bundle.as_ref().filter(|_| self.logprobs);
        let logprobs = logprobs.map(|model| ChatLogprobs::new(&delta.logprobs, model.tokenizer.vocabulary()));
        let content = DeltaBody { role: None, content: Some(&delta.text) };
        self.choice(Choice { index: delta.choice, delta: content, logprobs, finish_reason: None }, None, out);
    }
}

impl Encoder for ChatStream {
    fn event(&mut self, _: usize, event: GenerationEvent, out: &mut EventWriter) {
        match event {
            GenerationEvent::Started(started) => {
                (self.fingerprint, self.prompt_tokens) = (started.fingerprint, started.prompt_tokens);
                self.open(out);
            }
            GenerationEvent::FingerprintChanged { fingerprint, .. } => self.fingerprint = fingerprint,
            // Refused with `stream`.
            GenerationEvent::PromptLogprobs { .. } => {}
            GenerationEvent::Delta(delta) => self.delta(delta, out),
            GenerationEvent::Finished(finished) => {
                self.open = self.open.saturating_sub(1);
                if self.with_timings && self.open == 0 && !self.options.include_usage() {
                    self.last = Some(finished);
                } else {
                    self.finish(&finished, None, out);
                }
            }
            GenerationEvent::Completed(completed) => {
                self.usage.add(&completed.usage);
                self.timings = self.with_timings.then(|| completed.timings.into());
                if let Some(finished) = self.last.take() {
                    self.finish(&finished, self.timings, out);
                }
            }
        }
    }

    fn end(&mut self, out: &mut EventWriter) {
        if self.options.include_usage() {
            self.chunk(&[], Some(Some(self.usage)), self.timings, out);
        }
        out.text(None, b"[DONE]");
    }

    fn failure(&mut self, outcome: &Outcome, out: &mut EventWriter) {
        out.text(None, &envelope(Dialect::OpenAi, outcome));
    }
}

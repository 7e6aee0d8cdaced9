//! Streamed text completions.

use std::sync::Arc;

use inflight_contract::{FinishReason, PromptLogprobs};
use serde::Serialize;

use crate::cluster::bundle::Model;
use crate::outcome::Outcome;
use crate::output::event::GenerationEvent;
use crate::protocols::http::Started;
use crate::protocols::http::errors::{Dialect, envelope};
use crate::protocols::http::event_writer::EventWriter;
use crate::protocols::http::sse::Encoder;
use crate::protocols::openai::chat::finish_reason;
use crate::protocols::openai::chunk_writer::{ChunkWriter, Place};
use crate::protocols::openai::completions::Output;
use crate::protocols::openai::logprobs::{TextLogprobs, TextOffset};

/// Encoder of a streamed text completion.
pub(crate) struct CompletionStream {
    chunks: ChunkWriter<Ending>,
    bundle: Option<Arc<Model>>,
    output: Output,
    /// Choices of each prompt.
    choices_per_prompt: u32,
    choices: Vec<ChoiceState>,
    /// Prompts that are echoed with log probabilities.
    prompts: Vec<EchoedPrompt>,
}

/// State of a choice.
#[derive(Default)]
struct ChoiceState {
    /// Text of the prompt, until it is sent; all choices of a prompt share it.
    echo: Option<Arc<str>>,
    offset: TextOffset,
}

/// Prompt that is echoed with log probabilities.
struct EchoedPrompt {
    tokens: Vec<u32>,
    logprobs: Vec<PromptLogprobs>,
}

/// Last chunk of a choice.
struct Ending {
    index: u32,
    text: String,
    logprobs: Option<TextLogprobs>,
    reason: FinishReason,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
}

impl CompletionStream {
    /// Creates the encoder; `echoed` are the texts of the prompts that precede their outputs.
    pub(crate) fn new(started: &Started, output: Output, echoed: &[String], timings: bool) -> Self {
        let choices_per_prompt = started.choices();
        let count = started.streams.len() * choices_per_prompt as usize;
        let echoed: Vec<Arc<str>> = echoed.iter().map(|text| text.as_str().into()).collect();
        let choice = |index: usize| {
            let echo = echoed.get(index / choices_per_prompt as usize).cloned();
            ChoiceState { offset: TextOffset::after(echo.as_deref().unwrap_or_default()), echo }
        };
        let prompts = started.scored_prompts(output.echo && output.logprobs.is_some()).into_iter();
        Self {
            chunks: ChunkWriter::new(started, ("cmpl-", "text_completion"), output.stream_options, timings),
            bundle: started.bundle().filter(|_| output.logprobs.is_some()),
            output,
            choices_per_prompt,
            choices: (0..count).map(choice).collect(),
            prompts: prompts.map(|tokens| EchoedPrompt { tokens, logprobs: Vec::new() }).collect(),
        }
    }

    /// Writes the last chunk of a choice.
    fn finish(&mut self, ending: Ending, place: Place, out: &mut EventWriter) {
        let Ending { index, text, logprobs, reason } = ending;
        let finish_reason = Some(finish_reason(reason, false));
        self.chunks.choice(Choice { index, text: &text, logprobs, finish_reason }, place, out);
    }

    /// Returns the index of a prompt's choice among those of the call.
    fn index(&self, prompt: usize, choice: u32) -> u32 {
        prompt as u32 * self.choices_per_prompt + choice
    }

    /// Takes the text of the prompt that precedes the first output of a choice, with its log probabilities if
    /// they are wanted.
    fn take_echo(&mut self, prompt: usize, index: u32) -> (String, Option<TextLogprobs>) {
        let echo = self.choices.get_mut(index as usize).and_then(|choice| choice.echo.take());
        let Some(text) = echo else { return (String::new(), None) };
        let scored = self.prompts.get(prompt).zip(self.bundle.as_ref());
        let logprobs = scored.map(|(EchoedPrompt { tokens, logprobs }, model)| {
            let alternatives = self.output.logprobs.unwrap_or(0);
            TextLogprobs::echo(tokens, logprobs, alternatives, model.tokenizer.vocabulary())
        });
        (text.as_ref().to_owned(), logprobs)
    }
}

impl Encoder for CompletionStream {
    const EVENTS_ARE_COUNTED: bool = false;

    fn event(&mut self, prompt: usize, event: GenerationEvent, out: &mut EventWriter) {
        match event {
            GenerationEvent::Started(started) => self.chunks.start(started),
            GenerationEvent::FingerprintChanged { fingerprint, .. } => {
                self.chunks.change_fingerprint(fingerprint);
            }
            GenerationEvent::PromptLogprobs { positions, .. } => {
                if let Some(prompt) = self.prompts.get_mut(prompt) {
                    prompt.logprobs.extend(positions);
                }
            }
            GenerationEvent::Delta(delta) => {
                let index = self.index(prompt, delta.choice);
                self.chunks.count(&delta);
                let (mut text, echoed) = self.take_echo(prompt, index);
                text.push_str(&delta.text);
                let state = self.choices.get_mut(index as usize);
                let logprobs = self.bundle.as_ref().zip(state).map(|(model, state)| {
                    let mut body = echoed.unwrap_or_default();
                    body.extend(&delta.logprobs, model.tokenizer.vocabulary(), &mut state.offset);
                    body
                });
                if !text.is_empty() || logprobs.is_some() {
                    let choice = Choice { index, text: &text, logprobs, finish_reason: None };
                    self.chunks.choice(choice, Place::Within, out);
                }
            }
            GenerationEvent::Finished(finished) => {
                let index = self.index(prompt, finished.choice);
                let (text, logprobs) = self.take_echo(prompt, index);
                let ending = Ending { index, text, logprobs, reason: finished.reason };
                if let Some(ending) = self.chunks.finish(ending) {
                    self.finish(ending, Place::End, out);
                }
            }
            GenerationEvent::Completed(completed) => {
                if let Some(ending) = self.chunks.complete(prompt, completed) {
                    self.finish(ending, Place::Last, out);
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

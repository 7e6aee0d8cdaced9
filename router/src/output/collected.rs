//! Output of a response stream, collected for a response in one piece.

use inflight_contract::{FinishReason, PositionLogprobs, PromptLogprobs};

use inflight_output_parser::OutputEvent;

use crate::output::event::{self, Completed, Finished, GenerationEvent, Started, Timings, Usage};

/// Output of one prompt.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub(crate) choices: Vec<CollectedChoice>,
    pub(crate) started: Started,
    /// Log probabilities of the prompt tokens from the second one on, if requested.
    pub(crate) prompt_logprobs: Vec<PromptLogprobs>,
    /// Changes of the fingerprint after the start, each with the tokens of each choice before it.
    pub(crate) changes: Vec<(String, Vec<u32>)>,
    pub(crate) usage: Usage,
    pub(crate) timings: Timings,
}

/// Output of one choice.
#[derive(Debug, Default)]
pub(crate) struct CollectedChoice {
    /// Text; of a parsed output, its content.
    pub(crate) text: String,
    pub(crate) reasoning: String,
    /// Parts of a parsed output, in order.
    pub(crate) parts: Vec<CollectedPart>,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) logprobs: Vec<PositionLogprobs>,
    pub(crate) finished: Option<Finished>,
}

/// Part of a parsed output.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CollectedPart {
    Content(String),
    Reasoning(String),
    Call(CollectedCall),
}

/// Tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CollectedCall {
    pub(crate) id: String,
    pub(crate) name: String,
    /// Text of a JSON object.
    pub(crate) arguments: String,
}

impl CollectedCall {
    /// Whether the call was made: its arguments are whole.
    pub(crate) fn is_whole(&self) -> bool {
        serde_json::from_str::<serde::de::IgnoredAny>(&self.arguments).is_ok()
    }
}

impl Collected {
    /// Returns the number of positions with log probabilities.
    pub(crate) fn positions(&self) -> usize {
        self.prompt_logprobs.len() + self.choices.iter().map(|choice| choice.logprobs.len()).sum::<usize>()
    }
}

impl CollectedChoice {
    /// Returns the tool calls.
    pub(crate) fn calls(&self) -> impl Iterator<Item = &CollectedCall> {
        self.parts.iter().filter_map(|part| match part {
            CollectedPart::Call(call) => Some(call),
            CollectedPart::Content(_) | CollectedPart::Reasoning(_) => None,
        })
    }

    /// Whether the output has tool calls.
    pub(crate) fn called(&self) -> bool {
        self.finished.as_ref().is_some_and(|finished| finished.called)
    }

    /// Adds a part of a parsed output.
    fn add_part(&mut self, part: OutputEvent) {
        match (part, self.parts.last_mut()) {
            (OutputEvent::Content(text), Some(CollectedPart::Content(last))) => last.push_str(&text),
            (OutputEvent::Content(text), _) => self.parts.push(CollectedPart::Content(text)),
            (OutputEvent::Reasoning(text), last) => {
                self.reasoning.push_str(&text);
                match last {
                    Some(CollectedPart::Reasoning(last)) => last.push_str(&text),
                    _ => self.parts.push(CollectedPart::Reasoning(text)),
                }
            }
            (OutputEvent::CallBegin { id, name, .. }, _) => {
                let call = CollectedCall { id, name, arguments: String::new() };
                self.parts.push(CollectedPart::Call(call));
            }
            (OutputEvent::CallArguments { fragment, .. }, Some(CollectedPart::Call(call))) => {
                call.arguments.push_str(&fragment);
            }
            (OutputEvent::CallArguments { .. } | OutputEvent::CallEnd { .. }, _) => {}
        }
    }

    pub(crate) fn reason(&self) -> FinishReason {
        self.finished.as_ref().map_or(FinishReason::Error, |finished| finished.reason)
    }
}

impl Collected {
    fn choice(&mut self, choice: u32) -> &mut CollectedChoice {
        let choice = choice as usize;
        if self.choices.len() <= choice {
            self.choices.resize_with(choice + 1, CollectedChoice::default);
        }
        &mut self.choices[choice]
    }

    /// Returns the fingerprint of the worker that generated the last tokens.
    pub(crate) fn fingerprint(&self) -> &str {
        self.changes.last().map_or(&self.started.fingerprint, |(fingerprint, _)| fingerprint)
    }

    /// Adds the next event of the stream.
    pub(crate) fn add(&mut self, event: GenerationEvent) {
        match event {
            GenerationEvent::Started(started) => self.started = started,
            GenerationEvent::FingerprintChanged { fingerprint, tokens } => {
                self.changes.push((fingerprint, tokens));
            }
            GenerationEvent::PromptLogprobs { positions, .. } => self.prompt_logprobs.extend(positions),
            GenerationEvent::Delta(delta) => {
                let choice = self.choice(delta.choice);
                choice.text.push_str(&delta.text);
                delta.parts.into_iter().for_each(|part| choice.add_part(part));
                choice.token_ids.extend(delta.token_ids);
                choice.logprobs.extend(delta.logprobs);
            }
            GenerationEvent::Finished(finished) => {
                let choice = self.choice(finished.choice);
                choice.text.push_str(&event::content(&finished.parts));
                finished.parts.iter().cloned().for_each(|part| choice.add_part(part));
                choice.finished = Some(finished);
            }
            GenerationEvent::Completed(Completed { usage, timings }) => {
                (self.usage, self.timings) = (usage, timings);
            }
        }
    }
}

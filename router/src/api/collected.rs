//! Output of a response stream, collected for a response in one piece.

use inflight_contract::{FinishReason, PositionLogprobs, PromptLogprobs};

use crate::api::generation::{Completed, Finished, GenerationEvent, Started, Timings, Usage};

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
    pub(crate) text: String,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) logprobs: Vec<PositionLogprobs>,
    pub(crate) finished: Option<Finished>,
}

impl CollectedChoice {
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
                choice.token_ids.extend(delta.token_ids);
                choice.logprobs.extend(delta.logprobs);
            }
            GenerationEvent::Finished(finished) => {
                let choice = self.choice(finished.choice);
                choice.finished = Some(finished);
            }
            GenerationEvent::Completed(Completed { usage, timings }) => {
                (self.usage, self.timings) = (usage, timings);
            }
        }
    }
}

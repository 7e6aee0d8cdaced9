//! Events of a response stream, which every protocol maps to its own messages.

use inflight_contract::{FinishReason, PositionLogprobs, PromptLogprobs};
use inflight_output_parser::OutputEvent;

use crate::request::cursor::ChoicePosition;

/// Event of a response stream: `Started`, then `PromptLogprobs` if requested, then `Delta`s, one `Finished` for each choice, and `Completed`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum GenerationEvent {
    /// The request was dispatched to a worker.
    Started(Started),
    /// Log probabilities of the next prompt tokens, in the order of the prompt from its second token on.
    PromptLogprobs {
        /// Position of the first of these tokens in the prompt.
        first: u32,
        /// One entry per token.
        positions: Vec<PromptLogprobs>,
    },
    /// New output of one choice.
    Delta(Delta),
    /// A choice has finished.
    Finished(Finished),
    /// The stream continues on a worker with another numerics fingerprint.
    FingerprintChanged {
        /// Fingerprint of the worker that continues.
        fingerprint: String,
        /// Tokens of each choice before the change.
        tokens: Vec<u32>,
    },
    /// All choices have finished.
    Completed(Completed),
}

impl GenerationEvent {
    /// Whether it is output that the client has not received before.
    pub(crate) fn is_new_output(&self) -> bool {
        match self {
            Self::Delta(delta) => !delta.replayed,
            Self::Finished(finished) => !finished.replayed,
            Self::PromptLogprobs { .. } => true,
            Self::Started(_) | Self::FingerprintChanged { .. } | Self::Completed(_) => false,
        }
    }
}

/// First event of a stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Started {
    pub(crate) request_id: String,
    pub(crate) model: String,
    pub(crate) prompt_tokens: u32,
    pub(crate) seed: u64,
    /// Numerics fingerprint of the worker.
    pub(crate) fingerprint: String,
    /// Whether the output is parsed.
    pub(crate) parsed: bool,
}

/// New output of one choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Delta {
    /// Index of the choice.
    pub(crate) choice: u32,
    /// Text of whole characters, without stop strings; of a parsed output, its content alone.
    pub(crate) text: String,
    /// Parts of a parsed output, its content included, in order.
    pub(crate) parts: Vec<OutputEvent>,
    /// Ids of the new tokens, if requested.
    pub(crate) token_ids: Vec<u32>,
    /// Log probabilities of the new tokens, if requested.
    pub(crate) logprobs: Vec<PositionLogprobs>,
    /// Position of the choice after this delta; used in resumable streams only.
    pub(crate) position: ChoicePosition,
    /// Whether the client has received it before: the stream is being resumed.
    pub(crate) replayed: bool,
}

/// End of a choice.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Finished {
    /// Index of the choice.
    pub(crate) choice: u32,
    pub(crate) reason: FinishReason,
    /// Last parts of a parsed output, which its end decides.
    pub(crate) parts: Vec<OutputEvent>,
    /// Whether the output has tool calls, all of which were made.
    pub(crate) called: bool,
    /// Whether the output ended within a tool call, or one was malformed.
    pub(crate) cut_call: bool,
    /// Stop string that matched; empty if none did.
    pub(crate) stop_string: String,
    /// Stop token that matched.
    pub(crate) stop_token_id: Option<u32>,
    /// Position of the choice at its end, whose last tokens may have no text.
    pub(crate) position: ChoicePosition,
    /// Whether the client has received it before.
    pub(crate) replayed: bool,
}

/// End of a stream.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Completed {
    pub(crate) usage: Usage,
    pub(crate) timings: Timings,
}

/// Token counts of a request; tokens computed again after a failover count once.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    /// Generated tokens over all choices, stop tokens included.
    pub(crate) completion_tokens: u32,
    /// Prompt tokens found in the worker's prefix cache.
    pub(crate) cached_prompt_tokens: u32,
    /// Generated tokens that are reasoning, over all choices of a parsed output.
    pub(crate) reasoning_tokens: u32,
    /// Fingerprint of the worker that generated the last tokens.
    pub(crate) fingerprint: String,
}

/// Durations from the arrival of the request at the router, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Timings {
    /// Until the dispatch to a worker.
    pub(crate) queue_seconds: f64,
    /// Until the first token.
    pub(crate) first_token_seconds: f64,
    /// Mean time per token after the first; 0 with fewer than two tokens.
    pub(crate) per_token_seconds: f64,
    /// Until the last token.
    pub(crate) total_seconds: f64,
}

/// Returns the content among parts of an output.
pub(crate) fn content(parts: &[OutputEvent]) -> String {
    let text = |part: &OutputEvent| match part {
        OutputEvent::Content(text) => Some(text.clone()),
        _ => None,
    };
    parts.iter().filter_map(text).collect()
}

impl Delta {
    /// Returns the parts of the output; of one that is not parsed, its text.
    pub(crate) fn into_parts(self) -> Vec<OutputEvent> {
        if self.parts.is_empty() && !self.text.is_empty() {
            return vec![OutputEvent::Content(self.text)];
        }
        self.parts
    }
}

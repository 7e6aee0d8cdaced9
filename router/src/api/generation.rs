//! Generation request and events of the API's core, which every protocol maps to its own messages.

use std::sync::Arc;

use inflight_contract::{
    Constraint, FinishReason, PositionLogprobs, PromptLogprobs, SamplingError, SamplingSpec,
};
use inflight_output_parser::OutputEvent;

use crate::api::cursor::ChoicePosition;
use crate::api::tool_use::ToolUse;
use crate::text::{Conversation, MessageCall};

/// Prompt of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input {
    /// Plain text, tokenized with the model's special tokens.
    Text(String),
    /// Plain text, tokenized without special tokens.
    RawText(String),
    /// Token ids, used without change.
    TokenIds(Vec<u32>),
    /// Conversation, rendered by the model's chat template.
    Chat(Conversation),
}

/// Sampling parameters that a request sets; absent ones are taken from the model's generation config.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct SamplingOverrides {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<i32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) logit_bias: Vec<(u32, f32)>,
    pub(crate) allowed_token_ids: Arc<[u32]>,
    /// Words that the output does not contain.
    pub(crate) bad_words: Vec<String>,
    pub(crate) bad_word_token_ids: Vec<Vec<u32>>,
    /// Number of top alternatives reported with each token; `None`: no log probabilities.
    pub(crate) logprobs: Option<u32>,
    /// Number of top alternatives reported with each prompt token; `None`: no log probabilities of the prompt.
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) seed: Option<u64>,
    /// Number of choices.
    pub(crate) n: Option<u32>,
    /// Grammar that the output must match.
    pub(crate) constraint: Option<Arc<Constraint>>,
}

impl SamplingOverrides {
    /// Bytes of its lists. With `shared`, also of those that the requests of one message share.
    pub(crate) fn list_bytes(&self, shared: bool) -> usize {
        let words: usize = self.bad_words.iter().map(String::len).sum();
        let word_ids: usize = self.bad_word_token_ids.iter().map(|word| size_of_val(&word[..])).sum();
        let own = size_of_val(&self.logit_bias[..]) + words + word_ids;
        let grammar =
            || self.constraint.as_ref().map_or(0, |one| one.grammar.texts().iter().map(String::len).sum());
        own + if shared { size_of_val(&self.allowed_token_ids[..]) + grammar() } else { 0 }
    }

    /// Returns the sampling parameters of a request. Its bad words must be tokenized.
    pub(crate) fn apply(self, stop: &StopConditions, defaults: &SamplingSpec) -> SamplingSpec {
        SamplingSpec {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            logit_bias: self.logit_bias,
            allowed_token_ids: self.allowed_token_ids,
            bad_word_token_ids: self.bad_word_token_ids,
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            n: self.n.unwrap_or(defaults.n),
            min_tokens: stop.min_tokens,
            stop_token_ids: stop.stop_token_ids.clone(),
            ignore_eos: stop.ignore_eos,
            seed: self.seed.unwrap_or(defaults.seed),
            constraint: self.constraint,
        }
    }
}

/// Conditions that end a choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct StopConditions {
    /// Maximum generated tokens; `None`: the router's default. 0 with log probabilities of the prompt only.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) min_tokens: u32,
    /// Stop strings.
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) ignore_eos: bool,
}

/// Request to generate text, not validated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GenerationRequest {
    /// Model name; empty: the only one served.
    pub(crate) model: String,
    pub(crate) input: Input,
    /// Maximum tokens kept of the prompt, its last ones; -1: what the context leaves.
    pub(crate) truncate_prompt_tokens: Option<i32>,
    pub(crate) sampling: SamplingOverrides,
    pub(crate) stop: StopConditions,
    /// Whether special tokens are recognised in plain text; `None`: they are.
    pub(crate) parse_special: Option<bool>,
    /// Tools that the output may call.
    pub(crate) tools: Option<ToolUse>,
    /// Whether reasoning and tool calls are apart from the text of the output.
    pub(crate) parse_output: bool,
    /// Whether deltas carry token ids.
    pub(crate) return_token_ids: bool,
    /// Tenant name; empty: the caller's, or the default tenant.
    pub(crate) tenant: String,
    pub(crate) weight: Option<f32>,
    pub(crate) priority: i32,
    /// Request id; empty: generated by the router.
    pub(crate) request_id: String,
    /// The only numerics fingerprint it may run on; empty: any.
    pub(crate) require_fingerprint: String,
    /// Whether its stream can be resumed: events have positions.
    pub(crate) resumable: bool,
    /// Path whose events its cursors count; empty over gRPC.
    pub(crate) event_path: String,
    /// Position of the stream that it resumes.
    pub(crate) resume: Option<Resume>,
    /// Client's field that gives the constraint, named in refusals.
    pub(crate) constraint_field: &'static str,
}

impl GenerationRequest {
    /// Bytes that the JSON values of tools and calls take in memory beside the message: many times those of their text.
    pub(crate) fn decoded_json_bytes(&self) -> usize {
        /// Of a value as schemas and as templates have it.
        const VALUE_BYTES: usize = 64;
        let messages = match &self.input {
            Input::Chat(conversation) => &conversation.messages[..],
            Input::Text(_) | Input::RawText(_) | Input::TokenIds(_) => &[],
        };
        let calls = messages.iter().flat_map(|message| &message.tool_calls);
        let tools = self.tools.as_ref().map_or(0, ToolUse::values);
        VALUE_BYTES * (tools + calls.map(MessageCall::values).sum::<usize>())
    }
}

/// Position of a stream that a request resumes, as its client gives it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Resume {
    /// Signed cursor.
    pub(crate) cursor: Vec<u8>,
    /// Received tokens of each choice, from which workers continue; `None`: the stream is generated again.
    pub(crate) tokens: Option<Vec<Vec<u32>>>,
}

impl GenerationRequest {
    /// Returns a request with default parameters.
    pub(crate) fn new(model: String, input: Input) -> Self {
        Self {
            model,
            input,
            truncate_prompt_tokens: None,
            parse_special: None,
            sampling: SamplingOverrides::default(),
            stop: StopConditions::default(),
            tools: None,
            parse_output: false,
            return_token_ids: false,
            tenant: String::new(),
            weight: None,
            priority: 0,
            request_id: String::new(),
            require_fingerprint: String::new(),
            resumable: false,
            event_path: String::new(),
            resume: None,
            constraint_field: SamplingError::CONSTRAINT,
        }
    }
}

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
    /// Position of the choice after it; without meaning unless the stream is resumable.
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
    /// Whether the output has tool calls.
    pub(crate) called: bool,
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

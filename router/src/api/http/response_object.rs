//! The response object of `/v1/responses`.

use serde::Serialize;

use super::Started;
use super::errors::OpenAiError;
use super::logprobs::PositionBody;
use super::usage::TimingsBody;
use crate::api::collected::Collected;
use crate::api::generation::Usage;
use crate::outcome::Outcome;

/// What a response repeats of its request.
#[derive(Debug, Clone)]
pub(super) struct RequestEcho {
    pub(super) id: String,
    pub(super) message_id: String,
    pub(super) created_at: u64,
    pub(super) model: String,
    pub(super) instructions: Option<String>,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
}

impl RequestEcho {
    pub(super) fn new(
        started: &Started,
        instructions: Option<String>,
        max_output_tokens: Option<u32>,
    ) -> Self {
        let sampling = started.streams.first().map(|stream| &stream.call().sampling);
        Self {
            id: started.id("resp_"),
            message_id: started.id("msg_"),
            created_at: started.created,
            model: started.model.clone(),
            instructions,
            max_output_tokens,
            temperature: sampling.map_or(1.0, |sampling| sampling.temperature),
            top_p: sampling.map_or(1.0, |sampling| sampling.top_p),
        }
    }

    /// Returns the response object with this status and output.
    pub(super) fn response<'a>(&'a self, status: &'static str, output: Vec<Item<'a>>) -> ResponseObject<'a> {
        ResponseObject {
            id: &self.id,
            object: "response",
            created_at: self.created_at,
            status,
            background: false,
            error: None,
            incomplete_details: None,
            instructions: self.instructions.as_deref(),
            max_output_tokens: self.max_output_tokens,
            model: &self.model,
            output,
            parallel_tool_calls: true,
            previous_response_id: None,
            store: false,
            temperature: self.temperature,
            text: TextConfig { format: TextFormat { kind: "text" } },
            tool_choice: "auto",
            tools: [],
            top_p: self.top_p,
            truncation: "disabled",
            usage: None,
            metadata: Metadata {},
            timings: None,
        }
    }

    /// Returns the message item with this status and content.
    pub(super) fn item<'a>(&'a self, status: &'static str, content: Vec<TextPart<'a>>) -> Item<'a> {
        Item { id: &self.message_id, kind: "message", status, role: "assistant", content }
    }

    /// Returns the object of a response that has ended.
    pub(super) fn ended<'a>(&'a self, end: &'a Ended, parts: TextPart<'a>) -> ResponseObject<'a> {
        let status = end.status();
        let mut response = self.response(status, vec![self.item(status, vec![parts])]);
        response.incomplete_details =
            end.truncated.then_some(IncompleteDetails { reason: "max_output_tokens" });
        response.usage = Some(UsageBody::from(&end.usage));
        response.timings = end.timings;
        response
    }
}

/// End of a response.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// Whether `max_output_tokens` or the context ended the output.
    pub(super) truncated: bool,
    pub(super) usage: Usage,
    pub(super) timings: Option<TimingsBody>,
}

impl Ended {
    pub(super) fn status(&self) -> &'static str {
        if self.truncated { "incomplete" } else { "completed" }
    }

    pub(super) fn of(collected: &Collected, with_timings: bool) -> Self {
        let choice = collected.choices.first();
        Self {
            truncated: choice
                .is_some_and(|choice| choice.reason() == inflight_contract::FinishReason::Length),
            usage: collected.usage.clone(),
            timings: with_timings.then(|| collected.timings.into()),
        }
    }
}

#[derive(Serialize)]
pub(super) struct ResponseObject<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    background: bool,
    pub(super) error: Option<ErrorBody>,
    incomplete_details: Option<IncompleteDetails>,
    instructions: Option<&'a str>,
    max_output_tokens: Option<u32>,
    model: &'a str,
    output: Vec<Item<'a>>,
    parallel_tool_calls: bool,
    previous_response_id: Option<()>,
    store: bool,
    temperature: f32,
    text: TextConfig,
    tool_choice: &'static str,
    tools: [(); 0],
    top_p: f32,
    truncation: &'static str,
    usage: Option<UsageBody>,
    metadata: Metadata,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
}

#[derive(Serialize)]
struct TextConfig {
    format: TextFormat,
}

#[derive(Serialize)]
struct TextFormat {
    #[serde(rename = "type")]
    kind: &'static str,
}

#[derive(Serialize)]
struct Metadata {}

#[derive(Serialize)]
struct IncompleteDetails {
    reason: &'static str,
}

/// Failure of a response.
#[derive(Serialize)]
pub(super) struct ErrorBody {
    code: &'static str,
    message: String,
}

impl ErrorBody {
    pub(super) fn new(outcome: &Outcome) -> Self {
        let OpenAiError { message, code, .. } = OpenAiError::new(outcome);
        Self { code: code.unwrap_or("server_error"), message }
    }
}

/// Message in the output.
#[derive(Serialize)]
pub(super) struct Item<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    status: &'static str,
    role: &'static str,
    content: Vec<TextPart<'a>>,
}

/// Text of a message.
#[derive(Serialize)]
pub(super) struct TextPart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
    annotations: [(); 0],
    logprobs: &'a [PositionBody],
}

impl<'a> TextPart<'a> {
    pub(super) fn new(text: &'a str, logprobs: &'a [PositionBody]) -> Self {
        Self { kind: "output_text", text, annotations: [], logprobs }
    }
}

/// Token counts of a response.
#[derive(Serialize)]
struct UsageBody {
    input_tokens: u32,
    input_tokens_details: InputDetails,
    output_tokens: u32,
    output_tokens_details: OutputDetails,
    total_tokens: u32,
}

#[derive(Serialize)]
struct InputDetails {
    cached_tokens: u32,
}

#[derive(Serialize)]
struct OutputDetails {
    reasoning_tokens: u32,
}

impl From<&Usage> for UsageBody {
    fn from(usage: &Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens: usage.cached_prompt_tokens },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: 0 },
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
        }
    }
}

//! The response object of `/v1/responses`.

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::output::collected::{Collected, CollectedCall, CollectedChoice, CollectedPart};
use crate::output::event::Usage;
use crate::protocols::http::Started;
use crate::protocols::http::errors::OpenAiError;
use crate::protocols::http::usage::TimingsBody;
use crate::protocols::openai::logprobs::PositionBody;

/// What a response repeats of its request.
#[derive(Debug, Clone)]
pub(crate) struct RequestEcho {
    pub(crate) id: String,
    /// Id of the request, part of the ids of items.
    pub(crate) request_id: String,
    pub(crate) created_at: u64,
    pub(crate) model: String,
    pub(crate) instructions: Option<String>,
    pub(crate) max_output_tokens: Option<u32>,
    pub(crate) tools: ToolEcho,
    /// Whether the output is parsed: a message is an item only if it has text.
    pub(crate) parsed: bool,
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
}

impl RequestEcho {
    pub(crate) fn new(
        started: &Started,
        instructions: Option<String>,
        max_output_tokens: Option<u32>,
        tools: ToolEcho,
    ) -> Self {
        let sampling = started.streams.first().map(|stream| &stream.call().sampling);
        Self {
            id: started.id("resp_"),
            request_id: started.id(""),
            tools,
            parsed: started.is_parsed(),
            created_at: started.created,
            model: started.model.clone(),
            instructions,
            max_output_tokens,
            temperature: sampling.map_or(1.0, |sampling| sampling.temperature),
            top_p: sampling.map_or(1.0, |sampling| sampling.top_p),
        }
    }

    /// Returns the response object with this status and output.
    pub(crate) fn response<'a>(&'a self, status: &'static str, output: Vec<Item<'a>>) -> ResponseObject<'a> {
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
            parallel_tool_calls: self.tools.parallel,
            previous_response_id: None,
            store: false,
            temperature: self.temperature,
            text: TextConfig { format: TextFormat { kind: "text" } },
            tool_choice: self.tools.choice.as_deref(),
            tools: self.tools.tools.as_deref(),
            top_p: self.top_p,
            truncation: "disabled",
            usage: None,
            metadata: Metadata {},
            timings: None,
        }
    }

    /// Returns the id of the item at a position of the output.
    pub(crate) fn item_id(&self, item: &OutputItem, index: usize) -> String {
        let prefix = match item {
            OutputItem::Message(_) => "msg_",
            OutputItem::Reasoning(_) => "rs_",
            OutputItem::Call(_) => "fc_",
        };
        let suffix = if index == 0 { String::new() } else { format!("_{index}") };
        format!("{prefix}{}{suffix}", self.request_id)
    }

    /// Returns an item of the output with this status; without its content, if it is about to begin.
    pub(crate) fn item<'a>(
        &self,
        item: &'a OutputItem,
        index: usize,
        status: &'static str,
        logprobs: &'a [PositionBody],
        begins: bool,
    ) -> Item<'a> {
        let id = self.item_id(item, index);
        match item {
            OutputItem::Message(text) => {
                let part = (!begins).then(|| TextPart::new(text, logprobs));
                Item::Message { id, status, role: "assistant", content: part.into_iter().collect() }
            }
            OutputItem::Reasoning(text) => {
                let part = (!begins).then_some(ReasoningPart { kind: "reasoning_text", text });
                Item::Reasoning { id, status, summary: [], content: part.into_iter().collect() }
            }
            OutputItem::Call(CollectedCall { id: call_id, name, arguments }) => {
                Item::FunctionCall { id, status, call_id, name, arguments }
            }
        }
    }

    /// Returns the object of a response that has ended. The first message has the log probabilities.
    pub(crate) fn ended<'a>(
        &'a self,
        end: &'a Ended,
        items: &'a [OutputItem],
        logprobs: &'a [PositionBody],
    ) -> ResponseObject<'a> {
        let status = end.status();
        let message = items.iter().position(|item| matches!(item, OutputItem::Message(_)));
        let item = |(index, item): (usize, &'a OutputItem)| {
            let logprobs = if Some(index) == message { logprobs } else { &[] };
            let is_whole = match item {
                OutputItem::Call(call) => call.is_whole(),
                OutputItem::Message(_) | OutputItem::Reasoning(_) => {
                    end.is_complete() || index + 1 < items.len()
                }
            };
            let status = if is_whole { "completed" } else { "incomplete" };
            self.item(item, index, status, logprobs, false)
        };
        let mut response = self.response(status, items.iter().enumerate().map(item).collect());
        response.incomplete_details =
            (!end.is_complete()).then_some(IncompleteDetails { reason: end.incomplete_reason() });
        response.usage = Some(UsageBody::from(&end.usage));
        response.timings = end.timings;
        response
    }
}

/// Tools of a request, which its response repeats.
#[derive(Debug, Clone)]
pub(crate) struct ToolEcho {
    pub(crate) tools: Option<Box<RawValue>>,
    pub(crate) choice: Option<Box<RawValue>>,
    pub(crate) parallel: bool,
}

/// Item of the output.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OutputItem {
    Message(String),
    Reasoning(String),
    Call(CollectedCall),
}

impl OutputItem {
    /// Returns the items of a choice; one that is not parsed is a message.
    pub(crate) fn of_choice(choice: &CollectedChoice) -> Vec<Self> {
        if choice.parts.is_empty() && !choice.called() {
            return vec![Self::Message(choice.text.clone())];
        }
        let item = |part: &CollectedPart| match part {
            CollectedPart::Content(text) => Self::Message(text.clone()),
            CollectedPart::Reasoning(text) => Self::Reasoning(text.clone()),
            CollectedPart::Call(call) => Self::Call(call.clone()),
        };
        choice.parts.iter().map(item).collect()
    }
}

/// End of a response.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// Whether `max_output_tokens` or the context ended the output.
    pub(crate) truncated: bool,
    /// Whether the output ended within a tool call, or one was malformed.
    pub(crate) has_cut_call: bool,
    pub(crate) usage: Usage,
    pub(crate) timings: Option<TimingsBody>,
}

impl Ended {
    pub(crate) fn status(&self) -> &'static str {
        if self.is_complete() { "completed" } else { "incomplete" }
    }

    pub(crate) fn is_complete(&self) -> bool {
        !self.truncated && !self.has_cut_call
    }

    /// Why a response is incomplete.
    fn incomplete_reason(&self) -> &'static str {
        if self.truncated { "max_output_tokens" } else { "tool_call_incomplete" }
    }

    pub(crate) fn of(collected: &Collected, with_timings: bool) -> Self {
        let choice = collected.choices.first();
        Self {
            truncated: choice
                .is_some_and(|choice| choice.reason() == inflight_contract::FinishReason::Length),
            has_cut_call: choice.and_then(|choice| choice.finished.as_ref()).is_some_and(|end| end.cut_call),
            usage: collected.usage.clone(),
            timings: with_timings.then(|| collected.timings.into()),
        }
    }
}

#[derive(Serialize)]
pub(crate) struct ResponseObject<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    background: bool,
    pub(crate) error: Option<ErrorBody>,
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
    #[serde(serialize_with = "auto_if_absent")]
    tool_choice: Option<&'a RawValue>,
    #[serde(serialize_with = "empty_if_absent")]
    tools: Option<&'a RawValue>,
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
pub(crate) struct ErrorBody {
    code: &'static str,
    message: String,
}

impl ErrorBody {
    pub(crate) fn new(outcome: &Outcome) -> Self {
        let OpenAiError { message, code, .. } = OpenAiError::new(outcome);
        Self { code: code.unwrap_or("server_error"), message }
    }
}

/// Item in the output.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Item<'a> {
    Message { id: String, status: &'static str, role: &'static str, content: Vec<TextPart<'a>> },
    Reasoning { id: String, status: &'static str, summary: [(); 0], content: Vec<ReasoningPart<'a>> },
    FunctionCall { id: String, status: &'static str, call_id: &'a str, name: &'a str, arguments: &'a str },
}

/// Text of a reasoning.
#[derive(Serialize)]
pub(crate) struct ReasoningPart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
}

fn auto_if_absent<S: Serializer>(choice: &Option<&RawValue>, serializer: S) -> Result<S::Ok, S::Error> {
    match choice {
        Some(choice) => choice.serialize(serializer),
        None => serializer.serialize_str("auto"),
    }
}

fn empty_if_absent<S: Serializer>(tools: &Option<&RawValue>, serializer: S) -> Result<S::Ok, S::Error> {
    match tools {
        Some(tools) => tools.serialize(serializer),
        None => [(); 0].serialize(serializer),
    }
}

/// Text of a message.
#[derive(Serialize)]
pub(crate) struct TextPart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
    annotations: [(); 0],
    logprobs: &'a [PositionBody],
}

impl<'a> TextPart<'a> {
    pub(crate) fn new(text: &'a str, logprobs: &'a [PositionBody]) -> Self {
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
            output_tokens_details: OutputDetails { reasoning_tokens: usage.reasoning_tokens },
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
        }
    }
}

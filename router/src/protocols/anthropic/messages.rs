//! `/v1/messages`: Anthropic's API, and its counting of tokens.

use std::sync::Arc;

use inflight_contract::{FinishReason, StopConditions};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::Response;

use crate::outcome::Outcome;
use crate::output::event::{Finished, Usage};
use crate::protocols::anthropic::message_blocks::{self, Block};
use crate::protocols::anthropic::message_stream::MessageStream;
use crate::protocols::http::content;
use crate::protocols::http::fields::{Field, FieldTable, Fields, honoured, ignored, parse_object, refused};
use crate::protocols::http::read_body;
use crate::protocols::http::sampling;
use crate::protocols::http::sse;
use crate::protocols::http::structured;
use crate::protocols::http::usage::TimingsBody;
use crate::protocols::http::{Call, HttpApi, Started, json};
use crate::protocols::openai::chat::NO_MESSAGES;
use crate::protocols::openai::rendering::set_thinking;
use crate::request::draft::{Draft, Input, OutputParsing};
use crate::request::ingress::rejected;
use crate::request::limits;
use crate::request::message_list::{MessageList, check_continued};
use crate::request::tool_use::ToolUse;
use crate::text::{Conversation, Message, PromptEnd, Rendering};

/// Fields that make the prompt.
const PROMPT: &[Field] = &[
    honoured("model", "Name of a served model; absent: the only one."),
    honoured(
        "messages",
        "Roles `user`, `assistant` and `system`; text, thinking, `tool_use` and `tool_result` blocks, documents of text and search results. The output continues a last message of the assistant.",
    ),
    honoured("system", "A string or text blocks."),
    honoured("tools", "Tools of the client, at most 512; those of Anthropic's servers are skipped."),
    honoured(
        "tool_choice",
        "`auto`, `any`, `tool` or `none`; `disable_parallel_tool_use`: only the first call is returned.",
    ),
    refused("mcp_servers", "the router calls no servers of tools"),
    honoured("output_format", "The older name of `output_config.format`."),
    honoured(
        "thinking",
        "`type`: `enabled`, `adaptive` or `disabled`, for chat templates with a variable `enable_thinking` or `thinking`; `budget_tokens` has no effect.",
    ),
    ignored("cache_control", "The prefix cache needs no marks."),
    ignored("context_management", "The conversation is used as it is."),
    ignored("speed", "The served models have no such setting."),
    ignored("user_profile_id", "The API key names the tenant."),
    ignored("workspace_id", "The API key names the tenant."),
    honoured(
        "output_config",
        "`format`: `json_schema`, whose schema the output matches. `effort`: for chat templates with a variable `reasoning_effort`.",
    ),
];

/// Fields of `/v1/messages`.
pub(crate) static FIELDS: FieldTable = FieldTable {
    api: "messages",
    fields: &[
        PROMPT,
        &[
            honoured("max_tokens", "Required; at least 1."),
            sampling::number("temperature"),
            sampling::number("top_p"),
            honoured("top_k", "At least 0, or -1; 0 and -1 keep all tokens."),
            honoured("stop_sequences", "At most 16 strings of 1 to 256 bytes."),
            honoured("stream", "Server-sent events."),
            refused("container", "the router runs no code"),
            ignored("metadata", "The API key names the tenant."),
            ignored("service_tier", "The tenant's priority counts."),
            ignored("diagnostics", "`--http-timings` adds timings."),
            ignored("inference_geo", "The cluster is where it is."),
        ],
        structured::GUIDED,
    ],
    elsewhere: structured::ELSEWHERE,
};

/// Fields of `/v1/messages/count_tokens`.
pub(crate) static COUNT_FIELDS: FieldTable =
    FieldTable { api: "count_tokens", fields: &[PROMPT], elsewhere: &[] };

/// Message of a conversation.
#[derive(Deserialize)]
struct MessageBody<'a> {
    role: String,
    #[serde(borrow)]
    content: &'a RawValue,
}

/// Returns the grammars of the output's format, under either of its names; none for text.
fn output_formats(fields: &Fields<'_>) -> Result<[Option<structured::NamedGrammar>; 2], Outcome> {
    #[derive(Deserialize)]
    struct OutputConfig<'a> {
        #[serde(borrow, default)]
        format: Option<&'a RawValue>,
    }
    let config: Option<OutputConfig<'_>> = fields.object("output_config", "an object")?;
    let format = config.and_then(|config| config.format);
    let format = structured::format("output_config", "output_config.format", format)?;
    let older = structured::format("output_format", "output_format", fields.raw("output_format"))?;
    Ok([format, older])
}

/// Reads the conversation.
pub(crate) fn conversation(fields: &Fields<'_>) -> Result<Input, Outcome> {
    // It does not change the prompt, whose tokens may be all that is asked for.
    output_formats(fields)?;
    let bodies: Option<Vec<&RawValue>> = fields.get("messages", "an array of messages")?;
    let bodies = bodies.ok_or_else(|| Outcome::field("messages", "messages is missing"))?;
    if bodies.is_empty() {
        return Err(Outcome::field("messages", NO_MESSAGES));
    }
    MessageList::check_count(bodies.len())?;
    let mut messages = MessageList::default();
    let system = content::text("system", fields.raw("system"))?;
    if !system.is_empty() {
        messages.push(Message::new("system", system))?;
    }
    for (at, body) in bodies.into_iter().enumerate() {
        let name = format!("messages[{at}]");
        let body: MessageBody<'_> = parse_object(&name, body, "a message with role and content")?;
        match body.role.as_str() {
            "user" | "system" => {}
            "assistant" => {}
            other => {
                let reason = format!("{name} has the role {other:?}; roles are user, assistant and system");
                return Err(Outcome::field("messages", reason));
            }
        }
        message_blocks::read_message(&name, &body.role, body.content, &mut messages)?;
    }
    let (messages, rendering) = (messages.into_messages()?, read_rendering(fields)?);
    let mut conversation = Conversation { messages, tools: Vec::new(), rendering };
    if conversation.messages.last().is_some_and(|last| last.role == "assistant") {
        check_continued("messages", &conversation.messages)?;
        conversation.rendering.end = PromptEnd::LastMessage;
    }
    Ok(Input::Chat(conversation))
}

/// Reads how the conversation is rendered.
fn read_rendering(fields: &Fields<'_>) -> Result<Rendering, Outcome> {
    #[derive(Deserialize)]
    struct Thinking<'a> {
        #[serde(rename = "type")]
        kind: &'a str,
    }
    #[derive(Deserialize)]
    struct OutputConfig {
        #[serde(default)]
        effort: Option<String>,
    }
    let mut rendering = Rendering::default();
    let thinking: Option<Thinking<'_>> = fields.object("thinking", "an object with type")?;
    match thinking.map(|thinking| thinking.kind) {
        None => {}
        Some("enabled" | "adaptive") => set_thinking(true, &mut rendering.arguments),
        Some("disabled") => set_thinking(false, &mut rendering.arguments),
        Some(other) => {
            let reason = format!("thinking has the type {other:?}; types are enabled, adaptive and disabled");
            return Err(Outcome::field("thinking", reason));
        }
    }
    let config: Option<OutputConfig> = fields.object("output_config", "an object")?;
    if let Some(effort) = config.and_then(|config| config.effort) {
        rendering.arguments.set_default("reasoning_effort", effort.chars().take(16).collect::<String>());
    }
    Ok(rendering)
}

/// Reads the tools, whose definitions become part of the conversation.
fn read_tools(fields: &Fields<'_>, input: &mut Input) -> Result<Option<ToolUse>, Outcome> {
    let tools = message_blocks::tools(fields, || FIELDS.count("tools"))?;
    if let (Input::Chat(chat), Some(tools)) = (input, &tools) {
        chat.tools = tools.definitions();
    }
    Ok(tools)
}

/// Reads a request, and whether its response is streamed.
pub(crate) fn read(body: &[u8]) -> Result<(Draft, bool), Outcome> {
    let fields = FIELDS.read(body)?;
    let max_tokens = fields.count("max_tokens")?;
    let max_tokens = max_tokens.ok_or_else(|| Outcome::field("max_tokens", "max_tokens is missing"))?;
    let mut input = conversation(&fields)?;
    let tools = read_tools(&fields, &mut input)?;
    let mut request = Draft::new(fields.model()?, input);
    // A block of a call has its input, so it is none before the input is whole.
    (request.tools, request.parsing) = (tools, OutputParsing::WholeCalls);
    sampling::read_numbers(&fields, &mut request.sampling)?;
    let stop = fields.texts("stop_sequences")?;
    limits::check_stops("stop_sequences", &stop)?;
    request.stop = StopConditions { max_tokens: Some(max_tokens), stop, ..StopConditions::default() };
    structured::read_with(&fields, output_formats(&fields)?, &mut request)?;
    Ok((request, fields.flag("stream")?))
}

/// Token counts of a message. Cached tokens are not among the input tokens, unlike in OpenAI's API.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct UsageBody {
    pub(crate) input_tokens: u32,
    pub(crate) cache_creation_input_tokens: u32,
    pub(crate) cache_read_input_tokens: u32,
    pub(crate) output_tokens: u32,
}

impl From<&Usage> for UsageBody {
    fn from(usage: &Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(usage.cached_prompt_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_prompt_tokens,
            output_tokens: usage.completion_tokens,
        }
    }
}

/// Message of the assistant, complete or as its stream starts.
#[derive(Serialize)]
pub(crate) struct AssistantMessage<'a> {
    pub(crate) id: &'a str,
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) role: &'static str,
    pub(crate) model: &'a str,
    pub(crate) content: &'a [Block<'a>],
    pub(crate) stop_reason: Option<&'static str>,
    pub(crate) stop_sequence: Option<&'a str>,
    pub(crate) usage: UsageBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<TimingsBody>,
}

/// Returns the stop reason in Anthropic's terms, with the stop sequence that matched.
pub(crate) fn stop_reason(finished: &Finished) -> (&'static str, Option<&str>) {
    match finished.reason {
        FinishReason::Stop | FinishReason::Complete if finished.called => ("tool_use", None),
        FinishReason::Complete => ("end_turn", None),
        FinishReason::Stop if finished.stop_string.is_empty() => ("end_turn", None),
        FinishReason::Stop => ("stop_sequence", Some(&finished.stop_string)),
        FinishReason::Length => ("max_tokens", None),
        FinishReason::Cancelled | FinishReason::Deadline | FinishReason::Error => ("pause_turn", None),
    }
}

/// Answers a message.
pub(crate) async fn create(api: Arc<HttpApi>, call: Call, body: Bytes) -> Result<Response<Body>, Outcome> {
    let (request, stream) = read_body(call.context.caller.holder(), &body, read).await.map_err(rejected)?;
    drop(body);
    let started = Box::pin(api.start(vec![request], stream, call)).await.map_err(rejected)?;
    if stream {
        let encoder = MessageStream::new(&started, api.http.timings);
        return sse::respond(started, encoder, api.http.keepalive).await;
    }
    complete(&api, started).await
}

async fn complete(api: &HttpApi, started: Started) -> Result<Response<Body>, Outcome> {
    let (id, model) = (started.id("msg_"), started.model.clone());
    let mut prompts = started.generations().collect().await?;
    let prompt = prompts.pop().unwrap_or_default();
    let choice = prompt.choices.first();
    let finished = choice.and_then(|choice| choice.finished.as_ref());
    let (stop_reason, stop_sequence) = finished.map_or(("end_turn", None), stop_reason);
    let inputs = choice.map(message_blocks::inputs).unwrap_or_default();
    json(&AssistantMessage {
        id: &id,
        kind: "message",
        role: "assistant",
        model: &model,
        content: &choice.map_or_else(Vec::new, |choice| message_blocks::blocks(choice, &inputs)),
        stop_reason: Some(stop_reason),
        stop_sequence,
        usage: UsageBody::from(&prompt.usage),
        timings: api.http.timings.then(|| prompt.timings.into()),
    })
}

#[derive(Serialize)]
struct Count {
    input_tokens: usize,
}

/// Reads the model and the conversation whose tokens are counted.
pub(crate) fn read_count(body: &[u8]) -> Result<(String, Input), Outcome> {
    let fields = COUNT_FIELDS.read(body)?;
    let mut input = conversation(&fields)?;
    read_tools(&fields, &mut input)?;
    Ok((fields.model()?, input))
}

/// Counts the tokens of a conversation.
pub(crate) async fn count_tokens(
    api: Arc<HttpApi>,
    call: Call,
    body: Bytes,
) -> Result<Response<Body>, Outcome> {
    let (model, input) = read_body(call.context.caller.holder(), &body, read_count).await?;
    let (_, tokens) = api.ingress.tokens(&model, input, None, call.context).await?;
    json(&Count { input_tokens: tokens.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_and_blocks_become_a_conversation() {
        let body = br#"{"max_tokens": 5, "system": [{"type": "text", "text": "be kind", "cache_control": {}}],
            "messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "c"}]}], "stop_sequences": ["x"], "metadata": {}}"#;
        let (request, stream) = read(body).unwrap();
        let Input::Chat(chat) = request.input else { panic!() };
        let messages: Vec<_> = chat.messages.iter().map(|m| (m.role.as_str(), m.text())).collect();
        assert_eq!(messages, [("system", "be kind"), ("user", "a"), ("assistant", "b"), ("user", "c")]);
        assert_eq!(
            (request.stop.max_tokens, request.stop.stop, stream),
            (Some(5), vec!["x".to_owned()], false)
        );
    }

    #[test]
    fn the_numeric_parameters_of_the_table_are_read_and_no_others() {
        let body = br#"{"max_tokens": 5, "messages": [{"role": "user", "content": "a"}],
            "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.5}"#;
        let sampling = read(body).unwrap().0.sampling;
        // -1 keeps all tokens, as 0 does.
        let numbers = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p);
        assert_eq!(numbers, (Some(0.5), Some(0.25), Some(0), None));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_field() {
        for (more, field) in [
            ("", "max_tokens"),
            (r#", "max_tokens": 5, "tools": [{"name": ""}]"#, "tools"),
            (r#", "max_tokens": 5, "messages": [{"role": "assistant", "content": ""}]"#, "messages"),
            (r#", "max_tokens": 5, "thinking": {"type": "deep"}"#, "thinking"),
            (r#", "max_tokens": 5, "messages": [{"role": "user"}]"#, "messages"),
            (
                r#", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]"#,
                "messages",
            ),
            (r#", "max_tokens": 5, "system": 7"#, "system"),
            (r#", "max_tokens": 5, "output_config": {"format": {"type": "json_schema"}}"#, "output_config"),
        ] {
            let body = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}]{more}}}"#);
            match read(body.as_bytes()) {
                Err(Outcome::InvalidField { field: found, .. }) => assert_eq!(found, field, "{more}"),
                other => panic!("{more}: {:?}", other.map(|(request, _)| request)),
            }
        }
    }
}

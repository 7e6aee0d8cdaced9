//! `/v1/chat/completions`: requests, and responses in one piece.

use std::sync::Arc;

use inflight_contract::FinishReason;
use inflight_net::Holder;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::Response;

use crate::outcome::Outcome;
use crate::output::collected::{Collected, CollectedCall, CollectedChoice};
use crate::protocols::http::content;
use crate::protocols::http::fields::{
    FieldTable, Fields, honoured, ignored, is_empty, parse_object, refused,
};
use crate::protocols::http::sampling::{self, StreamOptions};
use crate::protocols::http::sse;
use crate::protocols::http::structured;
use crate::protocols::http::usage::{TimingsBody, UsageBody};
use crate::protocols::http::{Call, HttpApi, Started, json};
use crate::protocols::http::{SMALL_POSITIONS, aside, read_body};
use crate::protocols::openai::chat_stream::ChatStream;
use crate::protocols::openai::logprobs::{ChatLogprobs, PromptBody, check_outputs, check_prompts};
use crate::protocols::openai::rendering;
use crate::protocols::openai::tools::{self, ToolForm};
use crate::request::draft::{Draft, Input};
use crate::request::ingress::rejected;
use crate::request::message_list::MessageList;
use crate::text::{Conversation, Message};

/// Reason for which an empty conversation is refused.
pub(crate) const NO_MESSAGES: &str = "messages is empty; a conversation has at least one message";

/// Fields of `/v1/chat/completions`.
pub(crate) static FIELDS: FieldTable = FieldTable {
    api: "chat completions",
    fields: &[
        &[
            honoured(
                "messages",
                "Roles and text, `tool_calls` of the assistant with the results of role `tool`, `reasoning` or `reasoning_content`; `developer` is `system`. Images, audio and files are refused.",
            ),
            honoured(
                "max_completion_tokens",
                "At least 1, or 0 with `prompt_logprobs`; absent: what the context leaves, at most the router's default.",
            ),
            honoured("max_tokens", "The older name of `max_completion_tokens`, which counts first."),
            honoured("logprobs", "Log probabilities of the output."),
            honoured("top_logprobs", "In [0, 20]; needs `logprobs`."),
            honoured("response_format", structured::RESPONSE_FORMAT),
            honoured("reasoning_effort", rendering::REASONING_EFFORT),
            honoured("modalities", "Only `text`; others are refused."),
            honoured("tools", "Functions, at most 512; `strict` ones constrain the arguments."),
            honoured(
                "tool_choice",
                "`auto`, `none` (the model does not see the tools), `required`, a function by its name, or `allowed_tools`, the only ones that are called.",
            ),
            honoured("parallel_tool_calls", "False: only the first call is returned."),
            refused("functions", tools::FUNCTIONS),
            refused("function_call", tools::FUNCTIONS),
            refused("audio", "audio is not supported"),
            refused("web_search_options", "web search is not supported"),
            refused("chat_template", "the model's own template renders conversations"),
            refused("documents", "templates take no documents"),
            refused("echo", "only text completions echo their prompt"),
            ignored("moderation", "The output is that of the model."),
            ignored("prediction", "It changes the speed only."),
            ignored("prompt_cache_key", "The prefix cache needs no key."),
            ignored("prompt_cache_options", "The prefix cache needs no hint."),
            ignored("prompt_cache_retention", "The prefix cache needs no hint."),
            ignored("safety_identifier", "The API key names the tenant."),
            ignored("service_tier", "The tenant's priority counts."),
            ignored("store", "Nothing is stored."),
            ignored("verbosity", "The served models have no such setting."),
        ],
        rendering::RENDERING,
        &sampling::SAMPLING,
        &sampling::EXTENSIONS,
        structured::GUIDED,
    ],
    elsewhere: structured::ELSEWHERE,
};

/// Message of a conversation.
#[derive(Deserialize)]
struct MessageBody<'a> {
    role: String,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow, default)]
    function_call: Option<&'a RawValue>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
}

/// Reads `messages`.
pub(crate) fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, Outcome> {
    let messages: Option<Vec<&RawValue>> = fields.get("messages", "an array of messages")?;
    let messages = messages.ok_or_else(|| Outcome::field("messages", "messages is missing"))?;
    if messages.is_empty() {
        return Err(Outcome::field("messages", NO_MESSAGES));
    }
    MessageList::check_count(messages.len())?;
    let mut read = MessageList::default();
    for (at, message) in messages.into_iter().enumerate() {
        let message = read_message(at, message, &read)?;
        read.push(message)?;
    }
    read.into_messages()
}

/// Reads a message that follows others.
fn read_message(at: usize, message: &RawValue, earlier: &MessageList) -> Result<Message, Outcome> {
    let name = format!("messages[{at}]");
    let message: MessageBody<'_> = parse_object(&name, message, "a message with role and content")?;
    if message.function_call.is_some_and(|call| !is_empty(call)) {
        let reason = format!("{name} has a function_call, the older form of tool_calls; send tool_calls");
        return Err(Outcome::field("messages", reason));
    }
    let role = match message.role.as_str() {
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        other => {
            let reason = format!(
                "{name} has the role {other:?}; roles are system, developer, user, assistant and tool"
            );
            return Err(Outcome::field("messages", reason));
        }
    };
    let content = content::text(&format!("{name}.content"), message.content)?;
    let tool_calls = tools::message_calls(&format!("{name}.tool_calls"), message.tool_calls)?;
    if role != "assistant" && !tool_calls.is_empty() {
        let reason = format!("{name} has tool calls, but is not of the assistant");
        return Err(Outcome::field("messages", reason));
    }
    let mut read = Message::new(role, content);
    if !tool_calls.is_empty() && message.content.is_none_or(|content| content.get() == "null") {
        read.content = None;
    }
    read.name = message.name.unwrap_or_default();
    if role == "assistant" {
        let reasoning = message.reasoning.or(message.reasoning_content);
        (read.reasoning, read.tool_calls) = (reasoning.unwrap_or_default(), tool_calls);
    }
    if role == "tool" {
        read.tool_call_id = message.tool_call_id.unwrap_or_default();
        let called = earlier.called_tool(&read.tool_call_id).ok_or_else(|| {
            let id = &read.tool_call_id;
            let reason = format!("{name} is the result of the call {id:?}, which no message before it has");
            Outcome::field("messages", reason)
        })?;
        if read.name.is_empty() {
            read.name = called.to_owned();
        }
    }
    Ok(read)
}

/// Output options of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    stream: bool,
    stream_options: StreamOptions,
    logprobs: bool,
    /// Alternatives beside each prompt token, if the prompt's log probabilities are wanted.
    prompt_logprobs: Option<u32>,
}

pub(crate) fn read(body: &[u8]) -> Result<(Draft, Output), Outcome> {
    let fields = FIELDS.read(body)?;
    let messages = messages(&fields)?;
    let rendering = rendering::read(&fields, &messages)?;
    let conversation = Conversation { messages, tools: Vec::new(), rendering };
    let mut request = Draft::new(fields.model()?, Input::Chat(conversation));
    request.parsing = tools::parsing(&fields)?;
    tools::apply(tools::read(&fields, ToolForm::Nested, &FIELDS)?, &mut request);
    sampling::read(&fields, &mut request)?;
    let max_tokens = fields.count("max_tokens")?;
    let max_completion_tokens = fields.count("max_completion_tokens")?;
    if max_completion_tokens == Some(0) && request.sampling.prompt_logprobs.is_none() {
        let reason =
            "max_completion_tokens is 0; ask for at least one token, or for log probabilities of the prompt";
        return Err(Outcome::field("max_completion_tokens", reason));
    }
    request.stop.max_tokens = max_completion_tokens.or(max_tokens);
    let stream_options = StreamOptions::read(&fields)?;
    let logprobs = fields.flag("logprobs")?;
    let top_logprobs = sampling::alternatives(&fields, "top_logprobs")?;
    if top_logprobs.is_some_and(|top| top > 0) && !logprobs {
        return Err(Outcome::field("top_logprobs", "top_logprobs needs logprobs = true"));
    }
    request.sampling.logprobs = logprobs.then_some(top_logprobs.unwrap_or(0));
    request.return_token_ids = stream_options.continuous();
    check_text_only(&fields)?;
    let (stream, prompt_logprobs) = (fields.flag("stream")?, request.sampling.prompt_logprobs);
    Ok((request, Output { stream, stream_options, logprobs, prompt_logprobs }))
}

/// Checks the fields that ask for something other than text.
fn check_text_only(fields: &Fields<'_>) -> Result<(), Outcome> {
    let modalities: Option<Vec<String>> = fields.get("modalities", "an array of strings")?;
    if let Some(other) = modalities.iter().flatten().find(|modality| *modality != "text") {
        return Err(Outcome::field("modalities", format!("modalities has {other:?}; the output is text")));
    }
    Ok(())
}

/// Returns the finish reason in OpenAI's terms. `called`: the output has tool calls.
pub(crate) fn finish_reason(reason: FinishReason, called: bool) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::Complete if called => "tool_calls",
        FinishReason::Stop | FinishReason::Complete => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled | FinishReason::Deadline | FinishReason::Error => "error",
    }
}

#[derive(Serialize)]
struct Completion<'a> {
    id: String,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: Vec<Choice<'a>>,
    usage: UsageBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    message: AssistantMessage<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct AssistantMessage<'a> {
    role: &'static str,
    /// Null if the message has nothing but tool calls.
    content: Option<&'a str>,
    refusal: Option<()>,
    #[serde(flatten)]
    reasoning: Option<ReasoningBody<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCallBody<'a>>,
}

/// Reasoning, under both names that clients read.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct ReasoningBody<'a> {
    reasoning: &'a str,
    reasoning_content: &'a str,
}

impl<'a> ReasoningBody<'a> {
    /// Returns the fields of a reasoning; `None` if it is empty.
    pub(crate) fn new(text: &'a str) -> Option<Self> {
        (!text.is_empty()).then_some(Self { reasoning: text, reasoning_content: text })
    }
}

/// Tool call of a message.
#[derive(Serialize)]
struct ToolCallBody<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    function: FunctionCall<'a>,
}

#[derive(Serialize)]
struct FunctionCall<'a> {
    name: &'a str,
    arguments: &'a str,
}

impl<'a> AssistantMessage<'a> {
    fn new(choice: &'a CollectedChoice) -> Self {
        let calls = choice.calls().map(|CollectedCall { id, name, arguments }| ToolCallBody {
            id,
            kind: "function",
            function: FunctionCall { name, arguments },
        });
        let tool_calls: Vec<_> = calls.collect();
        let content = Some(choice.text.as_str()).filter(|text| tool_calls.is_empty() || !text.is_empty());
        let reasoning = ReasoningBody::new(&choice.reasoning);
        Self { role: "assistant", content, refusal: None, reasoning, tool_calls }
    }
}

/// Answers a chat completion.
pub(crate) async fn create(api: Arc<HttpApi>, call: Call, body: Bytes) -> Result<Response<Body>, Outcome> {
    let holder = call.context.caller.holder();
    let (request, output) = read_body(holder.clone(), &body, read).await.map_err(rejected)?;
    drop(body);
    let started = Box::pin(api.start(vec![request], output.stream, call)).await.map_err(rejected)?;
    // All choices share those of the prompt.
    let tokens = started.streams.iter().map(|stream| stream.call().prompt.len()).sum();
    check_prompts(tokens, 1, &[("prompt_logprobs", output.prompt_logprobs)])?;
    if output.stream {
        let encoder = ChatStream::new(&started, output.stream_options, output.logprobs, api.http.timings);
        return sse::respond(started, encoder, api.http.keepalive).await;
    }
    let alternatives = started.streams.first().and_then(|stream| stream.call().sampling.logprobs);
    check_outputs(started.output_tokens_max(), "top_logprobs", alternatives)?;
    complete(&api, holder, started, output).await
}

async fn complete(
    api: &HttpApi,
    holder: Option<Holder>,
    started: Started,
    output: Output,
) -> Result<Response<Body>, Outcome> {
    let (id, model, created) = (started.id("chatcmpl-"), started.model.clone(), started.created);
    let bundle = started.bundle();
    let prompts = started.generations().collect().await?;
    let mut usage = UsageBody::default();
    prompts.iter().for_each(|prompt| usage.add(&prompt.usage));
    let large = prompts.iter().map(Collected::positions).sum::<usize>() > SMALL_POSITIONS;
    let build = || {
        let choices = prompts.iter().flat_map(|prompt| prompt.choices.iter().enumerate());
        let choice = |(index, choice): (usize, &CollectedChoice)| {
            let logprobs = bundle.as_ref().filter(|_| output.logprobs);
            (index, logprobs.map(|model| ChatLogprobs::new(&choice.logprobs, model.tokenizer.vocabulary())))
        };
        let logprobs: Vec<_> = choices.clone().map(choice).collect();
        let choices = choices.zip(logprobs).map(|((index, choice), (_, logprobs))| Choice {
            index,
            message: AssistantMessage::new(choice),
            logprobs,
            finish_reason: finish_reason(choice.reason(), choice.called()),
        });
        let first = prompts.first();
        let scored = first.zip(output.prompt_logprobs).zip(bundle.as_ref());
        let prompt_logprobs = scored.map(|((prompt, alternatives), model)| {
            PromptBody::new(&prompt.prompt_logprobs, alternatives, model.tokenizer.vocabulary())
        });
        json(&Completion {
            id,
            object: "chat.completion",
            created,
            model: &model,
            system_fingerprint: first.map_or("", |prompt| prompt.fingerprint()),
            choices: choices.collect(),
            usage,
            prompt_logprobs,
            timings: first.filter(|_| api.http.timings).map(|prompt| prompt.timings.into()),
        })
    };
    aside(holder, large, build).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_with(more: &str) -> Result<(Draft, Output), Outcome> {
        read(format!(r#"{{"messages": [{{"role": "developer", "content": "hi"}}]{more}}}"#).as_bytes())
    }

    #[test]
    fn fields_become_parameters() {
        let (request, output) = read_with(
            r#", "max_tokens": 5, "max_completion_tokens": 7, "top_k": -1, "seed": -1, "stop": "x", "n": null,
            "logit_bias": {"3": 1.5}, "logprobs": true, "top_logprobs": 2, "stream": true,
            "stream_options": {"include_usage": true, "include_obfuscation": false},
            "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "functions": null"#,
        )
        .unwrap();
        assert_eq!((request.stop.max_tokens, request.stop.stop), (Some(7), vec!["x".to_owned()]));
        let sampling = request.sampling;
        assert_eq!((sampling.top_k, sampling.seed, sampling.n), (Some(0), Some(u64::MAX), None));
        assert_eq!((sampling.logit_bias, sampling.logprobs), (vec![(3, 1.5)], Some(2)));
        assert!(output.stream && output.stream_options.include_usage() && output.logprobs);
        let Input::Chat(chat) = request.input else { panic!() };
        assert_eq!(chat.messages, [Message::new("system", "hi".to_owned())]);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_field() {
        for (more, field) in [
            (r#", "tools": [{"type": "function"}]"#, "tools"),
            (r#", "tool_choice": "required""#, "tool_choice"),
            (r#", "response_format": {"type": "xml"}"#, "response_format"),
            (r#", "modalities": ["text", "audio"]"#, "modalities"),
            (r#", "top_logprobs": 2"#, "top_logprobs"),
            (r#", "temperature": "warm""#, "temperature"),
            (r#", "max_tokens": -1"#, "max_tokens"),
            (r#", "max_tokens": 1e30"#, "max_tokens"),
            (r#", "seed": 99999999999999999999"#, "seed"),
            (r#", "logit_bias": {"a": 1}"#, "logit_bias"),
            (r#", "n": 1.5"#, "n"),
            (r#", "stop": [[]]"#, "stop"),
            (r#", "stream": "yes""#, "stream"),
            (r#", "guided_choice": "a""#, "guided_choice"),
            (r#", "messages": "hi""#, "messages"),
            (r#", "messages": [{"content": "hi"}]"#, "messages"),
            (r#", "messages": [{"role": "wizard", "content": "hi"}]"#, "messages"),
            (r#", "messages": [{"role": "tool", "content": "hi"}]"#, "messages"),
            (r#", "messages": [{"role": "assistant", "tool_calls": [{}]}]"#, "messages"),
            (r#", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]"#, "messages"),
        ] {
            match read_with(more) {
                Err(Outcome::InvalidField { field: found, reason }) => {
                    assert_eq!(found, field, "{more}: {reason}");
                }
                other => panic!("{more}: {:?}", other.map(|(request, _)| request)),
            }
        }
    }
}

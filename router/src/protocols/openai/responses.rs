//! `/v1/responses`, without state: requests, and responses in one piece.

use std::sync::Arc;

use inflight_contract::StopConditions;
use serde::Deserialize;
use serde_json::value::RawValue;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::Response;

use crate::outcome::Outcome;
use crate::protocols::http::content;
use crate::protocols::http::fields::{FieldTable, Fields, honoured, ignored, parse, parse_object, refused};
use crate::protocols::http::sampling;
use crate::protocols::http::sse;
use crate::protocols::http::structured;
use crate::protocols::http::{Call, HttpApi, json};
use crate::protocols::http::{SMALL_POSITIONS, aside, read_body};
use crate::protocols::openai::logprobs::{PositionBody, check_outputs};
use crate::protocols::openai::rendering;
use crate::protocols::openai::response_events::ResponseEvents;
use crate::protocols::openai::response_object::{Ended, OutputItem, RequestEcho, ToolEcho};
use crate::protocols::openai::tools::{self, ToolForm};
use crate::request::draft::{Draft, Input};
use crate::request::ingress::rejected;
use crate::request::message_list::MessageList;
use crate::request::tool_call::message_call;
use crate::text::{Conversation, Message};

/// Reason for which earlier responses cannot be named.
const STATELESS: &str = "responses are not stored; send the whole conversation as input";

/// Fields of `/v1/responses`.
pub(crate) static FIELDS: FieldTable = FieldTable {
    api: "responses",
    fields: &[&[
        honoured("model", "Name of a served model; absent: the only one."),
        honoured(
            "input",
            "A string, or items: messages with text, `function_call`, `function_call_output` and `reasoning`; others are refused.",
        ),
        honoured("instructions", "A first message of the system."),
        honoured(
            "max_output_tokens",
            "At least 1; absent: what the context leaves, at most the router's default.",
        ),
        sampling::number("temperature"),
        sampling::number("top_p"),
        honoured("top_logprobs", "In [0, 20]: log probabilities of the output with so many alternatives."),
        honoured("include", "`message.output_text.logprobs`; others have no effect."),
        honoured("stream", "Server-sent events."),
        honoured(
            "text",
            "`format`: `text`, `json_object` or `json_schema`, whose schema the output matches, whether `strict` or not.",
        ),
        honoured("tools", "Functions, at most 512; other kinds are skipped."),
        honoured("tool_choice", "`auto`, `none`, `required`, or a function by its name."),
        honoured("parallel_tool_calls", "False: only the first call is returned."),
        refused("previous_response_id", STATELESS),
        refused("conversation", STATELESS),
        refused("background", "responses are not stored; stream the response instead"),
        refused("prompt", "prompt templates are not stored"),
        refused("image", "images are not supported"),
        ignored("access_programs", "The API key names the tenant."),
        ignored("background_options", "There are no background responses."),
        ignored("context_management", "The conversation is used as it is."),
        ignored("max_tool_calls", "It counts calls of tools that the router would run."),
        ignored("metadata", "Nothing is stored."),
        ignored("moderation", "The output is that of the model."),
        ignored("prompt_cache_key", "The prefix cache needs no key."),
        ignored("prompt_cache_options", "The prefix cache needs no hint."),
        ignored("prompt_cache_retention", "The prefix cache needs no hint."),
        honoured(
            "reasoning",
            "`effort`, as `reasoning_effort` of chat completions; `summary` has no effect.",
        ),
        ignored("safety_identifier", "The API key names the tenant."),
        ignored("service_tier", "The tenant's priority counts."),
        ignored("store", "Nothing is stored."),
        ignored("stream_options", "The last event always has the usage."),
        ignored("truncation", "Prompts are not truncated."),
        ignored("user", "The API key names the tenant."),
    ]],
};

/// Item of `input`.
#[derive(Deserialize)]
struct ItemBody<'a> {
    #[serde(default)]
    call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow, default)]
    output: Option<&'a RawValue>,
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    role: Option<String>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

/// Reads the conversation. An empty one, as clients send to probe a server, is an empty message of the user.
fn conversation(fields: &Fields<'_>, instructions: Option<&str>) -> Result<Input, Outcome> {
    let mut messages = MessageList::default();
    if let Some(text) = instructions {
        messages.push(Message::new("system", text.to_owned()))?;
    }
    let expected = "a string or an array of items";
    match fields.raw("input") {
        Some(input) if input.get().starts_with('[') => {
            let items: Vec<&RawValue> = parse("input", input, expected)?;
            let mut reasoning = String::new();
            for (at, item) in items.into_iter().enumerate() {
                read_item(&format!("input[{at}]"), item, &mut reasoning, &mut messages)?;
            }
        }
        Some(input) => messages.push(Message::new("user", parse("input", input, expected)?))?,
        None => {}
    }
    if !messages.messages().iter().any(|message| message.role != "system") {
        messages.push(Message::new("user", String::new()))?;
    }
    let (messages, rendering) = (messages.into_messages()?, rendering::of_responses(fields)?);
    Ok(Input::Chat(Conversation { messages, tools: Vec::new(), rendering }))
}

/// Reads an item. `reasoning` is that of the items before it, which belongs to the next message of the assistant.
fn read_item(
    name: &str,
    item: &RawValue,
    reasoning: &mut String,
    messages: &mut MessageList,
) -> Result<(), Outcome> {
    let item: ItemBody<'_> = parse_object(name, item, "an item")?;
    let refused = |what: &str| Err(Outcome::field("input", format!("{name} {what}")));
    match item.kind.as_deref() {
        None | Some("message") => {}
        Some("reasoning") => {
            reasoning.push_str(&reasoning_text(&format!("{name}.content"), item.content)?);
            return Ok(());
        }
        Some("compaction") => return Ok(()),
        Some("function_call") => {
            let (Some(id), Some(tool)) = (item.call_id, item.name) else {
                return refused("is a function_call without call_id or name");
            };
            let call = message_call(name, id, tool, item.arguments)?;
            let apart = if reasoning.is_empty() { messages.extend_last(call) } else { Err(call) };
            return apart.or_else(|call| {
                messages
                    .push(Message { reasoning: std::mem::take(reasoning), ..Message::of_calls(vec![call]) })
            });
        }
        Some("function_call_output") => {
            let id = item.call_id.unwrap_or_default();
            let Some(tool) = messages.called_tool(&id).map(str::to_owned) else {
                return refused(&format!("is the output of the call {id:?}, which no item before it has"));
            };
            let text = content::text(&format!("{name}.output"), item.output)?;
            return messages.push(Message { name: tool, tool_call_id: id, ..Message::new("tool", text) });
        }
        Some("item_reference") => return refused(&format!("refers to a stored item: {STATELESS}")),
        Some(other) => {
            return refused(&format!(
                "is of type {other:?}; send messages, function calls and their outputs"
            ));
        }
    }
    let role = match item.role.as_deref() {
        Some("system" | "developer") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some(other) => {
            return refused(&format!(
                "has the role {other:?}; roles are system, developer, user and assistant"
            ));
        }
        None => return refused("has no role"),
    };
    let content = content::text(&format!("{name}.content"), item.content)?;
    let mut message = Message::new(role, content);
    if role == "assistant" {
        message.reasoning = std::mem::take(reasoning);
    }
    messages.push(message)
}

/// Returns the text of a reasoning item.
fn reasoning_text(name: &str, content: Option<&RawValue>) -> Result<String, Outcome> {
    #[derive(Deserialize)]
    struct Part {
        #[serde(default)]
        text: String,
    }
    let Some(content) = content.filter(|content| content.get() != "null") else { return Ok(String::new()) };
    let parts: Vec<&RawValue> = parse(name, content, "an array of parts")?;
    let text = |part: &RawValue| parse_object::<Part>(name, part, "a part with text").map(|part| part.text);
    parts.into_iter().map(text).collect()
}

/// Output options of a call.
#[derive(Debug)]
pub(crate) struct Output {
    stream: bool,
    instructions: Option<String>,
    max_output_tokens: Option<u32>,
    tools: ToolEcho,
}

pub(crate) fn read(body: &[u8]) -> Result<(Draft, Output), Outcome> {
    let fields = FIELDS.read(body)?;
    let instructions = fields.text("instructions")?;
    let input = conversation(&fields, instructions.as_deref())?;
    let max_output_tokens = fields.count("max_output_tokens")?;
    if max_output_tokens == Some(0) {
        let reason = "max_output_tokens is 0; ask for at least one token";
        return Err(Outcome::field("max_output_tokens", reason));
    }
    let mut request = Draft::new(fields.model()?, input);
    request.parsing = tools::parsing(&fields)?;
    tools::apply(tools::read(&fields, ToolForm::Flat, &FIELDS)?, &mut request);
    sampling::read_numbers(&fields, &mut request.sampling)?;
    request.stop = StopConditions { max_tokens: max_output_tokens, ..StopConditions::default() };
    let included: Vec<String> = fields.get("include", "an array of strings")?.unwrap_or_default();
    let with_logprobs = included.iter().any(|name| name == "message.output_text.logprobs");
    let top_logprobs = sampling::alternatives(&fields, "top_logprobs")?.filter(|top| *top > 0);
    request.sampling.logprobs = top_logprobs.or(with_logprobs.then_some(0));
    let format = text_format(&fields)?;
    if let Some(grammar) = structured::format("text", "text.format", format)? {
        structured::constrain(&mut request, grammar);
    }
    // An event has no line breaks; strings have none either.
    let raw = |name: &str| {
        let text = fields.raw(name)?.get().replace(['\n', '\r'], " ");
        RawValue::from_string(text).ok()
    };
    let parallel = fields.get("parallel_tool_calls", "true or false")?.unwrap_or(true);
    let tools = ToolEcho { tools: raw("tools"), choice: raw("tool_choice"), parallel };
    Ok((request, Output { stream: fields.flag("stream")?, instructions, max_output_tokens, tools }))
}

/// Reads the format of the text; `None` for plain text.
fn text_format<'a>(fields: &Fields<'a>) -> Result<Option<&'a RawValue>, Outcome> {
    #[derive(Deserialize)]
    struct Text<'a> {
        #[serde(borrow, default)]
        format: Option<&'a RawValue>,
    }
    let text: Option<Text<'a>> = fields.object("text", "an object with a format")?;
    Ok(text.and_then(|text| text.format))
}

/// Answers a response.
pub(crate) async fn create(api: Arc<HttpApi>, call: Call, body: Bytes) -> Result<Response<Body>, Outcome> {
    let holder = call.context.caller.holder();
    let (request, output) = read_body(holder.clone(), &body, read).await.map_err(rejected)?;
    drop(body);
    let alternatives = request.sampling.logprobs;
    let started = Box::pin(api.start(vec![request], output.stream, call)).await.map_err(rejected)?;
    // Streamed ones too: the last event repeats them all.
    check_outputs(started.output_tokens_max(), "top_logprobs", alternatives)?;
    let echo = RequestEcho::new(&started, output.instructions, output.max_output_tokens, output.tools);
    let bundle = started.bundle().filter(|_| alternatives.is_some());
    if output.stream {
        let encoder = ResponseEvents::new(echo, bundle, api.http.timings);
        return sse::respond(started, encoder, api.http.keepalive).await;
    }
    let mut prompts = started.generations().collect().await?;
    let prompt = prompts.pop().unwrap_or_default();
    let choice = prompt.choices.first();
    let build = || {
        let logprobs: Vec<_> = match (choice, bundle) {
            (Some(choice), Some(model)) => {
                let vocabulary = model.tokenizer.vocabulary();
                choice.logprobs.iter().map(|position| PositionBody::new(position, vocabulary)).collect()
            }
            _ => Vec::new(),
        };
        let items = choice.map_or_else(Vec::new, OutputItem::of_choice);
        json(&echo.ended(&Ended::of(&prompt, api.http.timings), &items, &logprobs))
    };
    aside(holder, prompt.positions() > SMALL_POSITIONS, build).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(body: &str) -> Result<Vec<(String, String)>, Outcome> {
        let Input::Chat(chat) = read(body.as_bytes())?.0.input else { panic!() };
        Ok(chat
            .messages
            .into_iter()
            .map(|message| (message.role.clone(), message.text().to_owned()))
            .collect())
    }

    #[test]
    fn input_is_a_text_or_items_and_may_be_empty() {
        let one = |role: &str, text: &str| (role.to_owned(), text.to_owned());
        assert_eq!(messages(r#"{"input": "a"}"#).unwrap(), [one("user", "a")]);
        let items = r#"{"instructions": "i", "tools": [{"type": "web_search"}], "input": [{"role": "user",
            "content": [{"type": "input_text", "text": "a"}]}, {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"role": "developer", "content": "c"}]}"#;
        let expected = [one("system", "i"), one("user", "a"), one("assistant", "b"), one("system", "c")];
        assert_eq!(messages(items).unwrap(), expected);
        for empty in [r#"{"max_output_tokens": 1}"#, r#"{"input": []}"#, r#"{"input": ""}"#] {
            assert_eq!(messages(empty).unwrap(), [one("user", "")], "{empty}");
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_field() {
        for (body, field) in [
            (r#"{"previous_response_id": "resp_1"}"#, "previous_response_id"),
            (r#"{"conversation": {"id": "x"}}"#, "conversation"),
            (r#"{"background": true}"#, "background"),
            (r#"{"tools": [{"type": "function", "name": ""}]}"#, "tools"),
            (r#"{"text": {"format": {"type": "json_schema"}}}"#, "text"),
            (r#"{"tool_choice": {"type": "function"}}"#, "tool_choice"),
            (r#"{"input": [{"type": "function_call_output"}]}"#, "input"),
            (r#"{"input": [{"type": "item_reference", "id": "x"}]}"#, "input"),
            (r#"{"input": [{"role": "user", "content": [{"type": "input_image"}]}]}"#, "input"),
            (r#"{"input": {"a": 1}}"#, "input"),
            (r#"{"max_output_tokens": "many"}"#, "max_output_tokens"),
        ] {
            match read(body.as_bytes()) {
                Err(Outcome::InvalidField { field: found, .. }) => assert_eq!(found, field, "{body}"),
                other => panic!("{body}: {:?}", other.map(|(request, _)| request)),
            }
        }
    }
}

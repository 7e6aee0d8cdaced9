//! `/v1/responses`, without state: requests, and responses in one piece.

use std::sync::Arc;

use inflight_contract::StopConditions;
use serde::Deserialize;
use serde_json::value::RawValue;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::Response;

use crate::outcome::Outcome;
use crate::protocols::http::fields::{FieldTable, Fields, honoured, ignored, refused};
use crate::protocols::http::sampling;
use crate::protocols::http::sse;
use crate::protocols::http::structured;
use crate::protocols::http::{Call, HttpApi, json};
use crate::protocols::http::{SMALL_POSITIONS, aside, read_body};
use crate::protocols::openai::logprobs::{PositionBody, check_outputs};
use crate::protocols::openai::response_events::ResponseEvents;
use crate::protocols::openai::response_items;
use crate::protocols::openai::response_object::{Ended, OutputItem, RequestEcho, ToolEcho};
use crate::protocols::openai::tools::{self, ToolForm};
use crate::request::draft::Draft;
use crate::request::ingress::rejected;

/// Reason for which earlier responses cannot be named.
pub(super) const STATELESS: &str = "responses are not stored; send the whole conversation as input";

/// Fields of `/v1/responses`.
pub(crate) static FIELDS: FieldTable = FieldTable {
    api: "responses",
    fields: &[
        &[
            honoured("model", "Name of a served model; absent: the only one."),
            honoured(
                "input",
                "A string, or items: messages with text, `reasoning`, calls of functions, custom tools and the local shell, and their outputs; others are refused.",
            ),
            honoured("instructions", "A first message of the system."),
            honoured(
                "max_output_tokens",
                "At least 1; absent: what the context leaves, at most the router's default.",
            ),
            sampling::number("temperature"),
            sampling::number("top_p"),
            honoured(
                "top_logprobs",
                "In [0, 20]: log probabilities of the output with so many alternatives.",
            ),
            honoured("include", "`message.output_text.logprobs`; others have no effect."),
            honoured("stream", "Server-sent events."),
            honoured(
                "text",
                "`format`: `text`, `json_object`, which may have a `schema`, or `json_schema`; the output matches the schema, whether `strict` or not.",
            ),
            honoured("tools", "Functions, at most 512; other kinds are skipped."),
            honoured(
                "tool_choice",
                "`auto`, `none`, `required`, a function by its name, or `allowed_tools`, the only ones that are called.",
            ),
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
        ],
        structured::GUIDED,
    ],
    elsewhere: structured::ELSEWHERE,
};

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
    let input = response_items::conversation(&fields, instructions.as_deref())?;
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
    let format = structured::format("text", "text.format", text_format(&fields)?)?;
    structured::read_with(&fields, [format], &mut request)?;
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
    use crate::request::draft::Input;

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

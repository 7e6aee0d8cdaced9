//! Tools of OpenAI's APIs: definitions, the choice among them, and calls in messages.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::protocols::http::fields::{FieldTable, Fields, is_empty, parse, parse_object};
use crate::request::draft::{Draft, Input, OutputParsing};
use crate::request::tool_call::message_call;
use crate::request::tool_use::{Tool, ToolChoice, ToolDefinition, ToolUse};
use crate::text::MessageCall;

/// Reason for which the older form of tools is refused.
pub(crate) const FUNCTIONS: &str = "functions are the older form of tools; send tools and tool_choice";

/// Function of a tool, in either form.
#[derive(Deserialize)]
struct FunctionBody<'a> {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    description: Option<String>,
    #[serde(borrow, default)]
    parameters: Option<&'a RawValue>,
    #[serde(default)]
    strict: Option<bool>,
}

/// Tool of either API: chat completions nest the function, responses do not.
#[derive(Deserialize)]
struct ToolBody<'a> {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(borrow, default)]
    function: Option<&'a RawValue>,
}

/// Where an API puts a function's name and parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolForm {
    /// In an object `function`.
    Nested,
    /// Beside the type; tools of other kinds are skipped and counted.
    Flat,
}

/// Returns how the output is parsed: the finish reason of a stream says whether the calls in its fragments were made.
///
/// # Errors
/// `stream` is no boolean.
pub(crate) fn parsing(fields: &Fields<'_>) -> Result<OutputParsing, Outcome> {
    Ok(if fields.flag("stream")? { OutputParsing::Fragments } else { OutputParsing::WholeCalls })
}

/// Reads `tools`, `tool_choice` and `parallel_tool_calls`.
///
/// # Errors
/// A definition or the choice is invalid.
pub(crate) fn read(
    fields: &Fields<'_>,
    form: ToolForm,
    table: &'static FieldTable,
) -> Result<Option<ToolUse>, Outcome> {
    let bodies: Vec<&RawValue> = fields.get("tools", "an array of tools")?.unwrap_or_default();
    ToolUse::check_count(bodies.len())?;
    let mut tools = Vec::with_capacity(bodies.len());
    for (at, body) in bodies.into_iter().enumerate() {
        let place = format!("tools[{at}]");
        let tool: ToolBody<'_> = parse_object(&place, body, "a tool")?;
        let function = match (tool.kind.as_deref(), form) {
            (Some("function"), ToolForm::Nested) => tool.function.ok_or_else(|| {
                Outcome::field("tools", format!("{place} has no function; give its name and parameters"))
            })?,
            (Some("function"), ToolForm::Flat) => body,
            (Some(_), ToolForm::Flat) => {
                table.count("tools");
                continue;
            }
            (Some(other), ToolForm::Nested) => {
                let reason = format!("{place} is of type {other:?}; only functions are supported");
                return Err(Outcome::field("tools", reason));
            }
            (None, _) => return Err(Outcome::field("tools", format!("{place} has no type"))),
        };
        let function: FunctionBody<'_> = parse_object(&place, function, "a function with a name")?;
        let FunctionBody { name, description, parameters, strict } = function;
        let strict = strict.unwrap_or(false);
        tools.push(Tool::new(ToolDefinition { place: &place, name, description, parameters, strict })?);
    }
    let choice = choice(fields, form)?;
    let parallel = fields.get("parallel_tool_calls", "true or false")?.unwrap_or(true);
    ToolUse::new(tools, choice, parallel)
}

/// Reads `tool_choice`.
fn choice(fields: &Fields<'_>, form: ToolForm) -> Result<ToolChoice, Outcome> {
    #[derive(Deserialize)]
    struct Chosen<'a> {
        #[serde(rename = "type", default)]
        kind: Option<String>,
        #[serde(default)]
        name: Option<String>,
        #[serde(borrow, default)]
        function: Option<&'a RawValue>,
    }
    let expected = "none, auto, required, or a function";
    let Some(raw) = fields.raw("tool_choice") else { return Ok(ToolChoice::Auto) };
    if raw.get().starts_with('"') {
        return match raw.get() {
            "\"none\"" => Ok(ToolChoice::None),
            "\"auto\"" => Ok(ToolChoice::Auto),
            "\"required\"" => Ok(ToolChoice::Required),
            other => Err(Outcome::field(
                "tool_choice",
                format!("tool_choice must be {expected}; it is {other:.40}"),
            )),
        };
    }
    let chosen: Chosen<'_> = parse_object("tool_choice", raw, expected)?;
    let name = match (form, chosen.function) {
        (ToolForm::Nested, Some(function)) => {
            let function: FunctionBody<'_> = parse_object("tool_choice.function", function, "a function")?;
            function.name
        }
        (ToolForm::Flat, _) => chosen.name,
        (ToolForm::Nested, None) => None,
    };
    match (chosen.kind.as_deref(), name) {
        (Some("function"), Some(name)) => Ok(ToolChoice::Named(name)),
        _ => Err(Outcome::field("tool_choice", format!("tool_choice must be {expected} with its name"))),
    }
}

/// Gives a request its tools.
pub(crate) fn apply(tools: Option<ToolUse>, request: &mut Draft) {
    if let (Input::Chat(chat), Some(tools)) = (&mut request.input, &tools) {
        chat.tools = tools.definitions();
    }
    request.tools = tools;
}

/// Reads the calls of a message of the assistant, in chat completions.
///
/// # Errors
/// A call is malformed, or its arguments are no JSON object.
pub(crate) fn message_calls(name: &str, calls: Option<&RawValue>) -> Result<Vec<MessageCall>, Outcome> {
    #[derive(Deserialize)]
    struct CallBody<'a> {
        #[serde(default)]
        id: Option<String>,
        #[serde(borrow)]
        function: CalledBody<'a>,
    }
    #[derive(Deserialize)]
    struct CalledBody<'a> {
        name: String,
        #[serde(borrow, default)]
        arguments: Option<&'a RawValue>,
    }
    let Some(calls) = calls.filter(|calls| !is_empty(calls)) else { return Ok(Vec::new()) };
    let bodies: Vec<&RawValue> = parse(name, calls, "an array of tool calls")?;
    let read = |(at, body): (usize, &RawValue)| {
        let name = format!("{name}[{at}]");
        let call: CallBody<'_> = parse_object(&name, body, "a tool call with a function")?;
        let arguments = call.function.arguments;
        message_call(&name, call.id.unwrap_or_default(), call.function.name, arguments)
    };
    bodies.into_iter().enumerate().map(read).collect()
}

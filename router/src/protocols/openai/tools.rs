//! Tools of OpenAI's APIs: definitions, the choice among them, and calls in messages.

use std::collections::BTreeSet;

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
    let (choice, allowed) = match allowed(fields)? {
        Some((choice, names)) => (choice, Some(names)),
        None => (choice(fields, form)?, None),
    };
    let parallel = fields.get("parallel_tool_calls", "true or false")?.unwrap_or(true);
    let tools = ToolUse::new(tools, choice, parallel)?;
    match (tools, allowed) {
        (Some(tools), Some(names)) => tools.allow(names).map(Some),
        (None, Some(_)) => Err(Outcome::field("tool_choice", "tool_choice allows tools, but tools is empty")),
        (tools, None) => Ok(tools),
    }
}

/// Reads a `tool_choice` that allows some of the tools, which chat completions have in an object of its own; `None` for any other.
fn allowed(fields: &Fields<'_>) -> Result<Option<(ToolChoice, BTreeSet<String>)>, Outcome> {
    #[derive(Deserialize)]
    struct Kind<'a> {
        #[serde(rename = "type", default)]
        kind: Option<String>,
        #[serde(borrow, default)]
        allowed_tools: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Allowed<'a> {
        mode: String,
        #[serde(borrow)]
        tools: Vec<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Named<'a> {
        #[serde(rename = "type", default)]
        kind: Option<String>,
        #[serde(default)]
        name: Option<String>,
        #[serde(borrow, default)]
        function: Option<&'a RawValue>,
    }
    let Some(raw) = fields.raw("tool_choice").filter(|raw| raw.get().starts_with('{')) else {
        return Ok(None);
    };
    let kind: Kind<'_> = parse_object("tool_choice", raw, CHOICES)?;
    if kind.kind.as_deref() != Some("allowed_tools") {
        return Ok(None);
    }
    let (place, body) = match kind.allowed_tools {
        Some(body) => ("tool_choice.allowed_tools", body),
        None => ("tool_choice", raw),
    };
    let body: Allowed<'_> = parse_object(place, body, "an object with mode and tools")?;
    ToolUse::check_count(body.tools.len())?;
    let choice = match body.mode.as_str() {
        "auto" => ToolChoice::Auto,
        "required" => ToolChoice::Required,
        other => {
            let reason = format!("{place}.mode is {other:.40?}; modes are auto and required");
            return Err(Outcome::field("tool_choice", reason));
        }
    };
    let mut names = BTreeSet::new();
    for (at, tool) in body.tools.into_iter().enumerate() {
        let place = format!("{place}.tools[{at}]");
        let tool: Named<'_> = parse_object(&place, tool, "a tool")?;
        // Those of the server's, which are skipped among the tools, too.
        if tool.kind.is_some_and(|kind| kind != "function") {
            continue;
        }
        let function = tool.function.map(|function| {
            parse_object::<FunctionBody<'_>>(&format!("{place}.function"), function, "a function")
        });
        let name = function.transpose()?.and_then(|function| function.name).or(tool.name);
        let name = name.ok_or_else(|| Outcome::field("tool_choice", format!("{place} has no name")))?;
        names.insert(name);
    }
    Ok(Some((choice, names)))
}

/// Values of `tool_choice`, in errors.
const CHOICES: &str = "none, auto, required, a function, or allowed_tools";

/// Reads any other `tool_choice`.
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
    let Some(raw) = fields.raw("tool_choice") else { return Ok(ToolChoice::Auto) };
    if raw.get().starts_with('"') {
        return match raw.get() {
            "\"none\"" => Ok(ToolChoice::None),
            "\"auto\"" => Ok(ToolChoice::Auto),
            "\"required\"" => Ok(ToolChoice::Required),
            other => Err(Outcome::field(
                "tool_choice",
                format!("tool_choice must be {CHOICES}; it is {other:.40}"),
            )),
        };
    }
    let chosen: Chosen<'_> = parse_object("tool_choice", raw, CHOICES)?;
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
        _ => Err(Outcome::field("tool_choice", format!("tool_choice must be {CHOICES} with its name"))),
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

//! Content blocks of Anthropic's messages: text, thinking, calls of tools and their results, in requests and responses.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::documents;
use crate::outcome::Outcome;
use crate::output::collected::{CollectedChoice, CollectedPart};
use crate::protocols::http::content;
use crate::protocols::http::fields::{Fields, parse, parse_object};
use crate::request::message_list::MessageList;
use crate::request::tool_call::message_call;
use crate::request::tool_use::{Tool, ToolChoice, ToolDefinition, ToolUse};
use crate::text::Message;

/// Block of a message that is not text alone.
#[derive(Deserialize)]
struct BlockBody<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    thinking: Option<String>,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(default)]
    tool_use_id: Option<String>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

/// Reads a message, and appends it and the results of tools in it.
///
/// # Errors
/// A block is malformed, or of a kind that the role does not have.
pub(crate) fn read_message(
    name: &str,
    role: &str,
    body: &RawValue,
    messages: &mut MessageList,
) -> Result<(), Outcome> {
    let place = format!("{name}.content");
    if !body.get().starts_with('[') {
        return messages.push(Message::new(role, content::text(&place, Some(body))?));
    }
    let blocks: Vec<&RawValue> = parse(&place, body, "a string or an array of blocks")?;
    let mut message = Message::new(role, String::new());
    let (mut texts, mut results) = (Vec::new(), 0);
    let blocks_given = blocks.len();
    for (at, raw) in blocks.into_iter().enumerate() {
        let place = format!("{place}[{at}]");
        if raw.get().starts_with('"') {
            texts.push(parse::<String>(&place, raw, "text")?);
            continue;
        }
        let block: BlockBody<'_> = parse_object(&place, raw, "a block with a type")?;
        match (block.kind.as_str(), role) {
            ("tool_use", "assistant") => {
                let missing = |what| Outcome::field("messages", format!("{place} has no {what}"));
                let id = block.id.ok_or_else(|| missing("id"))?;
                let tool = block.name.ok_or_else(|| missing("name"))?;
                message.tool_calls.push(message_call(&place, id, tool, block.input)?);
            }
            ("tool_result", "user") => {
                messages.push(result(&place, block, messages)?)?;
                results += 1;
            }
            ("thinking", "assistant") => message.reasoning.push_str(&block.thinking.unwrap_or_default()),
            (_, "assistant") => texts.extend(content::part(&place, raw)?),
            _ => texts.extend(documents::part(&place, raw)?),
        }
    }
    // A message of calls alone has no text.
    message.content = (!texts.is_empty() || message.tool_calls.is_empty()).then(|| texts.join("\n"));
    // Results alone are no message of the user.
    if results == 0 || results < blocks_given {
        messages.push(message)?;
    }
    Ok(())
}

/// Returns the message of a tool's result.
fn result(place: &str, block: BlockBody<'_>, earlier: &MessageList) -> Result<Message, Outcome> {
    let id = block.tool_use_id.unwrap_or_default();
    let name = earlier.called_tool(&id).map(str::to_owned).ok_or_else(|| {
        let reason = format!("{place} is the result of the call {id:?}, which no message before it has");
        Outcome::field("messages", reason)
    })?;
    let text = content::text_of_parts(&format!("{place}.content"), block.content, documents::part)?;
    Ok(Message { name, tool_call_id: id, ..Message::new("tool", text) })
}

/// Reads `tools` and `tool_choice`; calls `skipped` for each tool that is no function of the client.
///
/// # Errors
/// A definition or the choice is invalid.
pub(crate) fn tools(fields: &Fields<'_>, skipped: impl Fn()) -> Result<Option<ToolUse>, Outcome> {
    #[derive(Deserialize)]
    struct ToolBody<'a> {
        #[serde(rename = "type", default)]
        kind: Option<String>,
        #[serde(default)]
        name: Option<String>,
        #[serde(default)]
        description: Option<String>,
        #[serde(borrow, default)]
        input_schema: Option<&'a RawValue>,
        #[serde(default)]
        strict: Option<bool>,
    }
    #[derive(Deserialize)]
    struct Chosen {
        #[serde(rename = "type")]
        kind: String,
        #[serde(default)]
        name: Option<String>,
        #[serde(default)]
        disable_parallel_tool_use: Option<bool>,
    }
    let bodies: Vec<&RawValue> = fields.get("tools", "an array of tools")?.unwrap_or_default();
    ToolUse::check_count(bodies.len())?;
    let mut tools = Vec::with_capacity(bodies.len());
    for (at, body) in bodies.into_iter().enumerate() {
        let place = format!("tools[{at}]");
        let tool: ToolBody<'_> = parse_object(&place, body, "a tool with a name")?;
        if tool.kind.is_some_and(|kind| kind != "custom") {
            skipped();
            continue;
        }
        tools.push(Tool::new(ToolDefinition {
            place: &place,
            name: tool.name,
            description: tool.description,
            parameters: tool.input_schema,
            strict: tool.strict.unwrap_or(false),
        })?);
    }
    let expected = "an object of the type auto, any, tool or none";
    let chosen: Option<Chosen> = fields.object("tool_choice", expected)?;
    let parallel = !chosen.as_ref().and_then(|chosen| chosen.disable_parallel_tool_use).unwrap_or(false);
    let choice = match chosen.map(|chosen| (chosen.kind, chosen.name)) {
        None => ToolChoice::Auto,
        Some((kind, name)) => match (kind.as_str(), name) {
            ("auto", _) => ToolChoice::Auto,
            ("any", _) => ToolChoice::Required,
            ("none", _) => ToolChoice::None,
            ("tool", Some(name)) => ToolChoice::Named(name),
            _ => {
                let reason = format!("tool_choice must be {expected}, which a tool names");
                return Err(Outcome::field("tool_choice", reason));
            }
        },
    };
    ToolUse::new(tools, choice, parallel)
}

/// Block of a response.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Block<'a> {
    Text { text: &'a str },
    Thinking { thinking: &'a str, signature: &'static str },
    ToolUse { id: &'a str, name: &'a str, input: &'a RawValue },
}

/// Fragment of a block.
#[derive(Serialize)]
#[allow(clippy::enum_variant_names, reason = "the names are those of the API")]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Fragment<'a> {
    TextDelta { text: &'a str },
    ThinkingDelta { thinking: &'a str },
    InputJsonDelta { partial_json: &'a str },
}

/// Inputs of the calls of a choice, as JSON. Calls of messages are delivered whole, so all of them are.
pub(crate) fn inputs(choice: &CollectedChoice) -> Vec<Box<RawValue>> {
    choice.calls().filter_map(|call| serde_json::from_str(&call.arguments).ok()).collect()
}

/// Returns the blocks of a choice; `inputs` are those of its calls.
pub(crate) fn blocks<'a>(choice: &'a CollectedChoice, inputs: &'a [Box<RawValue>]) -> Vec<Block<'a>> {
    if choice.parts.is_empty() && !choice.called() {
        return vec![Block::Text { text: &choice.text }];
    }
    let mut inputs = inputs.iter();
    let block = |part: &'a CollectedPart| match part {
        CollectedPart::Content(text) => Some(Block::Text { text }),
        CollectedPart::Reasoning(text) => Some(Block::Thinking { thinking: text, signature: "" }),
        CollectedPart::Call(call) => {
            inputs.next().map(|input| Block::ToolUse { id: &call.id, name: &call.name, input })
        }
    };
    choice.parts.iter().filter_map(block).collect()
}

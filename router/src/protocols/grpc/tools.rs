//! Tools of the `inflight.v1.Inference` service: definitions and conversations to those of the core, parts of an output to
//! messages.

use inflight_output_parser::OutputEvent;
use inflight_proto::v1;
use serde_json::value::{RawValue, to_raw_value};

use crate::outcome::Outcome;
use crate::request::draft::Input;
use crate::request::message_list::{MessageList, check_continued};
use crate::request::tool_call::message_call;
use crate::request::tool_use::{Tool, ToolChoice, ToolDefinition, ToolUse};
use crate::text::{Conversation, Message, PromptEnd, Rendering, TemplateArguments};

/// Returns the tools of a request.
pub(crate) fn tool_use(message: v1::ToolUse) -> Result<Option<ToolUse>, Outcome> {
    let choice = match (message.choice(), message.name) {
        (v1::ToolChoice::Unspecified, _) => ToolChoice::Auto,
        (v1::ToolChoice::None, _) => ToolChoice::None,
        (v1::ToolChoice::Required, name) if name.is_empty() => ToolChoice::Required,
        (v1::ToolChoice::Required, name) => ToolChoice::Named(name),
    };
    ToolUse::check_count(message.tools.len())?;
    let tool = |(at, tool): (usize, v1::Tool)| {
        let place = format!("tools.tools[{at}]");
        let v1::Tool { name, description, parameters, strict } = tool;
        let schema = Some(parameters).filter(|text| !text.is_empty()).map(RawValue::from_string).transpose();
        let schema = schema.map_err(|error| {
            Outcome::field("tools", format!("{place} has parameters that are not JSON: {error}"))
        })?;
        Tool::new(ToolDefinition {
            place: &place,
            name: Some(name),
            description: Some(description).filter(|text| !text.is_empty()),
            parameters: schema.as_deref(),
            strict,
        })
    };
    let tools = message.tools.into_iter().enumerate().map(tool).collect::<Result<Vec<_>, _>>()?;
    ToolUse::new(tools, choice, !message.single_call)
}

/// Returns the conversation of a request.
pub(crate) fn conversation(chat: v1::Chat, tools: Option<&ToolUse>) -> Result<Input, Outcome> {
    MessageList::check_count(chat.messages.len())?;
    let mut messages = MessageList::default();
    for (at, message) in chat.messages.into_iter().enumerate() {
        let place = format!("chat.messages[{at}]");
        let v1::ChatMessage { role, content, reasoning, tool_calls, tool_call_id, name } = message;
        // A message of calls alone has no text.
        let content = (!content.is_empty() || tool_calls.is_empty()).then_some(content);
        let mut read = Message { role, content, reasoning, tool_call_id, name, ..Message::default() };
        for v1::ToolCall { id, name, arguments } in tool_calls {
            // A text that is no JSON is one of a model, and its template's to read.
            let is_object = arguments.trim_start().starts_with('{');
            let json = is_object.then(|| RawValue::from_string(arguments.clone()).ok()).flatten();
            let arguments = json.map_or_else(|| to_raw_value(&arguments), Ok).map_err(|error| {
                Outcome::field("chat", format!("{place} has arguments that are no text: {error}"))
            })?;
            read.tool_calls.push(message_call(&place, id, name, Some(&arguments))?);
        }
        if !read.tool_call_id.is_empty() {
            let called = messages.called_tool(&read.tool_call_id).ok_or_else(|| {
                let id = &read.tool_call_id;
                let reason =
                    format!("{place} is the result of the call {id:?}, which no message before it has");
                Outcome::field("chat", reason)
            })?;
            if read.name.is_empty() {
                read.name = called.to_owned();
            }
        }
        messages.push(read)?;
    }
    let messages = messages.into_messages()?;
    let rendering = rendering(&chat.template_arguments, chat.continue_last_message, &messages)?;
    let tools = tools.map(ToolUse::definitions).unwrap_or_default();
    Ok(Input::Chat(Conversation { messages, tools, rendering }))
}

/// Returns how a conversation of these messages is rendered.
fn rendering(arguments: &str, continues: bool, messages: &[Message]) -> Result<Rendering, Outcome> {
    let mut rendering = Rendering::default();
    if !arguments.is_empty() {
        rendering.arguments = TemplateArguments::of_json(arguments).map_err(|error| {
            Outcome::field("chat", format!("chat.template_arguments is invalid: {error}"))
        })?;
    }
    if continues {
        check_continued("chat", messages)?;
        rendering.end = PromptEnd::LastMessage;
    }
    Ok(rendering)
}

/// Parts of an output as a message has them.
#[derive(Default)]
pub(crate) struct MessageParts {
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) tool_calls: Vec<v1::ToolCallDelta>,
}

impl MessageParts {
    pub(crate) fn new(parts: Vec<OutputEvent>) -> Self {
        let mut message = Self::default();
        for part in parts {
            match part {
                OutputEvent::Content(text) => message.text.push_str(&text),
                OutputEvent::Reasoning(text) => message.reasoning.push_str(&text),
                OutputEvent::CallBegin { index, id, name } => {
                    message.tool_calls.push(v1::ToolCallDelta { index, id, name, ..Default::default() });
                }
                OutputEvent::CallArguments { index, fragment } => {
                    match message.tool_calls.last_mut().filter(|call| call.index == index) {
                        Some(call) => call.arguments.push_str(&fragment),
                        None => {
                            let arguments = fragment;
                            message.tool_calls.push(v1::ToolCallDelta {
                                index,
                                arguments,
                                ..Default::default()
                            });
                        }
                    }
                }
                OutputEvent::CallEnd { whole: true, .. } => {}
                OutputEvent::CallEnd { index, whole: false } => {
                    match message.tool_calls.last_mut().filter(|call| call.index == index) {
                        Some(call) => call.cut = true,
                        None => {
                            message.tool_calls.push(v1::ToolCallDelta {
                                index,
                                cut: true,
                                ..Default::default()
                            });
                        }
                    }
                }
            }
        }
        message
    }
}

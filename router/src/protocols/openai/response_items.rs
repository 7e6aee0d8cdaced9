//! Items of the input of a response: messages, reasoning, calls of tools and their outputs, as a conversation.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::outcome::Outcome;
use crate::protocols::http::content;
use crate::protocols::http::fields::{Fields, Object, parse, parse_object};
use crate::protocols::openai::rendering;
use crate::protocols::openai::responses::STATELESS;
use crate::request::draft::Input;
use crate::request::message_list::MessageList;
use crate::request::tool_call::message_call;
use crate::text::{Conversation, Message};

/// Name under which calls of OpenAI's local shell are in the conversation.
const LOCAL_SHELL: &str = "local_shell";

/// Item of `input`.
#[derive(Deserialize)]
struct ItemBody<'a> {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
    /// Text of a call of a tool without a schema.
    #[serde(default)]
    input: Option<String>,
    /// Command of a call of the local shell.
    #[serde(borrow, default)]
    action: Option<&'a RawValue>,
    #[serde(borrow, default)]
    output: Option<&'a RawValue>,
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    role: Option<String>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    summary: Option<&'a RawValue>,
    #[serde(borrow, default)]
    encrypted_content: Option<&'a RawValue>,
}

/// Reads the conversation. An empty one, as clients send to probe a server, is an empty message of the user.
pub(super) fn conversation(fields: &Fields<'_>, instructions: Option<&str>) -> Result<Input, Outcome> {
    let mut items = Items::default();
    if let Some(text) = instructions {
        items.messages.push(Message::new("system", text.to_owned()))?;
    }
    let expected = "a string or an array of items";
    match fields.raw("input") {
        Some(input) if input.get().starts_with('[') => {
            let given: Vec<&RawValue> = parse("input", input, expected)?;
            for (at, item) in given.into_iter().enumerate() {
                items.read(&format!("input[{at}]"), item)?;
            }
            items.check_reasoning()?;
        }
        Some(input) => items.messages.push(Message::new("user", parse("input", input, expected)?))?,
        None => {}
    }
    let mut messages = items.messages;
    if !messages.messages().iter().any(|message| message.role != "system") {
        messages.push(Message::new("user", String::new()))?;
    }
    let (messages, rendering) = (messages.into_messages()?, rendering::of_responses(fields)?);
    Ok(Input::Chat(Conversation { messages, tools: Vec::new(), rendering }))
}

/// Items read so far.
#[derive(Default)]
struct Items {
    messages: MessageList,
    /// Reasoning of the items before, which belongs to the next message or call of the assistant, with the place of the last.
    reasoning: String,
    reasoned_at: String,
    /// Ids of calls by the ids of their items.
    calls: HashMap<String, String>,
}

impl Items {
    fn read(&mut self, name: &str, item: &RawValue) -> Result<(), Outcome> {
        let item: ItemBody<'_> = parse_object(name, item, "an item")?;
        match item.kind.as_deref() {
            None | Some("message") => self.message(name, &item),
            Some("reasoning") => self.reasoning(name, &item),
            Some("function_call" | "custom_tool_call" | "local_shell_call") => self.call(name, item),
            Some("function_call_output" | "custom_tool_call_output" | "local_shell_call_output") => {
                self.output(name, item)
            }
            Some("item_reference") => refused(name, &format!("refers to a stored item: {STATELESS}")),
            Some("compaction") => refused(
                name,
                "is a compaction, which only the server that made it can read; send the items that it stands for",
            ),
            Some(
                kind @ ("web_search_call"
                | "file_search_call"
                | "code_interpreter_call"
                | "image_generation_call"
                | "tool_search_call"),
            ) => refused(
                name,
                &format!(
                    "is a {kind}, which another server ran, and its results are not in the request; leave it out, or send what it found as a message"
                ),
            ),
            Some(other) => refused(
                name,
                &format!(
                    "is of type {other:?}; send calls and their results as function_call and function_call_output, and all else as messages"
                ),
            ),
        }
    }

    fn message(&mut self, name: &str, item: &ItemBody<'_>) -> Result<(), Outcome> {
        let role = match item.role.as_deref() {
            Some("system" | "developer") => "system",
            Some("user") => "user",
            Some("assistant") => "assistant",
            Some(other) => {
                return refused(
                    name,
                    &format!("has the role {other:?}; roles are system, developer, user and assistant"),
                );
            }
            None => return refused(name, "has no role"),
        };
        let mut message = Message::new(role, content::text(&format!("{name}.content"), item.content)?);
        if role == "assistant" {
            message.reasoning = std::mem::take(&mut self.reasoning);
        } else {
            self.check_reasoning()?;
        }
        self.messages.push(message)
    }

    fn reasoning(&mut self, name: &str, item: &ItemBody<'_>) -> Result<(), Outcome> {
        let mut text = reasoning_text(&format!("{name}.content"), item.content)?;
        if text.is_empty() {
            text = reasoning_text(&format!("{name}.summary"), item.summary)?;
        }
        if text.is_empty() && item.encrypted_content.is_some_and(|content| content.get() != "null") {
            return refused(
                name,
                "is reasoning that only the server that encrypted it can read; leave it out, or send its text as content",
            );
        }
        self.reasoning.push_str(&text);
        name.clone_into(&mut self.reasoned_at);
        Ok(())
    }

    /// Checks that no reasoning waits for a message or call of the assistant.
    fn check_reasoning(&self) -> Result<(), Outcome> {
        if self.reasoning.is_empty() {
            return Ok(());
        }
        refused(
            &self.reasoned_at,
            "is reasoning that no message or call of the assistant follows; leave it out, or send what followed it",
        )
    }

    fn call(&mut self, name: &str, item: ItemBody<'_>) -> Result<(), Outcome> {
        let kind = item.kind.unwrap_or_default();
        let arguments = match (&*kind, item.input, item.action) {
            ("custom_tool_call", Some(input), _) => Some(raw(&serde_json::json!({"input": input}))?),
            ("custom_tool_call", None, _) => return refused(name, "is a custom_tool_call without input"),
            ("local_shell_call", _, Some(action)) => {
                let Object(entries) = parse_object(&format!("{name}.action"), action, "an object")?;
                let entries = entries.iter().filter(|(key, _)| key != "type");
                let entries: Vec<String> = entries
                    .map(|(key, value)| format!("{}:{value}", serde_json::Value::from(&**key)))
                    .collect();
                let action = RawValue::from_string(format!("{{{}}}", entries.join(",")));
                Some(action.map_err(|error| Outcome::field("input", format!("{name}.action: {error}")))?)
            }
            ("local_shell_call", ..) => return refused(name, "is a local_shell_call without action"),
            _ => None,
        };
        let tool = if kind == "local_shell_call" { Some(LOCAL_SHELL.to_owned()) } else { item.name };
        let (Some(id), Some(tool)) = (item.call_id, tool) else {
            return refused(name, &format!("is a {kind} without call_id or name"));
        };
        if let Some(item) = item.id {
            self.calls.insert(item, id.clone());
        }
        let call = message_call(name, id, tool, arguments.as_deref().or(item.arguments))?;
        let apart = if self.reasoning.is_empty() { self.messages.extend_last(call) } else { Err(call) };
        apart.or_else(|call| {
            let reasoning = std::mem::take(&mut self.reasoning);
            self.messages.push(Message { reasoning, ..Message::of_calls(vec![call]) })
        })
    }

    fn output(&mut self, name: &str, item: ItemBody<'_>) -> Result<(), Outcome> {
        // The local shell's names the item of its call.
        let id = item.call_id.or(item.id).unwrap_or_default();
        let called = |id: &str| self.messages.called_tool(id).map(str::to_owned);
        let by_item = || self.calls.get(&id).cloned();
        let found = called(&id).map(|tool| (id.clone(), tool));
        let found = found.or_else(|| by_item().and_then(|id| called(&id).map(|tool| (id, tool))));
        let Some((tool_call_id, tool)) = found else {
            return refused(name, &format!("is the output of the call {id:?}, which no item before it has"));
        };
        let text = content::text(&format!("{name}.output"), item.output)?;
        self.messages.push(Message { name: tool, tool_call_id, ..Message::new("tool", text) })
    }
}

fn refused<T>(name: &str, what: &str) -> Result<T, Outcome> {
    Err(Outcome::field("input", format!("{name} {what}")))
}

fn raw(value: &serde_json::Value) -> Result<Box<RawValue>, Outcome> {
    to_raw_value(value).map_err(|error| Outcome::field("input", error))
}

/// Returns the text of the parts of a reasoning item.
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

#[cfg(test)]
mod tests {
    use super::super::responses::read;
    use super::*;
    use crate::text::MessageCall;

    fn messages(items: &str) -> Result<Vec<Message>, Outcome> {
        let Input::Chat(chat) = read(format!("{{\"input\": {items}}}").as_bytes())?.0.input else { panic!() };
        Ok(chat.messages)
    }

    #[test]
    fn calls_of_tools_without_schemas_and_of_the_shell_are_calls_with_results() {
        let items = r#"[{"role": "user", "content": "a"}, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "custom_tool_call", "id": "i1", "call_id": "c1", "name": "sql", "input": "SELECT \"x\""},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "1"},
            {"type": "local_shell_call", "id": "i2", "call_id": "c2", "status": "completed", "action": {"type": "exec",
                "command": ["ls", "-l"], "env": {}, "timeout_ms": 9007199254740993}},
            {"type": "local_shell_call_output", "id": "i2", "output": "{\"stdout\": \"y\"}"},
            {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["pwd"]}},
            {"type": "function_call_output", "call_id": "c3", "output": "/"}]"#;
        let found = messages(items).unwrap();
        let arguments = |call: &MessageCall| serde_json::to_string(&call.arguments).unwrap();
        let calls: Vec<_> = found.iter().flat_map(|message| &message.tool_calls).collect();
        let calls: Vec<_> = calls.iter().map(|call| (&*call.id, &*call.name, arguments(call))).collect();
        let expected = [
            ("c1", "sql", r#"{"input":"SELECT \"x\""}"#.to_owned()),
            (
                "c2",
                "local_shell",
                r#"{"command":["ls","-l"],"env":{},"timeout_ms":9007199254740993}"#.to_owned(),
            ),
            ("c3", "local_shell", r#"{"command":["pwd"]}"#.to_owned()),
        ];
        assert_eq!(calls, expected);
        assert_eq!(found[1].reasoning, "hm");
        let results = found.iter().filter(|message| message.role == "tool");
        let results: Vec<_> = results.map(|of| (&*of.tool_call_id, &*of.name, of.text())).collect();
        let expected =
            [("c1", "sql", "1"), ("c2", "local_shell", "{\"stdout\": \"y\"}"), ("c3", "local_shell", "/")];
        assert_eq!(results, expected);
    }

    #[test]
    fn no_item_is_dropped() {
        let user = r#"{"role": "user", "content": "a"}"#;
        let reasoning = r#"{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}"#;
        for (items, words) in [
            (
                r#"{"type": "web_search_call", "id": "w", "status": "completed"}"#.to_owned(),
                "input[0] is a web_search_call",
            ),
            (r#"{"type": "file_search_call"}"#.to_owned(), "results are not in the request"),
            (
                r#"{"type": "computer_call", "call_id": "c"}"#.to_owned(),
                "as function_call and function_call_output",
            ),
            (r#"{"type": "compaction", "encrypted_content": "x"}"#.to_owned(), "is a compaction"),
            (r#"{"type": "reasoning", "summary": [], "encrypted_content": "x"}"#.to_owned(), "encrypted it"),
            (format!("{reasoning}, {user}"), "input[0] is reasoning that no message or call"),
            (format!("{user}, {reasoning}"), "input[1] is reasoning that no message or call"),
            (r#"{"type": "custom_tool_call", "call_id": "c", "name": "f"}"#.to_owned(), "without input"),
            (
                r#"{"type": "custom_tool_call", "name": "f", "input": ""}"#.to_owned(),
                "without call_id or name",
            ),
            (r#"{"type": "local_shell_call", "call_id": "c"}"#.to_owned(), "without action"),
            (
                r#"{"type": "local_shell_call_output", "id": "c", "output": ""}"#.to_owned(),
                "which no item before it has",
            ),
        ] {
            match messages(&format!("[{items}]")) {
                Err(Outcome::InvalidField { field, reason }) => {
                    assert!(field == "input" && reason.contains(words), "{items}: {field}: {reason}");
                }
                other => panic!("{items}: {other:?}"),
            }
        }
        let empty = format!(r#"[{user}, {{"type": "reasoning", "summary": [], "encrypted_content": null}}]"#);
        assert_eq!(messages(&empty).unwrap().len(), 1);
    }
}

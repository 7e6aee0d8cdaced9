//! Conversations as chat templates read them: messages, tool calls and tool definitions.

use minijinja::value::{Value, ValueKind};

/// Message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// Role of the author, such as `user`.
    pub role: String,
    /// Text of the message.
    pub content: String,
    /// Reasoning that led to the message; empty if there is none.
    pub reasoning: String,
    /// Calls of tools in the message.
    pub tool_calls: Vec<MessageCall>,
    /// Call whose result the message is; empty if it is none.
    pub tool_call_id: String,
    /// Name of the tool whose result the message is, or of the author; empty if there is none.
    pub name: String,
}

/// Tool call of an earlier message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageCall {
    /// Id that its result refers to.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments, an object.
    pub arguments: Value,
}

impl Message {
    /// Returns a message of text alone.
    pub fn new(role: &str, content: String) -> Self {
        Self { role: role.to_owned(), content, ..Self::default() }
    }

    /// Returns the message with all of its texts replaced.
    pub(super) fn map(&self, change: &dyn Fn(&str) -> String) -> Self {
        let call = |call: &MessageCall| MessageCall {
            id: change(&call.id),
            name: change(&call.name),
            arguments: map(&call.arguments, change),
        };
        Self {
            role: change(&self.role),
            content: change(&self.content),
            reasoning: change(&self.reasoning),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            tool_call_id: change(&self.tool_call_id),
            name: change(&self.name),
        }
    }

    /// Calls a function with each text.
    pub(super) fn visit(&self, seen: &mut dyn FnMut(&str)) {
        [&self.role, &self.content, &self.reasoning, &self.tool_call_id, &self.name]
            .into_iter()
            .for_each(|text| seen(text));
        for call in &self.tool_calls {
            seen(&call.id);
            seen(&call.name);
            visit(&call.arguments, seen);
        }
    }

    /// Returns the bytes of all texts.
    pub(crate) fn bytes(&self) -> usize {
        let mut bytes = 0;
        self.visit(&mut |text| bytes += text.len());
        bytes
    }

    /// Returns the message as templates read it: as in OpenAI's API, with arguments as objects.
    pub(super) fn to_value(&self) -> Value {
        let mut fields =
            vec![("role", Value::from(self.role.as_str())), ("content", Value::from(self.content.as_str()))];
        let texts = [
            ("reasoning_content", &self.reasoning),
            ("tool_call_id", &self.tool_call_id),
            ("name", &self.name),
        ];
        fields.extend(
            texts.into_iter().filter(|(_, text)| !text.is_empty()).map(|(key, text)| (key, text.into())),
        );
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| {
                let function =
                    [("name", Value::from(call.name.as_str())), ("arguments", call.arguments.clone())];
                Value::from_pairs([
                    ("type", Value::from("function")),
                    ("id", Value::from(call.id.as_str())),
                    ("function", Value::from_pairs(function)),
                ])
            });
            fields.push(("tool_calls", calls.collect::<Value>()));
        }
        Value::from_pairs(fields)
    }
}

/// Replaces the texts of a value, keys included.
pub(super) fn map(value: &Value, change: &dyn Fn(&str) -> String) -> Value {
    match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => Value::from(change(text)),
        (ValueKind::Seq, _) => {
            value.try_iter().into_iter().flatten().map(|item| map(&item, change)).collect()
        }
        (ValueKind::Map, _) => {
            let keys = value.try_iter().into_iter().flatten();
            let entries = keys.map(|key| {
                let item = value.get_item(&key).unwrap_or_default();
                (map(&key, change), map(&item, change))
            });
            Value::from_pairs(entries)
        }
        _ => value.clone(),
    }
}

/// Calls a function with each text of a value, keys included.
pub(super) fn visit(value: &Value, seen: &mut dyn FnMut(&str)) {
    match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => seen(text),
        (ValueKind::Seq, _) => value.try_iter().into_iter().flatten().for_each(|item| visit(&item, seen)),
        (ValueKind::Map, _) => {
            for key in value.try_iter().into_iter().flatten() {
                visit(&key, seen);
                visit(&value.get_item(&key).unwrap_or_default(), seen);
            }
        }
        _ => {}
    }
}

/// Returns the bytes of all texts of a conversation; each text of a tool's definition counts some more, for what JSON
/// puts around it.
pub(super) fn bytes(messages: &[Message], tools: &[Value]) -> usize {
    let mut bytes = messages.iter().map(Message::bytes).sum();
    tools.iter().for_each(|tool| visit(tool, &mut |text| bytes += text.len() + 4));
    bytes
}

/// Conversation with the definitions of its tools, as in OpenAI's API.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Conversation {
    /// Messages, oldest first.
    pub messages: Vec<Message>,
    /// Definitions of tools.
    pub tools: Vec<Value>,
}

impl Conversation {
    /// Returns the bytes of all texts.
    pub(crate) fn bytes(&self) -> usize {
        bytes(&self.messages, &self.tools)
    }
}

impl From<Vec<Message>> for Conversation {
    fn from(messages: Vec<Message>) -> Self {
        Self { messages, tools: Vec::new() }
    }
}

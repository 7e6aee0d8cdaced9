//! Conversations as chat templates read them: messages, tool calls and tool definitions.

use std::fmt::{self, Write as _};

use minijinja::value::{Value, ValueKind};

use super::rendering::Rendering;

/// Message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// Role of the author, such as `user`.
    pub role: String,
    /// Text of the message; `None` for one of calls alone, which templates tell from an empty text.
    pub content: Option<String>,
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

impl MessageCall {
    /// Returns the number of JSON values of the arguments, keys included.
    pub(crate) fn values(&self) -> usize {
        values(&self.arguments)
    }
}

fn values(value: &Value) -> usize {
    let items = value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::Seq => 1 + items.map(|item| values(&item)).sum::<usize>(),
        ValueKind::Map => {
            1 + items.map(|key| 1 + values(&value.get_item(&key).unwrap_or_default())).sum::<usize>()
        }
        _ => 1,
    }
}

impl Message {
    /// Returns a message of text alone.
    pub fn new(role: &str, content: String) -> Self {
        Self { role: role.to_owned(), content: Some(content), ..Self::default() }
    }

    /// Returns a message of calls alone.
    pub fn of_calls(tool_calls: Vec<MessageCall>) -> Self {
        Self { role: "assistant".to_owned(), tool_calls, ..Self::default() }
    }

    /// Returns the text of the message; empty if it has none.
    pub fn text(&self) -> &str {
        self.content.as_deref().unwrap_or_default()
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
            content: self.content.as_deref().map(change),
            reasoning: change(&self.reasoning),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            tool_call_id: change(&self.tool_call_id),
            name: change(&self.name),
        }
    }

    /// Calls a function with each text.
    pub(super) fn visit(&self, seen: &mut dyn FnMut(&str)) {
        [&self.role, self.text(), &self.reasoning, &self.tool_call_id, &self.name]
            .into_iter()
            .for_each(&mut *seen);
        for call in &self.tool_calls {
            seen(&call.id);
            seen(&call.name);
            visit(&call.arguments, seen);
        }
    }

    /// Returns the size of the message: the bytes of its texts, and of its tool calls as JSON.
    pub(crate) fn bytes(&self) -> usize {
        let texts = [&self.role, self.text(), &self.reasoning, &self.tool_call_id, &self.name];
        let call = |call: &MessageCall| {
            CALL_BYTES + text_bytes(&call.id) + text_bytes(&call.name) + json_bytes(&call.arguments)
        };
        let calls: usize = self.tool_calls.iter().map(call).sum();
        texts.into_iter().map(str::len).sum::<usize>() + calls
    }

    /// Returns the message as templates read it: as in OpenAI's API, with the names that transformers gives a reasoning.
    pub(super) fn to_value(&self, form: Form) -> Value {
        let text = |key, text: &str| (!text.is_empty()).then(|| (key, Value::from(text)));
        let mut fields = Vec::from_iter(text("thinking", &self.reasoning));
        fields.push(("role", Value::from(self.role.as_str())));
        fields.extend(form.content(self.content.as_deref()).map(|content| ("content", content)));
        fields.extend(text("reasoning_content", &self.reasoning));
        fields.extend(text("tool_call_id", &self.tool_call_id));
        fields.extend(text("name", &self.name));
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| {
                let function = [
                    ("name", Value::from(call.name.as_str())),
                    ("arguments", form.arguments(&call.arguments)),
                ];
                Value::from_pairs([
                    ("id", Value::from(call.id.as_str())),
                    ("type", Value::from("function")),
                    ("function", Value::from_pairs(function)),
                ])
            });
            fields.push(("tool_calls", calls.collect::<Value>()));
        }
        Value::from_pairs(fields)
    }
}

/// How a message without a text is given to a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NoText {
    /// It has no content, as transformers gives it.
    Absent,
    /// Its content is none.
    None,
    /// Its content is empty.
    Empty,
}

/// Form of messages in which templates differ. One that fails on a form is given the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    no_text: NoText,
    /// Whether arguments of calls are JSON texts instead of objects.
    arguments_as_text: bool,
    /// Whether contents are lists of parts instead of texts.
    parts: bool,
}

impl Form {
    /// Returns the forms in which messages may be given to a template, in the order in which they are tried.
    pub(super) fn all(parts: bool) -> Vec<Self> {
        let contents = [NoText::Absent, NoText::None, NoText::Empty];
        let forms = contents.into_iter().flat_map(|no_text| [(no_text, false), (no_text, true)]);
        forms.map(|(no_text, arguments_as_text)| Self { no_text, arguments_as_text, parts }).collect()
    }

    /// Whether messages are the same in this form as in another one.
    pub(super) fn is_same(self, other: Self, messages: &[Message]) -> bool {
        let have_texts = || messages.iter().all(|message| message.content.is_some());
        let have_no_calls = || messages.iter().all(|message| message.tool_calls.is_empty());
        (self.no_text == other.no_text || have_texts())
            && (self.arguments_as_text == other.arguments_as_text || have_no_calls())
    }

    fn content(self, text: Option<&str>) -> Option<Value> {
        let text = match (text, self.no_text) {
            (Some(text), _) => text,
            (None, NoText::Absent) => return None,
            (None, NoText::None) => return Some(Value::from(())),
            (None, NoText::Empty) => "",
        };
        let part = || Value::from_pairs([("type", "text"), ("text", text)]);
        Some(if self.parts { Value::from(vec![part()]) } else { text.into() })
    }

    fn arguments(self, arguments: &Value) -> Value {
        match self.arguments_as_text {
            // Text that is no JSON is given as it is.
            true if arguments.as_str().is_none() => {
                super::template_json::text(arguments).map_or_else(|_| arguments.clone(), Value::from)
            }
            _ => arguments.clone(),
        }
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

/// Bytes of a call as JSON beside its id, name and arguments.
const CALL_BYTES: usize = r#"{"type": "function", "id": , "function": {"name": , "arguments": }}, "#.len();
/// Bytes between two values of an array or an object, or between a key and its value.
const SEPARATOR_BYTES: usize = 2;
/// Bytes by which Rust's text of a float may be shorter than that in JSON, which has an exponent later.
const EXPONENT_BYTES: usize = 4;

/// Returns the bytes of a value's JSON text on one line, or a few more.
fn json_bytes(value: &Value) -> usize {
    let items = value.try_iter().into_iter().flatten();
    match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => text_bytes(text),
        (ValueKind::Seq, _) => 2 + items.map(|item| json_bytes(&item) + SEPARATOR_BYTES).sum::<usize>(),
        (ValueKind::Map, _) => {
            let entry = |key: Value| {
                let item = value.get_item(&key).unwrap_or_default();
                json_bytes(&key) + json_bytes(&item) + 2 * SEPARATOR_BYTES
            };
            2 + items.map(entry).sum::<usize>()
        }
        (ValueKind::Number, _) => number_bytes(value),
        _ => "false".len(),
    }
}

/// Returns the bytes of a text as JSON, at most.
fn text_bytes(text: &str) -> usize {
    let escaped = |byte| match byte {
        b'"' | b'\\' => 1,
        // As \u and four digits.
        0..0x20 => 5,
        _ => 0,
    };
    2 + text.len() + text.bytes().map(escaped).sum::<usize>()
}

/// Returns the bytes of a number as JSON, at most.
fn number_bytes(value: &Value) -> usize {
    let mut count = ByteCount(0);
    // The counter accepts any text.
    let _ = match f64::try_from(value.clone()) {
        // With an exponent where that is shorter, as in JSON.
        Ok(number) if !value.is_integer() => write!(count, "{number:?}"),
        _ => write!(count, "{value}"),
    };
    count.0 + if value.is_integer() { 0 } else { EXPONENT_BYTES }
}

/// Counts bytes that are written.
struct ByteCount(usize);

impl fmt::Write for ByteCount {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 += text.len();
        Ok(())
    }
}

/// Conversation with the definitions of its tools, as in OpenAI's API.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Conversation {
    /// Messages, oldest first.
    pub messages: Vec<Message>,
    /// Definitions of tools.
    pub tools: Vec<Value>,
    /// Options of its rendering.
    pub rendering: Rendering,
}

impl Conversation {
    /// Returns the size of the conversation: the bytes of all texts of messages, and of their calls, the tools' definitions and the
    /// template's arguments as JSON. Not only of texts, as a schema of numbers takes as long to render and to tokenize.
    pub(crate) fn bytes(&self) -> usize {
        let values = self.tools.iter().chain(self.rendering.arguments.iter().map(|(_, value)| value));
        let values = values.map(|value| json_bytes(value) + SEPARATOR_BYTES);
        self.messages.iter().map(Message::bytes).sum::<usize>() + values.sum::<usize>()
    }

    /// Returns the conversation with all texts of messages, definitions and arguments replaced.
    pub(super) fn map(&self, change: &dyn Fn(&str) -> String) -> Self {
        let arguments = self.rendering.arguments.map(change);
        Self {
            messages: self.messages.iter().map(|message| message.map(change)).collect(),
            tools: self.tools.iter().map(|tool| map(tool, change)).collect(),
            rendering: Rendering { arguments, ..self.rendering.clone() },
        }
    }

    /// Calls a function with each text of messages, definitions and arguments.
    pub(super) fn visit(&self, seen: &mut dyn FnMut(&str)) {
        self.messages.iter().for_each(|message| message.visit(seen));
        self.tools.iter().for_each(|tool| visit(tool, seen));
        self.rendering.arguments.visit(seen);
    }
}

impl From<&[Message]> for Conversation {
    fn from(messages: &[Message]) -> Self {
        messages.to_vec().into()
    }
}

/// Returns a conversation with a call without a text, whose name and argument are a probe, and nothing else is.
pub(super) fn of_a_call(probe: &str) -> Conversation {
    let call = MessageCall {
        id: "call00001".to_owned(),
        name: probe.to_owned(),
        arguments: Value::from_pairs([("x", probe)]),
    };
    let (id, name) = (call.id.clone(), "f".to_owned());
    let result = Message { tool_call_id: id, name, ..Message::new("tool", "1".to_owned()) };
    let messages = vec![Message::new("user", "a".to_owned()), Message::of_calls(vec![call]), result];
    let definition = r#"{"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object",
        "properties": {"x": {"type": "string", "description": "X"}}, "required": ["x"]}}}"#;
    let tools = serde_json::from_str(definition).into_iter().collect();
    Conversation { messages, tools, ..Conversation::default() }
}

impl From<Vec<Message>> for Conversation {
    fn from(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn value() -> impl Strategy<Value = serde_json::Value> {
        let scalar = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<u64>().prop_map(Into::into),
            any::<f64>().prop_map(Into::into),
            (-9i32..9, 0i32..20).prop_map(|(digits, places)| (f64::from(digits) / 10f64.powi(places)).into()),
            any::<String>().prop_map(Into::into),
        ];
        scalar.prop_recursive(4, 64, 8, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Into::into),
                prop::collection::btree_map(any::<String>(), inner, 0..8)
                    .prop_map(|fields| fields.into_iter().collect::<serde_json::Map<_, _>>().into()),
            ]
        })
    }

    proptest! {
        #[test]
        fn the_bytes_of_definitions_and_of_arguments_are_at_least_those_of_their_json(json in value()) {
            let value: Value = serde_json::from_str(&json.to_string()).unwrap();
            let text = serde_json::to_string(&value).unwrap();
            let definition = Conversation { tools: vec![value.clone()], ..Conversation::default() };
            prop_assert!(definition.bytes() >= text.len(), "{} for {text}", definition.bytes());
            let call = MessageCall { id: String::new(), name: String::new(), arguments: value };
            let message = Message { tool_calls: vec![call], ..Message::default() };
            prop_assert!(message.bytes() >= text.len(), "{} for {text}", message.bytes());
        }
    }

    #[test]
    fn the_bytes_of_values_are_few_more_than_those_of_their_json() {
        for (json, most) in [("[1, 22, -3]", 13), ("[1.5, 2e300]", 24), (r#"{"a": "b\n"}"#, 19)] {
            let parsed: Value = serde_json::from_str(json).unwrap();
            let bytes = json_bytes(&parsed);
            assert!((json.len()..=most).contains(&bytes), "{bytes} for {json}");
        }
    }
}

//! Files of conversations: messages as JSON, in the form of OpenAI's API.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use inflight_proto::v1::{ChatMessage, ToolCall};
use serde_json::{Map, Value, json};

/// Maximum size of a file, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// Returns the path that was typed; `~/` at its start is the home directory.
pub fn path(typed: &str) -> PathBuf {
    let home = || std::env::var_os("HOME").filter(|home| !home.is_empty());
    match typed.strip_prefix("~/").and_then(|rest| Some(PathBuf::from(home()?).join(rest))) {
        Some(path) => path,
        None => PathBuf::from(typed),
    }
}

/// Writes messages to a file, which only its owner may read. A file with other content is not replaced.
///
/// # Errors
/// Says why the file cannot be written.
pub fn save<'a>(path: &Path, messages: impl Iterator<Item = &'a ChatMessage>) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
    if path.exists()
        && let Err(reason) = load(path)
    {
        return Err(format!("{reason}; it is not replaced, give the name of another file"));
    }
    let values: Vec<Value> = messages.map(to_json).collect();
    let text = serde_json::to_string_pretty(&values).map_err(|error| failed(error.into()))? + "\n";
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.tmp", std::process::id()));
    let partial = PathBuf::from(partial);
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
        file.write_all(text.as_bytes())?;
        std::fs::rename(&partial, path)
    };
    write().map_err(|error| {
        // What is left of it, if anything.
        let _ = std::fs::remove_file(&partial);
        failed(error)
    })
}

/// Reads the messages of a file: an array, or an object with the array `messages`.
///
/// # Errors
/// Says why the file cannot be read, or where it has no messages in OpenAI's form.
pub fn load(path: &Path) -> Result<Vec<ChatMessage>, String> {
    let failed = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    // A pipe would be waited for.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(format!("{} is no regular file", path.display()));
    }
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    let len = file.take(BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if len as u64 > BYTES_MAX {
        return Err(format!("{} has more than {} MiB", path.display(), BYTES_MAX >> 20));
    }
    parse(&text).map_err(|reason| format!("{} has no conversation: {reason}", path.display()))
}

fn parse(text: &str) -> Result<Vec<ChatMessage>, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let messages = value.get("messages").unwrap_or(&value);
    let messages =
        messages.as_array().ok_or("it must be an array of messages, or an object with messages")?;
    let numbered = messages.iter().enumerate();
    numbered.map(|(at, value)| of_json(value).map_err(|reason| format!("message {at}: {reason}"))).collect()
}

fn to_json(message: &ChatMessage) -> Value {
    let mut value = Map::new();
    value.insert("role".to_owned(), json!(message.role));
    value.insert("content".to_owned(), json!(message.content));
    let texts = [
        ("reasoning_content", &message.reasoning),
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ];
    value.extend(
        texts
            .into_iter()
            .filter(|(_, text)| !text.is_empty())
            .map(|(key, text)| (key.to_owned(), json!(text))),
    );
    if !message.tool_calls.is_empty() {
        let call = |ToolCall { id, name, arguments }: &ToolCall| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
        value.insert("tool_calls".to_owned(), message.tool_calls.iter().map(call).collect());
    }
    Value::Object(value)
}

fn of_json(value: &Value) -> Result<ChatMessage, String> {
    let role = text(value, "role")?;
    if role.is_empty() {
        return Err("role is missing".to_owned());
    }
    // As the HTTP APIs read it.
    let role = if role == "developer" { "system".to_owned() } else { role };
    let calls = match &value["tool_calls"] {
        Value::Null => Vec::new(),
        Value::Array(calls) => calls.iter().map(call_of_json).collect::<Result<_, _>>()?,
        _ => return Err("tool_calls must be an array".to_owned()),
    };
    Ok(ChatMessage {
        role,
        content: content(&value["content"])?,
        reasoning: text(value, "reasoning_content")?,
        tool_calls: calls,
        tool_call_id: text(value, "tool_call_id")?,
        name: text(value, "name")?,
    })
}

/// Reads a content: a text, nothing, or parts of text, which are joined by line breaks.
fn content(value: &Value) -> Result<String, String> {
    match value {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let part = |part: &Value| match part["type"].as_str() {
                Some("text") => text(part, "text"),
                kind => {
                    Err(format!("content has a part of the type {}; only text is taken", kind.unwrap_or("?")))
                }
            };
            Ok(parts.iter().map(part).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err("content must be a string or an array of parts".to_owned()),
    }
}

fn call_of_json(value: &Value) -> Result<ToolCall, String> {
    let function = &value["function"];
    let call = ToolCall {
        id: text(value, "id")?,
        name: text(function, "name")?,
        arguments: text(function, "arguments")?,
    };
    if call.name.is_empty() { Err("a tool call has no function.name".to_owned()) } else { Ok(call) }
}

/// Returns a field of text; empty if it is absent or null.
fn text(value: &Value, key: &str) -> Result<String, String> {
    match &value[key] {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        _ => Err(format!("{key} must be a string")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> ChatMessage {
        ChatMessage { role: role.to_owned(), content: content.to_owned(), ..ChatMessage::default() }
    }

    #[test]
    fn saved_messages_are_loaded_again_and_other_files_are_not_replaced() {
        let temporary = inflight_fixtures::TempDir::new("saved-chats").unwrap();
        let folder = temporary.path();
        let path = folder.join("chat.json");
        let call = ToolCall { id: "c0".into(), name: "f".into(), arguments: "{\"a\": 1}".into() };
        let messages = [
            message("system", "s"),
            message("user", "a \"quoted\"\nline \u{1f600}"),
            ChatMessage { tool_calls: vec![call], reasoning: "r".into(), ..message("assistant", "") },
            ChatMessage { tool_call_id: "c0".into(), name: "f".into(), ..message("tool", "1") },
        ];
        for kept in [1, 4] {
            save(&path, messages[..kept].iter()).unwrap();
            assert_eq!(load(&path).unwrap(), messages[..kept]);
        }
        let value: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(value[2]["tool_calls"][0]["function"], json!({ "name": "f", "arguments": "{\"a\": 1}" }));
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);

        let other = folder.join("notes.txt");
        std::fs::write(&other, "notes").unwrap();
        let refused = save(&other, messages.iter()).unwrap_err();
        assert!(refused.contains("not replaced"), "{refused}");
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "notes");
        assert!(save(&folder.join("none/chat.json"), messages.iter()).unwrap_err().contains("cannot write"));
        assert!(load(folder).unwrap_err().contains("no regular file"));
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 2, "partial files are left");
    }

    #[test]
    fn files_have_messages_in_openais_form() {
        let parts = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null}]}"#;
        assert_eq!(parse(parts).unwrap(), [message("user", "a\nb"), message("assistant", "")]);
        assert_eq!(parse(r#"[{"role": "developer", "content": "s"}]"#).unwrap(), [message("system", "s")]);
        assert_eq!(parse("[]").unwrap(), []);
        for (text, reason) in [
            ("{", "EOF"),
            ("3", "an array of messages"),
            ("[{}]", "message 0: role is missing"),
            (r#"[{"role": "user", "content": "a"}, {"role": 1}]"#, "message 1: role must be a string"),
            (r#"[{"role": "user", "content": 1}]"#, "content must be"),
            (r#"[{"role": "user", "content": [{"type": "image_url"}]}]"#, "type image_url; only text"),
            (r#"[{"role": "assistant", "tool_calls": {}}]"#, "tool_calls must be an array"),
            (r#"[{"role": "assistant", "tool_calls": [{}]}]"#, "no function.name"),
        ] {
            let refused = parse(text).unwrap_err();
            assert!(refused.contains(reason), "{text}: {refused}");
        }
    }
}

//! Tools of `inflight chat`: a JSON file of definitions, and the calls in an answer.

use std::path::Path;

use inflight_proto::v1::{Tool, ToolCall, ToolCallDelta, ToolUse};
use serde_json::Value;

use crate::exit::{CommandError, Exit};

/// Reads a file of tools: an array of OpenAI's definitions, with or without the object `function` around each.
///
/// # Errors
/// The file cannot be read, or is no such array.
pub fn read(path: &Path) -> Result<ToolUse, CommandError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| CommandError::chain(&format!("cannot read {}", path.display()), &error))?;
    parse(&text)
        .map_err(|reason| CommandError::new(Exit::Usage, format!("--tools {}: {reason}", path.display())))
}

fn parse(text: &str) -> Result<ToolUse, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let Value::Array(definitions) = value else {
        return Err("the file must have an array of tools".to_owned());
    };
    let tool = |(at, definition): (usize, &Value)| {
        let function = definition.get("function").unwrap_or(definition);
        let text = |key: &str| function.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        if text("name").is_empty() {
            return Err(format!("tool {at} has no name"));
        }
        Ok(Tool {
            name: text("name"),
            description: text("description"),
            parameters: function.get("parameters").map(Value::to_string).unwrap_or_default(),
            strict: function.get("strict").and_then(Value::as_bool).unwrap_or(false),
        })
    };
    let tools = definitions.iter().enumerate().map(tool).collect::<Result<_, _>>()?;
    Ok(ToolUse { tools, ..ToolUse::default() })
}

/// Appends fragments to the calls of an answer; one that was not made becomes empty.
pub fn append(calls: &mut Vec<ToolCall>, fragments: Vec<ToolCallDelta>) {
    for ToolCallDelta { index, id, name, arguments, cut } in fragments {
        let index = index as usize;
        if index >= calls.len() {
            calls.resize_with(index + 1, ToolCall::default);
        }
        let call = &mut calls[index];
        if call.name.is_empty() {
            (call.id, call.name) = (id, name);
        }
        call.arguments.push_str(&arguments);
        if cut {
            *call = ToolCall::default();
        }
    }
}

/// Removes the calls that were not made, once the answer has ended.
pub fn remove_cut(calls: &mut Vec<ToolCall>) {
    calls.retain(|call| !call.name.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_have_either_form_and_a_name() {
        let nested = r#"[{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object"}}},
            {"name": "g", "description": "d"}]"#;
        let tools = parse(nested).unwrap().tools;
        assert_eq!((tools[0].name.as_str(), tools[0].strict), ("f", true));
        assert_eq!(tools[0].parameters, r#"{"type":"object"}"#);
        assert_eq!((tools[1].description.as_str(), tools[1].parameters.as_str()), ("d", ""));
        for (text, reason) in [("{}", "an array"), ("[{}]", "tool 0 has no name"), ("[", "EOF")] {
            assert!(parse(text).unwrap_err().contains(reason), "{text}");
        }
    }

    #[test]
    fn fragments_make_calls() {
        let delta = |index, name: &str, arguments: &str| ToolCallDelta {
            index,
            id: format!("c{index}"),
            name: name.to_owned(),
            arguments: arguments.to_owned(),
            cut: false,
        };
        let mut calls = Vec::new();
        append(&mut calls, vec![delta(0, "f", "{\"a\": ")]);
        append(&mut calls, vec![delta(0, "", "1}"), ToolCallDelta { cut: true, ..delta(1, "h", "{") }]);
        append(&mut calls, vec![delta(2, "g", "{}")]);
        remove_cut(&mut calls);
        let shown: Vec<_> = calls.iter().map(|call| (&*call.id, &*call.name, &*call.arguments)).collect();
        assert_eq!(shown, [("c0", "f", "{\"a\": 1}"), ("c2", "g", "{}")]);
    }
}

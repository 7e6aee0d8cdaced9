//! Log lines of child processes, shown on the terminal of the parent.

use serde::Deserialize;
use serde_json::{Map, Value};

/// Most characters of a line that are kept.
const LINE_CHARS_MAX: usize = 2_000;

/// A line that a child wrote to its standard error.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// Warnings, errors and whatever is not a log record (a panic before logging is set up, say).
    pub urgent: bool,
    /// For people.
    pub text: String,
}

#[derive(Deserialize)]
struct Record {
    level: String,
    target: String,
    fields: Map<String, Value>,
    #[serde(default)]
    spans: Vec<Map<String, Value>>,
}

/// Reads a line: a JSON log record becomes `LEVEL target: message key=value`, anything else stays as it is.
pub fn read(line: &str) -> Line {
    match serde_json::from_str::<Record>(line) {
        Ok(record) => {
            Line { urgent: matches!(record.level.as_str(), "WARN" | "ERROR"), text: cut(&render(&record)) }
        }
        Err(_) => Line { urgent: !line.trim().is_empty(), text: cut(line) },
    }
}

fn render(record: &Record) -> String {
    let message = record.fields.get("message").map(plain).unwrap_or_default();
    let mut text = format!("{:>5} {}: {message}", record.level, record.target);
    let of_spans = record.spans.iter().flatten().filter(|(key, _)| *key != "name");
    let of_event = record.fields.iter().filter(|(key, _)| *key != "message");
    for (key, value) in of_spans.chain(of_event) {
        text.push_str(&format!(" {key}={}", plain(value)));
    }
    text
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(LINE_CHARS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_rendered_and_other_lines_pass() {
        let record = r#"{"timestamp":"t","level":"WARN","fields":{"message":"lost a worker","worker":"w0"},
            "target":"inflight_router","spans":[{"name":"request","id":"r1"}]}"#;
        let line = read(record);
        assert_eq!(
            line,
            Line { urgent: true, text: " WARN inflight_router: lost a worker id=r1 worker=w0".into() }
        );
        assert!(!read(&record.replace("WARN", "INFO")).urgent);
        assert_eq!(read("error: no such file"), Line { urgent: true, text: "error: no such file".into() });
        assert_eq!(read(&"é".repeat(5_000)).text.chars().count(), LINE_CHARS_MAX + 1);
    }
}

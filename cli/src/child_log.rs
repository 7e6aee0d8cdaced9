//! Rendering of child processes' log lines on the parent's terminal.

use serde::Deserialize;
use serde_json::{Map, Value};

/// Maximum characters of a rendered line; longer ones are truncated.
const LINE_CHARS_MAX: usize = 2_000;

/// Line that a child wrote to its standard error.
#[derive(Debug, PartialEq, Eq)]
pub struct LogLine {
    /// Whether the line is a warning, an error, or not a log record (such as a panic before logging is set
    /// up).
    pub urgent: bool,
    /// Human-readable text.
    pub text: String,
}

#[derive(Deserialize)]
struct LogRecord {
    level: String,
    target: String,
    fields: Map<String, Value>,
    #[serde(default)]
    spans: Vec<Map<String, Value>>,
}

/// Parses a line: a JSON log record becomes `LEVEL target: message key=value`, other text stays unchanged.
pub fn parse(line: &str) -> LogLine {
    match serde_json::from_str::<LogRecord>(line) {
        Ok(record) => LogLine {
            urgent: matches!(record.level.as_str(), "WARN" | "ERROR"),
            text: truncate(&render(&record)),
        },
        Err(_) => LogLine { urgent: !line.trim().is_empty(), text: truncate(line) },
    }
}

fn render(record: &LogRecord) -> String {
    let message = record.fields.get("message").map(value_text).unwrap_or_default();
    let mut text = format!("{:>5} {}: {message}", record.level, record.target);
    let span_fields = record.spans.iter().flatten().filter(|(key, _)| *key != "name");
    let event_fields = record.fields.iter().filter(|(key, _)| *key != "message");
    for (key, value) in span_fields.chain(event_fields) {
        text.push_str(&format!(" {key}={}", value_text(value)));
    }
    text
}

fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn truncate(text: &str) -> String {
    match text.char_indices().nth(LINE_CHARS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_records_are_rendered_and_other_lines_stay_unchanged() {
        let record = r#"{"timestamp":"t","level":"WARN","fields":{"message":"lost a worker","worker":"w0"},
            "target":"inflight_router","spans":[{"name":"request","id":"r1"}]}"#;
        let line = parse(record);
        assert_eq!(
            line,
            LogLine { urgent: true, text: " WARN inflight_router: lost a worker id=r1 worker=w0".into() }
        );
        assert!(!parse(&record.replace("WARN", "INFO")).urgent);
        assert_eq!(
            parse("error: no such file"),
            LogLine { urgent: true, text: "error: no such file".into() }
        );
        assert_eq!(parse(&"é".repeat(5_000)).text.chars().count(), LINE_CHARS_MAX + 1);
    }
}

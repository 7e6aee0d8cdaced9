//! Qwen3-Coder's calls: `<function=NAME>`, then `<parameter=KEY>` with values as plain text, written as JSON.

use crate::ToolTypes;
use crate::call_part::{CallPart, NAME_BYTES_MAX, Progress};
use crate::tool_types::ParameterKind;

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// Bytes of a value that is not text above which it is written as text.
const VALUE_BYTES_MAX: usize = 1 << 20;

/// Position in the call.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Before or in `<function=`.
    Head,
    /// In the name.
    Name,
    /// Before or in the tag of a parameter, or of the end.
    Body,
    /// In the key of a parameter.
    Key,
    /// In a value.
    Value { kind: ParameterKind, first: bool },
}

/// Parser of one call.
#[derive(Debug, Clone)]
pub(crate) struct XmlCall {
    state: State,
    /// Text of the current tag, name or key.
    text: String,
    /// End of a value that may be part of its closing tag.
    tail: String,
    /// Value that is not text, up to its end.
    value: String,
    name: String,
    parameters: u32,
}

impl XmlCall {
    pub(crate) fn new() -> Self {
        let text = String::new;
        let (tail, value, name) = (text(), text(), text());
        Self { state: State::Head, text: text(), tail, value, name, parameters: 0 }
    }

    pub(crate) fn in_text(&self) -> bool {
        matches!(self.state, State::Value { .. })
    }

    pub(crate) fn push(&mut self, c: char, tools: &ToolTypes, out: &mut Vec<CallPart>) -> Progress {
        match self.state {
            State::Head | State::Body if self.text.is_empty() && c.is_whitespace() => Progress::More,
            State::Head => self.tag(c, &[(FUNCTION, State::Name)], out),
            State::Body => self.tag(c, &[(PARAMETER, State::Key), (FUNCTION_END, State::Head)], out),
            State::Name | State::Key if c != '>' => {
                self.text.push(c);
                let valid = c != '<' && c != '\n' && self.text.len() <= NAME_BYTES_MAX;
                if valid { Progress::More } else { self.invalid(out) }
            }
            State::Name => {
                self.name = std::mem::take(&mut self.text).trim().to_owned();
                if self.name.is_empty() {
                    return Progress::Invalid;
                }
                self.state = State::Body;
                out.extend([CallPart::Begin(self.name.clone()), CallPart::Arguments("{".to_owned())]);
                Progress::More
            }
            State::Key => {
                let key = std::mem::take(&mut self.text);
                let kind = tools.kind(&self.name, key.trim());
                self.open(key.trim(), kind, out);
                Progress::More
            }
            State::Value { kind, first } => {
                self.state = State::Value { kind, first: false };
                // The line break after the tag is not part of the value.
                if !(first && c == '\n') {
                    self.value_char(c, kind, out);
                }
                Progress::More
            }
        }
    }

    /// Takes a character of a tag; the state is that of the first tag that is complete.
    fn tag(&mut self, c: char, tags: &[(&str, State)], out: &mut Vec<CallPart>) -> Progress {
        self.text.push(c);
        if let Some((tag, state)) = tags.iter().find(|(tag, _)| *tag == self.text) {
            self.text.clear();
            if *tag == FUNCTION_END {
                out.extend([CallPart::Arguments("}".to_owned()), CallPart::End]);
                return Progress::Done;
            }
            self.state = state.clone();
            return Progress::More;
        }
        let begins = tags.iter().any(|(tag, _)| tag.starts_with(self.text.as_str()));
        if begins { Progress::More } else { self.invalid(out) }
    }

    /// Closes the arguments of a call that turns out to be malformed.
    fn invalid(&mut self, out: &mut Vec<CallPart>) -> Progress {
        if !self.name.is_empty() {
            out.push(CallPart::Arguments("}".to_owned()));
        }
        Progress::Invalid
    }

    /// Writes the key of a parameter.
    fn open(&mut self, key: &str, kind: ParameterKind, out: &mut Vec<CallPart>) {
        let comma = if self.parameters > 0 { ", " } else { "" };
        self.parameters += 1;
        let quote = if kind == ParameterKind::Text { "\"" } else { "" };
        out.push(CallPart::Arguments(format!("{comma}{}: {quote}", quoted(key))));
        self.state = State::Value { kind, first: true };
        self.value.clear();
        self.tail.clear();
    }

    fn value_char(&mut self, c: char, kind: ParameterKind, out: &mut Vec<CallPart>) {
        self.tail.push(c);
        loop {
            let unbroken = self.tail.strip_prefix('\n').unwrap_or(&self.tail);
            if unbroken == PARAMETER_END {
                self.tail.clear();
                self.close(kind, out);
                return;
            }
            if self.tail.is_empty() || PARAMETER_END.starts_with(unbroken) {
                return;
            }
            let released = self.tail.remove(0);
            self.release(released, kind, out);
        }
    }

    fn release(&mut self, c: char, kind: ParameterKind, out: &mut Vec<CallPart>) {
        if kind == ParameterKind::Text {
            let text = quoted(c.encode_utf8(&mut [0; 4]));
            out.push(CallPart::Arguments(text[1..text.len() - 1].to_owned()));
            return;
        }
        self.value.push(c);
        if self.value.len() > VALUE_BYTES_MAX {
            let text = quoted(&std::mem::take(&mut self.value));
            out.push(CallPart::Arguments(text[..text.len() - 1].to_owned()));
            self.state = State::Value { kind: ParameterKind::Text, first: false };
        }
    }

    /// Ends a value.
    fn close(&mut self, kind: ParameterKind, out: &mut Vec<CallPart>) {
        // A value that was too long has become text.
        let kind = match self.state {
            State::Value { kind, .. } => kind,
            _ => kind,
        };
        let value = std::mem::take(&mut self.value);
        let trimmed = value.trim();
        let json = |text: &str| serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok();
        let text = match kind {
            ParameterKind::Text => "\"".to_owned(),
            ParameterKind::NullableText if matches!(trimmed, "null" | "None") => "null".to_owned(),
            ParameterKind::NullableText => quoted(&value),
            // Python's spelling, in which models of this format write them.
            ParameterKind::Json => match trimmed {
                "True" => "true".to_owned(),
                "False" => "false".to_owned(),
                "None" => "null".to_owned(),
                text if json(text) => text.to_owned(),
                _ => quoted(&value),
            },
        };
        out.push(CallPart::Arguments(text));
        self.state = State::Body;
    }

    /// Releases the rest of a value that was cut off.
    pub(crate) fn finish(&mut self, out: &mut Vec<CallPart>) {
        if let State::Value { kind, .. } = self.state {
            let tail = std::mem::take(&mut self.tail);
            tail.chars().for_each(|c| self.release(c, kind, out));
            if !self.value.is_empty() {
                out.push(CallPart::Arguments(std::mem::take(&mut self.value)));
            }
        }
    }
}

/// Returns a text as a JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

//! Qwen3-Coder's calls: `<function=NAME>`, then `<parameter=KEY>` with values as plain text, written as JSON.
//!
//! A value that its tag does not close ends where the call or another parameter follows, as in the model's own parser. A closing tag of
//! the call ends a value only if the call ends there, and the tag of a parameter only if the tool has it and it was not given: any other
//! such text is part of the value. A value of JSON has no tags within its strings, up to a line break, which is in no string of JSON.

use crate::call_part::{CallPart, NAME_BYTES_MAX, Progress};
use crate::tool_types::ParameterKind;
use crate::{OutputEnd, ToolTypes};

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
    /// In a value, after the closing tag of the call, which is the end if nothing but the call's closing marker follows.
    MaybeEnd { kind: ParameterKind },
    /// In a value, in the tag of a parameter, which begins another value if the tool has it.
    MaybeKey { kind: ParameterKind },
}

/// Whether a value that begins as JSON is within a string.
#[derive(Debug, Clone, Default)]
struct JsonStrings {
    /// Whether the value is an array, an object or a string, and no string of it has a line break.
    is_json: Option<bool>,
    inside: bool,
    escaped: bool,
}

impl JsonStrings {
    /// Takes a character; returns whether it is within a string, or its last quote.
    fn push(&mut self, c: char) -> bool {
        if self.is_json.is_none() && !c.is_whitespace() {
            self.is_json = Some(matches!(c, '{' | '[' | '"'));
        }
        if self.is_json != Some(true) {
            return false;
        }
        let was_inside = self.inside;
        match c {
            '\n' if was_inside => (self.is_json, self.inside) = (Some(false), false),
            _ if std::mem::take(&mut self.escaped) => {}
            '\\' => self.escaped = was_inside,
            '"' => self.inside = !was_inside,
            _ => {}
        }
        was_inside && self.is_json == Some(true)
    }
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
    strings: JsonStrings,
    name: String,
    /// Keys of the parameters so far.
    given: Vec<String>,
    /// Text after the beginning of a tag in a value that may be its end.
    ambiguous: String,
}

impl XmlCall {
    pub(crate) fn new() -> Self {
        let text = String::new;
        let (tail, value, name) = (text(), text(), text());
        let (given, ambiguous, strings) = (Vec::new(), text(), JsonStrings::default());
        Self { state: State::Head, text: text(), tail, value, strings, name, given, ambiguous }
    }

    pub(crate) fn in_text(&self) -> bool {
        matches!(self.state, State::Value { .. } | State::MaybeKey { .. })
    }

    /// Takes a marker outside of text; `is_end` if it is that of the end of a call.
    pub(crate) fn push_marker(&mut self, is_end: bool, out: &mut Vec<CallPart>) -> Progress {
        match self.state {
            State::MaybeEnd { kind } if is_end => {
                self.close(kind, out);
                out.extend([CallPart::Arguments("}".to_owned()), CallPart::End]);
                Progress::Done
            }
            _ => Progress::Invalid,
        }
    }

    pub(crate) fn push(&mut self, c: char, tools: &ToolTypes, out: &mut Vec<CallPart>) -> Progress {
        match self.state {
            State::Head | State::Body if self.text.is_empty() && c.is_whitespace() => Progress::More,
            State::Head => self.tag(c, &[(FUNCTION, State::Name)], out),
            State::Body => self.tag(c, &[(PARAMETER, State::Key), (FUNCTION_END, State::Head)], out),
            State::Name | State::Key if c != '>' => {
                self.text.push(c);
                let valid = c != '<' && c != '\n' && self.text.len() <= NAME_BYTES_MAX;
                if valid { Progress::More } else { Progress::Invalid }
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
            State::MaybeEnd { kind } => {
                self.ambiguous.push(c);
                if !c.is_whitespace() || self.ambiguous.len() > NAME_BYTES_MAX {
                    self.continue_value(FUNCTION_END, kind, out);
                }
                Progress::More
            }
            State::MaybeKey { kind } => {
                if c == '>' && tools.has_parameter(&self.name, self.ambiguous.trim()) {
                    let key = std::mem::take(&mut self.ambiguous).trim().to_owned();
                    if !self.given.contains(&key) {
                        self.tail.clear();
                        self.close(kind, out);
                        self.open(&key, tools.kind(&self.name, &key), out);
                        return Progress::More;
                    }
                    self.ambiguous = key;
                }
                self.ambiguous.push(c);
                if matches!(c, '>' | '<' | '\n') || self.ambiguous.len() > NAME_BYTES_MAX {
                    self.continue_value(PARAMETER, kind, out);
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
        if begins { Progress::More } else { Progress::Invalid }
    }

    /// Writes the key of a parameter.
    fn open(&mut self, key: &str, kind: ParameterKind, out: &mut Vec<CallPart>) {
        let comma = if self.given.is_empty() { "" } else { ", " };
        self.given.push(key.to_owned());
        let quote = if kind == ParameterKind::Text { "\"" } else { "" };
        out.push(CallPart::Arguments(format!("{comma}{}: {quote}", quoted(key))));
        self.state = State::Value { kind, first: true };
        self.value.clear();
        self.strings = JsonStrings::default();
        self.tail.clear();
    }

    fn value_char(&mut self, c: char, kind: ParameterKind, out: &mut Vec<CallPart>) {
        if self.kind() == Some(ParameterKind::Json) && self.strings.push(c) {
            self.release(c, kind, out);
            return;
        }
        self.tail.push(c);
        loop {
            let unbroken = self.tail.strip_prefix('\n').unwrap_or(&self.tail);
            match unbroken {
                PARAMETER_END => {
                    self.tail.clear();
                    self.close(kind, out);
                    return;
                }
                // The line break before the tag stays in the tail until it is known whose it is.
                FUNCTION_END => {
                    self.state = State::MaybeEnd { kind };
                    return;
                }
                PARAMETER => {
                    self.state = State::MaybeKey { kind };
                    return;
                }
                _ => {}
            }
            let begins = |tag: &str| tag.starts_with(unbroken);
            if self.tail.is_empty() || begins(PARAMETER_END) || begins(FUNCTION_END) || begins(PARAMETER) {
                return;
            }
            let released = self.tail.remove(0);
            self.release(released, kind, out);
        }
    }

    /// Continues a value with a tag that was not its end, and what came after the tag.
    fn continue_value(&mut self, tag: &str, kind: ParameterKind, out: &mut Vec<CallPart>) {
        self.state = State::Value { kind, first: false };
        let broken = self.tail.len() > tag.len();
        self.tail.clear();
        let text = format!("{}{tag}", if broken { "\n" } else { "" });
        text.chars().for_each(|c| self.release(c, kind, out));
        for c in std::mem::take(&mut self.ambiguous).chars() {
            // A value that became too long has become text.
            let State::Value { kind, .. } = self.state else { return };
            self.value_char(c, kind, out);
        }
    }

    /// Returns the kind of the value; one that was too long has become text.
    fn kind(&self) -> Option<ParameterKind> {
        match self.state {
            State::Value { kind, .. } | State::MaybeEnd { kind } | State::MaybeKey { kind } => Some(kind),
            State::Head | State::Name | State::Body | State::Key => None,
        }
    }

    fn release(&mut self, c: char, kind: ParameterKind, out: &mut Vec<CallPart>) {
        let kind = self.kind().unwrap_or(kind);
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
        let kind = self.kind().unwrap_or(kind);
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

    /// Ends the call at the end of the output: releases the rest of a value that was cut off. Returns whether the call was made: its
    /// closing tag in a value is its end only if the model ended the output there.
    pub(crate) fn finish(&mut self, end: OutputEnd, out: &mut Vec<CallPart>) -> bool {
        if let State::MaybeEnd { kind } = self.state {
            if end == OutputEnd::Model {
                self.close(kind, out);
                out.push(CallPart::Arguments("}".to_owned()));
                return true;
            }
            self.continue_value(FUNCTION_END, kind, out);
        }
        if let State::MaybeKey { kind } = self.state {
            self.continue_value(PARAMETER, kind, out);
        }
        if let State::Value { kind, .. } = self.state {
            let tail = std::mem::take(&mut self.tail);
            tail.chars().for_each(|c| self.release(c, kind, out));
            if !self.value.is_empty() {
                out.push(CallPart::Arguments(std::mem::take(&mut self.value)));
            }
        }
        false
    }
}

/// Returns a text as a JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

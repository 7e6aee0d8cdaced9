//! Formats in which models write tool calls and reasoning.

use std::fmt;
use std::str::FromStr;

use crate::Marker;

/// Format of a model's tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolCallFormat {
    /// Llama 3: `<|python_tag|>{"name": …, "parameters": {…}}`, or the object alone as the whole output.
    Llama3,
    /// Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
    Hermes,
    /// Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
    QwenXml,
    /// Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]` or `[TOOL_CALLS]NAME[ARGS]{…}`.
    Mistral,
}

/// Format of a model's reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReasoningFormat {
    /// `<think>…</think>`.
    Think,
    /// Mistral: `[THINK]…[/THINK]`.
    Mistral,
}

/// Unknown name of a format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown format {name:?}; known are {known}")]
pub struct FormatError {
    name: String,
    known: &'static str,
}

impl ToolCallFormat {
    /// All formats.
    pub const ALL: [Self; 4] = [Self::Llama3, Self::Hermes, Self::QwenXml, Self::Mistral];

    /// Returns the markers of the format with their texts.
    pub fn markers(self) -> &'static [(Marker, &'static str)] {
        match self {
            Self::Llama3 => &[(Marker::CallBegin, "<|python_tag|>")],
            Self::Hermes => &[(Marker::CallBegin, "<tool_call>"), (Marker::CallEnd, "</tool_call>")],
            Self::QwenXml => &[
                (Marker::CallBegin, "<tool_call>"),
                (Marker::CallEnd, "</tool_call>"),
                (Marker::FunctionBegin, "<function="),
            ],
            Self::Mistral => &[
                (Marker::CallBegin, "[TOOL_CALLS]"),
                (Marker::Arguments, "[ARGS]"),
                (Marker::CallId, "[CALL_ID]"),
            ],
        }
    }

    /// Returns the format that a chat template writes in the turns of the assistant.
    pub fn of_template(template: &str) -> Option<Self> {
        if template.contains("[TOOL_CALLS]") {
            return Some(Self::Mistral);
        }
        if template.contains("<tool_call>") {
            let xml = template.contains("<function=") && template.contains("<parameter=");
            return Some(if xml { Self::QwenXml } else { Self::Hermes });
        }
        let llama = template.contains("<|python_tag|>")
            || (template.contains("<|start_header_id|>") && template.contains("tool_call"));
        llama.then_some(Self::Llama3)
    }
}

impl ReasoningFormat {
    /// All formats.
    pub const ALL: [Self; 2] = [Self::Think, Self::Mistral];

    /// Returns the markers of the format with their texts.
    pub fn markers(self) -> &'static [(Marker, &'static str)] {
        match self {
            Self::Think => &[(Marker::ReasoningBegin, "<think>"), (Marker::ReasoningEnd, "</think>")],
            Self::Mistral => &[(Marker::ReasoningBegin, "[THINK]"), (Marker::ReasoningEnd, "[/THINK]")],
        }
    }

    /// Returns the format that a chat template knows.
    pub fn of_template(template: &str) -> Option<Self> {
        let knows = |format: &Self| {
            format.markers().iter().all(|(_, text)| template.contains(text))
                // Templates that only open the reasoning leave its end to the model.
                || (*format == Self::Think && template.contains("<think>\\n"))
        };
        Self::ALL.into_iter().find(knows)
    }
}

impl fmt::Display for ToolCallFormat {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Llama3 => "llama3",
            Self::Hermes => "hermes",
            Self::QwenXml => "qwen-xml",
            Self::Mistral => "mistral",
        })
    }
}

impl FromStr for ToolCallFormat {
    type Err = FormatError;

    fn from_str(name: &str) -> Result<Self, FormatError> {
        let found = Self::ALL.into_iter().find(|format| format.to_string() == name);
        let known = "llama3, hermes, qwen-xml and mistral";
        found.ok_or_else(|| FormatError { name: name.to_owned(), known })
    }
}

impl fmt::Display for ReasoningFormat {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Think => "think",
            Self::Mistral => "mistral",
        })
    }
}

impl FromStr for ReasoningFormat {
    type Err = FormatError;

    fn from_str(name: &str) -> Result<Self, FormatError> {
        let found = Self::ALL.into_iter().find(|format| format.to_string() == name);
        found.ok_or_else(|| FormatError { name: name.to_owned(), known: "think and mistral" })
    }
}

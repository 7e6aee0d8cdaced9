//! Parsers of the calls that follow a marker, one for each format.

use crate::call_object::CallObject;
use crate::call_part::{CallPart, Progress};
use crate::marker::Symbol;
use crate::mistral::MistralCalls;
use crate::qwen_xml::XmlCall;
use crate::{ToolCallFormat, ToolTypes};

/// Parser of what follows a marker, or the first brace of an object without one.
#[derive(Debug, Clone)]
pub(crate) enum CallMachine {
    Object(CallObject),
    Mistral(MistralCalls),
    Xml(XmlCall),
}

impl CallMachine {
    pub(crate) fn new(format: ToolCallFormat) -> Self {
        match format {
            ToolCallFormat::Llama3 | ToolCallFormat::Hermes => Self::Object(CallObject::new(false)),
            ToolCallFormat::Mistral => Self::Mistral(MistralCalls::new()),
            ToolCallFormat::QwenXml => Self::Xml(XmlCall::new()),
        }
    }

    /// Takes the next symbol. A marker inside of a string is its text.
    pub(crate) fn push(&mut self, symbol: Symbol, tools: &ToolTypes, out: &mut Vec<CallPart>) -> Progress {
        let (marker, text) = match symbol {
            Symbol::Char(c) => return self.push_char(c, tools, out),
            Symbol::Marker(marker, text) => (marker, text),
        };
        if !self.in_text() {
            return match self {
                Self::Mistral(calls) => calls.push_marker(marker),
                Self::Object(_) | Self::Xml(_) => Progress::Invalid,
            };
        }
        for c in text.chars() {
            let progress = self.push_char(c, tools, out);
            if progress != Progress::More {
                return progress;
            }
        }
        Progress::More
    }

    fn in_text(&self) -> bool {
        match self {
            Self::Object(object) => object.in_text(),
            Self::Mistral(calls) => calls.in_text(),
            Self::Xml(call) => call.in_text(),
        }
    }

    fn push_char(&mut self, c: char, tools: &ToolTypes, out: &mut Vec<CallPart>) -> Progress {
        match self {
            Self::Object(object) => object.push(c, out),
            Self::Mistral(calls) => calls.push(c, out),
            Self::Xml(call) => call.push(c, tools, out),
        }
    }

    /// Releases arguments that are held back, at the end of the output.
    pub(crate) fn finish(&mut self, out: &mut Vec<CallPart>) {
        if let Self::Xml(call) = self {
            call.finish(out);
        }
    }
}

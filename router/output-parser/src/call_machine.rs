//! Parsers of the calls that follow a marker, one for each format.

use crate::call_object::CallObject;
use crate::call_part::{CallPart, Progress};
use crate::marker::{Marker, Symbol};
use crate::mistral::MistralCalls;
use crate::qwen_xml::XmlCall;
use crate::{OutputEnd, ToolCallFormat, ToolTypes};

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
            ToolCallFormat::Llama3 | ToolCallFormat::Hermes => Self::Object(CallObject::new()),
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
            return match (self, marker) {
                (Self::Mistral(calls), _) => calls.push_marker(marker),
                // It is no marker within a call, but its text.
                (machine @ Self::Xml(_), Marker::FunctionBegin) => machine.push_text(text, tools, out),
                (Self::Xml(call), _) => call.push_marker(marker == Marker::CallEnd, out),
                (Self::Object(_), _) => Progress::Invalid,
            };
        }
        self.push_text(text, tools, out)
    }

    fn push_text(&mut self, text: &str, tools: &ToolTypes, out: &mut Vec<CallPart>) -> Progress {
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

    /// Ends an open call, at the end of the output or because it is malformed: releases arguments that are held back.
    pub(crate) fn finish(&mut self, end: OutputEnd, out: &mut Vec<CallPart>) {
        let is_whole = match self {
            Self::Object(object) => object.has_all_arguments(),
            Self::Mistral(calls) => calls.has_all_arguments(),
            Self::Xml(call) => call.finish(end, out),
        };
        out.push(if is_whole { CallPart::End } else { CallPart::Cut });
    }
}

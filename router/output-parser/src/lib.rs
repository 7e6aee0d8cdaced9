//! Parsers of model output: reasoning, content and tool calls, from token ids and text.
//!
//! Pure and incremental: no I/O, no clock, no randomness. What has been emitted after some output depends on that output
//! alone, not on how it was divided into pieces, so a stream that is generated again yields the same events.

#![forbid(unsafe_code)]

mod call_ids;
mod call_machine;
mod call_object;
mod call_part;
mod call_schema;
mod event;
mod format;
#[doc(hidden)]
pub mod fuzz;
mod grammar;
mod json_scanner;
mod marker;
mod mistral;
mod parameters;
mod parser;
mod qwen_xml;
mod tool_types;
mod xml_grammar;

pub use call_ids::{CallIdStyle, CallIds};
pub use call_schema::may_look_like_call;
pub use event::{OutputEnd, OutputEvent};
pub use format::{FormatError, ReasoningFormat, ToolCallFormat};
pub use grammar::{CallGrammar, CallGrammarError, GrammarAnswer, GrammarTool};
pub use marker::Marker;
pub use parser::{MarkerToken, OutputFormat, OutputParser};
pub use tool_types::{ParameterKind, ToolTypes};

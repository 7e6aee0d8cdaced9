//! Tests of the parser of model output and of the grammars of tool calls.

mod answers;
mod differential;
mod grammar;
mod parser;

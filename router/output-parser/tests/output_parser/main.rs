//! Tests of the parser of model output and of the grammars of tool calls.

mod answers;
mod grammar;
mod parser;

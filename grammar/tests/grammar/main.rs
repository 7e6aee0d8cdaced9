//! Grammars over a small vocabulary: what compiles, what is refused, and what matchers allow.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod chains;
mod differential;
mod limits;
mod matching;
mod refusals;
mod vocabulary;
mod whitespace;

//! Structured output: grammars, compiled for the vocabulary of a model, and the tokens that may follow an
//! output so far.
//!
//! A [`Compiler`] turns a grammar into a [`CompiledGrammar`], with bounded work; each sequence then has a [`Matcher`],
//! whose state is a pure function of the grammar and of the tokens consumed. Limits are counted work, never time, so that a
//! grammar is refused on every machine or on none. Matchers share a [`MemoryBudget`].

#![forbid(unsafe_code)]

mod budget;
mod chains;
mod compiler;
pub mod ebnf;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod json_in_lark;
mod json_schema;
mod matcher;
mod messages;
mod nesting;
mod rewrite;
mod text;
mod usage;
mod vocabulary;

pub use budget::MemoryBudget;
pub use compiler::{CompiledGrammar, Compiler};
pub use error::{GrammarError, MatchError};
pub use matcher::{MaskOutcome, Matcher};
pub use vocabulary::{Leading, Vocabulary, VocabularyError};

//! Grammars over a small vocabulary: what compiles, what is refused, and what matchers allow.

mod matching;
mod refusals;
mod vocabulary;

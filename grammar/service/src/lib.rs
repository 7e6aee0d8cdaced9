//! Grammars of a model, for routers and workers: checked in processes of their own, compiled once, and cached.
//!
//! [`Grammars`] is what a role holds for each model. With a [`Confinement`] it compiles in its own process only what a helper process
//! ([`serve`]) has compiled before, within bounds of time and memory.

#![forbid(unsafe_code)]

mod cache;
mod confined;
mod grammars;

pub use confined::{Confinement, serve};
pub use grammars::{GrammarCounters, Grammars};

//! A worker: model, runtime, engine, and the session service that drives them.

pub mod runtime;

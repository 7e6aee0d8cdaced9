//! Tests of the worker: models and the CPU runtime against references, the engine over recording and
//! simulated runtimes, sessions with routers. One binary, as each costs time to link.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod bad_models;
mod engine;
mod gguf;
mod parity;
mod quantization;
mod service;
mod simulated;
mod tensor_parallel;

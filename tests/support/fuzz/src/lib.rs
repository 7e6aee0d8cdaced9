//! Parsers of untrusted input as functions of bytes. Each function takes any bytes, panics if a property of the parser does not
//! hold, and returns whether it accepted them; `tests/fuzz` calls them with a fuzzer's inputs, the tests of this crate with the kept corpora.

mod recordings;

pub use inflight::fuzz::configuration;
pub use inflight_grammar::fuzz::grammar;
pub use inflight_models::fuzz::{config, gguf, safetensors};
pub use inflight_output_parser::fuzz::output_parser;
pub use inflight_router::fuzz::{http_json, kserve, template, tenants, tokenizer, worker_session};
pub use inflight_worker::fuzz::router_session;
pub use recordings::{router_recording, worker_recording};

/// Parser under test.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the target and of the folder of its corpus.
    pub name: &'static str,
    /// The function.
    pub run: fn(&[u8]) -> bool,
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        [$(Target { name: stringify!($name), run: $name }),*]
    };
}

/// All targets, by name.
pub const TARGETS: [Target; 15] = targets![
    config,
    configuration,
    gguf,
    grammar,
    http_json,
    kserve,
    output_parser,
    router_recording,
    router_session,
    safetensors,
    template,
    tenants,
    tokenizer,
    worker_recording,
    worker_session,
];

//! Client-facing APIs: the layers that run before a message is read, the core that they share, the protocols
//! over it, and the response stream.

mod admin;
pub(crate) mod admission;
pub(crate) mod arrival;
pub(crate) mod auth;
mod bad_words;
mod choice_output;
mod cold_start;
mod collected;
pub(crate) mod cursor;
mod generation;
mod grammar_check;
pub(crate) mod grpc;
mod grpc_tools;
pub(crate) mod http;
pub(crate) mod ingress;
pub(crate) mod key_failures;
pub(crate) mod kserve;
mod message_list;
pub(crate) mod operations;
pub(crate) mod output_plan;
mod paths;
mod prompt;
pub(crate) mod refusal;
mod request;
mod response_stream;
pub(crate) mod serve;
pub(crate) mod sites;
mod tokenizing;
mod tool_use;

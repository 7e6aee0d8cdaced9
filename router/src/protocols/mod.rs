//! Protocols of clients. Each translates its messages to drafts of requests, and the events of their output to its messages.

mod anthropic;
pub(crate) mod diagnosis;
pub(crate) mod fuzz;
pub(crate) mod grpc;
pub(crate) mod http;
pub(crate) mod kserve;
mod openai;
mod openapi;
pub(crate) mod operations;
pub(crate) mod page;
mod route;
pub(crate) mod routes;

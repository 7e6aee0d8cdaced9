//! OpenAI's HTTP API: chat completions, completions, responses, models, and tokenization as other servers offer it beside them.

pub(crate) mod chat;
mod chat_stream;
mod chat_templates;
mod chunk_writer;
mod completion_stream;
pub(crate) mod completions;
mod logprobs;
pub(crate) mod models;
pub(crate) mod rendering;
mod response_events;
mod response_items;
mod response_object;
pub(crate) mod responses;
pub(crate) mod tokenize;
pub(crate) mod tools;

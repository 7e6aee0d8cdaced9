//! Anthropic's HTTP API: messages, and counting of their tokens.

mod documents;
mod message_blocks;
mod message_stream;
pub(crate) mod messages;

//! The way of the output to the client: choices, stop strings, the events of a response stream, and responses in one piece.

pub(crate) mod choice_output;
pub(crate) mod collected;
pub(crate) mod event;
pub(crate) mod response_stream;
pub(crate) mod stop;

//! What clients call: the layers before a message is read, the APIs, and the stream of responses.

pub(crate) mod admission;
pub(crate) mod arrival;
pub(crate) mod auth;
pub(crate) mod ingress;
pub(crate) mod kserve;
mod paths;
mod request;
mod response_stream;

//! Client-facing APIs: the layers that run before a message is read, the services, and the response stream.

pub(crate) mod admission;
pub(crate) mod arrival;
pub(crate) mod auth;
pub(crate) mod ingress;
pub(crate) mod kserve;
mod paths;
mod request;
mod response_stream;

//! HTTP of all APIs: the fields of request bodies, server-sent events, errors.

mod api;
mod aside;
pub(crate) mod body;
mod call;
pub(crate) mod content;
pub(crate) mod errors;
pub(crate) mod event_writer;
pub(crate) mod fields;
mod generations;
pub(crate) mod integers;
pub(crate) mod known_paths;
pub(crate) mod probes;
pub(crate) mod sampling;
pub(crate) mod sse;
mod started;
pub(crate) mod structured;
pub(crate) mod usage;

pub use api::RenderMetrics;
pub(crate) use api::{AxumResponse, HttpApi, json};
pub(crate) use aside::{SMALL_BODY_BYTES, SMALL_POSITIONS, aside, read_aside, read_body};
pub(crate) use call::Call;
pub(crate) use errors::refuse;
pub(crate) use started::Started;

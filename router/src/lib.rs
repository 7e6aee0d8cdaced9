//! The router: API, text, dispatcher, worker sessions and response streams.
//!
//! A call passes the `layers` (arrival, authentication, admission). Its protocol in `protocols` reads a draft, which `request`
//! checks, tokenizes and admits. It waits in the dispatcher's queue until a worker's grant has room. The worker's session appends
//! tokens to the request's journal; the task that writes the client's stream reads them (`output`), detokenizes and ends the call.
//! When a session is lost, its requests return to the queue and are resubmitted to other workers.

#![forbid(unsafe_code)]

mod call_guard;
mod clock;
mod cluster;
mod dispatcher;
mod format_choice;
#[doc(hidden)]
pub mod fuzz;
mod layers;
mod live;
pub mod metrics;
mod options;
mod outcome;
mod output;
mod protocols;
mod request;
mod restart;
mod router;
mod serve;
mod stats;
mod sync;
mod tenants;
pub mod text;
mod trace;
pub mod usage;

pub use cluster::bundle::BundleError;
pub use cluster::connector::{Connector, Io};
pub use cluster::discovery::{Source, SourceError};
pub use cluster::model_cache::BundleLoad;
pub use format_choice::FormatChoice;
pub use inflight_output_parser::{ReasoningFormat, ToolCallFormat};
pub use inflight_router_core::{
    Command, DispatcherOptions, Event, PlacementKind, QueueLimits, UnknownPlacement, WorkerCommand,
    is_recording, replay,
};
pub use options::{
    Admin, ConnectionOptions, HttpOptions, Options, OptionsError, TemplateDate, TraceUrl, UsageLogExcess,
    UsageLogOptions, UsageLogPolicy,
};
pub use protocols::http::RenderMetrics;
pub use router::{Core, Error, Handle, Router};
pub use stats::RouterStats;

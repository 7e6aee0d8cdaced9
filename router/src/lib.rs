//! The router: ingress, text, queue, placement, sessions and relay.
//!
//! A client's call passes the edge (arrival, deadline), the ingress (checks, tokens) and waits in the
//! dispatcher's queue until a worker's grant has room. Its worker's session then appends tokens to the call's
//! journal, and the task that writes the client's stream reads them, makes text of them and ends the call. A
//! lost session puts its calls back into the queue, from where they go on elsewhere.

mod admission;
mod auth;
mod bundle;
mod clock;
mod dial;
mod directory;
mod discovery;
mod dispatch;
mod edge;
mod generation;
mod ingress;
mod kserve;
mod lease;
mod members;
pub mod metrics;
mod options;
mod outcome;
mod placing;
mod queueing;
mod relay;
mod request;
mod restart;
mod router;
mod session;
mod tenants;
pub mod text;
mod trace;
mod violation;

pub use bundle::BundleError;
pub use dial::{Dial, Io};
pub use discovery::{Source, SourceError};
pub use inflight_router_core::{PlacementKind, UnknownPlacement};
pub use options::{Options, OptionsError};
pub use router::{Census, Core, Error, Handle, Router};

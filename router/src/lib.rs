//! The router: ingress, text, queue, placement, sessions and relay.
//!
//! A client's call passes the edge (arrival, deadline), the ingress (checks, tokens) and waits in the
//! dispatcher's queue until a worker's grant has room. Its worker's session then appends tokens to the call's
//! journal, and the task that writes the client's stream reads them, makes text of them and ends the call. A
//! lost session puts its calls back into the queue, from where they go on elsewhere.

mod api;
mod call_guard;
mod clock;
mod cluster;
mod dispatcher;
pub mod metrics;
mod options;
mod outcome;
mod restart;
mod router;
mod stats;
mod tenants;
pub mod text;
mod trace;

pub use cluster::bundle::BundleError;
pub use cluster::connector::{Dial, Io};
pub use cluster::discovery::{Source, SourceError};
pub use inflight_router_core::{PlacementKind, UnknownPlacement};
pub use options::{Options, OptionsError};
pub use router::{Core, Error, Handle, Router};
pub use stats::RouterStats;

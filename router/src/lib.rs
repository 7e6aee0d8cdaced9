//! The router: ingress, text, queue, placement, sessions and relay.
//!
//! A client's call passes the edge (arrival, deadline), the ingress (checks, tokens) and waits in the
//! dispatcher's queue until a worker's grant has room. Its worker's session then appends tokens to the call's
//! journal, and the task that writes the client's stream reads them, makes text of them and ends the call. A
//! lost session puts its calls back into the queue, from where they go on elsewhere.

mod bundle;
mod directory;
mod dispatch;
mod edge;
mod generation;
mod ingress;
pub mod metrics;
mod options;
mod outcome;
mod relay;
mod request;
mod router;
mod session;
pub mod text;
mod trace;

pub use bundle::BundleError;
pub use options::{Options, OptionsError};
pub use router::{Error, Handle, Router};

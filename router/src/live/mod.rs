//! The live view: what the cluster does now, request by request and iteration by iteration, for operators.
//!
//! The dispatcher's shell reports each change in the life of a request to the [`Hub`](hub::Hub), the tasks of the sessions
//! report loads and iterations of their workers. A viewer pulls: a snapshot is taken when one is due for a viewer, and
//! without viewers none is taken and no worker is observed.

mod compact;
pub(crate) mod diagnosis;
pub(crate) mod display_text;
mod findings;
pub(crate) mod hub;
pub(crate) mod life;
pub(crate) mod observation;
pub(crate) mod page;
pub(crate) mod request;
mod sampler;
pub(crate) mod supervisor;
pub(crate) mod tenant;
pub(crate) mod tracker;
pub(crate) mod view;
pub(crate) mod viewer;
pub(crate) mod viewer_places;
mod window;
pub(crate) mod worker;
mod worker_clock;

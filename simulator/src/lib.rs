//! The worker's own scheduler on a virtual clock.
//!
//! A [`Simulation`] feeds [`Request`]s to an [`inflight_worker_core::Scheduler`] as they arrive, executes what it
//! plans on a [`Device`] that only says how long things take, and tells an [`Observer`] all that happens. Nothing
//! of the scheduler is written a second time, and nothing depends on the machine: the same requests, limits and
//! device give the same events.
//!
//! [`Records`] keeps what became of each request and what the memory held; [`ServiceDifference`] and [`ServiceGap`]
//! measure fairness. [`cluster`] does the same for routers and many workers. [`trace`] reads published traces, [`workload`] generates requests from a seed.

pub mod cluster;
mod device;
mod event;
mod fairness;
mod profile;
mod records;
mod request;
mod simulation;
mod table;
pub mod trace;
pub mod workload;

pub use device::{BatchWork, Device};
pub use event::{Event, Observer, StepSample};
pub use fairness::{ServedRequest, ServiceDifference, ServiceGap};
pub use profile::{ProfileError, ProfiledDevice};
pub use records::{KvUse, Record, Records, percentile};
pub use request::Request;
pub use simulation::{Simulation, SimulationError};
pub use table::Table;

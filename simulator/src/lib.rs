//! Discrete-event simulation of the worker's scheduler on a virtual clock.
//!
//! A [`Simulation`] submits [`Request`]s to an [`inflight_worker_core::Scheduler`] at their arrival times,
//! executes its plans on a [`Device`] that only models durations, and reports all events to an [`Observer`].
//! The scheduler is the real one. Results do not depend on the machine: equal requests, limits and devices
//! give equal events.
//!
//! [`Records`] collects latencies per request and KV memory use; [`ServiceDifference`] and [`ServiceGap`]
//! measure fairness. [`cluster`] simulates routers with many workers. [`workload`] generates requests from a
//! seed; `inflight_traces` reads published ones.

#![forbid(unsafe_code)]

pub mod cluster;
mod device;
mod drafts;
mod event;
mod fairness;
mod piecewise_linear;
mod profile;
mod records;
mod request;
mod simulation;
pub mod workload;

pub use device::{BatchWork, Device};
pub use drafts::AcceptanceTrace;
pub use event::{Observer, RequestEvent, StepSample};
pub use fairness::{ServiceDifference, ServiceGap};
pub use piecewise_linear::PiecewiseLinear;
pub use profile::{ProfileError, ProfiledDevice};
pub use records::{KvUsage, Records, RequestRecord, percentile};
pub use request::{Request, requests_of};
pub use simulation::{Simulation, SimulationError};

//! Scripted worker: a gRPC server that speaks the session protocol with routers, and whose sessions a test or a benchmark drives. It
//! computes nothing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod profile;
mod session;
mod worker;

pub use profile::{Access, Script, WorkerProfile};
pub use session::{Command, ScriptedObservation, ScriptedSession, sequence};
pub use worker::{ScriptedWorker, Sessions, StoppedWorker, WorkerService};

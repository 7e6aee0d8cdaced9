//! The worker process: model, runtime, engine, and the gRPC service for sessions with routers.
//!
//! ```text
//! session ▶ inbox ▶ [ scheduler.plan ▶ runtime.execute ▶ sample ▶ scheduler.commit ]* ▶ outbox ▶ session
//! ```

mod bundle;
pub mod engine;
pub mod metrics;
pub mod models;
mod options;
pub mod runtime;
mod session;
mod worker;

pub use bundle::Bundle;
pub use inflight_worker_core::policy::{PolicyKind, UnknownPolicy};
pub use inflight_worker_core::{BlockedBy, Iteration, Preemption, ReplayError, replay};
pub use models::ModelSource;
pub use options::{Device, KvCacheDtype, Options, OptionsError, UnknownDevice};
pub use worker::{Core, Error, Progress, Served, Turning, Worker, usable_gpus};

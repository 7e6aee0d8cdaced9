//! The worker process: model, runtime, engine, and the gRPC service for sessions with routers.
//!
//! ```text
//! session ▶ inbox ▶ [ scheduler.plan ▶ runtime.execute ▶ sample ▶ scheduler.commit ]* ▶ outbox ▶ session
//! ```

#![forbid(unsafe_code)]

mod bundle;
mod device;
pub mod engine;
#[doc(hidden)]
pub mod fuzz;
pub mod metrics;
mod options;
mod self_test;
mod self_test_interval;
mod session;
mod sizing;
mod sync;
mod worker;

pub use inflight_models::ModelSource;
pub use inflight_runtime::{HostMemory, MemoryNeeds, Readable};
pub use inflight_runtime_cpu::Quantization;
pub use inflight_worker_core::policy::{Aging, PolicyKind, UnknownPolicy};
pub use inflight_worker_core::{
    BlockedBy, Drafts, FirstTokenParts, FirstTokens, Iteration, LatencyObjectives, Preemption, ReplayError,
    ReplayEvent, SchedulerLimits, SchedulingOptions, SequenceId, StepTarget, StepTargetOption, UnknownDrafts,
    replay,
};

pub use bundle::Bundle;
pub use device::{host_memory_limit, usable_gpus};
pub use options::{ComputeOptions, Device, KvCacheDtype, Options, OptionsError, UnknownDevice};
pub use self_test_interval::SelfTestInterval;
pub use session::EngineExecution;
pub use sizing::{gpu_memory, gpus_support, memory_needs};
pub use worker::{CONNECTIONS_MAX, Core, Error, Progress, Served, Worker};

//! Pure policies of a router: fair queue, placement, grant ledger, journal, retry budget, outlier ejection.
//!
//! No clock, no I/O, no randomness, no unordered iteration: equal calls give equal results, so a simulator
//! drives these types exactly as the router does.

mod command;
mod fair_queue;
mod journal;
mod ledger;
mod outliers;
mod pace;
mod placement;
mod prefix_index;
mod queue_bounds;
mod rate;
mod retry_budget;
mod suspicion;
mod tenant_gate;
mod update;

pub use command::{ResumedChoice, Submission, WorkerCommand};
pub use fair_queue::{Admitted, Ahead, Arrival, FairQueue, FairQueueOptions, Place, Taken};
pub use journal::{Append, End, Fresh, Journal, JournalError, Resumed};
pub use ledger::{Ledger, Settled};
pub use outliers::{OutlierLimits, Outliers};
pub use pace::Pace;
pub use placement::{
    Ask, Cached, Candidate, Chain, Cost, Credits, Estimate, Fleet, LeastLoaded, PlacementKind, Placer,
    Policy, PowerOfTwo, Prefix, Random, RoundRobin, Standing, UnknownPlacement, WorkerLoad,
};
pub use prefix_index::{CacheChange, IndexStep, PrefixIndex, SnapshotPiece, Tier};
pub use queue_bounds::{Bound, Hold, QueueFull, QueueLimits};
pub use rate::{Gcra, RateLimit, Spent};
pub use retry_budget::RetryBudget;
pub use suspicion::{AfterLoss, Suspicion};
pub use tenant_gate::{OverLimit, TenantGate, TenantLimits};
pub use update::{
    CacheEvents, CacheSnapshot, Grant, IncarnationCounters, SequenceEnd, SequenceUpdate, TenantCounter,
    WorkerUpdate,
};

//! Pure policies of a router: fair queue, placement, grant ledger, journal, retry budget, outlier ejection.
//!
//! No clock, no I/O, no randomness, no unordered iteration: equal calls give equal results, so a simulator
//! drives these types exactly as the router does.

mod command;
mod dispatch_rate;
mod fair_queue;
mod journal;
mod ledger;
mod loss_streak;
mod outliers;
mod placement;
mod prefix_index;
mod queue_bounds;
mod rate;
mod retry_budget;
mod tenant_gate;
mod update;

pub use command::{ResumedChoice, Submission, WorkerCommand};
pub use dispatch_rate::DispatchRate;
pub use fair_queue::{
    Admitted, Arrival, Dequeued, FairQueue, FairQueueOptions, QueuePosition, RequestsAhead,
};
pub use journal::{AppendOutcome, ChoiceEnd, Journal, JournalError, Resumed, UnreadOutput};
pub use ledger::{Ledger, Settled};
pub use loss_streak::{LossAction, LossStreak};
pub use outliers::{OutlierDetector, OutlierLimits};
pub use placement::{
    Cached, Candidate, Chain, Cost, Credits, Estimate, Fleet, LeastLoaded, PlacementKind, PlacementRequest,
    Placer, Policy, PowerOfTwo, Prefix, Random, RoundRobin, Standing, UnknownPlacement, WorkerLoad,
};
pub use prefix_index::{CacheChange, IndexStep, PrefixIndex, SnapshotPiece, Tier};
pub use queue_bounds::{QueueBound, QueueFull, QueueLimits, QueueUsage};
pub use rate::{Gcra, RateCharge, RateLimit};
pub use retry_budget::RetryBudget;
pub use tenant_gate::{OverLimit, TenantGate, TenantLimits};
pub use update::{
    CacheEvents, CacheSnapshot, Grant, IncarnationCounters, SequenceEnd, SequenceUpdate, TenantCounter,
    WorkerUpdate,
};

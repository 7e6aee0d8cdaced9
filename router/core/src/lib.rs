//! Decisions of a router as a pure state machine: fair queue, placement, grant ledger, failover, ejection.
//!
//! No clock, no I/O, no randomness, no unordered iteration: equal calls give equal results, so a simulator
//! drives these types exactly as the router does.

#![forbid(unsafe_code)]

mod budget;
mod dispatch_rate;
mod dispatcher;
mod failure_throttle;
mod fair_queue;
mod fair_queue_options;
mod ids;
mod journal;
mod ledger;
mod loss_streak;
mod outliers;
mod placement;
mod prefix_index;
mod queue_bounds;
mod rate;
mod record;
mod retry_budget;
mod tenant_gate;
mod tokenize_queue;
mod update;

pub use budget::{BudgetExceeded, DailyBudget, DailyLimit};
pub use dispatch_rate::DispatchRate;
pub use dispatcher::{
    ChoiceOutput, ClientCommand, Command, Dispatcher, DispatcherLoad, DispatcherOptions, Event, Failure,
    Lane, Notice, RequestPlaced, RequestSpec, ResolveError, ResubmissionReason, ResumedChoice, RetryWait,
    Submission, Violation, WorkerCommand, WorkerInfo, WorkerUsage, prompt_chains,
};
pub use failure_throttle::{FailureLimits, FailureThrottle};
pub use fair_queue::{Admitted, Arrival, Dequeued, FairQueue, QueuePosition, RequestsAhead};
pub use fair_queue_options::FairQueueOptions;
pub use ids::{LaneId, RequestId, SessionId, SubmissionId, WorkerId};
pub use inflight_contract::Priority;
pub use journal::{AppendOutcome, ChoiceEnd, Journal, JournalError, Resumed};
pub use ledger::{Ledger, Settled};
pub use loss_streak::{LossAction, LossStreak};
pub use outliers::{OutlierDetector, OutlierLimits};
pub use placement::{
    BlockHashChain, Cached, Candidate, Cost, Credits, Estimate, LeastLoaded, PlacementKind, PlacementRequest,
    Placer, Policy, PowerOfTwo, Prefix, Random, RoundRobin, Standing, UnknownPlacement, WorkerLoad,
    WorkerStates,
};
pub use prefix_index::{CacheChange, IndexStatus, PrefixIndex, SnapshotPiece, Tier};
pub use queue_bounds::{QueueBound, QueueFull, QueueLimits, QueueUsage};
pub use rate::{Gcra, RateCharge, RateLimit};
pub use record::{Recording, ReplayError, is_recording, replay};
pub use retry_budget::RetryBudget;
pub use tenant_gate::{OverLimit, TenantGate, TenantLimits};
pub use tokenize_queue::{
    TokenizeAdmitted, TokenizeArrival, TokenizeJobId, TokenizePiece, TokenizeQueue, TokenizeQueueFull,
    TokenizeQueueOptions,
};
pub use update::{
    CacheEvents, CacheSnapshot, FailureBlame, Grant, IncarnationCounters, SequenceEnd, SequenceUpdate,
    TenantCounter, WorkerUpdate,
};

/// Serializes shared text.
fn serialize_str<S: serde::Serializer>(text: &std::sync::Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

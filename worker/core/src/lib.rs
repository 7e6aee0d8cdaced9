//! Pure state machine of a worker: iteration scheduler, paged KV block manager, cost model.
//!
//! [`Scheduler::plan`] decides what the next forward pass computes; [`Scheduler::commit`] takes its results.
//! The crate uses no clock, I/O, threads or unordered iteration: equal calls give equal plans, whether a
//! device, a simulator or a test drives the scheduler.

#![forbid(unsafe_code)]

mod anticipation;
mod cost;
mod diagnosis;
mod dispatch_ahead;
mod drafts;
mod evicted_hashes;
mod first_token;
mod grants;
mod hash_index;
mod history;
mod iteration;
mod least_squares;
mod memory;
pub mod policy;
mod prefill_load;
mod profile;
mod record;
mod replay;
mod scheduler;
mod scheduler_limits;
mod scheduling_options;
mod sequence;
mod state_progress;
mod step_target;
mod time;

pub use anticipation::Anticipation;
pub use cost::{CostModel, CostPrior, StepWork};
pub use diagnosis::{Bottleneck, Conditions, Finding, Objectives, diagnose};
pub use dispatch_ahead::DispatchAhead;
pub use drafts::{DraftKind, DraftSource, Drafts, DraftsWanted, PromptLookup, UnknownDrafts};
pub use first_token::{FirstTokenParts, FirstTokens};
pub use grants::{Capacity, Grant, Grants, priority_sequences_max};
pub use history::{History, IterationSummary};
pub use inflight_contract::{BlockHash, LayerGroup, MemoryShape};
pub use iteration::{
    Blocked, BlockedBy, Chunk, Copy, Direction, Iteration, IterationOutcome, PredictedPreemption, Preempted,
    Preemption, TokenVerdict, Transfer, TransferId,
};
pub use memory::{Block, CacheEvent, CacheTier, GroupTable, SnapshotShape, Tables};
pub use prefill_load::PrefillLoad;
pub use profile::{DeviceProfile, ProfileError};
pub use replay::{ReplayError, ReplayEvent, replay};
pub use scheduler::{
    CommitError, Ended, Load, PrefillEstimate, Scheduler, SequencePhase, SequenceStatus, SubmitError,
};
pub use scheduler_limits::{LimitsError, SchedulerLimits};
pub use scheduling_options::{SchedulingOptions, StepTargetOption};
pub use sequence::{NewSequence, ScoredRange, SequenceId, Slot};
pub use step_target::{LatencyObjectives, StepTarget};
pub use time::Time;

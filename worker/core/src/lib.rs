//! The pure state machine of a worker: iteration scheduler and paged KV block manager.
//!
//! [`Scheduler::plan`] decides what the next forward pass computes, [`Scheduler::commit`] takes what it yielded.
//! There is no clock, no I/O, no thread and no unordered iteration in here: the same calls give the same plans,
//! whether a device, a simulator or a test drives them.

mod blocks;
mod grants;
mod iteration;
mod limits;
mod scheduler;
mod sequence;
mod time;

pub use blocks::{Block, BlockPool};
pub use grants::{Capacity, Grant, Grants};
pub use iteration::{Blocked, BlockedBy, Chunk, Iteration, Verdict};
pub use limits::{Limits, LimitsError};
pub use scheduler::{CommitError, Ended, Load, Scheduler, SubmitError};
pub use sequence::{NewSequence, SequenceId, Slot};
pub use time::Time;

//! The pure policies of a router: request queue, placement, credit ledger and relay journal.
//!
//! No clock, no I/O, no randomness, no unordered iteration: the same calls give the same answers, so a
//! simulator can drive these types as the router does.

mod journal;
mod ledger;
mod outliers;
mod placement;
mod queue;
mod retry_budget;
mod suspicion;

pub use journal::{Append, End, Fresh, Journal, JournalError, Resumed};
pub use ledger::{Ledger, Settled};
pub use outliers::{OutlierLimits, Outliers};
pub use placement::{Candidate, Credits, LeastLoaded, Placement};
pub use queue::{Place, QueueFull, QueueLimits, RequestQueue};
pub use retry_budget::RetryBudget;
pub use suspicion::{AfterLoss, Suspicion};

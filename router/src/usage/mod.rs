//! Usage log: one line per request, for billing.

mod files;
pub(crate) mod log;
mod reader;
mod record;
mod summary;

pub use files::UsageLogError;
pub(crate) use reader::tokens_used_today;
pub use reader::{UsageReadError, UsageReading, read_usage};
pub use record::UsageRecord;
pub(crate) use record::timestamp;
pub use summary::{UnknownUsageGroup, UsageGroup, UsageSince, UsageSummary, UsageTotals};

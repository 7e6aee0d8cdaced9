//! Clock of the router.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Returns the runtime's time, which a simulation can control.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Returns the wall-clock time since the Unix epoch, for days and time stamps.
pub(crate) fn since_unix_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

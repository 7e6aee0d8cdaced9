//! Clock of the router.

use std::time::Instant;

/// Returns the runtime's time, which a simulation can control.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

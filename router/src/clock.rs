use std::time::Instant;

/// The runtime's clock, so that a simulation can turn it.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

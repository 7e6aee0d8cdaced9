//! Service charged in a cluster simulation.

use inflight_worker_core::Time;

/// Service charged to a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Charge {
    /// Time.
    pub at: Time,
    /// Name of the tenant.
    pub tenant: String,
    /// Service in weighted tokens.
    pub service: u64,
}

//! Counters of the service that tenants receive.

use crate::virtual_token_counters::Weight;

/// Monotonic service counter of a tenant, independent of its weight.
///
/// A tenant that is evicted and returns continues at a `base` no lower than any evicted counter, so that a
/// reader that kept the old value counts as growth only what exceeds both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ServiceCounter {
    /// Value of the counter, in tokens weighted by [`TokenCost`](crate::TokenCost).
    pub cost: u64,
    /// Value at which the counter started.
    pub base: u64,
}

impl From<u64> for ServiceCounter {
    /// Creates a counter that started at 0.
    fn from(cost: u64) -> Self {
        Self { cost, base: 0 }
    }
}

/// Charges of a tenant since they were last drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantCharge<'a> {
    /// Name of the tenant.
    pub tenant: &'a str,
    /// Service counter of the tenant after the charges.
    pub counter: ServiceCounter,
    /// Service charged since the last drain, in tokens weighted by [`TokenCost`](crate::TokenCost).
    pub growth: u64,
    /// Fair-share weight of the tenant.
    pub weight: Weight,
}

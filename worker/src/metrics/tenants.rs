//! Service by tenant, with a bounded number of labels.

use std::collections::BTreeMap;

use inflight_contract::TenantCharge;
use metrics::{Counter, Gauge};

use super::{TENANT_SERVICE, TENANT_WEIGHT};

/// Label of the tenants without one of their own.
const OTHER: &str = "(other)";

/// Metrics of the tenants' service.
pub(crate) struct TenantMetrics {
    /// The tenants with a label of their own, by name.
    tenants: BTreeMap<String, TenantHandles>,
    other: Counter,
}

struct TenantHandles {
    service: Counter,
    weight: Gauge,
}

impl TenantMetrics {
    /// Maximum number of tenants with a label of their own: the first that were served. A label stays, because a
    /// series that ends and begins again would count as a restart.
    const LABELS_MAX: usize = 100;

    pub fn new() -> Self {
        Self { tenants: BTreeMap::new(), other: metrics::counter!(TENANT_SERVICE, "tenant" => OTHER) }
    }

    /// Counts the charges of a tenant.
    pub fn charge(&mut self, charge: &TenantCharge<'_>) {
        if !self.tenants.contains_key(charge.tenant)
            && charge.tenant != OTHER
            && self.tenants.len() < Self::LABELS_MAX
        {
            self.tenants.insert(charge.tenant.to_owned(), TenantHandles::new(charge.tenant));
        }
        match self.tenants.get(charge.tenant) {
            Some(handles) => {
                handles.service.increment(charge.growth);
                handles.weight.set(charge.weight.get());
            }
            None => self.other.increment(charge.growth),
        }
    }
}

impl TenantHandles {
    fn new(tenant: &str) -> Self {
        Self {
            service: metrics::counter!(TENANT_SERVICE, "tenant" => tenant.to_owned()),
            weight: metrics::gauge!(TENANT_WEIGHT, "tenant" => tenant.to_owned()),
        }
    }
}

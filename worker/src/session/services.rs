use std::sync::{Mutex, PoisonError};

use inflight_contract::{Charged, ServiceTable};
use inflight_proto::v1;

/// Incarnations of workers that are remembered, and tenants of each.
const INCARNATIONS_MAX: usize = 256;
const TENANTS_MAX: usize = 10_000;
/// Longest name that is taken.
const NAME_BYTES_MAX: usize = 128;

/// What routers told of the services of other incarnations, kept for routers to come.
pub(crate) struct Services {
    own: String,
    table: Mutex<ServiceTable>,
}

impl Services {
    /// Of others than the incarnation `own`, for which the engine's own counters speak.
    pub fn new(own: &str) -> Self {
        let table = Mutex::new(ServiceTable::new(INCARNATIONS_MAX, TENANTS_MAX));
        Self { own: own.to_owned(), table }
    }

    /// Takes in what a router told.
    pub fn learn(&self, told: v1::ServiceTable) {
        let valid = |name: &str| name.len() <= NAME_BYTES_MAX;
        if told.incarnation == self.own || told.incarnation.is_empty() || !valid(&told.incarnation) {
            return;
        }
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        for charge in told.tenants.iter().filter(|charge| valid(&charge.tenant)) {
            let charged = Charged { cost: charge.cost, base: charge.base };
            table.merge(&told.incarnation, &charge.tenant, charged);
        }
    }

    /// All that is known, for a new session.
    pub fn tell(&self) -> Vec<v1::ServiceTable> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let mut told: Vec<v1::ServiceTable> = Vec::new();
        for (incarnation, tenant, Charged { cost, base }) in table.iter() {
            let charge = v1::TenantCharge { tenant: tenant.to_owned(), cost, base };
            match told.last_mut().filter(|last| last.incarnation == incarnation) {
                Some(last) => last.tenants.push(charge),
                None => {
                    told.push(v1::ServiceTable { incarnation: incarnation.to_owned(), tenants: vec![charge] })
                }
            }
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_router_taught_another_is_told_and_nobody_speaks_for_this_incarnation() {
        let services = Services::new("own");
        let table = |incarnation: &str, cost| v1::ServiceTable {
            incarnation: incarnation.to_owned(),
            tenants: vec![v1::TenantCharge { tenant: "t".to_owned(), cost, base: 0 }],
        };
        for told in
            [table("own", 1), table("gone", 5), table("gone", 3), table("", 1), table(&"x".repeat(200), 1)]
        {
            services.learn(told);
        }
        assert_eq!(services.tell(), [table("gone", 5)]);
    }
}

//! Service counters of other worker incarnations, as routers report them, kept for routers that connect later.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inflight_contract::{Charged, SERVICE_COUNTER_MAX, ServiceTable, plausible_growth};
use inflight_proto::v1;
use inflight_worker_core::Time;

use crate::engine::SessionId;

/// Incarnations of workers that are remembered, and tenants of each.
const INCARNATIONS_MAX: usize = 256;
const TENANTS_MAX: usize = 10_000;
/// Longest name that is taken.
const NAME_BYTES_MAX: usize = 128;
/// How long an incarnation is remembered after the last session that reported of it is closed.
const ORPHANED_MAX: Duration = Duration::from_secs(3600);

/// A report that no sound router makes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Implausible {
    /// A counter beyond what any worker can have served.
    #[error("service counter {counter} of incarnation {incarnation:?} exceeds the limit of {most}")]
    Counter { incarnation: String, counter: u64, most: u64 },
    /// Counters that grew faster than any worker serves.
    #[error(
        "service counters of incarnation {incarnation:?} grew by {grown} since the last report, more than {most}"
    )]
    Growth { incarnation: String, grown: u64, most: u64 },
}

/// What routers reported of the services of other incarnations.
pub(crate) struct Services {
    own: String,
    state: Mutex<State>,
}

struct State {
    table: ServiceTable,
    reported: BTreeMap<String, Reported>,
}

/// Who reported of an incarnation.
struct Reported {
    /// Sessions that are open.
    by: BTreeSet<SessionId>,
    last: Time,
}

impl Services {
    /// Of others than the incarnation `own`, for which the engine's own counters speak.
    pub fn new(own: &str) -> Self {
        let table = ServiceTable::new(INCARNATIONS_MAX, TENANTS_MAX);
        Self { own: own.to_owned(), state: Mutex::new(State { table, reported: BTreeMap::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the state whole, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what a session's router reports.
    ///
    /// # Errors
    /// [`Implausible`]; then nothing of the report was taken in, and the session should be closed.
    pub fn report(
        &self,
        session: SessionId,
        report: &v1::ServiceTable,
        now: Time,
    ) -> Result<(), Implausible> {
        let valid = |name: &str| name.len() <= NAME_BYTES_MAX;
        let incarnation = &report.incarnation;
        if *incarnation == self.own || incarnation.is_empty() || !valid(incarnation) {
            return Ok(());
        }
        let mut state = self.lock();
        state.forget_orphaned(now);
        let charges = || report.tenants.iter().filter(|charge| valid(&charge.tenant));
        let largest = charges().map(|charge| charge.service.max(charge.baseline)).max().unwrap_or(0);
        if largest > SERVICE_COUNTER_MAX {
            let (incarnation, most) = (incarnation.clone(), SERVICE_COUNTER_MAX);
            return Err(Implausible::Counter { incarnation, counter: largest, most });
        }
        if let Some(known) = state.reported.get(incarnation) {
            let most = plausible_growth(now.since(known.last));
            let growth = charges().map(|charge| {
                let counted = state.table.counted(incarnation, &charge.tenant);
                charge.service.saturating_sub(counted.max(charge.baseline))
            });
            let grown = growth.fold(0, u64::saturating_add);
            if grown > most {
                return Err(Implausible::Growth { incarnation: incarnation.clone(), grown, most });
            }
        }
        for charge in charges() {
            let charged = Charged { cost: charge.service, base: charge.baseline.min(charge.service) };
            state.table.merge(incarnation, &charge.tenant, charged);
        }
        let new = || Reported { by: BTreeSet::new(), last: now };
        let reported = state.reported.entry(incarnation.clone()).or_insert_with(new);
        reported.by.insert(session);
        reported.last = now;
        Ok(())
    }

    /// A session is closed: what only its router reported is forgotten after a while.
    pub fn close(&self, session: SessionId, now: Time) {
        for reported in self.lock().reported.values_mut() {
            if reported.by.remove(&session) {
                reported.last = now;
            }
        }
    }

    /// All that is known, for a new session.
    pub fn all(&self, now: Time) -> Vec<v1::ServiceTable> {
        let mut state = self.lock();
        state.forget_orphaned(now);
        let mut tables: Vec<v1::ServiceTable> = Vec::new();
        for (incarnation, tenant, Charged { cost, base }) in state.table.iter() {
            let charge =
                v1::TenantServiceCounter { tenant: tenant.to_owned(), service: cost, baseline: base };
            match tables.last_mut().filter(|last| last.incarnation == incarnation) {
                Some(last) => last.tenants.push(charge),
                None => tables
                    .push(v1::ServiceTable { incarnation: incarnation.to_owned(), tenants: vec![charge] }),
            }
        }
        tables
    }
}

impl State {
    fn forget_orphaned(&mut self, now: Time) {
        let Self { table, reported } = self;
        reported.retain(|incarnation, reported| {
            let known = table.knows(incarnation);
            let orphaned = reported.by.is_empty() && now.since(reported.last) >= ORPHANED_MAX;
            if orphaned {
                table.forget(incarnation);
            }
            known && !orphaned
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::ZERO;

    fn table(incarnation: &str, cost: u64) -> v1::ServiceTable {
        let tenants = vec![v1::TenantServiceCounter { tenant: "t".to_owned(), service: cost, baseline: 0 }];
        v1::ServiceTable { incarnation: incarnation.to_owned(), tenants }
    }

    fn after(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn what_one_router_reported_another_is_told_and_nobody_speaks_for_this_incarnation() {
        let services = Services::new("own");
        for report in
            [table("own", 1), table("gone", 5), table("gone", 3), table("", 1), table(&"x".repeat(200), 1)]
        {
            services.report(SessionId(1), &report, NOW).unwrap();
        }
        assert_eq!(services.all(NOW), [table("gone", 5)]);
    }

    #[test]
    fn counters_that_no_worker_reaches_are_refused_and_leave_nothing_behind() {
        let services = Services::new("own");
        let refused = services.report(SessionId(1), &table("ghost", 1 << 63), NOW).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "service counter 9223372036854775808 of incarnation \"ghost\" exceeds the limit of 1125899906842624"
        );
        assert_eq!(services.all(NOW), []);
        services.report(SessionId(1), &table("gone", 1000), NOW).unwrap();
        let refused = services.report(SessionId(1), &table("gone", 1 << 40), after(1)).unwrap_err();
        assert!(matches!(refused, Implausible::Growth { .. }), "{refused}");
        assert_eq!(services.all(NOW), [table("gone", 1000)]);
        services.report(SessionId(1), &table("gone", 1 << 40), after(1 << 14)).unwrap();
    }

    #[test]
    fn an_incarnation_is_forgotten_an_hour_after_the_last_router_that_reported_it_is_gone() {
        let services = Services::new("own");
        services.report(SessionId(1), &table("gone", 5), NOW).unwrap();
        services.report(SessionId(2), &table("gone", 5), NOW).unwrap();
        services.close(SessionId(1), after(10));
        assert_eq!(services.all(after(100_000)), [table("gone", 5)], "one still speaks for it");
        services.close(SessionId(2), after(100_000));
        assert_eq!(services.all(after(103_599)), [table("gone", 5)]);
        assert_eq!(services.all(after(103_600)), []);
    }
}

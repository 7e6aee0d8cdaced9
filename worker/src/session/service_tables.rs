//! Service counters of other worker incarnations, reported by routers and passed on to routers that connect
//! later.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inflight_contract::{SERVICE_COUNTER_MAX, ServiceCounter, ServiceTable, plausible_growth};
use inflight_proto::v1;
use inflight_worker_core::Time;

use crate::engine::SessionId;

/// Maximum remembered worker incarnations, and tenants of each.
const INCARNATIONS_MAX: usize = 256;
const TENANTS_MAX: usize = 10_000;
/// Maximum length of an accepted name in bytes.
const NAME_BYTES_MAX: usize = 128;
/// Retention of an incarnation after the last session that reported it has closed.
const ORPHANED_MAX: Duration = Duration::from_secs(3600);

/// Protocol violation: a report that no correct router sends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ImplausibleReport {
    /// A counter exceeds what any worker can have served.
    #[error("service counter {counter} of incarnation {incarnation:?} exceeds the limit of {most}")]
    Counter { incarnation: String, counter: u64, most: u64 },
    /// More tenants than any router reports of an incarnation.
    #[error("{tenants} service counters of incarnation {incarnation:?}; at most {most} are allowed")]
    Tenants { incarnation: String, tenants: usize, most: usize },
    /// Counters grew faster than any worker serves.
    #[error(
        "service counters of incarnation {incarnation:?} grew by {grown} since the last report, more than {most}"
    )]
    Growth { incarnation: String, grown: u64, most: u64 },
}

/// Service tables of other incarnations, as reported by routers.
pub(crate) struct ServiceTables {
    own: String,
    state: Mutex<ReportedTables>,
}

struct ReportedTables {
    table: ServiceTable,
    reported: BTreeMap<String, Reporters>,
}

/// Sessions whose routers reported an incarnation.
struct Reporters {
    /// Open sessions.
    sessions: BTreeSet<SessionId>,
    /// Time of the last report, or of the close of a reporting session.
    last: Time,
}

impl ServiceTables {
    /// Creates empty tables. Reports of the incarnation `own` are ignored: the engine has its counters.
    pub fn new(own: &str) -> Self {
        let table = ServiceTable::new(INCARNATIONS_MAX, TENANTS_MAX);
        Self { own: own.to_owned(), state: Mutex::new(ReportedTables { table, reported: BTreeMap::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, ReportedTables> {
        // Every critical section leaves the state consistent, so poisoning can be ignored.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Merges a router's report.
    ///
    /// # Errors
    /// [`ImplausibleReport`]; then nothing is merged, and the session should be closed.
    pub fn report(
        &self,
        session: SessionId,
        report: &v1::ServiceTable,
        now: Time,
    ) -> Result<(), ImplausibleReport> {
        let valid = |name: &str| name.len() <= NAME_BYTES_MAX;
        let incarnation = &report.incarnation;
        if *incarnation == self.own || incarnation.is_empty() || !valid(incarnation) {
            return Ok(());
        }
        let tenants = report.tenants.len();
        if tenants > TENANTS_MAX {
            let (incarnation, most) = (incarnation.clone(), TENANTS_MAX);
            return Err(ImplausibleReport::Tenants { incarnation, tenants, most });
        }
        let mut state = self.lock();
        state.forget_orphaned(now);
        let charges = || report.tenants.iter().filter(|charge| valid(&charge.tenant));
        let largest = charges().map(|charge| charge.service.max(charge.baseline)).max().unwrap_or(0);
        if largest > SERVICE_COUNTER_MAX {
            let (incarnation, most) = (incarnation.clone(), SERVICE_COUNTER_MAX);
            return Err(ImplausibleReport::Counter { incarnation, counter: largest, most });
        }
        if let Some(known) = state.reported.get(incarnation) {
            let most = plausible_growth(now.since(known.last));
            let growth = charges().map(|charge| {
                let counted = state.table.counted(incarnation, &charge.tenant);
                charge.service.saturating_sub(counted.max(charge.baseline))
            });
            let grown = growth.fold(0, u64::saturating_add);
            if grown > most {
                return Err(ImplausibleReport::Growth { incarnation: incarnation.clone(), grown, most });
            }
        }
        for charge in charges() {
            let charged = ServiceCounter { cost: charge.service, base: charge.baseline.min(charge.service) };
            state.table.merge(incarnation, &charge.tenant, charged);
        }
        let new = || Reporters { sessions: BTreeSet::new(), last: now };
        let reporters = state.reported.entry(incarnation.clone()).or_insert_with(new);
        reporters.sessions.insert(session);
        reporters.last = now;
        Ok(())
    }

    /// Removes a closed session; incarnations that only its router reported expire after [`ORPHANED_MAX`].
    pub fn close(&self, session: SessionId, now: Time) {
        for reporters in self.lock().reported.values_mut() {
            if reporters.sessions.remove(&session) {
                reporters.last = now;
            }
        }
    }

    /// Returns all tables, for a new session.
    pub fn all(&self, now: Time) -> Vec<v1::ServiceTable> {
        let mut state = self.lock();
        state.forget_orphaned(now);
        let mut tables: Vec<v1::ServiceTable> = Vec::new();
        for (incarnation, tenant, ServiceCounter { cost, base }) in state.table.iter() {
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

impl ReportedTables {
    fn forget_orphaned(&mut self, now: Time) {
        let Self { table, reported } = self;
        reported.retain(|incarnation, reporters| {
            let known = table.knows(incarnation);
            let orphaned = reporters.sessions.is_empty() && now.since(reporters.last) >= ORPHANED_MAX;
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
    fn reports_reach_other_routers_except_those_of_the_own_incarnation() {
        let tables = ServiceTables::new("own");
        for report in
            [table("own", 1), table("gone", 5), table("gone", 3), table("", 1), table(&"x".repeat(200), 1)]
        {
            tables.report(SessionId(1), &report, NOW).unwrap();
        }
        assert_eq!(tables.all(NOW), [table("gone", 5)]);
    }

    #[test]
    fn implausible_counters_are_rejected_without_a_trace() {
        let tables = ServiceTables::new("own");
        let refused = tables.report(SessionId(1), &table("ghost", 1 << 63), NOW).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "service counter 9223372036854775808 of incarnation \"ghost\" exceeds the limit of 1125899906842624"
        );
        let many = v1::ServiceTable {
            tenants: vec![v1::TenantServiceCounter::default(); 10_001],
            ..table("ghost", 1)
        };
        let refused = tables.report(SessionId(1), &many, NOW).unwrap_err();
        assert!(matches!(refused, ImplausibleReport::Tenants { .. }), "{refused}");
        assert_eq!(tables.all(NOW), []);
        tables.report(SessionId(1), &table("gone", 1000), NOW).unwrap();
        let refused = tables.report(SessionId(1), &table("gone", 1 << 40), after(1)).unwrap_err();
        assert!(matches!(refused, ImplausibleReport::Growth { .. }), "{refused}");
        assert_eq!(tables.all(NOW), [table("gone", 1000)]);
        tables.report(SessionId(1), &table("gone", 1 << 40), after(1 << 14)).unwrap();
    }

    #[test]
    fn an_incarnation_is_forgotten_an_hour_after_its_last_reporter_is_gone() {
        let tables = ServiceTables::new("own");
        tables.report(SessionId(1), &table("gone", 5), NOW).unwrap();
        tables.report(SessionId(2), &table("gone", 5), NOW).unwrap();
        tables.close(SessionId(1), after(10));
        assert_eq!(tables.all(after(100_000)), [table("gone", 5)], "one reporter is left");
        tables.close(SessionId(2), after(100_000));
        assert_eq!(tables.all(after(103_599)), [table("gone", 5)]);
        assert_eq!(tables.all(after(103_600)), []);
    }
}

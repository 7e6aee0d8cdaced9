//! Scheduling policies: one file each, with its name, its order and its trade-off.

mod aging;
mod fair;
mod fcfs;
mod priority;
mod static_batch;

use std::cmp::Ordering;
use std::fmt::{self, Debug};
use std::str::FromStr;
use std::time::Duration;

use inflight_contract::{Service, Tenant};

pub use aging::{Aging, InvalidPolicy, Policy};
pub use fair::Fair;
pub use fcfs::Fcfs;
pub use priority::Priority;
pub use static_batch::StaticBatch;

/// Properties of a sequence that a scheduling policy orders by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceView {
    /// Priority; higher is more important.
    pub priority: i32,
    /// Arrival number, counted over submissions.
    pub arrival: u64,
    /// Known tokens plus tokens it may still generate; constant over its lifetime.
    pub tokens: u32,
    /// Tenant of the sequence.
    pub tenant: Tenant,
    /// Virtual time: the tenant's service over its weight.
    pub service: Service,
    /// Current queueing time; zero while it runs.
    pub waited: Duration,
}

/// Order of sequences: the first is admitted first, the last is preempted first.
///
/// The order must be total at any time, and by arrival within a flow (one tenant and priority), since the
/// scheduler considers only the head of each flow. One test suite checks both for every policy.
pub trait SchedulingPolicy: Debug + Send {
    /// Returns the name used in configuration.
    fn name(&self) -> &'static str;

    /// Compares two sequences; `Less` means `a` goes before `b`.
    fn compare(&self, a: &SequenceView, b: &SequenceView) -> Ordering;

    /// Returns true if waiting sequences may be admitted while `running` sequences run. `group_open` is set
    /// if the previous step stopped admitting only because its token budget was used up.
    fn admits(&self, running: usize, group_open: bool) -> bool {
        let _ = (running, group_open);
        true
    }
}

/// Names of the scheduling policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// First come, first served ([`Fcfs`]).
    Fcfs,
    /// By priority with aging ([`Priority`]).
    Priority,
    /// Virtual token counters beneath priorities ([`Fair`]).
    #[default]
    Fair,
    /// Static batching ([`StaticBatch`]).
    Static,
}

/// Unknown name of a scheduling policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown scheduling policy `{0}`; supported are {known}", known = PolicyKind::ALL.map(PolicyKind::name).join(", "))]
pub struct UnknownPolicy(String);

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Fcfs, Self::Priority, Self::Fair, Self::Static];

    /// Returns the name used in configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Priority => "priority",
            Self::Fair => "fair",
            Self::Static => "static",
        }
    }

    /// Creates the policy with default parameters.
    pub fn build(self) -> Box<dyn SchedulingPolicy> {
        Policy::from(self).build()
    }
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_contract::{Service, TokenCost, VirtualTokenCounters, Weight};
    use proptest::prelude::*;

    fn views() -> impl Strategy<Value = Vec<SequenceView>> {
        prop::collection::vec((-2i32..=2, 0usize..3, 0u64..100_000), 1..12).prop_map(|specs| {
            let mut service = VirtualTokenCounters::new(TokenCost::default(), 10);
            let tenants: Vec<_> = (0..3).map(|t| service.arrive(&t.to_string(), Weight::default())).collect();
            service.charge(tenants[1], 700, 10);
            service.charge(tenants[2], 30, 5);
            // Earlier arrivals have longer queueing times.
            let mut waits: Vec<u64> = specs.iter().map(|(_, _, wait)| *wait).collect();
            waits.sort_unstable_by(|a, b| b.cmp(a));
            let views =
                specs.iter().zip(waits).enumerate().map(|(arrival, ((priority, tenant, _), wait))| {
                    SequenceView {
                        priority: *priority,
                        arrival: arrival as u64,
                        tokens: 1,
                        tenant: tenants[*tenant],
                        service: service.service(tenants[*tenant]),
                        waited: Duration::from_millis(wait),
                    }
                });
            views.collect()
        })
    }

    proptest! {
        #[test]
        fn every_policy_is_a_total_order_and_fcfs_within_a_flow(views in views()) {
            for policy in PolicyKind::ALL.map(PolicyKind::build) {
                for a in &views {
                    for b in &views {
                        let order = policy.compare(a, b);
                        prop_assert_eq!(order, policy.compare(b, a).reverse(), "{} is not antisymmetric", policy.name());
                        prop_assert_eq!(order == Ordering::Equal, a.arrival == b.arrival);
                        if (a.priority, a.tenant) == (b.priority, b.tenant) {
                            prop_assert_eq!(order, a.arrival.cmp(&b.arrival), "{} reorders a flow", policy.name());
                        }
                        for c in &views {
                            if order.is_lt() && policy.compare(b, c).is_lt() {
                                prop_assert!(policy.compare(a, c).is_lt(), "{} is not transitive", policy.name());
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn fair_aging_forgives_service_per_second_up_to_its_maximum() {
        let fair = Fair { tokens_per_second: 10.0, tokens_max: 50.0, ..Fair::default() };
        let tenant = VirtualTokenCounters::new(TokenCost::default(), 10).arrive("t", Weight::default());
        let view = |arrival, tokens: u64, seconds| SequenceView {
            priority: 0,
            arrival,
            tokens: 1,
            tenant,
            service: Service::from_thousandths(tokens * 1000),
            waited: Duration::from_secs(seconds),
        };
        let new = view(0, 70, 0);
        assert_eq!(fair.compare(&view(1, 100, 2), &new), Ordering::Greater, "80 tokens against 70");
        assert_eq!(fair.compare(&view(1, 100, 4), &new), Ordering::Less, "60 tokens against 70");
        assert_eq!(
            fair.compare(&view(1, 100, 100), &view(0, 45, 0)),
            Ordering::Greater,
            "50 tokens against 45"
        );
    }

    #[test]
    fn an_overdue_sequence_has_no_priority() {
        let fair = Fair { wait_max: Duration::from_secs(60), ..Fair::default() };
        let tenant = VirtualTokenCounters::new(TokenCost::default(), 10).arrive("t", Weight::default());
        let view = |arrival, priority, seconds| SequenceView {
            priority,
            arrival,
            tokens: 1,
            tenant,
            service: Service::from_thousandths(0),
            waited: Duration::from_secs(seconds),
        };
        // Arrivals in order of `waited`; priorities against it.
        let overdue = [view(0, 0, 90), view(1, 5, 80), view(2, 9, 70)];
        let others = [view(4, 9, 50), view(3, 0, 55)];
        let all: Vec<_> = overdue.into_iter().chain(others).collect();
        for pair in all.windows(2) {
            assert_eq!(fair.compare(&pair[0], &pair[1]), Ordering::Less, "{pair:?}");
        }
    }

    #[test]
    fn names_and_kinds_agree() {
        for kind in PolicyKind::ALL {
            assert_eq!(kind.to_string().parse::<PolicyKind>(), Ok(kind));
            assert_eq!(kind.build().name(), kind.to_string());
        }
        assert!("sjf".parse::<PolicyKind>().is_err());
    }
}

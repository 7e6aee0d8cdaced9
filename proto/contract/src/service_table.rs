//! Service counters of tenants per worker incarnation, exchanged by routers and workers: a grow-only counter
//! CRDT.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::service_counter::ServiceCounter;

/// Maximum plausible service counter, in tokens weighted by [`TokenCost`](crate::TokenCost).
pub const SERVICE_COUNTER_MAX: u64 = 1 << 50;
/// Maximum plausible service of an incarnation per second: far more than any worker computes.
pub const SERVICE_PER_SECOND_MAX: u64 = 1 << 27;
/// Allowance per report beyond [`SERVICE_PER_SECOND_MAX`], for reports that were read late.
pub const SERVICE_PER_REPORT_MAX: u64 = 1 << 30;

/// Returns the maximum plausible growth of an incarnation's counters over the time `since` the last report.
pub fn plausible_growth(since: Duration) -> u64 {
    let seconds = since.as_secs().saturating_add(1);
    SERVICE_PER_SECOND_MAX.saturating_mul(seconds).saturating_add(SERVICE_PER_REPORT_MAX)
}

/// Service of each tenant at each worker incarnation, replicated between routers by way of the workers.
///
/// A grow-only counter CRDT. A worker is the only writer of its incarnation's counters; every other process
/// keeps the largest value reported. Merging is idempotent, commutative and associative, so order and
/// repetition of reports do not matter. Counters of terminated incarnations stay: their service was received.
///
/// Bounds: `incarnations_max` incarnations, `tenants_max` tenants of each, `16 * tenants_max` counters.
/// Eviction beyond a bound: the least recently updated incarnation without a session here
/// ([`ServiceTable::open`]), and within an incarnation the tenants with the least service, a sixteenth of them at a
/// time, which amortizes the search. Evicted service that is reported again is not counted twice: of an incarnation
/// only the growth after its return counts, of a tenant only what exceeds all evicted counters.
///
/// An incarnation that never had a session here is known from other routers' reports alone; it expires
/// ([`ServiceTable::expire`]), so that a false report does no lasting harm.
#[derive(Debug, Clone)]
pub struct ServiceTable {
    incarnations: BTreeMap<String, Incarnation>,
    incarnations_max: usize,
    tenants_max: usize,
    /// Number of counters of all incarnations.
    len: usize,
    /// Number of merges so far: the logical clock of recency.
    merges: u64,
    /// Evicted incarnations by name, with the number of their eviction.
    evicted: BTreeMap<String, u64>,
    /// Evictions, the latest last; one is outdated if `evicted` has another number for its name.
    evictions: VecDeque<(u64, String)>,
    /// Number of the next eviction.
    next_eviction: u64,
    /// Time of the last call of [`ServiceTable::expire`].
    now: Duration,
}

/// Merged counter of a tenant at an incarnation.
#[derive(Debug, Clone, Copy)]
struct MergedCounter {
    charged: ServiceCounter,
    /// Sum of the growth that [`ServiceTable::merge`] returned for it.
    grown: u64,
}

/// Service of a tenant at an expired incarnation, to be refunded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpiredService {
    /// Name of the tenant.
    pub tenant: String,
    /// Growth counted here, in tokens weighted by [`TokenCost`](crate::TokenCost).
    pub cost: u64,
}

#[derive(Debug, Clone, Default)]
struct Incarnation {
    counters: BTreeMap<String, MergedCounter>,
    /// Value of `merges` at its last update.
    updated: u64,
    /// Whether the worker has a session here.
    connected: bool,
    /// Whether the worker has ever had a session here.
    ever_connected: bool,
    /// Time of its first report.
    first_seen: Duration,
    /// Whether it was evicted before: the first value of each tenant was counted then.
    returned: bool,
    /// Upper bound of its evicted counters.
    evicted_cost_max: u64,
}

impl ServiceTable {
    /// Creates an empty table with the given bounds.
    pub fn new(incarnations_max: usize, tenants_max: usize) -> Self {
        Self {
            incarnations: BTreeMap::new(),
            incarnations_max,
            tenants_max,
            len: 0,
            merges: 0,
            evicted: BTreeMap::new(),
            evictions: VecDeque::new(),
            next_eviction: 0,
            now: Duration::ZERO,
        }
    }

    /// Marks an incarnation as connected: its worker has a session here.
    pub fn open(&mut self, incarnation: &str) {
        self.merges += 1;
        self.touch(incarnation);
        if let Some(entry) = self.incarnations.get_mut(incarnation) {
            entry.connected = true;
            entry.ever_connected = true;
        }
    }

    /// Marks an incarnation as disconnected, which makes it evictable.
    pub fn close(&mut self, incarnation: &str) {
        if let Some(entry) = self.incarnations.get_mut(incarnation) {
            entry.connected = false;
        }
        self.shrink(incarnation);
    }

    /// Merges a reported counter and returns its growth: the service not counted here before.
    pub fn merge(&mut self, incarnation: &str, tenant: &str, charged: impl Into<ServiceCounter>) -> u64 {
        let charged = charged.into();
        self.merges += 1;
        let tenants_max = self.tenants_max;
        self.touch(incarnation);
        let Some(entry) = self.incarnations.get_mut(incarnation) else { return 0 };
        if let Some(MergedCounter { charged: known, grown: total }) = entry.counters.get_mut(tenant) {
            let grown = charged.cost.saturating_sub(known.cost.max(charged.base));
            known.cost = known.cost.max(charged.cost);
            known.base = known.base.max(charged.base);
            *total = total.saturating_add(grown);
            return grown;
        }
        let grown = if entry.returned {
            0
        } else {
            charged.cost.saturating_sub(charged.base.max(entry.evicted_cost_max))
        };
        if entry.counters.len() >= tenants_max {
            self.len -= entry.evict_least((tenants_max / 16).max(1));
        }
        entry.counters.insert(tenant.to_owned(), MergedCounter { charged, grown });
        self.len += 1;
        self.shrink(incarnation);
        grown
    }

    /// Returns the value up to which a tenant's counter at an incarnation has been counted; 0 if unknown.
    pub fn counted(&self, incarnation: &str, tenant: &str) -> u64 {
        let Some(entry) = self.incarnations.get(incarnation) else { return 0 };
        entry.counters.get(tenant).map_or(entry.evicted_cost_max, |counter| counter.charged.cost)
    }

    /// Removes the incarnations that never had a session here and were first reported `indirect_age_max` ago or
    /// longer. Returns the growth counted for their tenants. `now` must not decrease between calls.
    pub fn expire(&mut self, now: Duration, indirect_age_max: Duration) -> Vec<ExpiredService> {
        self.now = now;
        let old = self.incarnations.iter().filter(|(_, entry)| {
            !entry.ever_connected && now.saturating_sub(entry.first_seen) >= indirect_age_max
        });
        let old: Vec<String> = old.map(|(name, _)| name.clone()).collect();
        let mut expired = Vec::new();
        for name in old {
            let counters = self.remove(name).into_iter();
            let grown = counters.filter(|(_, counter)| counter.grown > 0);
            expired.extend(grown.map(|(tenant, counter)| ExpiredService { tenant, cost: counter.grown }));
        }
        expired
    }

    /// Iterates over all counters as (incarnation, tenant, counter), grouped by incarnation.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, ServiceCounter)> {
        self.counters(|_| true)
    }

    /// Iterates over the counters of incarnations that have had a session here, as (incarnation, tenant,
    /// counter).
    pub fn first_hand(&self) -> impl Iterator<Item = (&str, &str, ServiceCounter)> {
        self.counters(|entry| entry.ever_connected)
    }

    fn counters(
        &self,
        filter: impl Fn(&Incarnation) -> bool,
    ) -> impl Iterator<Item = (&str, &str, ServiceCounter)> {
        let incarnations = self.incarnations.iter().filter(move |(_, entry)| filter(entry));
        incarnations.flat_map(|(incarnation, entry)| {
            let counters = entry.counters.iter();
            counters.map(move |(tenant, counter)| (incarnation.as_str(), tenant.as_str(), counter.charged))
        })
    }

    /// Returns a tenant's service over all incarnations, in tokens weighted by
    /// [`TokenCost`](crate::TokenCost).
    pub fn total(&self, tenant: &str) -> u64 {
        let counters = self.incarnations.values().filter_map(|entry| entry.counters.get(tenant));
        counters.map(|counter| counter.charged.cost - counter.charged.base).sum()
    }

    /// Inserts an incarnation if it is absent and marks it as the most recently updated.
    fn touch(&mut self, incarnation: &str) {
        if let Some(entry) = self.incarnations.get_mut(incarnation) {
            entry.updated = self.merges;
        } else {
            let returned = self.evicted.remove(incarnation).is_some();
            let entry = Incarnation {
                updated: self.merges,
                returned,
                first_seen: self.now,
                ..Incarnation::default()
            };
            self.incarnations.insert(incarnation.to_owned(), entry);
            self.shrink(incarnation);
        }
    }

    /// Evicts incarnations other than `except` until the table is within its bounds or all others are
    /// connected.
    fn shrink(&mut self, except: &str) {
        while self.incarnations.len() > self.incarnations_max || self.len > 16 * self.tenants_max {
            let evictable =
                self.incarnations.iter().filter(|(name, entry)| !entry.connected && *name != except);
            let oldest = evictable.min_by_key(|(_, entry)| entry.updated).map(|(name, _)| name.clone());
            let Some(name) = oldest else { return };
            self.remove(name);
        }
    }

    /// Returns whether the table holds an incarnation.
    pub fn knows(&self, incarnation: &str) -> bool {
        self.incarnations.contains_key(incarnation)
    }

    /// Evicts an incarnation.
    pub fn forget(&mut self, incarnation: &str) {
        if self.knows(incarnation) {
            self.remove(incarnation.to_owned());
        }
    }

    /// Removes an incarnation, records its name as evicted, and returns its counters.
    fn remove(&mut self, name: String) -> BTreeMap<String, MergedCounter> {
        let counters = self.incarnations.remove(&name).map(|entry| entry.counters).unwrap_or_default();
        self.len -= counters.len();
        self.evicted.insert(name.clone(), self.next_eviction);
        self.evictions.push_back((self.next_eviction, name));
        self.next_eviction += 1;
        if self.evictions.len() > 16 * self.incarnations_max
            && let Some((number, oldest)) = self.evictions.pop_front()
            && self.evicted.get(&oldest) == Some(&number)
        {
            self.evicted.remove(&oldest);
        }
        counters
    }
}

impl Incarnation {
    /// Evicts `count` tenants with the least service. Returns how many there were.
    fn evict_least(&mut self, count: usize) -> usize {
        let mut costs: Vec<_> =
            self.counters.iter().map(|(name, counter)| (counter.charged.cost, name.clone())).collect();
        if count < costs.len() {
            costs.select_nth_unstable(count);
            costs.truncate(count);
        }
        for (cost, name) in &costs {
            self.counters.remove(name);
            self.evicted_cost_max = self.evicted_cost_max.max(*cost);
        }
        costs.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Growing counters, reported in any order and any number of times to any of three tables that
        /// exchange reports, converge to the same values in all tables.
        #[test]
        fn tables_converge_whatever_the_order_and_repetition_of_reports(
            reports in prop::collection::vec((0usize..3, 0u8..3, 0u8..4, 0u64..1000), 1..200)
        ) {
            let mut tables = vec![ServiceTable::new(10, 10); 3];
            let mut truth = BTreeMap::new();
            for (table, incarnation, tenant, cost) in reports {
                let (incarnation, tenant) = (incarnation.to_string(), tenant.to_string());
                tables[table].merge(&incarnation, &tenant, cost);
                let known = truth.entry((incarnation, tenant)).or_insert(0);
                *known = cost.max(*known);
            }
            for from in [0, 1, 2, 0, 1] {
                let reports: Vec<_> =
                    tables[from].iter().map(|(i, t, c)| (i.to_owned(), t.to_owned(), c)).collect();
                for table in &mut tables {
                    for (incarnation, tenant, cost) in &reports {
                        table.merge(incarnation, tenant, *cost);
                    }
                }
            }
            for table in &tables {
                let known: BTreeMap<_, _> =
                    table.iter().map(|(i, t, c)| ((i.to_owned(), t.to_owned()), c.cost)).collect();
                prop_assert_eq!(&known, &truth);
            }
        }

        #[test]
        fn growth_returned_by_merging_adds_up_to_the_totals(
            reports in prop::collection::vec((0u8..3, 0u8..4, 0u64..1000), 1..100)
        ) {
            let mut table = ServiceTable::new(10, 10);
            let mut sums = BTreeMap::new();
            for (incarnation, tenant, cost) in reports {
                let grown = table.merge(&incarnation.to_string(), &tenant.to_string(), cost);
                *sums.entry(tenant.to_string()).or_insert(0) += grown;
            }
            for (tenant, sum) in sums {
                prop_assert_eq!(table.total(&tenant), sum);
            }
        }

        /// However small the table and whatever it evicts, no service is counted twice, and with enough room
        /// for the tenants all service of connected incarnations is counted.
        #[test]
        fn evicted_counters_that_return_are_not_counted_again(
            reports in prop::collection::vec((0u8..6, 0u8..4, 1u64..1000), 1..200), tenants_max in 1usize..5
        ) {
            let mut table = ServiceTable::new(2, tenants_max);
            for incarnation in 0..3u8 {
                table.open(&incarnation.to_string());
            }
            let mut truth: BTreeMap<(u8, u8), u64> = BTreeMap::new();
            let mut counted: BTreeMap<(u8, u8), u64> = BTreeMap::new();
            for (incarnation, tenant, more) in reports {
                let cost = truth.entry((incarnation, tenant)).or_default();
                *cost += more;
                let grown = table.merge(&incarnation.to_string(), &tenant.to_string(), *cost);
                *counted.entry((incarnation, tenant)).or_default() += grown;
            }
            for (key, truth) in truth {
                prop_assert!(counted[&key] <= truth, "{key:?} had {truth} and is charged {}", counted[&key]);
                if key.0 < 3 && tenants_max == 4 {
                    prop_assert_eq!(counted[&key], truth, "{:?} is always connected", key);
                }
            }
        }
    }

    #[test]
    fn indirect_reports_expire_with_their_charges_and_direct_ones_stay() {
        let second = Duration::from_secs;
        let mut table = ServiceTable::new(10, 10);
        table.open("author");
        table.close("author");
        table.merge("author", "t", 5u64);
        assert_eq!(table.merge("ghost", "t", 100u64), 100);
        assert_eq!(table.expire(second(1), second(10)), []);
        assert_eq!(table.merge("late", "t", 7u64), 7);
        assert_eq!(table.merge("ghost", "t", 120u64), 20);
        let expired = ExpiredService { tenant: "t".to_owned(), cost: 120 };
        assert_eq!(table.expire(second(10), second(10)), [expired]);
        assert_eq!(table.total("t"), 12);
        assert_eq!(table.merge("ghost", "t", 130u64), 0, "its first value after expiry was counted before");
        let first_hand: Vec<_> = table.first_hand().map(|(incarnation, ..)| incarnation).collect();
        assert_eq!(first_hand, ["author"]);
        // An incarnation that connects does not expire.
        table.open("late");
        assert_eq!(table.expire(second(100), second(10)).len(), 0);
        assert_eq!(table.total("t"), 12);
    }

    #[test]
    fn a_full_table_evicts_many_tenants_at_a_time() {
        const TENANTS: u64 = 1600;
        let mut table = ServiceTable::new(2, TENANTS as usize);
        let (mut evictions, mut len) = (0, 0);
        for tenant in 0..4 * TENANTS {
            table.merge("a", &tenant.to_string(), 1000 + tenant);
            evictions += u64::from(table.len < len);
            len = table.len;
            assert_eq!(table.iter().count(), len);
        }
        // Each search through the table makes room for a hundred.
        assert_eq!(evictions, 3 * TENANTS / 100);
        let least = table.iter().map(|(.., counter)| counter.cost).min();
        assert_eq!(least, Some(1000 + 3 * TENANTS), "those with the least service are evicted");
    }

    #[test]
    fn an_incarnation_that_is_evicted_again_and_again_is_never_counted_twice() {
        let mut table = ServiceTable::new(1, 2);
        assert_eq!(table.merge("a", "t", 5u64), 5);
        for other in 0..100u32 {
            // The evictions of `a` are many; those of the others are forgotten beyond sixteen.
            assert_eq!(table.merge(&other.to_string(), "t", 1u64), 1);
            assert_eq!(table.merge("a", "t", 5u64), 0, "after {other}");
        }
        assert!(table.evicted.len() <= 17 && table.evictions.len() <= 16, "{table:?}");
    }

    #[test]
    fn the_table_is_bounded_and_evicts_the_least_recently_updated() {
        let mut table = ServiceTable::new(2, 2);
        for (incarnation, tenant, cost) in [("a", "x", 5u64), ("b", "x", 5), ("a", "y", 1), ("c", "x", 5)] {
            table.merge(incarnation, tenant, cost);
        }
        assert_eq!(table.total("x"), 10, "b is evicted");
        table.merge("a", "z", 3u64);
        let of_a: Vec<_> = table.iter().filter(|(i, ..)| *i == "a").collect();
        assert_eq!(of_a, [("a", "x", 5u64.into()), ("a", "z", 3u64.into())]);
        assert_eq!(table.merge("a", "y", 1u64), 0, "it was counted before its eviction");
        assert_eq!(table.merge("b", "x", 5u64), 0, "so was this");
        assert_eq!(table.merge("b", "x", 7u64), 2);
    }
}

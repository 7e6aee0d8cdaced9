//! Service counters of tenants at every worker incarnation, as routers and workers exchange them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::tenant_service::Charged;

/// Largest plausible service counter, in tokens as weighted by [`TokenCost`](crate::TokenCost).
pub const SERVICE_COUNTER_MAX: u64 = 1 << 50;
/// Most service that an incarnation plausibly gives in a second: far more than any worker computes.
pub const SERVICE_PER_SECOND_MAX: u64 = 1 << 27;
/// Most service that may be reported at once beyond that, for reports that were read late.
pub const SERVICE_PER_REPORT_MAX: u64 = 1 << 30;

/// Most service that an incarnation can plausibly have given since it was reported of last.
pub fn plausible_growth(since: Duration) -> u64 {
    let seconds = since.as_secs().saturating_add(1);
    SERVICE_PER_SECOND_MAX.saturating_mul(seconds).saturating_add(SERVICE_PER_REPORT_MAX)
}

/// Which tenant had how much service at which worker: what a cluster knows of its past, and the way by which several
/// routers share it with nothing but the workers between them.
///
/// A worker is the only author of the counters of its incarnation; they only grow. Everybody else keeps the largest
/// value heard of, so that merging is idempotent, commutative and associative: it does not matter who tells whom how
/// often. Counters of incarnations that are gone stay, for what they served stays served.
///
/// Bounds: at most `incarnations_max` incarnations with at most `tenants_max` tenants each, and 16 times as many
/// counters in all. Past these goes the incarnation heard of least recently, though never one whose author is
/// connected ([`ServiceTable::open`]), and of an incarnation's tenants the one with the least service. What comes back
/// after that is not counted twice: of an incarnation, only what grows after it is back; of a tenant, only what is
/// above all that went.
///
/// What is known of an incarnation only by hearsay, because its author was never connected here, is forgotten after a
/// time ([`ServiceTable::expire`]): a false report does no lasting harm.
#[derive(Debug, Clone)]
pub struct ServiceTable {
    incarnations: BTreeMap<String, Incarnation>,
    incarnations_max: usize,
    tenants_max: usize,
    /// Counters in all.
    len: usize,
    /// Counts merges, for recency.
    merges: u64,
    /// Names of incarnations that had to go, the latest last.
    dropped: VecDeque<String>,
    /// As of the last call of [`ServiceTable::expire`].
    now: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Counter {
    charged: Charged,
    /// By how much it grew here.
    grown: u64,
}

/// Service of a tenant that is not counted any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expired {
    /// Whose it was.
    pub tenant: String,
    /// By how much its counter had grown here.
    pub cost: u64,
}

#[derive(Debug, Clone, Default)]
struct Incarnation {
    counters: BTreeMap<String, Counter>,
    heard: u64,
    /// Its author is connected.
    open: bool,
    /// Its author was connected at some time.
    first_hand: bool,
    /// When it was first heard of.
    since: Duration,
    /// It was dropped before: what it says first of a tenant was counted then.
    returned: bool,
    /// No counter that had to go was above this.
    gone: u64,
}

impl ServiceTable {
    /// An empty table.
    pub fn new(incarnations_max: usize, tenants_max: usize) -> Self {
        let (incarnations, dropped) = (BTreeMap::new(), VecDeque::new());
        let now = Duration::ZERO;
        Self { incarnations, incarnations_max, tenants_max, len: 0, merges: 0, dropped, now }
    }

    /// The author of an incarnation's counters is connected.
    pub fn open(&mut self, incarnation: &str) {
        self.merges += 1;
        self.touch(incarnation);
        if let Some(entry) = self.incarnations.get_mut(incarnation) {
            entry.open = true;
            entry.first_hand = true;
        }
    }

    /// It is not any more.
    pub fn close(&mut self, incarnation: &str) {
        if let Some(entry) = self.incarnations.get_mut(incarnation) {
            entry.open = false;
        }
        self.shrink(incarnation);
    }

    /// Takes a counter in; returns by how much it grew here.
    pub fn merge(&mut self, incarnation: &str, tenant: &str, charged: impl Into<Charged>) -> u64 {
        let charged = charged.into();
        self.merges += 1;
        let tenants_max = self.tenants_max;
        self.touch(incarnation);
        let Some(entry) = self.incarnations.get_mut(incarnation) else { return 0 };
        if let Some(Counter { charged: known, grown: all }) = entry.counters.get_mut(tenant) {
            let grown = charged.cost.saturating_sub(known.cost.max(charged.base));
            known.cost = known.cost.max(charged.cost);
            known.base = known.base.max(charged.base);
            *all = all.saturating_add(grown);
            return grown;
        }
        let grown =
            if entry.returned { 0 } else { charged.cost.saturating_sub(charged.base.max(entry.gone)) };
        let full = entry.counters.len() >= tenants_max;
        if full {
            let costs = entry.counters.iter().map(|(name, counter)| (counter.charged.cost, name));
            if let Some((cost, least)) = costs.min().map(|(cost, name)| (cost, name.clone())) {
                entry.counters.remove(&least);
                entry.gone = entry.gone.max(cost);
            }
        }
        entry.counters.insert(tenant.to_owned(), Counter { charged, grown });
        if !full {
            self.len += 1;
            self.shrink(incarnation);
        }
        grown
    }

    /// From where a tenant's counter at an incarnation would grow here.
    pub fn counted(&self, incarnation: &str, tenant: &str) -> u64 {
        let Some(entry) = self.incarnations.get(incarnation) else { return 0 };
        entry.counters.get(tenant).map_or(entry.gone, |counter| counter.charged.cost)
    }

    /// Forgets the incarnations that are known by hearsay alone, and were first heard of `hearsay_max` ago or longer.
    /// `now` never goes back. Returns what their tenants were charged here.
    pub fn expire(&mut self, now: Duration, hearsay_max: Duration) -> Vec<Expired> {
        self.now = now;
        let old = self
            .incarnations
            .iter()
            .filter(|(_, entry)| !entry.first_hand && now.saturating_sub(entry.since) >= hearsay_max);
        let old: Vec<String> = old.map(|(name, _)| name.clone()).collect();
        let mut expired = Vec::new();
        for name in old {
            let counters = self.remove(name).into_iter();
            let grown = counters.filter(|(_, counter)| counter.grown > 0);
            expired.extend(grown.map(|(tenant, counter)| Expired { tenant, cost: counter.grown }));
        }
        expired
    }

    /// All counters, as (incarnation, tenant, counter), one incarnation after the other.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, Charged)> {
        self.counters(|_| true)
    }

    /// The counters of incarnations whose authors were connected here, in the same form.
    pub fn first_hand(&self) -> impl Iterator<Item = (&str, &str, Charged)> {
        self.counters(|entry| entry.first_hand)
    }

    fn counters(&self, of: impl Fn(&Incarnation) -> bool) -> impl Iterator<Item = (&str, &str, Charged)> {
        let incarnations = self.incarnations.iter().filter(move |(_, entry)| of(entry));
        incarnations.flat_map(|(incarnation, entry)| {
            let counters = entry.counters.iter();
            counters.map(move |(tenant, counter)| (incarnation.as_str(), tenant.as_str(), counter.charged))
        })
    }

    /// What a tenant had at all incarnations together.
    pub fn total(&self, tenant: &str) -> u64 {
        let counters = self.incarnations.values().filter_map(|entry| entry.counters.get(tenant));
        counters.map(|counter| counter.charged.cost - counter.charged.base).sum()
    }

    /// Makes sure that an incarnation is there, heard of just now.
    fn touch(&mut self, incarnation: &str) {
        if let Some(entry) = self.incarnations.get_mut(incarnation) {
            entry.heard = self.merges;
        } else {
            let place = self.dropped.iter().position(|dropped| dropped == incarnation);
            let returned = place.and_then(|place| self.dropped.remove(place)).is_some();
            let entry =
                Incarnation { heard: self.merges, returned, since: self.now, ..Incarnation::default() };
            self.incarnations.insert(incarnation.to_owned(), entry);
            self.shrink(incarnation);
        }
    }

    /// Drops incarnations but `kept` until the table is within its bounds, or only what is open is left.
    fn shrink(&mut self, kept: &str) {
        while self.incarnations.len() > self.incarnations_max || self.len > 16 * self.tenants_max {
            let closed = self.incarnations.iter().filter(|(name, entry)| !entry.open && *name != kept);
            let oldest = closed.min_by_key(|(_, entry)| entry.heard).map(|(name, _)| name.clone());
            let Some(name) = oldest else { return };
            self.remove(name);
        }
    }

    /// Whether anything is known of an incarnation.
    pub fn knows(&self, incarnation: &str) -> bool {
        self.incarnations.contains_key(incarnation)
    }

    /// Forgets an incarnation.
    pub fn forget(&mut self, incarnation: &str) {
        if self.knows(incarnation) {
            self.remove(incarnation.to_owned());
        }
    }

    /// Removes an incarnation and remembers its name; returns its counters.
    fn remove(&mut self, name: String) -> BTreeMap<String, Counter> {
        let counters = self.incarnations.remove(&name).map(|entry| entry.counters).unwrap_or_default();
        self.len -= counters.len();
        self.dropped.push_back(name);
        if self.dropped.len() > 16 * self.incarnations_max {
            self.dropped.pop_front();
        }
        counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Growing counters told in any order, any number of times, through any of three tables that tell each
        /// other, come out the same everywhere.
        #[test]
        fn tables_that_heard_the_same_agree_whatever_the_order_and_the_repetitions(
            told in prop::collection::vec((0usize..3, 0u8..3, 0u8..4, 0u64..1000), 1..200)
        ) {
            let mut tables = vec![ServiceTable::new(10, 10); 3];
            let mut truth = BTreeMap::new();
            for (table, incarnation, tenant, cost) in told {
                let (incarnation, tenant) = (incarnation.to_string(), tenant.to_string());
                tables[table].merge(&incarnation, &tenant, cost);
                let known = truth.entry((incarnation, tenant)).or_insert(0);
                *known = cost.max(*known);
            }
            for from in [0, 1, 2, 0, 1] {
                let told: Vec<_> =
                    tables[from].iter().map(|(i, t, c)| (i.to_owned(), t.to_owned(), c)).collect();
                for table in &mut tables {
                    for (incarnation, tenant, cost) in &told {
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
        fn what_merging_returns_adds_up_to_the_totals(
            told in prop::collection::vec((0u8..3, 0u8..4, 0u64..1000), 1..100)
        ) {
            let mut table = ServiceTable::new(10, 10);
            let mut sums = BTreeMap::new();
            for (incarnation, tenant, cost) in told {
                let grown = table.merge(&incarnation.to_string(), &tenant.to_string(), cost);
                *sums.entry(tenant.to_string()).or_insert(0) += grown;
            }
            for (tenant, sum) in sums {
                prop_assert_eq!(table.total(&tenant), sum);
            }
        }

        /// However small the table and whatever it had to drop in between, no service is counted twice, and within the
        /// bounds of what is open none of theirs is missed.
        #[test]
        fn what_had_to_go_and_comes_back_is_not_counted_again(
            told in prop::collection::vec((0u8..6, 0u8..4, 1u64..1000), 1..200), tenants_max in 1usize..5
        ) {
            let mut table = ServiceTable::new(2, tenants_max);
            for incarnation in 0..3u8 {
                table.open(&incarnation.to_string());
            }
            let mut truth: BTreeMap<(u8, u8), u64> = BTreeMap::new();
            let mut counted: BTreeMap<(u8, u8), u64> = BTreeMap::new();
            for (incarnation, tenant, more) in told {
                let cost = truth.entry((incarnation, tenant)).or_default();
                *cost += more;
                let grown = table.merge(&incarnation.to_string(), &tenant.to_string(), *cost);
                *counted.entry((incarnation, tenant)).or_default() += grown;
            }
            for (key, truth) in truth {
                prop_assert!(counted[&key] <= truth, "{key:?} had {truth} and is charged {}", counted[&key]);
                if key.0 < 3 && tenants_max == 4 {
                    prop_assert_eq!(counted[&key], truth, "{:?} is open all the time", key);
                }
            }
        }
    }

    #[test]
    fn hearsay_expires_with_what_it_charged_and_what_an_author_said_stays() {
        let second = Duration::from_secs;
        let mut table = ServiceTable::new(10, 10);
        table.open("author");
        table.close("author");
        table.merge("author", "t", 5u64);
        assert_eq!(table.merge("ghost", "t", 100u64), 100);
        assert_eq!(table.expire(second(1), second(10)), []);
        assert_eq!(table.merge("late", "t", 7u64), 7);
        assert_eq!(table.merge("ghost", "t", 120u64), 20);
        let expired = Expired { tenant: "t".to_owned(), cost: 120 };
        assert_eq!(table.expire(second(10), second(10)), [expired]);
        assert_eq!(table.total("t"), 12);
        assert_eq!(table.merge("ghost", "t", 130u64), 0, "what it says first now was counted and expired");
        let first_hand: Vec<_> = table.first_hand().map(|(incarnation, ..)| incarnation).collect();
        assert_eq!(first_hand, ["author"]);
        // An author that connects is believed.
        table.open("late");
        assert_eq!(table.expire(second(100), second(10)).len(), 0);
        assert_eq!(table.total("t"), 12);
    }

    #[test]
    fn the_table_is_bounded_and_keeps_what_was_heard_of_last() {
        let mut table = ServiceTable::new(2, 2);
        for (incarnation, tenant, cost) in [("a", "x", 5u64), ("b", "x", 5), ("a", "y", 1), ("c", "x", 5)] {
            table.merge(incarnation, tenant, cost);
        }
        assert_eq!(table.total("x"), 10, "b is gone");
        table.merge("a", "z", 3u64);
        let of_a: Vec<_> = table.iter().filter(|(i, ..)| *i == "a").collect();
        assert_eq!(of_a, [("a", "x", 5u64.into()), ("a", "z", 3u64.into())]);
        assert_eq!(table.merge("a", "y", 1u64), 0, "it was counted before it went");
        assert_eq!(table.merge("b", "x", 5u64), 0, "so was this");
        assert_eq!(table.merge("b", "x", 7u64), 2);
    }
}

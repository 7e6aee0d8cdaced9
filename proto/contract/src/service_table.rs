use std::collections::{BTreeMap, VecDeque};

use crate::tenant_service::Charged;

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
}

#[derive(Debug, Clone, Default)]
struct Incarnation {
    charged: BTreeMap<String, Charged>,
    heard: u64,
    /// Its author is connected.
    open: bool,
    /// It was dropped before: what it says first of a tenant was counted then.
    returned: bool,
    /// No counter that had to go was above this.
    gone: u64,
}

impl ServiceTable {
    /// An empty table.
    pub fn new(incarnations_max: usize, tenants_max: usize) -> Self {
        let (incarnations, dropped) = (BTreeMap::new(), VecDeque::new());
        Self { incarnations, incarnations_max, tenants_max, len: 0, merges: 0, dropped }
    }

    /// The author of an incarnation's counters is connected.
    pub fn open(&mut self, incarnation: &str) {
        self.merges += 1;
        self.touch(incarnation);
        if let Some(entry) = self.incarnations.get_mut(incarnation) {
            entry.open = true;
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
        if let Some(known) = entry.charged.get_mut(tenant) {
            let grown = charged.cost.saturating_sub(known.cost.max(charged.base));
            known.cost = known.cost.max(charged.cost);
            known.base = known.base.max(charged.base);
            return grown;
        }
        let grown =
            if entry.returned { 0 } else { charged.cost.saturating_sub(charged.base.max(entry.gone)) };
        let full = entry.charged.len() >= tenants_max;
        if full {
            let least = entry.charged.iter().min_by_key(|(_, charged)| charged.cost);
            if let Some((least, cost)) = least.map(|(name, charged)| (name.clone(), charged.cost)) {
                entry.charged.remove(&least);
                entry.gone = entry.gone.max(cost);
            }
        }
        entry.charged.insert(tenant.to_owned(), charged);
        if !full {
            self.len += 1;
            self.shrink(incarnation);
        }
        grown
    }

    /// From where a tenant's counter at an incarnation would grow here.
    pub fn counted(&self, incarnation: &str, tenant: &str) -> u64 {
        let Some(entry) = self.incarnations.get(incarnation) else { return 0 };
        entry.charged.get(tenant).map_or(entry.gone, |charged| charged.cost)
    }

    /// All counters, as (incarnation, tenant, counter), one incarnation after the other.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, Charged)> {
        self.incarnations.iter().flat_map(|(incarnation, entry)| {
            entry
                .charged
                .iter()
                .map(move |(tenant, charged)| (incarnation.as_str(), tenant.as_str(), *charged))
        })
    }

    /// What a tenant had at all incarnations together.
    pub fn total(&self, tenant: &str) -> u64 {
        let charged = self.incarnations.values().filter_map(|entry| entry.charged.get(tenant));
        charged.map(|charged| charged.cost - charged.base).sum()
    }

    /// Makes sure that an incarnation is there, heard of just now.
    fn touch(&mut self, incarnation: &str) {
        if let Some(entry) = self.incarnations.get_mut(incarnation) {
            entry.heard = self.merges;
        } else {
            let place = self.dropped.iter().position(|dropped| dropped == incarnation);
            let returned = place.and_then(|place| self.dropped.remove(place)).is_some();
            let entry = Incarnation { heard: self.merges, returned, ..Incarnation::default() };
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
            self.len -= self.incarnations.remove(&name).map_or(0, |entry| entry.charged.len());
            self.dropped.push_back(name);
            if self.dropped.len() > 16 * self.incarnations_max {
                self.dropped.pop_front();
            }
        }
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

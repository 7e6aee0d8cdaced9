use std::collections::BTreeMap;

/// Which tenant had how much service at which worker: what a cluster knows of its past, and the way by which several
/// routers share it with nothing but the workers between them.
///
/// A worker is the only author of the counters of its incarnation; they only grow. Everybody else keeps the largest
/// value heard of, so that merging is idempotent, commutative and associative: it does not matter who tells whom how
/// often. Counters of incarnations that are gone stay, for what they served stays served.
///
/// Bounds: at most `incarnations_max` incarnations (past it, the one heard of least recently is dropped) with at most
/// `tenants_max` tenants each (past it, the one with the least service).
#[derive(Debug, Clone)]
pub struct ServiceTable {
    incarnations: BTreeMap<String, Incarnation>,
    incarnations_max: usize,
    tenants_max: usize,
    /// Counts merges, for recency.
    merges: u64,
}

#[derive(Debug, Clone, Default)]
struct Incarnation {
    costs: BTreeMap<String, u64>,
    heard: u64,
}

impl ServiceTable {
    /// An empty table.
    pub fn new(incarnations_max: usize, tenants_max: usize) -> Self {
        Self { incarnations: BTreeMap::new(), incarnations_max, tenants_max, merges: 0 }
    }

    /// Takes a counter in; returns by how much it grew here.
    pub fn merge(&mut self, incarnation: &str, tenant: &str, cost: u64) -> u64 {
        self.merges += 1;
        let merges = self.merges;
        if !self.incarnations.contains_key(incarnation) {
            if self.incarnations.len() >= self.incarnations_max {
                self.drop_oldest();
            }
            self.incarnations.insert(incarnation.to_owned(), Incarnation::default());
        }
        let Some(entry) = self.incarnations.get_mut(incarnation) else { return 0 };
        entry.heard = merges;
        if let Some(known) = entry.costs.get_mut(tenant) {
            let grown = cost.saturating_sub(*known);
            *known += grown;
            return grown;
        }
        if entry.costs.len() >= self.tenants_max {
            let least = entry.costs.iter().min_by_key(|(_, cost)| **cost).map(|(name, _)| name.clone());
            least.and_then(|least| entry.costs.remove(&least));
        }
        entry.costs.insert(tenant.to_owned(), cost);
        cost
    }

    /// All counters, as (incarnation, tenant, cost).
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, u64)> {
        self.incarnations.iter().flat_map(|(incarnation, entry)| {
            entry.costs.iter().map(move |(tenant, cost)| (incarnation.as_str(), tenant.as_str(), *cost))
        })
    }

    /// What a tenant had at all incarnations together.
    pub fn total(&self, tenant: &str) -> u64 {
        self.incarnations.values().filter_map(|entry| entry.costs.get(tenant)).sum()
    }

    fn drop_oldest(&mut self) {
        let oldest = self.incarnations.iter().min_by_key(|(_, entry)| entry.heard);
        if let Some(name) = oldest.map(|(name, _)| name.clone()) {
            self.incarnations.remove(&name);
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
                    table.iter().map(|(i, t, c)| ((i.to_owned(), t.to_owned()), c)).collect();
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
    }

    #[test]
    fn the_table_is_bounded_and_keeps_what_was_heard_of_last() {
        let mut table = ServiceTable::new(2, 2);
        for (incarnation, tenant, cost) in [("a", "x", 5), ("b", "x", 5), ("a", "y", 1), ("c", "x", 5)] {
            table.merge(incarnation, tenant, cost);
        }
        assert_eq!(table.total("x"), 10, "b is gone");
        table.merge("a", "z", 3);
        let of_a: Vec<_> = table.iter().filter(|(i, ..)| *i == "a").collect();
        assert_eq!(of_a, [("a", "x", 5), ("a", "z", 3)]);
    }
}

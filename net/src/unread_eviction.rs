//! Choice of the connections to close when responses that are not read exceed their budget.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::shared_pool::Holder;

/// What one connection has of the budget.
pub(crate) struct ConnectionLoad {
    /// Bytes of all its responses.
    pub bytes: u64,
    /// Bytes of the responses for which it may be closed, with the holder of each.
    pub unread: Vec<(Option<Holder>, u64)>,
}

/// Name of a holder; `None` for calls without one.
type Name = Option<Arc<str>>;

/// What one holder has in all connections.
struct HolderLoad {
    weight: f64,
    bytes: u64,
    /// Indices of its connections, with its bytes in each; ascending, so that the last has most.
    connections: Vec<(u64, usize)>,
}

/// Returns the indices of the connections to close, in that order, so that at most `limit` of `total` bytes remain, if as many can be
/// freed: each time the connection in which the holder with most unread bytes for its weight has most. So a holder that keeps to its
/// share loses no connection for what others leave unread, unless it shares one with them.
pub(crate) fn evictions(connections: &[ConnectionLoad], mut total: u64, limit: u64) -> Vec<usize> {
    let mut holders: BTreeMap<Name, HolderLoad> = BTreeMap::new();
    for (index, connection) in connections.iter().enumerate() {
        for (name, (weight, bytes)) in by_holder(connection) {
            let holder =
                holders.entry(name).or_insert(HolderLoad { weight, bytes: 0, connections: Vec::new() });
            holder.bytes += bytes;
            holder.connections.push((bytes, index));
        }
    }
    holders.values_mut().for_each(|holder| holder.connections.sort_unstable_by_key(|(bytes, _)| *bytes));
    let mut closed = vec![false; connections.len()];
    let mut evictions = Vec::new();
    while total > limit {
        let heaviest = holders.values_mut().filter(|holder| holder.bytes > 0);
        let load = |holder: &HolderLoad| holder.bytes as f64 / holder.weight;
        let Some(holder) = heaviest.max_by(|a, b| load(a).total_cmp(&load(b))) else { break };
        // Bytes above 0 are those of connections that are open.
        let Some((_, index)) = holder.connections.pop() else { break };
        if std::mem::replace(&mut closed[index], true) {
            continue;
        }
        total = total.saturating_sub(connections[index].bytes);
        for (name, (_, bytes)) in by_holder(&connections[index]) {
            if let Some(holder) = holders.get_mut(&name) {
                holder.bytes -= bytes;
            }
        }
        evictions.push(index);
    }
    evictions
}

/// Sums a connection's unread bytes by holder, with its weight; holders without any are left out.
fn by_holder(connection: &ConnectionLoad) -> BTreeMap<Name, (f64, u64)> {
    let mut sums = BTreeMap::new();
    for (holder, bytes) in connection.unread.iter().filter(|(_, bytes)| *bytes > 0) {
        let name = holder.as_ref().map(|holder| holder.name.clone());
        sums.entry(name).or_insert((holder.as_ref().map_or(1.0, |holder| holder.weight), 0)).1 += bytes;
    }
    sums
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn connection(bytes: u64, unread: &[(&str, u64)]) -> ConnectionLoad {
        let holder = |name: &str| {
            let (name, weight) = name.split_once('*').unwrap_or((name, "1"));
            (!name.is_empty()).then(|| Holder { name: name.into(), weight: weight.parse().unwrap() })
        };
        ConnectionLoad { bytes, unread: unread.iter().map(|(name, bytes)| (holder(name), *bytes)).collect() }
    }

    #[test]
    fn the_holder_with_most_for_its_weight_loses_its_heaviest_connections() {
        let one = [connection(90, &[("", 90)]), connection(30, &[("", 20)]), connection(100, &[("", 40)])];
        assert_eq!(evictions(&one, 220, 220), [0; 0]);
        assert_eq!(evictions(&one, 220, 130), [0], "without names, the heaviest");
        assert_eq!(evictions(&one, 220, 0), [0, 2, 1]);
        // Sixty small connections of a tenant beside the one large one of another.
        let mut many: Vec<_> = (0..60).map(|_| connection(10, &[("many", 10)])).collect();
        many.push(connection(200, &[("one", 200)]));
        assert!(evictions(&many, 800, 420).iter().all(|index| *index < 60));
        assert!(evictions(&many, 800, 300).contains(&60), "now it has as much");
        let weights = [connection(100, &[("light", 100)]), connection(250, &[("heavy*3", 250)])];
        assert_eq!(evictions(&weights, 350, 300), [0]);
        let shared = [connection(100, &[("a", 60), ("b", 40)]), connection(50, &[("b", 50)])];
        assert_eq!(evictions(&shared, 150, 100), [1], "b has most, and there most of it");
        assert_eq!(evictions(&[connection(100, &[("a", 0)])], 100, 10), [0; 0], "nothing is unread");
    }

    proptest! {
        /// No more connections are closed than needed, as few bytes remain as can be, and a holder under an equal share of the limit
        /// loses no connection of its own.
        #[test]
        fn a_holder_within_its_share_of_the_limit_keeps_its_connections(
            loads in prop::collection::vec((0..4usize, 0..100u64), 1..40), limit in 0..2000u64
        ) {
            let names = ["a", "b", "c", "d"];
            let connections: Vec<_> =
                loads.iter().map(|(who, bytes)| connection(*bytes, &[(names[*who], *bytes)])).collect();
            let total: u64 = loads.iter().map(|(_, bytes)| bytes).sum();
            let closed = evictions(&connections, total, limit);
            let left = |closed: &[usize]| total - closed.iter().map(|index| loads[*index].1).sum::<u64>();
            prop_assert!(left(&closed) <= limit);
            prop_assert!(closed.is_empty() || left(&closed[..closed.len() - 1]) > limit);
            for who in 0..4 {
                let own: u64 = loads.iter().filter(|(holder, _)| *holder == who).map(|(_, bytes)| bytes).sum();
                if own <= limit / 4 {
                    prop_assert!(closed.iter().all(|index| loads[*index].0 != who));
                }
            }
        }
    }
}

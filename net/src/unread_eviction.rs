//! Choice of the connections to close when responses that are not read exceed their budget.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::shared_pool::Holder;

/// What one connection has of the budget.
pub(crate) struct ConnectionLoad {
    /// Its responses.
    pub responses: Vec<ResponseLoad>,
}

/// Data of a response that waits for its client.
pub(crate) struct ResponseLoad {
    pub holder: Option<Holder>,
    pub bytes: u64,
    /// Whether its connection may be closed for it.
    pub is_unread: bool,
}

impl ConnectionLoad {
    /// Bytes of all its responses.
    pub(crate) fn bytes(&self) -> u64 {
        self.responses.iter().map(|response| response.bytes).sum()
    }
}

/// Name of a holder; `None` for calls without one.
type Name = Option<Arc<str>>;

impl ResponseLoad {
    fn name(&self) -> Name {
        self.holder.as_ref().map(|holder| holder.name.clone())
    }
}

/// What one holder has in all open connections.
struct HolderLoad {
    weight: f64,
    /// Bytes of all its responses, whether their client reads or not.
    bytes: u64,
    /// Indices of the connections that may be closed for it, with its unread bytes in each; ascending, so that the last has most.
    connections: Vec<(u64, usize)>,
}

/// Returns the indices of the connections to close, in that order, until at most `limit` bytes remain or none may be closed: each time, of
/// the holders above their weighted share of the limit the one with most bytes for its weight loses the connection in which it has most
/// unread bytes. So a holder within its share loses no connection for what others hold, read slowly or not at all, unless it shares
/// one with them.
pub(crate) fn evictions(connections: &[ConnectionLoad], limit: u64) -> Vec<usize> {
    let mut holders: BTreeMap<Name, HolderLoad> = BTreeMap::new();
    for (index, connection) in connections.iter().enumerate() {
        for response in connection.responses.iter().filter(|response| response.bytes > 0) {
            let weight = response.holder.as_ref().map_or(1.0, |holder| holder.weight);
            let new = HolderLoad { weight, bytes: 0, connections: Vec::new() };
            let holder = holders.entry(response.name()).or_insert(new);
            holder.bytes += response.bytes;
            if response.is_unread {
                match holder.connections.last_mut() {
                    Some((bytes, last)) if *last == index => *bytes += response.bytes,
                    _ => holder.connections.push((response.bytes, index)),
                }
            }
        }
    }
    holders.values_mut().for_each(|holder| holder.connections.sort_unstable_by_key(|(bytes, _)| *bytes));
    let share = limit as f64 / holders.values().map(|holder| holder.weight).sum::<f64>();
    let mut total: u64 = connections.iter().map(ConnectionLoad::bytes).sum();
    let mut closed = vec![false; connections.len()];
    let mut evictions = Vec::new();
    while total > limit {
        let load = |holder: &HolderLoad| holder.bytes as f64 / holder.weight;
        let above =
            holders.values_mut().filter(|holder| load(holder) > share && !holder.connections.is_empty());
        let Some(holder) = above.max_by(|a, b| load(a).total_cmp(&load(b))) else { break };
        // Just seen not to be empty.
        let Some((_, index)) = holder.connections.pop() else { break };
        if std::mem::replace(&mut closed[index], true) {
            continue;
        }
        total -= connections[index].bytes();
        for response in &connections[index].responses {
            if let Some(holder) = holders.get_mut(&response.name()) {
                holder.bytes -= response.bytes;
            }
        }
        evictions.push(index);
    }
    evictions
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Connection with these responses (`NAME*WEIGHT` of the holder, or empty; `+`: the client reads it) and their bytes.
    fn connection(responses: &[(&str, u64)]) -> ConnectionLoad {
        let response = |(name, bytes): &(&str, u64)| {
            let (name, is_unread) = name.strip_suffix('+').map_or((*name, true), |name| (name, false));
            let (name, weight) = name.split_once('*').unwrap_or((name, "1"));
            let holder =
                (!name.is_empty()).then(|| Holder { name: name.into(), weight: weight.parse().unwrap() });
            ResponseLoad { holder, bytes: *bytes, is_unread }
        };
        ConnectionLoad { responses: responses.iter().map(response).collect() }
    }

    #[test]
    fn the_holder_with_most_for_its_weight_loses_its_heaviest_connections() {
        let one =
            [connection(&[("", 90)]), connection(&[("", 20), ("+", 10)]), connection(&[("", 40), ("+", 60)])];
        assert_eq!(evictions(&one, 220), [0; 0]);
        assert_eq!(evictions(&one, 130), [0], "without names, the heaviest");
        assert_eq!(evictions(&one, 0), [0, 2, 1]);
        // Sixty small connections of a tenant beside the one large one of another.
        let mut many: Vec<_> = (0..60).map(|_| connection(&[("many", 10)])).collect();
        many.push(connection(&[("one", 200)]));
        assert!(evictions(&many, 420).iter().all(|index| *index < 60));
        assert!(evictions(&many, 300).contains(&60), "now it has as much");
        let weights = [connection(&[("light", 100)]), connection(&[("heavy*3", 250)])];
        assert_eq!(evictions(&weights, 300), [0]);
        let shared = [connection(&[("a", 60), ("b", 40)]), connection(&[("b", 50)])];
        assert_eq!(evictions(&shared, 100), [1], "b has most, and there most of it");
        assert_eq!(evictions(&[connection(&[("a+", 100)])], 10), [0; 0], "nothing is unread");
    }

    #[test]
    fn a_client_that_reads_a_little_does_not_have_others_closed() {
        let mut connections: Vec<_> = (0..17).map(|_| connection(&[("trickling+", 16)])).collect();
        connections.push(connection(&[("paused", 20)]));
        assert_eq!(evictions(&connections, 256), [0; 0]);
        connections.push(connection(&[("trickling", 16)]));
        assert_eq!(evictions(&connections, 256), [18]);
    }

    proptest! {
        /// No more connections are closed than needed, and a holder within an equal share of the limit loses no connection of its own.
        #[test]
        fn a_holder_within_its_share_of_the_limit_keeps_its_connections(
            loads in prop::collection::vec((0..4usize, 0..100u64, any::<bool>()), 1..40), limit in 0..2000u64, all: bool,
        ) {
            let names = [["a", "a+"], ["b", "b+"], ["c", "c+"], ["d", "d+"]];
            let name = |who: usize, reads: bool| names[who][usize::from(reads && !all)];
            let connections: Vec<_> =
                loads.iter().map(|(who, bytes, reads)| connection(&[(name(*who, *reads), *bytes)])).collect();
            let total: u64 = loads.iter().map(|(_, bytes, _)| bytes).sum();
            let closed = evictions(&connections, limit);
            let left = |closed: &[usize]| total - closed.iter().map(|index| loads[*index].1).sum::<u64>();
            prop_assert!(!all || left(&closed) <= limit);
            prop_assert!(closed.is_empty() || left(&closed[..closed.len() - 1]) > limit);
            for who in 0..4 {
                let own: u64 = loads.iter().filter(|(holder, ..)| *holder == who).map(|(_, bytes, _)| bytes).sum();
                if own <= limit / 4 {
                    prop_assert!(closed.iter().all(|index| loads[*index].0 != who));
                }
            }
        }
    }
}

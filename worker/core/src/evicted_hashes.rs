//! Ring of the hashes evicted last from the prefix cache: a prompt that finds its prefix here would have been a hit in a
//! larger pool (a ghost list, as in ARC: Megiddo and Modha, FAST 2003).

use inflight_contract::BlockHash;

use crate::hash_index::HashIndex;

/// Ring of evicted hashes with a fixed capacity, so that no operation allocates.
#[derive(Debug)]
pub(crate) struct EvictedHashes {
    ring: Vec<BlockHash>,
    capacity: usize,
    /// Entry that is overwritten next.
    next: usize,
    index: HashIndex,
}

impl EvictedHashes {
    /// Creates an empty ring of `capacity` hashes.
    pub fn new(capacity: u32) -> Self {
        Self {
            ring: Vec::with_capacity(capacity as usize),
            capacity: capacity as usize,
            next: 0,
            index: HashIndex::new(capacity),
        }
    }

    /// Adds a hash, in the place of the oldest one if the ring is full. A hash that is there keeps its place.
    pub fn push(&mut self, hash: BlockHash) {
        if self.capacity == 0 || self.index.get(hash).is_some() {
            return;
        }
        if self.ring.len() < self.capacity {
            self.ring.push(hash);
        } else {
            let oldest = std::mem::replace(&mut self.ring[self.next], hash);
            self.index.remove(oldest);
        }
        self.index.insert(hash, self.next as u32);
        self.next = (self.next + 1) % self.capacity;
    }

    /// Returns true if the hash is in the ring.
    pub fn contains(&self, hash: BlockHash) -> bool {
        self.index.get(hash).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_holds_the_last_distinct_hashes(capacity in 0u32..6, pushed in prop::collection::vec(0u128..12, 0..80)) {
            let hash = |raw: u128| BlockHash::from_raw((raw << 64) | (raw * 5 + 1));
            let (mut ring, mut model) = (EvictedHashes::new(capacity), VecDeque::new());
            for raw in pushed {
                ring.push(hash(raw));
                if capacity > 0 && !model.contains(&raw) {
                    if model.len() == capacity as usize {
                        model.pop_front();
                    }
                    model.push_back(raw);
                }
                for raw in 0..12 {
                    prop_assert_eq!(ring.contains(hash(raw)), model.contains(&raw));
                }
            }
        }
    }
}

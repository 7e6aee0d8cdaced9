//! Fixed-size open-addressing hash table from block hashes to blocks.

use inflight_contract::BlockHash;

use crate::Block;

/// Map from block hashes to blocks with linear probing and a fixed capacity, so that no operation allocates.
/// Backward-shift deletion (Knuth, *The Art of Computer Programming*, 6.4, algorithm R) avoids tombstones and
/// keeps probe sequences short.
#[derive(Debug)]
pub(crate) struct HashIndex {
    entries: Vec<Option<(BlockHash, Block)>>,
    len: u32,
}

impl HashIndex {
    /// Creates a table for at most `capacity` entries, with a load factor of at most 1/2.
    pub fn new(capacity: u32) -> Self {
        let size = (capacity.max(1) as usize * 2).next_power_of_two();
        Self { entries: vec![None; size], len: 0 }
    }

    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn get(&self, hash: BlockHash) -> Option<Block> {
        let mut at = self.home(hash);
        while let Some((found, block)) = self.entries[at] {
            if found == hash {
                return Some(block);
            }
            at = self.after(at);
        }
        None
    }

    /// Inserts an entry unless the hash is present. Returns true if it was inserted.
    pub fn insert(&mut self, hash: BlockHash, block: Block) -> bool {
        let mut at = self.home(hash);
        while let Some((found, _)) = self.entries[at] {
            if found == hash {
                return false;
            }
            at = self.after(at);
        }
        debug_assert!(
            (self.len as usize) < self.entries.len() / 2,
            "the table holds more entries than its capacity"
        );
        self.entries[at] = Some((hash, block));
        self.len += 1;
        true
    }

    pub fn remove(&mut self, hash: BlockHash) {
        let mut at = self.home(hash);
        loop {
            match self.entries[at] {
                None => return,
                Some((found, _)) if found == hash => break,
                Some(_) => at = self.after(at),
            }
        }
        self.len -= 1;
        let mut hole = at;
        loop {
            at = self.after(at);
            let Some((moved, _)) = self.entries[at] else { break };
            // An entry may move into the hole unless its home position lies cyclically behind the hole.
            let distance = |from: usize| at.wrapping_sub(from) & (self.entries.len() - 1);
            if distance(self.home(moved)) >= distance(hole) {
                self.entries[hole] = self.entries[at];
                hole = at;
            }
        }
        self.entries[hole] = None;
    }

    /// Returns the entries, in table order.
    pub fn iter(&self) -> impl Iterator<Item = (BlockHash, Block)> + '_ {
        self.entries.iter().flatten().copied()
    }

    /// Returns the position at which probing for this hash starts.
    fn home(&self, hash: BlockHash) -> usize {
        // The hash is already uniformly distributed.
        hash.short() as usize & (self.entries.len() - 1)
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.entries.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_agrees_with_an_ordered_map(ops in prop::collection::vec((any::<bool>(), 0u128..40), 0..400)) {
            let mut index = HashIndex::new(16);
            let mut map = BTreeMap::new();
            for (block, (add, raw)) in ops.into_iter().enumerate() {
                // Few home positions, to force probing and shifting, also across the wrap-around.
                let hash = BlockHash::from_raw((raw << 64) | (raw * 7 % 5 + 29));
                if add && map.len() < 15 {
                    let free = !map.contains_key(&hash);
                    prop_assert_eq!(index.insert(hash, block as Block), free);
                    map.entry(hash).or_insert(block as Block);
                } else {
                    index.remove(hash);
                    map.remove(&hash);
                }
                prop_assert_eq!(index.len() as usize, map.len());
                let same = (0..40u128).all(|raw| {
                    let hash = BlockHash::from_raw((raw << 64) | (raw * 7 % 5 + 29));
                    index.get(hash) == map.get(&hash).copied()
                });
                prop_assert!(same, "a lookup differs");
            }
        }
    }
}

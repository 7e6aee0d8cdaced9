//! Bounded hash table from block hashes to indices: of blocks, or of entries of a ring.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use inflight_contract::BlockHash;

/// Map from block hashes to indices with a fixed capacity, so that no operation allocates. It is not iterated:
/// the order of its entries decides nothing.
#[derive(Debug)]
pub(crate) struct HashIndex {
    entries: HashTable<(BlockHash, u32)>,
    capacity: u32,
}

/// Result of [`HashIndex::get_or_insert`].
pub(crate) enum Indexed {
    /// It was there.
    Known(u32),
    /// It was added.
    Inserted(u32),
    /// It is not there, and was not added.
    Absent,
}

impl HashIndex {
    /// Creates a table for at most `capacity` entries. It reserves twice as many: only a table that is more
    /// than half full grows to get rid of deleted entries; otherwise it rehashes in place.
    pub fn new(capacity: u32) -> Self {
        Self { entries: HashTable::with_capacity(capacity as usize * 2 + 2), capacity }
    }

    pub fn len(&self) -> u32 {
        self.entries.len() as u32
    }

    pub fn get(&self, hash: BlockHash) -> Option<u32> {
        self.entries.find(hash.short(), |(found, _)| *found == hash).map(|(_, block)| *block)
    }

    /// Inserts an entry unless the hash is present. Returns true if it was inserted.
    pub fn insert(&mut self, hash: BlockHash, block: u32) -> bool {
        matches!(self.get_or_insert(hash, || Some(block)), Indexed::Inserted(_))
    }

    /// Returns the index of a hash; of one that is not present, `index` yields it, if anything.
    pub fn get_or_insert(&mut self, hash: BlockHash, index: impl FnOnce() -> Option<u32>) -> Indexed {
        debug_assert!(self.len() <= self.capacity, "the table holds more entries than its capacity");
        match self.entries.entry(hash.short(), |(found, _)| *found == hash, |(found, _)| found.short()) {
            Entry::Occupied(entry) => Indexed::Known(entry.get().1),
            Entry::Vacant(vacant) => match index() {
                Some(block) => {
                    vacant.insert((hash, block));
                    Indexed::Inserted(block)
                }
                None => Indexed::Absent,
            },
        }
    }

    pub fn remove(&mut self, hash: BlockHash) {
        if let Ok(entry) = self.entries.find_entry(hash.short(), |(found, _)| *found == hash) {
            entry.remove();
        }
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
                // Few hash values, so that entries collide and deleted ones are reused.
                let hash = BlockHash::from_raw((raw << 64) | (raw * 7 % 5 + 29));
                if add && map.len() < 15 {
                    let free = !map.contains_key(&hash);
                    prop_assert_eq!(index.insert(hash, block as u32), free);
                    map.entry(hash).or_insert(block as u32);
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
            prop_assert_eq!(index.entries.capacity(), HashIndex::new(16).entries.capacity(), "it has grown");
        }
    }
}

//! Cache of what was computed for a digest, with a bounded number of entries and bytes.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Digest that names an entry.
pub type Digest = [u8; 32];

/// Bounded cache by digest; beyond its capacity, the entries used least recently are dropped.
#[derive(Debug)]
pub struct DigestCache<V> {
    entries: Mutex<Entries<V>>,
    capacity: usize,
    bytes_max: usize,
}

#[derive(Debug)]
struct Entries<V> {
    by_digest: HashMap<Digest, Entry<V>>,
    bytes: usize,
    lookups: u64,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    bytes: usize,
    /// Time of the last use, counted in lookups.
    used: u64,
}

impl<V: Clone> DigestCache<V> {
    /// Creates an empty cache with a capacity of at least one entry and no limit on bytes.
    pub fn new(capacity: usize) -> Self {
        let entries = Entries { by_digest: HashMap::new(), bytes: 0, lookups: 0 };
        Self { entries: Mutex::new(entries), capacity: capacity.max(1), bytes_max: usize::MAX }
    }

    /// Bounds the bytes of the entries. The newest entry stays if it has more.
    pub fn with_bytes_max(self, bytes_max: usize) -> Self {
        Self { bytes_max, ..self }
    }

    /// Returns an entry, which counts as used.
    pub fn get(&self, digest: &Digest) -> Option<V> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.lookups += 1;
        let now = entries.lookups;
        let entry = entries.by_digest.get_mut(digest)?;
        entry.used = now;
        Some(entry.value.clone())
    }

    /// Stores an entry of this many bytes.
    pub fn insert(&self, digest: Digest, value: V, bytes: usize) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.lookups += 1;
        let entry = Entry { value, bytes, used: entries.lookups };
        entries.bytes += bytes;
        if let Some(replaced) = entries.by_digest.insert(digest, entry) {
            entries.bytes -= replaced.bytes;
        }
        while entries.by_digest.len() > self.capacity
            || entries.bytes > self.bytes_max && entries.by_digest.len() > 1
        {
            let oldest = entries.by_digest.iter().min_by_key(|(_, entry)| entry.used);
            let Some(oldest) = oldest.map(|(digest, _)| *digest) else { return };
            if let Some(dropped) = entries.by_digest.remove(&oldest) {
                entries.bytes -= dropped.bytes;
            }
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).by_digest.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_cache_drops_the_entries_used_least_recently() {
        let cache = DigestCache::new(2);
        cache.insert([1; 32], 'a', 0);
        cache.insert([2; 32], 'b', 0);
        assert_eq!(cache.get(&[1; 32]), Some('a'));
        cache.insert([3; 32], 'c', 0);
        assert_eq!([1, 2, 3].map(|id| cache.get(&[id; 32])), [Some('a'), None, Some('c')]);
        assert_eq!(cache.len(), 2);

        let cache = DigestCache::new(9).with_bytes_max(10);
        (1..=3).for_each(|id| cache.insert([id; 32], id, 3));
        cache.insert([1; 32], 4, 4);
        assert_eq!([1, 2, 3].map(|id| cache.get(&[id; 32])), [Some(4), Some(2), Some(3)]);
        cache.insert([4; 32], 5, 6);
        assert_eq!([1, 2, 3, 4].map(|id| cache.get(&[id; 32])), [None, None, Some(3), Some(5)]);
        cache.insert([5; 32], 6, 99);
        assert_eq!((cache.len(), cache.get(&[5; 32])), (1, Some(6)));
    }
}

//! Cache of what was computed for a digest, with a bounded number of entries.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Digest that names an entry.
pub type Digest = [u8; 32];

/// Bounded cache by digest; beyond its capacity, the entry used least recently is dropped.
#[derive(Debug)]
pub struct DigestCache<V> {
    entries: Mutex<Entries<V>>,
    capacity: usize,
}

#[derive(Debug)]
struct Entries<V> {
    /// Value and time of the last use, counted in lookups.
    by_digest: HashMap<Digest, (V, u64)>,
    lookups: u64,
}

impl<V: Clone> DigestCache<V> {
    /// Creates an empty cache of at least one entry.
    pub fn new(capacity: usize) -> Self {
        let entries = Entries { by_digest: HashMap::new(), lookups: 0 };
        Self { entries: Mutex::new(entries), capacity: capacity.max(1) }
    }

    /// Returns an entry, which counts as used.
    pub fn get(&self, digest: &Digest) -> Option<V> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.lookups += 1;
        let now = entries.lookups;
        let (value, used) = entries.by_digest.get_mut(digest)?;
        *used = now;
        Some(value.clone())
    }

    /// Stores an entry.
    pub fn insert(&self, digest: Digest, value: V) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.lookups += 1;
        let now = entries.lookups;
        entries.by_digest.insert(digest, (value, now));
        if entries.by_digest.len() > self.capacity {
            let oldest = entries.by_digest.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(oldest) = oldest.map(|(digest, _)| *digest) {
                entries.by_digest.remove(&oldest);
            }
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).by_digest.len()
    }

    /// Whether it has no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_cache_drops_the_entry_used_least_recently() {
        let cache = DigestCache::new(2);
        cache.insert([1; 32], 'a');
        cache.insert([2; 32], 'b');
        assert_eq!(cache.get(&[1; 32]), Some('a'));
        cache.insert([3; 32], 'c');
        assert_eq!([1, 2, 3].map(|id| cache.get(&[id; 32])), [Some('a'), None, Some('c')]);
        assert_eq!(cache.len(), 2);
    }
}

//! KV block pool with reference counts and a prefix cache: LRU eviction over intrusive free lists.

use inflight_contract::BlockHash;

use crate::evicted_hashes::EvictedHashes;
use crate::hash_index::HashIndex;

/// Index of a KV block in its pool.
pub type Block = u32;

/// Null block index, at the ends of a free list.
const NONE: Block = Block::MAX;

#[derive(Debug, Clone, Copy)]
struct BlockMeta {
    /// Reference count: block tables and transfers that own the block.
    refs: u32,
    /// Hash of the content while it is in the prefix cache.
    hash: Option<BlockHash>,
    /// Value of the pool's free counter when the block was last freed.
    freed: u64,
    /// Neighbours in the free list; valid while `refs` is 0.
    prev: Block,
    next: Block,
}

/// Ends of a doubly linked free list; blocks are allocated from the head.
#[derive(Debug, Clone, Copy)]
struct FreeList {
    head: Block,
    tail: Block,
    len: u32,
}

impl FreeList {
    const EMPTY: Self = Self { head: NONE, tail: NONE, len: 0 };
}

/// Pool that holds a block of the prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheTier {
    /// Device pool.
    Device,
    /// Host pool.
    Host,
}

/// Change of the prefix cache, reported to routers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheEvent {
    /// A block with this hash was added.
    Stored(BlockHash),
    /// The block with this hash was removed.
    Removed(BlockHash),
}

/// Pool of KV blocks: owners of each block, and the prefix cache.
///
/// The prefix cache consists of the blocks with a hash. A block without owners keeps content and hash until
/// it is allocated again. Allocation takes blocks without a hash first, then evicts the least recently freed
/// one. Tables are released from their end, so that the tails of prefixes are evicted before their heads.
///
/// **Invariants**: free + owned = total after every call. A block is in a free list exactly while it has no
/// owner: in `cached`, ordered by the time of its release, if it has a hash, else in `empty`. `index` holds
/// exactly the hashes of the blocks that have one, so hashes are unique.
#[derive(Debug)]
pub struct BlockPool {
    meta: Vec<BlockMeta>,
    empty: FreeList,
    cached: FreeList,
    free: u32,
    frees: u64,
    index: HashIndex,
    events: Vec<CacheEvent>,
    /// Hashes evicted last; `None`: not kept.
    evicted: Option<EvictedHashes>,
}

impl BlockPool {
    /// Creates a pool of `total` free blocks with an empty cache.
    pub fn new(total: u32) -> Self {
        let unused = BlockMeta { refs: 0, hash: None, freed: 0, prev: NONE, next: NONE };
        let mut pool = Self {
            meta: vec![unused; total as usize],
            empty: FreeList::EMPTY,
            cached: FreeList::EMPTY,
            free: 0,
            frees: 0,
            index: HashIndex::new(total),
            events: Vec::new(),
            evicted: None,
        };
        // Low indices first, so that a lightly used pool touches little memory.
        (0..total).rev().for_each(|block| pool.link(block, NONE));
        pool
    }

    /// Returns the pool with a memory of the evicted hashes, as many as it has blocks.
    #[must_use]
    pub fn with_evicted_hashes(mut self) -> Self {
        self.evicted = Some(EvictedHashes::new(self.total()));
        self
    }

    /// Returns true if a block with this hash was among the last evicted ones.
    pub fn was_evicted(&self, hash: BlockHash) -> bool {
        self.evicted.as_ref().is_some_and(|evicted| evicted.contains(hash))
    }

    /// Returns the number of blocks in the pool.
    pub fn total(&self) -> u32 {
        self.meta.len() as u32
    }

    /// Returns the number of blocks without an owner, cached ones included.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Returns the number of blocks with an owner.
    pub fn used(&self) -> u32 {
        self.total() - self.free
    }

    /// Returns the number of blocks in the prefix cache, owned or not.
    pub fn cached(&self) -> u32 {
        self.index.len()
    }

    /// Returns the number of blocks in the prefix cache that have no owner.
    pub fn cold_blocks(&self) -> u32 {
        self.cached.len
    }

    /// Returns the hashes of all blocks in the prefix cache; at most one per block of the pool.
    pub fn contents(&self) -> impl Iterator<Item = BlockHash> + '_ {
        self.meta.iter().filter_map(|meta| meta.hash)
    }

    /// Returns the reference count of a block.
    pub fn owners(&self, block: Block) -> u32 {
        self.meta[block as usize].refs
    }

    /// Allocates a free block to the caller, evicting its content from the cache; `None` if no block is free.
    pub fn take(&mut self) -> Option<Block> {
        let block = if self.empty.head == NONE { self.cached.head } else { self.empty.head };
        if block == NONE {
            return None;
        }
        self.unlink(block);
        if let (Some(evicted), Some(hash)) = (&mut self.evicted, self.meta[block as usize].hash) {
            evicted.push(hash);
        }
        self.uncache(block);
        self.meta[block as usize].refs = 1;
        Some(block)
    }

    /// Allocates blocks until `table` has `len` of them. Returns false and allocates none if too few are
    /// free.
    pub fn extend(&mut self, table: &mut Vec<Block>, len: u32) -> bool {
        let missing = (len as usize).saturating_sub(table.len());
        if missing > self.free as usize {
            return false;
        }
        for _ in 0..missing {
            table.extend(self.take());
        }
        true
    }

    /// Returns the cached block with this hash.
    pub fn lookup(&self, hash: BlockHash) -> Option<Block> {
        self.index.get(hash)
    }

    /// Adds an owner to a block that is cached or in another table.
    pub fn share(&mut self, block: Block) {
        if self.meta[block as usize].refs == 0 {
            self.unlink(block);
        }
        self.meta[block as usize].refs += 1;
    }

    /// Adds an owned block to the prefix cache. No-op if another block has the same hash already.
    pub fn seal(&mut self, block: Block, hash: BlockHash) {
        let meta = &mut self.meta[block as usize];
        debug_assert!(meta.refs > 0, "a block without an owner was sealed");
        if meta.hash.is_some() {
            return;
        }
        if self.index.insert(hash, block) {
            meta.hash = Some(hash);
            self.events.push(CacheEvent::Stored(hash));
        }
    }

    /// Releases one reference to a block.
    ///
    /// # Panics
    /// If the block has no owner (double release).
    pub fn release(&mut self, block: Block) {
        let meta = &mut self.meta[block as usize];
        assert!(meta.refs > 0, "block {block} was released twice");
        meta.refs -= 1;
        if meta.refs > 0 {
            return;
        }
        self.frees += 1;
        meta.freed = self.frees;
        let after = if meta.hash.is_some() { self.cached.tail } else { NONE };
        self.link(block, after);
    }

    /// Releases a reference that was taken only to copy the block. If it was the last one, the block returns
    /// to its previous position in the eviction order.
    ///
    /// # Panics
    /// If the block has no owner (double release).
    pub fn release_cold(&mut self, block: Block) {
        let meta = &mut self.meta[block as usize];
        assert!(meta.refs > 0, "block {block} was released twice");
        meta.refs -= 1;
        if meta.refs > 0 {
            return;
        }
        let BlockMeta { freed, hash, .. } = *meta;
        let mut after = NONE;
        if hash.is_some() {
            // The block was near the head, so the search is short.
            let mut next = self.cached.head;
            while next != NONE && self.meta[next as usize].freed < freed {
                after = next;
                next = self.meta[next as usize].next;
            }
        }
        self.link(block, after);
    }

    /// Returns the free cached blocks in eviction order.
    pub fn cold(&self) -> impl Iterator<Item = (Block, BlockHash)> + '_ {
        let first = (self.cached.head != NONE).then_some(self.cached.head);
        let links = std::iter::successors(first, |block| {
            let next = self.meta[*block as usize].next;
            (next != NONE).then_some(next)
        });
        links.filter_map(|block| self.meta[block as usize].hash.map(|hash| (block, hash)))
    }

    /// Releases all blocks of a table, from its end.
    pub fn release_table(&mut self, table: &mut Vec<Block>) {
        while let Some(block) = table.pop() {
            self.release(block);
        }
    }

    /// Removes all blocks from the prefix cache.
    pub fn clear_cache(&mut self) {
        let cached: Vec<BlockHash> = self.contents().collect();
        cached.into_iter().for_each(|hash| self.forget(hash));
    }

    /// Removes the block with this hash from the prefix cache, if it is there; its owners keep it.
    pub fn forget(&mut self, hash: BlockHash) {
        let Some(block) = self.lookup(hash) else { return };
        let free = self.meta[block as usize].refs == 0;
        if free {
            self.unlink(block);
        }
        self.uncache(block);
        if free {
            self.link(block, NONE);
        }
    }

    /// Drains the cache changes since the last call, in order.
    pub fn drain_events(&mut self) -> impl Iterator<Item = CacheEvent> + '_ {
        self.events.drain(..)
    }

    /// Removes a block from the prefix cache, if it is there.
    fn uncache(&mut self, block: Block) {
        if let Some(hash) = self.meta[block as usize].hash.take() {
            self.index.remove(hash);
            self.events.push(CacheEvent::Removed(hash));
        }
    }

    /// Inserts a block without owners into its free list behind `after`, or at the head if `after` is `NONE`.
    fn link(&mut self, block: Block, after: Block) {
        let list = if self.meta[block as usize].hash.is_some() { &mut self.cached } else { &mut self.empty };
        list.len += 1;
        let next = match after {
            NONE => std::mem::replace(&mut list.head, block),
            after => std::mem::replace(&mut self.meta[after as usize].next, block),
        };
        match next {
            NONE => list.tail = block,
            next => self.meta[next as usize].prev = block,
        }
        let meta = &mut self.meta[block as usize];
        (meta.prev, meta.next) = (after, next);
        self.free += 1;
    }

    /// Removes a block from its free list.
    fn unlink(&mut self, block: Block) {
        let BlockMeta { prev, next, hash, .. } = self.meta[block as usize];
        let list = if hash.is_some() { &mut self.cached } else { &mut self.empty };
        list.len -= 1;
        match prev {
            NONE => list.head = next,
            prev => self.meta[prev as usize].next = next,
        }
        match next {
            NONE => list.tail = prev,
            next => self.meta[next as usize].prev = prev,
        }
        self.free -= 1;
    }

    /// Checks the pool's invariants. `claims[block]` is the number of references held by tables and
    /// transfers.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_consistent(&self, claims: &[u32]) {
        for (block, meta) in self.meta.iter().enumerate() {
            assert_eq!(meta.refs, claims[block], "owners of block {block}");
            if let Some(hash) = meta.hash {
                assert_eq!(self.index.get(hash), Some(block as Block), "the index misses block {block}");
            }
        }
        let hashed = self.meta.iter().filter(|meta| meta.hash.is_some()).count();
        assert_eq!(hashed, self.index.len() as usize, "the index names blocks that have no hash");
        let mut listed = 0;
        for (list, cached) in [(self.empty, false), (self.cached, true)] {
            let (mut at, mut before, others) = (list.head, NONE, listed);
            while at != NONE {
                let meta = &self.meta[at as usize];
                assert_eq!((meta.refs, meta.prev), (0, before), "a free list is broken at block {at}");
                assert_eq!(meta.hash.is_some(), cached, "block {at} is in the wrong list");
                assert!(
                    !cached || before == NONE || self.meta[before as usize].freed < meta.freed,
                    "out of order"
                );
                (before, at, listed) = (at, meta.next, listed + 1);
                assert!(listed <= self.total(), "a free list is a circle");
            }
            assert_eq!(before, list.tail, "a free list loses its end");
            assert_eq!(listed - others, list.len, "a free list is miscounted");
        }
        assert_eq!(listed, self.free, "a free list loses blocks");
        assert_eq!(listed + claims.iter().filter(|refs| **refs > 0).count() as u32, self.total());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    fn hash(raw: u128) -> BlockHash {
        BlockHash::from_raw(raw)
    }

    #[test]
    fn a_prefix_is_evicted_from_its_tail_and_after_uncached_blocks() {
        let mut pool = BlockPool::new(4);
        let mut table = Vec::new();
        assert!(pool.extend(&mut table, 3));
        let prefix = table.clone();
        for (position, block) in table.iter().enumerate() {
            pool.seal(*block, hash(position as u128));
        }
        pool.release_table(&mut table);
        assert_eq!(pool.free(), 4);
        let taken: Vec<_> = (0..3).filter_map(|_| pool.take()).collect();
        assert_eq!(taken, [3, prefix[2], prefix[1]]);
        assert_eq!(pool.lookup(hash(0)), Some(prefix[0]));
        assert_eq!(pool.lookup(hash(1)), None);
    }

    #[test]
    fn borrowing_cold_blocks_does_not_change_the_eviction_order() {
        let filled = || {
            let mut pool = BlockPool::new(6);
            let mut table = Vec::new();
            assert!(pool.extend(&mut table, 4));
            (0..4).for_each(|position| pool.seal(table[position], hash(position as u128)));
            pool.release_table(&mut table);
            pool
        };
        let taken = |mut pool: BlockPool| std::iter::from_fn(|| pool.take()).collect::<Vec<_>>();
        for borrowed in [vec![0, 1], vec![1, 0], vec![2], vec![3, 1, 0], vec![0, 1, 2, 3]] {
            let mut pool = filled();
            let cold: Vec<Block> = pool.cold().map(|(block, _)| block).collect();
            borrowed.iter().for_each(|position| pool.share(cold[*position]));
            borrowed.iter().for_each(|position| pool.release_cold(cold[*position]));
            assert_eq!(taken(pool), taken(filled()), "{borrowed:?}");
        }
    }

    proptest! {
        #[test]
        fn the_pool_agrees_with_a_naive_model(ops in prop::collection::vec((0u8..5, any::<u32>()), 0..300)) {
            let mut pool = BlockPool::new(12);
            let mut owned: Vec<Block> = Vec::new();
            let mut found: BTreeMap<BlockHash, Block> = BTreeMap::new();
            for (op, pick) in ops {
                match op {
                    0 => owned.extend(pool.take()),
                    1 if !owned.is_empty() => {
                        let block = owned.swap_remove(pick as usize % owned.len());
                        pool.release(block);
                    }
                    2 if !owned.is_empty() => {
                        pool.seal(owned[pick as usize % owned.len()], hash(u128::from(pick % 20)));
                    }
                    3 => if let Some(block) = pool.lookup(hash(u128::from(pick % 20))) {
                        pool.share(block);
                        owned.push(block);
                    },
                    _ if pick % 50 == 0 => pool.clear_cache(),
                    _ => {}
                }
                for event in pool.drain_events() {
                    match event {
                        CacheEvent::Stored(hash) => prop_assert!(found.insert(hash, 0).is_none()),
                        CacheEvent::Removed(hash) => prop_assert!(found.remove(&hash).is_some()),
                    }
                }
                prop_assert_eq!(found.len() as u32, pool.cached(), "events and cache differ");
                prop_assert!(found.keys().all(|hash| pool.lookup(*hash).is_some()));
                let mut claims = vec![0; 12];
                owned.iter().for_each(|block| claims[*block as usize] += 1);
                pool.assert_consistent(&claims);
            }
        }
    }
}

//! Blocks of the device or the host: their pool, and what of them is in the prefix cache.

use inflight_contract::{BlockHash, MemoryShape};

use super::block_pool::{Block, BlockPool};
use super::prefix_cache::{CacheEvent, PrefixCache, SealedSpan};
use super::snapshots::{SnapshotKind, SnapshotShape};
use super::tables::{Spans, Tables};

/// Result of a lookup of a prefix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundPrefix {
    /// Number of leading spans that need not be computed.
    pub spans: u32,
    /// Number of their blocks without an owner.
    pub unowned: u32,
    /// Number of blocks without an owner of the snapshot at their end, if other sequences will resume from it, too.
    pub pinned: u32,
    /// Number of leading spans that the first group has: a sequence that computes up to there can be resumed from.
    pub cached: u32,
}

/// Blocks of the device or the host. A block without owners keeps its cached content until it is allocated again.
#[derive(Debug)]
pub(crate) struct BlockStore {
    shape: MemoryShape,
    pool: BlockPool,
    cache: PrefixCache,
}

impl BlockStore {
    /// Creates a store of `total` free blocks with an empty cache, which keeps snapshots of this shape.
    pub fn new(shape: MemoryShape, snapshot: Option<SnapshotShape>, total: u32) -> Self {
        Self { shape, pool: BlockPool::new(total), cache: PrefixCache::new(shape, snapshot, total) }
    }

    /// Returns the store with a memory of the evicted hashes, as many as it has blocks.
    #[must_use]
    pub fn with_evicted_hashes(mut self) -> Self {
        self.cache.keep_evicted_hashes();
        self
    }

    /// Returns the prefix cache.
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// Returns the number of blocks.
    pub fn total(&self) -> u32 {
        self.pool.total()
    }

    /// Returns the number of blocks without an owner, cached ones included.
    pub fn free(&self) -> u32 {
        self.pool.free()
    }

    /// Returns the number of blocks with an owner.
    pub fn used(&self) -> u32 {
        self.pool.total() - self.pool.free()
    }

    /// Returns the number of cached blocks without an owner.
    pub fn cold(&self) -> u32 {
        self.pool.cold()
    }

    /// Returns the reference count of a block.
    pub fn owners(&self, block: Block) -> u32 {
        self.pool.owners(block)
    }

    /// Returns the number of blocks that only this sequence owns.
    pub fn exclusive(&self, tables: &Tables) -> u32 {
        let owned = |block: &&Block| self.pool.owners(**block) == 1;
        let of = |blocks: &[Block]| blocks.iter().filter(owned).count() as u32;
        let of_groups = tables.groups().iter().map(|table| of(table.blocks())).sum::<u32>();
        of_groups + of(tables.state()) + of(tables.snapshot())
    }

    /// Returns the spans that hold `tokens` tokens, by group.
    pub fn ends(&self, tokens: u32) -> Spans {
        [self.shape.spans(tokens); inflight_contract::GROUPS_MAX]
    }

    /// Allocates a free block to the caller, evicting its content from the cache; `None` if no block is free.
    pub fn take(&mut self) -> Option<Block> {
        let (block, kept) = self.pool.take()?;
        if kept {
            self.cache.evict(block, |other| self.pool.forget(other));
        }
        Some(block)
    }

    /// Extends tables to these spans, with a state. Returns false and allocates no block if too few are free.
    pub fn extend(&mut self, tables: &mut Tables, ends: &Spans) -> bool {
        if tables.lacking(ends) > self.pool.free() {
            return false;
        }
        for (group, end) in ends.iter().enumerate().take(tables.groups().len()) {
            let missing = end.saturating_sub(tables.groups()[group].end_span());
            for _ in 0..missing * self.shape.groups()[group].blocks {
                self.take().into_iter().for_each(|block| tables.push(group, block));
            }
        }
        for _ in 0..tables.lacking_state() {
            self.take().into_iter().for_each(|block| tables.push_state(block));
        }
        true
    }

    /// Appends the cached blocks of a span to a group of the tables, and makes the sequence an owner of them.
    pub fn share_cached(&mut self, tables: &mut Tables, group: usize, leader: Block) {
        for block in self.cache.blocks(leader, group) {
            self.pool.share_hit(block);
            tables.push(group, block);
        }
    }

    /// Appends blocks of another sequence to a group of the tables, and makes the sequence an owner of them.
    pub fn share(&mut self, tables: &mut Tables, group: usize, blocks: &[Block]) {
        for block in blocks {
            self.pool.share(*block);
            tables.push(group, *block);
        }
    }

    /// Adds an owner to a block, to copy it.
    pub fn borrow(&mut self, block: Block) {
        self.pool.share(block);
    }

    /// Makes a sequence an owner of the snapshot at the end of a cached span, to copy it. Returns true if the sequence makes it superfluous.
    pub fn share_snapshot(&mut self, tables: &mut Tables, leader: Block) -> bool {
        for block in self.cache.snapshot(leader) {
            self.pool.share_hit(*block);
            tables.push_snapshot(*block);
        }
        self.cache.hit_snapshot(leader)
    }

    /// Makes the blocks of the snapshot at the end of a cached span, which have no owner, the first ones of a sequence's state.
    pub fn take_snapshot(&mut self, tables: &mut Tables, leader: Block) {
        let pool = &mut self.pool;
        self.cache.hit_snapshot(leader);
        self.cache.drop_snapshot(leader, |block| {
            pool.forget(block);
            pool.share(block);
            tables.push_state(block);
        });
    }

    /// Takes free blocks for a snapshot of `blocks` blocks, of which at least `kept` others stay free. Returns false if there are too few.
    pub fn take_for_snapshot(&mut self, tables: &mut Tables, blocks: u32, kept: u32) -> bool {
        let fits = self.pool.free() >= blocks.saturating_add(kept);
        for _ in 0..if fits { blocks } else { 0 } {
            self.take().into_iter().for_each(|block| tables.push_snapshot(block));
        }
        fits
    }

    /// Adds owned blocks as the snapshot at the end of the cached span with this hash, unless it has one or is not cached. Returns true if it
    /// is to be evicted before others.
    pub fn keep_snapshot(&mut self, hash: BlockHash, blocks: &[Block], kind: SnapshotKind) -> bool {
        self.cache.keep_snapshot(hash, blocks, kind, |block| self.pool.keep(block));
        self.cache.is_demoted(kind)
    }

    /// Releases the snapshot that a sequence holds; `demoted`: to be evicted before others.
    pub fn release_snapshot(&mut self, tables: &mut Tables, demoted: bool) {
        while let Some(block) = tables.pop_snapshot() {
            self.pool.release_kept(block, demoted);
        }
    }

    /// Looks up the longest prefix behind which a sequence can resume: the highest boundary at which every group has the spans that
    /// the next token sees and, with recurrent layers, a snapshot is kept. `hashes` are those of the sequence's spans, from the first one on.
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> FoundPrefix {
        if self.shape.is_uniform() {
            let (mut spans, mut unowned) = (0, 0);
            for leader in hashes.iter().map_while(|hash| self.cache.lookup(*hash)) {
                spans += 1;
                unowned += u32::from(self.owners(leader) == 0);
            }
            return FoundPrefix { spans, unowned, pinned: 0, cached: spans };
        }
        let lookup = |position: u32| self.cache.lookup(hashes[position as usize]);
        let groups = self.shape.groups();
        // The first group is searched upwards if it needs all spans.
        let cached = match groups[0].window {
            None => hashes.iter().map_while(|hash| self.cache.lookup(*hash)).count() as u32,
            Some(_) => {
                let known = hashes.iter().rposition(|hash| self.cache.lookup(*hash).is_some());
                known.map_or(0, |last| last as u32 + 1)
            }
        };
        let reach = |group: usize| groups[group].reach(self.shape.block_tokens()).unwrap_or(u32::MAX);
        let mut spans = cached;
        // Downwards, to the gap that is farthest from the boundary, until no group has one.
        loop {
            let gap = |group: usize| {
                let seen = spans.saturating_sub(reach(group))..spans;
                let has =
                    |position: &u32| lookup(*position).is_some_and(|leader| self.cache.has(leader, group));
                seen.rev().find(|position| !has(position))
            };
            // The first group has no gap if it needs all spans.
            let windowed = (0..groups.len()).filter(|group| groups[*group].window.is_some());
            let has_state =
                |position: &u32| lookup(*position).is_some_and(|leader| self.cache.has_state(leader));
            let with_state = (0..spans).rev().find(has_state).map_or(0, |last| last + 1);
            match windowed.filter_map(gap).min() {
                Some(position) => spans = position,
                None if with_state < spans => spans = with_state,
                None => break,
            }
        }
        let mut unowned = 0;
        for group in 0..groups.len() {
            for leader in (spans.saturating_sub(reach(group))..spans).filter_map(lookup) {
                unowned += self.cache.blocks(leader, group).filter(|block| self.owners(*block) == 0).count();
            }
        }
        let snapshot = spans.checked_sub(1).and_then(lookup).filter(|leader| self.cache.is_junction(*leader));
        let snapshot = snapshot.map_or(&[][..], |leader| self.cache.snapshot(leader));
        let pinned = snapshot.iter().filter(|block| self.owners(**block) == 0).count();
        FoundPrefix { spans, unowned: unowned as u32, pinned: pinned as u32, cached }
    }

    /// Adds a span of a sequence to the prefix cache, or the blocks of it that are not there.
    pub fn seal(&mut self, span: &SealedSpan, tables: &Tables) {
        let blocks = |group: usize| tables.groups()[group].span(span.position);
        // A sequence that could not resume behind cached spans computes them again. Its own blocks are used last, so the span gets these.
        let cold = self.cache.lookup(span.hash).filter(|leader| self.pool.owners(*leader) == 0);
        if let Some(cold) = cold.filter(|_| self.shape.state_blocks() > 0 && !self.shape.has_windows()) {
            self.cache.replace(cold, blocks, &mut self.pool);
            return;
        }
        self.cache.insert(span, blocks, |block| self.pool.keep(block));
    }

    /// Adds an owned block to the prefix cache, in a pool whose spans have one block each.
    pub fn seal_block(&mut self, block: Block, hash: BlockHash) {
        let span = SealedSpan { hash, position: 0, parent: None };
        self.cache.insert(&span, |_| std::slice::from_ref(&block), |block| self.pool.keep(block));
    }

    /// Releases one reference to a block.
    pub fn release(&mut self, block: Block) {
        self.pool.release(block);
    }

    /// Releases a reference that was taken only to copy the block; see [`BlockPool::release_cold`].
    pub fn release_cold(&mut self, block: Block) {
        self.pool.release_cold(block);
    }

    /// Releases the blocks of the windowed groups that no token from `position` on sees. They are the first to be allocated again,
    /// unless a sequence that resumes behind the span before `junction` would need them.
    pub fn pass(&mut self, tables: &mut Tables, position: u32, junction: u32) {
        debug_assert!(self.shape.has_windows(), "nothing is passed without windows");
        for (index, group) in self.shape.groups().iter().enumerate() {
            let Some(reach) = group.reach(self.shape.block_tokens()) else { continue };
            let first = group.first_span(position, self.shape.block_tokens());
            let before = tables.groups()[index].first_span();
            let mut at = 0;
            tables.pass(index, first, |block| {
                let span = before + at / group.blocks;
                at += 1;
                if span < junction && span + reach >= junction {
                    self.pool.release(block);
                } else {
                    self.pool.release_passed(block);
                }
            });
        }
    }

    /// Releases the blocks behind these spans, the last ones first; not those of the state.
    pub fn truncate(&mut self, tables: &mut Tables, ends: &Spans) {
        for (group, end) in ends.iter().enumerate().take(tables.groups().len()) {
            while let Some(block) = tables.pop(group, *end) {
                self.pool.release(block);
            }
        }
    }

    /// Releases all blocks of a sequence, from the last span on, so that the tails of prefixes are evicted before their heads. `demoted`: a
    /// snapshot of its state is to be evicted before others.
    pub fn release_all(&mut self, tables: &mut Tables, demoted: bool) {
        self.release_snapshot(tables, false);
        // A snapshot is evicted before the spans up to it.
        while let Some(block) = tables.pop_state() {
            self.pool.release_kept(block, demoted);
        }
        let last = tables.ends().into_iter().max().unwrap_or(0);
        if tables.groups().len() == 1 {
            return self.truncate(tables, &[0; inflight_contract::GROUPS_MAX]);
        }
        for end in (0..last).rev() {
            self.truncate(tables, &[end; inflight_contract::GROUPS_MAX]);
        }
    }

    /// Removes the span with this hash from the prefix cache, if it is there; its owners keep it.
    pub fn forget(&mut self, hash: BlockHash) {
        self.cache.forget(hash, |block| self.pool.forget(block));
    }

    /// Returns the free cached blocks of a pool whose spans have one block each, in eviction order.
    pub fn coldest(&self) -> impl Iterator<Item = (Block, BlockHash)> + '_ {
        self.pool.coldest().filter_map(|block| Some((block, self.cache.hash_of(block)?)))
    }

    /// Drains the changes of the cache since the last call, in order.
    pub fn drain_events(&mut self) -> impl Iterator<Item = CacheEvent> + '_ {
        self.cache.drain_events()
    }

    /// Checks all invariants. `claims[block]` is the number of references held by tables and transfers.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_consistent(&self, claims: &[u32]) {
        self.pool.assert_consistent(claims, |block| self.cache.holds(block));
        self.cache.assert_consistent();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use inflight_contract::LayerGroup;
    use proptest::prelude::*;

    use super::*;

    fn hash(raw: u128) -> BlockHash {
        BlockHash::from_raw(raw)
    }

    fn store(total: u32) -> (BlockStore, Tables) {
        let shape = MemoryShape::uniform(4);
        (BlockStore::new(shape, None, total), Tables::new(&shape, 4 * total, 1))
    }

    /// Seals the spans of a sequence whose hashes are their positions.
    fn seal(store: &mut BlockStore, tables: &Tables, spans: u32) {
        for position in 0..spans {
            let parent = position.checked_sub(1).map(|before| hash(u128::from(before)));
            store.seal(&SealedSpan { hash: hash(u128::from(position)), position, parent }, tables);
        }
    }

    #[test]
    fn a_prefix_is_evicted_from_its_tail_and_after_uncached_blocks() {
        let (mut store, mut tables) = store(4);
        assert!(store.extend(&mut tables, &[3; 4]));
        let prefix: Vec<Block> = tables.blocks().collect();
        seal(&mut store, &tables, 3);
        store.release_all(&mut tables, false);
        assert_eq!((store.free(), store.cold()), (4, 3));
        let taken: Vec<_> = (0..3).filter_map(|_| store.take()).collect();
        assert_eq!(taken, [3, prefix[2], prefix[1]]);
        assert_eq!(store.cache().lookup(hash(0)), Some(prefix[0]));
        assert_eq!(store.cache().lookup(hash(1)), None);
    }

    #[test]
    fn borrowing_cold_blocks_does_not_change_the_eviction_order() {
        let filled = || {
            let (mut store, mut tables) = store(6);
            assert!(store.extend(&mut tables, &[4; 4]));
            seal(&mut store, &tables, 4);
            store.release_all(&mut tables, false);
            store
        };
        let taken = |mut store: BlockStore| std::iter::from_fn(|| store.take()).collect::<Vec<_>>();
        for borrowed in [vec![0, 1], vec![1, 0], vec![2], vec![3, 1, 0], vec![0, 1, 2, 3]] {
            let mut store = filled();
            let cold: Vec<Block> = store.coldest().map(|(block, _)| block).collect();
            borrowed.iter().for_each(|position| store.borrow(cold[*position]));
            borrowed.iter().for_each(|position| store.release_cold(cold[*position]));
            assert_eq!(taken(store), taken(filled()), "{borrowed:?}");
        }
    }

    #[test]
    fn what_a_window_has_passed_is_evicted_first_unless_it_was_hit() {
        // A window of 5 tokens needs the last span before a boundary.
        let groups = [LayerGroup { blocks: 1, window: None }, LayerGroup { blocks: 2, window: Some(5) }];
        let shape = MemoryShape::new(4, &groups).unwrap();
        let mut store = BlockStore::new(shape, None, 12);
        let hashes: Vec<BlockHash> = (0..4).map(hash).collect();
        let run = |store: &mut BlockStore, junction: u32| {
            let found = store.find_prefix(&hashes);
            let mut tables = Tables::new(&shape, 16, 16);
            let first = found.spans.saturating_sub(1);
            tables.begin(&[0, first, 0, 0]);
            for (group, begin) in [(0, 0), (1, first)] {
                for position in begin..found.spans {
                    let leader = store.cache().lookup(hashes[position as usize]).unwrap();
                    store.share_cached(&mut tables, group, leader);
                }
            }
            assert!(store.extend(&mut tables, &[4; 4]));
            seal(store, &tables, 4);
            store.pass(&mut tables, 16, junction);
            store.assert_consistent(&claims(store, &tables));
            (found, tables)
        };
        fn claims(store: &BlockStore, tables: &Tables) -> Vec<u32> {
            let mut claims = vec![0; store.total() as usize];
            tables.blocks().for_each(|block| claims[block as usize] += 1);
            claims
        }
        let (found, mut tables) = run(&mut store, 0);
        assert_eq!((found.spans, tables.len(), store.free()), (0, 4 + 2, 6));
        assert_eq!(
            store.find_prefix(&hashes[..3]).spans,
            3,
            "what is passed is cached until it is allocated"
        );
        // Two allocations take the blocks of the first span in the window's group.
        let taken = [store.take(), store.take()].map(Option::unwrap);
        assert_eq!(store.find_prefix(&hashes[..1]).spans, 0);
        assert_eq!((store.find_prefix(&hashes[..1]).cached, store.find_prefix(&hashes[..3]).spans), (1, 3));
        taken.into_iter().for_each(|block| store.release(block));
        store.release_all(&mut tables, false);
        // The next sequence hits all of it, so nothing is passed that others would not want.
        let (found, mut tables) = run(&mut store, 0);
        assert_eq!((found.spans, found.unowned), (4, 4 + 2));
        store.release_all(&mut tables, false);
        store.assert_consistent(&[0; 12]);
    }

    proptest! {
        #[test]
        fn the_store_agrees_with_a_naive_model(ops in prop::collection::vec((0u8..5, any::<u32>()), 0..300)) {
            let (mut store, _) = store(12);
            let mut owned: Vec<Block> = Vec::new();
            let mut found: BTreeMap<BlockHash, Block> = BTreeMap::new();
            for (op, pick) in ops {
                match op {
                    0 => owned.extend(store.take()),
                    1 if !owned.is_empty() => {
                        let block = owned.swap_remove(pick as usize % owned.len());
                        store.release(block);
                    }
                    2 if !owned.is_empty() => {
                        store.seal_block(owned[pick as usize % owned.len()], hash(u128::from(pick % 20)));
                    }
                    3 => if let Some(block) = store.cache().lookup(hash(u128::from(pick % 20))) {
                        store.borrow(block);
                        owned.push(block);
                    },
                    _ if pick % 50 == 0 => (0..20).for_each(|raw| store.forget(hash(raw))),
                    _ => {}
                }
                for event in store.drain_events() {
                    match event {
                        CacheEvent::Stored(hash) => prop_assert!(found.insert(hash, 0).is_none()),
                        CacheEvent::Removed(hash) => prop_assert!(found.remove(&hash).is_some()),
                    }
                }
                prop_assert_eq!(found.len(), store.cache().contents().count(), "events and cache differ");
                prop_assert!(found.keys().all(|hash| store.cache().lookup(*hash).is_some()));
                let mut claims = vec![0; 12];
                owned.iter().for_each(|block| claims[*block as usize] += 1);
                store.assert_consistent(&claims);
            }
        }
    }
}

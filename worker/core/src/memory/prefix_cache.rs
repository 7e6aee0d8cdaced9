//! Prefix cache: which spans of tokens are in which blocks, and at which spans a sequence can resume.

use inflight_contract::{BlockHash, MemoryShape};

use super::block_pool::{Block, BlockPool, NONE};
use super::chain::Chain;
use super::snapshots::{SnapshotKind, SnapshotShape, Snapshots};
use crate::evicted_hashes::EvictedHashes;
use crate::hash_index::{HashIndex, Indexed};

/// Pool that holds a span of the prefix cache.
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
    /// A sequence can resume behind the span with this hash.
    Stored(BlockHash),
    /// It cannot any more.
    Removed(BlockHash),
}

/// A span of a sequence that is to be cached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SealedSpan {
    pub hash: BlockHash,
    /// Index of the span in its sequence, and the hash of the one before it.
    pub position: u32,
    pub parent: Option<BlockHash>,
}

/// Spans of tokens that are cached in a pool's blocks.
///
/// A cached span is named by the first block of its first group, its leader; the other blocks are its companions. The first group
/// is the one that needs a span longest, so a span is forgotten with a block of it, and a block of another group takes with it the
/// blocks of that group only: the span then remains for sequences whose windows are past it.
///
/// With recurrent layers a sequence resumes at the end of a span that has a snapshot. It is forgotten with a block of it, and with its span.
///
/// **Invariants**: `index` holds exactly the hashes of the leaders, so hashes are unique. Every block of a cached span or of its snapshot
/// names the leader, and no other block does.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    shape: MemoryShape,
    /// Leaders by hash.
    index: HashIndex,
    /// Hash of each leader.
    hashes: Vec<Option<BlockHash>>,
    /// Leader of each block of a cached span, else `NONE`.
    leaders: Vec<Block>,
    /// Companions of each leader, in the order of the groups; [blocks, blocks of a span - 1].
    companions: Vec<Block>,
    /// Order of the spans in their sequences; `None` if every span's end can be resumed from.
    chain: Option<Chain>,
    /// States at the ends of spans, by leader.
    snapshots: Snapshots,
    events: Vec<CacheEvent>,
    /// Hashes evicted last; `None`: not kept.
    evicted: Option<EvictedHashes>,
}

impl PrefixCache {
    /// Creates an empty cache in a pool of `total` blocks, which keeps snapshots of this shape.
    pub fn new(shape: MemoryShape, snapshot: Option<SnapshotShape>, total: u32) -> Self {
        let others = shape.span_blocks() as usize - 1;
        Self {
            shape,
            index: HashIndex::new(total),
            hashes: vec![None; total as usize],
            leaders: vec![NONE; total as usize],
            companions: vec![NONE; total as usize * others],
            chain: shape.has_windows().then(|| Chain::new(&shape, total)),
            snapshots: Snapshots::new(snapshot, total),
            events: Vec::new(),
            evicted: None,
        }
    }

    /// Keeps the hashes that are evicted, as many as the pool has blocks.
    pub fn keep_evicted_hashes(&mut self) {
        self.evicted = Some(EvictedHashes::new(self.hashes.len() as u32));
    }

    /// Returns true if a span with this hash was among the last evicted ones.
    pub fn was_evicted(&self, hash: BlockHash) -> bool {
        self.evicted.as_ref().is_some_and(|evicted| evicted.contains(hash))
    }

    /// Returns true if the block holds a part of a cached span.
    pub fn holds(&self, block: Block) -> bool {
        self.leaders[block as usize] != NONE
    }

    /// Returns the hash of the span whose leader this block is.
    pub fn hash_of(&self, block: Block) -> Option<BlockHash> {
        self.hashes[block as usize]
    }

    /// Returns the leader of the cached span with this hash.
    pub fn lookup(&self, hash: BlockHash) -> Option<Block> {
        self.index.get(hash)
    }

    /// Returns the hashes of the spans behind which a sequence can resume; at most one per block.
    pub fn contents(&self) -> impl Iterator<Item = BlockHash> + '_ {
        let announced = |block: Block| match &self.chain {
            Some(chain) => chain.is_announced(block),
            None => self.has_state(block),
        };
        let spans = self.hashes.iter().enumerate().filter(move |(block, _)| announced(*block as Block));
        spans.filter_map(|(_, hash)| *hash)
    }

    /// Drains the changes since the last call, in order.
    pub fn drain_events(&mut self) -> impl Iterator<Item = CacheEvent> + '_ {
        self.events.drain(..)
    }

    /// Returns the blocks of a cached span in a group; none if they are not cached.
    pub fn blocks(&self, leader: Block, group: usize) -> impl Iterator<Item = Block> + '_ {
        let first = (group == 0).then_some(leader);
        let others = self.companions(leader, group).iter().copied().filter(|block| *block != NONE);
        first.into_iter().chain(others)
    }

    /// Returns true if a cached span has its blocks of a group.
    pub fn has(&self, leader: Block, group: usize) -> bool {
        group == 0 || self.companions(leader, group).first() != Some(&NONE)
    }

    /// Returns the blocks of the snapshot at the end of a cached span; none if there is none.
    pub fn snapshot(&self, leader: Block) -> &[Block] {
        self.snapshots.of(leader)
    }

    /// Returns the number of snapshots.
    pub fn snapshots(&self) -> u32 {
        self.snapshots.len()
    }

    /// Returns true if a cached span has a snapshot at the end of a prefix that several prompts share.
    pub fn is_junction(&self, leader: Block) -> bool {
        self.snapshots.kind(leader) == Some(SnapshotKind::Junction)
    }

    /// Returns true if snapshots of this kind are to be evicted before others.
    pub fn is_demoted(&self, kind: SnapshotKind) -> bool {
        self.snapshots.is_demoted(kind)
    }

    /// Notes that a sequence resumes from the snapshot at the end of a cached span. Returns true if it makes it superfluous.
    pub fn hit_snapshot(&mut self, leader: Block) -> bool {
        self.snapshots.hit(leader)
    }

    /// Returns true if a sequence has the state to resume at the end of a cached span.
    pub fn has_state(&self, leader: Block) -> bool {
        self.shape.state_blocks() == 0 || !self.snapshots.of(leader).is_empty()
    }

    /// Adds the snapshot at the end of the cached span with this hash, unless it has one or is not cached. Calls `keep` with each block.
    pub fn keep_snapshot(
        &mut self,
        hash: BlockHash,
        blocks: &[Block],
        kind: SnapshotKind,
        keep: impl FnMut(Block),
    ) {
        let Some(leader) = self.lookup(hash) else { return };
        let is_used = |block: &Block| self.leaders[*block as usize] != NONE;
        let known = !self.snapshots.of(leader).is_empty() || blocks.iter().any(is_used);
        if known || !self.snapshots.insert(leader, blocks, kind) {
            return;
        }
        blocks.iter().for_each(|block| self.leaders[*block as usize] = leader);
        blocks.iter().copied().for_each(keep);
        let resumes = self.chain.as_ref().is_none_or(|chain| {
            !chain.is_announced(leader) && chain.can_resume(leader, |block, group| self.has(block, group))
        });
        if resumes {
            self.chain.iter_mut().for_each(|chain| chain.announce(leader));
            self.events.push(CacheEvent::Stored(hash));
        }
    }

    /// Forgets the snapshot at the end of a cached span, if there is one. Calls `forget` with each of its blocks.
    pub fn drop_snapshot(&mut self, leader: Block, mut forget: impl FnMut(Block)) {
        if self.snapshots.of(leader).is_empty() {
            return;
        }
        let leaders = &mut self.leaders;
        self.snapshots.remove(leader, |block| {
            leaders[block as usize] = NONE;
            forget(block);
        });
        let announced = self.chain.as_mut().is_none_or(|chain| chain.withdraw(leader));
        self.events.extend(self.hashes[leader as usize].filter(|_| announced).map(CacheEvent::Removed));
    }

    /// Adds a span, or blocks that a cached span with the same hash lacks. `blocks` returns the blocks of a group. Calls `keep` with
    /// each block whose content is cached now.
    pub fn insert<'p>(
        &mut self,
        span: &SealedSpan,
        blocks: impl Fn(usize) -> &'p [Block],
        mut keep: impl FnMut(Block),
    ) {
        // A span that the window of the first group has passed resumes nothing.
        let leaders = &self.leaders;
        let own = blocks(0);
        let first = || own.first().copied().filter(|block| leaders[*block as usize] == NONE);
        let (leader, known) = match self.index.get_or_insert(span.hash, first) {
            Indexed::Known(leader) => (leader, true),
            Indexed::Inserted(leader) => {
                self.hashes[leader as usize] = Some(span.hash);
                self.leaders[leader as usize] = leader;
                keep(leader);
                self.add_companions(leader, 0, &own[1..], &mut keep);
                (leader, false)
            }
            Indexed::Absent => return,
        };
        for group in 1..self.shape.groups().len() {
            if !self.has(leader, group) {
                self.add_companions(leader, group, blocks(group), &mut keep);
            }
        }
        let Some(mut chain) = self.chain.take() else {
            self.events.extend((!known && self.has_state(leader)).then_some(CacheEvent::Stored(span.hash)));
            return;
        };
        let parent = span.parent.and_then(|parent| self.index.get(parent));
        chain.link(leader, span.position, parent);
        let resumes =
            self.has_state(leader) && chain.can_resume(leader, |block, group| self.has(block, group));
        if resumes && !chain.is_announced(leader) {
            chain.announce(leader);
            self.events.push(CacheEvent::Stored(span.hash));
        }
        self.chain = Some(chain);
    }

    /// Moves a cached span without owners to the blocks of a sequence that has computed the same tokens again, and frees its old blocks. `blocks`
    /// returns the sequence's blocks of a group. No-op for models with sliding windows.
    pub fn replace<'p>(
        &mut self,
        leader: Block,
        blocks: impl Fn(usize) -> &'p [Block],
        pool: &mut BlockPool,
    ) {
        let groups = self.shape.groups().len();
        let used = |block: &Block| self.leaders[*block as usize] != NONE;
        let (Some(hash), Some(first)) = (self.hash_of(leader), blocks(0).first().copied()) else { return };
        if self.chain.is_some() || (0..groups).any(|group| blocks(group).iter().any(used)) {
            return;
        }
        for group in 0..groups {
            for (old, new) in self.blocks(leader, group).zip(blocks(group)).collect::<Vec<_>>() {
                self.leaders[old as usize] = NONE;
                pool.forget(old);
                self.leaders[*new as usize] = first;
                pool.keep(*new);
            }
            let (from, to) = (self.range(leader, group), self.range(first, group));
            let skipped = usize::from(group == 0);
            self.companions[from].fill(NONE);
            self.companions[to].copy_from_slice(&blocks(group)[skipped..]);
        }
        self.index.remove(hash);
        self.index.insert(hash, first);
        (self.hashes[leader as usize], self.hashes[first as usize]) = (None, Some(hash));
        let leaders = &mut self.leaders;
        self.snapshots.rename(leader, first, |block| leaders[block as usize] = first);
    }

    fn add_companions(
        &mut self,
        leader: Block,
        group: usize,
        blocks: &[Block],
        keep: &mut impl FnMut(Block),
    ) {
        if blocks.is_empty() || blocks.iter().any(|block| self.leaders[*block as usize] != NONE) {
            return;
        }
        let range = self.range(leader, group);
        self.companions[range].copy_from_slice(blocks);
        for block in blocks {
            self.leaders[*block as usize] = leader;
            keep(*block);
        }
    }

    /// Forgets what an allocated block held, and with it the blocks that are of no use without it. Calls `forget` with each of these.
    pub fn evict(&mut self, block: Block, mut forget: impl FnMut(Block)) {
        let leader = self.leaders[block as usize];
        if leader == NONE {
            return;
        }
        let other = |other: Block| {
            if other != block {
                forget(other);
            }
        };
        if self.snapshots.of(leader).contains(&block) {
            if let (Some(evicted), Some(hash)) = (&mut self.evicted, self.hashes[leader as usize]) {
                evicted.push(hash);
            }
            return self.drop_snapshot(leader, other);
        }
        match (1..self.shape.groups().len()).find(|group| self.companions(leader, *group).contains(&block)) {
            Some(group) => self.drop_group(leader, group, other),
            None => {
                if let (Some(evicted), Some(hash)) = (&mut self.evicted, self.hashes[leader as usize]) {
                    evicted.push(hash);
                }
                self.drop_span(leader, other);
            }
        }
    }

    /// Forgets the span with this hash, if it is cached. Calls `forget` with each of its blocks.
    pub fn forget(&mut self, hash: BlockHash, forget: impl FnMut(Block)) {
        if let Some(leader) = self.lookup(hash) {
            self.drop_span(leader, forget);
        }
    }

    /// Forgets a span in all groups.
    fn drop_span(&mut self, leader: Block, mut forget: impl FnMut(Block)) {
        // With its removal, if a sequence could resume there.
        self.drop_snapshot(leader, &mut forget);
        let Some(hash) = self.hashes[leader as usize].take() else { return };
        self.index.remove(hash);
        self.leaders[leader as usize] = NONE;
        forget(leader);
        let others = self.shape.span_blocks() as usize - 1;
        for at in leader as usize * others..(leader as usize + 1) * others {
            let block = std::mem::replace(&mut self.companions[at], NONE);
            if block != NONE {
                self.leaders[block as usize] = NONE;
                forget(block);
            }
        }
        match &mut self.chain {
            None if self.shape.state_blocks() > 0 => {}
            None => self.events.push(CacheEvent::Removed(hash)),
            Some(chain) => {
                if chain.withdraw(leader) {
                    self.events.push(CacheEvent::Removed(hash));
                }
                let (hashes, events) = (&self.hashes, &mut self.events);
                chain.remove(leader, |block| events.extend(hashes[block as usize].map(CacheEvent::Removed)));
            }
        }
    }

    /// Forgets a span in one group, other than the first.
    fn drop_group(&mut self, leader: Block, group: usize, mut forget: impl FnMut(Block)) {
        for at in self.range(leader, group) {
            let block = std::mem::replace(&mut self.companions[at], NONE);
            if block != NONE {
                self.leaders[block as usize] = NONE;
                forget(block);
            }
        }
        let (hashes, events) = (&self.hashes, &mut self.events);
        if let Some(chain) = &mut self.chain {
            chain.lose(leader, group, |block| events.extend(hashes[block as usize].map(CacheEvent::Removed)));
        }
    }

    /// Returns the companions of a leader in a group; in the first group the leader is none of them.
    fn companions(&self, leader: Block, group: usize) -> &[Block] {
        &self.companions[self.range(leader, group)]
    }

    fn range(&self, leader: Block, group: usize) -> std::ops::Range<usize> {
        let groups = self.shape.groups();
        let before: u32 = groups[..group].iter().map(|group| group.blocks).sum();
        let start =
            leader as usize * (self.shape.span_blocks() as usize - 1) + before.saturating_sub(1) as usize;
        start..start + groups[group].blocks as usize - usize::from(group == 0)
    }

    /// Checks the cache's invariants.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_consistent(&self) {
        let mut leaders = 0;
        for (block, hash) in self.hashes.iter().enumerate() {
            let block = block as Block;
            let Some(hash) = hash else {
                assert!(self.leaders[block as usize] != block, "block {block} leads no span");
                continue;
            };
            leaders += 1;
            assert_eq!(self.index.get(*hash), Some(block), "the index misses block {block}");
            let snapshot = self.snapshots.of(block);
            assert!(
                snapshot.iter().all(|other| self.leaders[*other as usize] == block),
                "a snapshot is shared"
            );
            for group in 0..self.shape.groups().len() {
                let blocks: Vec<Block> = self.blocks(block, group).collect();
                let whole = blocks.len() as u32 == self.shape.groups()[group].blocks;
                assert!(whole || blocks.is_empty() && group > 0, "span {block} has a part of group {group}");
                assert!(blocks.iter().all(|other| self.leaders[*other as usize] == block));
            }
        }
        assert_eq!(leaders, self.index.len(), "the index names spans that have no hash");
        let named = self.leaders.iter().filter(|leader| **leader != NONE);
        assert!(
            named.clone().all(|leader| self.hashes[*leader as usize].is_some()),
            "a block of a forgotten span"
        );
        let of_spans = |leader: Block| -> usize {
            let of_groups = (0..self.shape.groups().len()).map(|group| self.blocks(leader, group).count());
            of_groups.sum::<usize>() + self.snapshots.of(leader).len()
        };
        let spans = self.hashes.iter().enumerate().filter(|(_, hash)| hash.is_some());
        let blocks: usize = spans.map(|(leader, _)| of_spans(leader as Block)).sum();
        assert_eq!(named.count(), blocks, "a block names a span that it is not of");
        if let Some(chain) = &self.chain {
            chain.assert_consistent(
                |block| self.hashes[block as usize].is_some(),
                |block, group| self.has(block, group),
            );
        }
    }
}

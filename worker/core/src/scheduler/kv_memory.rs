//! KV memory of the sequences: what they hold of the blocks of device and host, share, lack and give back.

use inflight_contract::{BlockHash, GROUPS_MAX};

use super::transfers::{Offloaded, Transfers};
use crate::memory::{BlockStore, FoundPrefix, SealedSpan, SnapshotKind, Spans, Tables};
use crate::sequence::Sequence;
use crate::state_progress::StateBegin;
use crate::{Block, CacheEvent, CacheTier, Direction, SchedulerLimits, SnapshotShape};

/// Maximum number of cold prefix-cache blocks copied to the host by one transfer.
const OFFLOAD_MAX: usize = 16;
/// Maximum number of cold blocks examined to find them.
const OFFLOAD_EXAMINED_MAX: usize = 256;

/// Blocks of the device and the host. Tables of sequences change only here.
#[derive(Debug)]
pub(super) struct KvMemory {
    limits: SchedulerLimits,
    /// Whether groups of layers give up blocks; asked for each sequence.
    has_windows: bool,
    /// Positions between two ends of spans at which a recurrent state can be kept; `None`: none is.
    snapshot_every: Option<u32>,
    device: BlockStore,
    host: BlockStore,
}

impl KvMemory {
    /// Creates the free blocks of `limits`, with empty prefix caches.
    pub fn new(limits: &SchedulerLimits) -> Self {
        Self {
            limits: *limits,
            has_windows: limits.shape.has_windows(),
            snapshot_every: limits.snapshot_every(),
            device: BlockStore::new(limits.shape, limits.snapshot, limits.blocks).with_evicted_hashes(),
            host: BlockStore::new(limits.shape, None, limits.host_blocks),
        }
    }

    /// Returns tables without blocks for a sequence of at most `tokens` tokens.
    pub fn tables(&self, tokens: u32) -> Tables {
        Tables::new(&self.limits.shape, tokens, self.limits.tokens_ahead())
    }

    /// Returns the number of device blocks.
    pub fn total(&self) -> u32 {
        self.device.total()
    }

    /// Returns the number of device blocks without an owner, cached ones included.
    pub fn free(&self) -> u32 {
        self.device.free()
    }

    /// Returns the number of device blocks with an owner.
    pub fn used(&self) -> u32 {
        self.device.used()
    }

    /// Returns the number of cached device blocks without an owner.
    pub fn cold(&self) -> u32 {
        self.device.cold()
    }

    /// Returns the number of host blocks with an owner.
    pub fn host_used(&self) -> u32 {
        self.host.used()
    }

    /// Returns the number of host blocks without an owner, cached ones included.
    pub fn host_free(&self) -> u32 {
        self.host.free()
    }

    /// Returns the number of positions of a sequence's blocks that hold no computed token.
    pub fn unfilled(&self, sequence: &Sequence) -> u32 {
        (sequence.tables.end() * self.limits.block_tokens()).saturating_sub(sequence.computed_tokens)
    }

    /// Returns true if a sequence has the blocks of its first `tokens` tokens.
    #[inline]
    pub fn holds(&self, sequence: &Sequence, tokens: u32) -> bool {
        sequence.tables.end() * self.limits.block_tokens() >= tokens
    }

    /// Returns the number of blocks that a sequence lacks for its first `tokens` tokens.
    pub fn lacking(&self, sequence: &Sequence, tokens: u32) -> u32 {
        sequence.tables.lacking(&self.device.ends(tokens))
    }

    /// Takes the blocks that a sequence lacks for its first `tokens` tokens. Returns false and takes none if too few are free.
    pub fn extend(&mut self, sequence: &mut Sequence, tokens: u32) -> bool {
        let ends = self.device.ends(tokens);
        self.device.extend(&mut sequence.tables, &ends)
    }

    /// Returns the number of tokens of a prefill for which it holds blocks or for which there are free ones beyond the watermark.
    /// Without windows all blocks are reserved at admission.
    pub fn room(&self, sequence: &Sequence) -> u32 {
        if !self.has_windows {
            return u32::MAX;
        }
        let spare = self.device.free().saturating_sub(self.limits.watermark_blocks);
        let most =
            sequence.computed_tokens.saturating_add(self.limits.iteration_tokens).min(sequence.known_tokens);
        let end = sequence.tables.reachable(self.limits.shape.spans(most), spare);
        (end * self.limits.block_tokens()).saturating_sub(sequence.computed_tokens)
    }

    /// Returns the maximum length of a prefill chunk, after which the state is where a snapshot of it is wanted.
    pub fn until_snapshot(&self, sequence: &Sequence) -> u32 {
        let most =
            |shape| sequence.progress.chunk_max(sequence.computed_tokens, sequence.known_tokens, shape);
        self.limits.snapshot.map_or(u32::MAX, most)
    }

    /// Takes the blocks of the next `len` tokens of a prefill, for which there is room.
    pub fn hold(&mut self, sequence: &mut Sequence, len: u32) {
        if self.has_windows && len > 0 {
            let taken = self.extend(sequence, sequence.computed_tokens + len);
            assert!(taken, "there is room for {len} tokens");
        }
    }

    /// Returns the spans up to which the tables of a new sequence reach, and the blocks that must be free to admit it: those behind a
    /// found prefix of `tokens` tokens, those of the prefix without an owner, and the watermark. Alone, a sequence may also use the
    /// watermark and the blocks of a snapshot that others need, so that one of maximum length can run.
    pub fn admission_need(
        &self,
        sequence: &Sequence,
        found: &FoundPrefix,
        tokens: u32,
        alone: bool,
    ) -> (Spans, u32) {
        let ends = self.limits.reserved(sequence.known_tokens, sequence.remaining_tokens, tokens);
        let new = self.limits.blocks_of(&[found.spans; GROUPS_MAX], &ends) + self.limits.shape.state_blocks();
        let kept = if alone { 0 } else { found.pinned + self.watermark(alone) };
        (ends, new + found.unowned + kept)
    }

    fn watermark(&self, alone: bool) -> u32 {
        if alone { 0 } else { self.limits.watermark_blocks }
    }

    /// Looks up the longest prefix on the device behind which a sequence with these hashes can resume.
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> FoundPrefix {
        self.device.find_prefix(hashes)
    }

    /// Returns the number of leading hashes in the prefix cache of the host, which holds those of a model with one group only.
    pub fn find_on_host(&self, hashes: &[BlockHash]) -> u32 {
        if !self.limits.shape.is_uniform() {
            return 0;
        }
        hashes.iter().map_while(|hash| self.host.cache().lookup(*hash)).count() as u32
    }

    /// Returns the tokens behind the first `found` spans of a new sequence whose blocks were evicted from the prefix cache. A preempted
    /// sequence has none: its own blocks are no hits of others.
    pub fn evicted_hits(&self, sequence: &Sequence, found: u32) -> u32 {
        if sequence.preempted_at.is_some() {
            return 0;
        }
        let max = (sequence.reusable_tokens() / self.limits.block_tokens()) as usize;
        let hashes = sequence.hashes.get(found as usize..sequence.hashes.len().min(max)).unwrap_or_default();
        let was_evicted = |hash: &BlockHash| self.device.cache().was_evicted(*hash);
        let spans = match self.snapshot_every {
            None => hashes.iter().take_while(|hash| was_evicted(hash)).count(),
            // The last one at whose end there was a snapshot, or that was evicted itself.
            Some(_) => hashes.iter().rposition(was_evicted).map_or(0, |last| last + 1),
        };
        spans as u32 * self.limits.block_tokens()
    }

    /// Fills the tables of a new sequence with the blocks of the first `spans` spans that the token behind `tokens` tokens sees: of a
    /// sibling, or else of the prefix cache.
    pub fn share_prefix(
        &mut self,
        tables: &mut Tables,
        spans: u32,
        tokens: u32,
        sibling: Option<&Sequence>,
        hashes: &[BlockHash],
    ) {
        let firsts = self.limits.first_spans(tokens);
        tables.begin(&firsts);
        for (group, first) in firsts.iter().enumerate().take(tables.groups().len()) {
            for position in *first..spans {
                if let Some(sibling) = sibling {
                    self.device.share(tables, group, sibling.tables.groups()[group].span(position));
                } else if let Some(leader) = self.device.cache().lookup(hashes[position as usize]) {
                    self.device.share_cached(tables, group, leader);
                }
            }
        }
    }

    /// Returns true if the tables of a sequence have what the token behind `tokens` tokens sees: no window has passed it.
    pub fn sees(&self, sequence: &Sequence, tokens: u32) -> bool {
        let firsts = self.limits.first_spans(tokens);
        sequence.tables.groups().iter().zip(firsts).all(|(table, first)| table.first_span() <= first)
    }

    /// Extends the tables of a new sequence to the spans of [`KvMemory::admission_need`], for which blocks are free.
    pub fn reserve(&mut self, tables: &mut Tables, ends: &Spans) {
        let needed = tables.lacking(ends);
        let taken = self.device.extend(tables, ends);
        assert!(taken, "{needed} blocks were found free");
    }

    /// Makes a new sequence an owner of the host's cached blocks with these hashes, to load them.
    pub fn borrow_from_host(&mut self, hashes: &[BlockHash]) -> Tables {
        let tokens = hashes.len() as u32 * self.limits.block_tokens();
        let mut tables = Tables::new(&self.limits.shape, tokens, 1);
        for hash in hashes {
            if let Some(leader) = self.host.cache().lookup(*hash) {
                self.host.share_cached(&mut tables, 0, leader);
            }
        }
        tables
    }

    /// Returns the number of blocks that only this sequence owns.
    pub fn exclusive(&self, sequence: &Sequence) -> u32 {
        self.device.exclusive(&sequence.tables)
    }

    /// Returns the number of device blocks that become free at the fences of transfers.
    pub fn outgoing(&self, transfers: &Transfers) -> u32 {
        let outgoing = transfers.iter().filter(|transfer| transfer.direction == Direction::Out);
        let exclusive = |block: &Block| self.device.owners(*block) == 1;
        outgoing.map(|transfer| transfer.device_blocks().filter(exclusive).count() as u32).sum()
    }

    /// Returns the number of leading cached spans that the first group shares with other owners, and of the cached spans behind
    /// them, which can be evicted once dropped.
    pub fn cached_spans(&self, sequence: &Sequence) -> (u32, u32) {
        if self.limits.shape.state_blocks() > 0 {
            // A state is of no use in part, and is the sequence's alone.
            let at = sequence.progress.settled().filter(|at| self.hash_before(sequence, *at).is_some());
            return (0, (at.unwrap_or(0) / self.limits.block_tokens()).min(sequence.sealed_spans));
        }
        let Some(table) = sequence.tables.groups().first() else { return (0, 0) };
        let sealed = table.end_span().min(sequence.sealed_spans);
        let is_shared = |span: &u32| table.span(*span).iter().all(|block| self.device.owners(*block) > 1);
        let shared = (table.first_span()..sealed).take_while(is_shared).count() as u32;
        // What a window has passed is as lost as what is dropped.
        if table.first_span() > 0 { (0, sealed) } else { (shared, sealed - shared) }
    }

    /// Returns the number of blocks with rows of a sequence's committed tokens, and of its state.
    pub fn blocks_to_swap_out(&self, sequence: &Sequence) -> u32 {
        let ends = self.device.ends(sequence.committed_tokens);
        sequence.tables.len() - self.limits.blocks_of(&ends, &sequence.tables.ends())
    }

    /// Prepares the swap-out of a sequence: allocates host blocks for its committed tokens, and frees its device blocks behind them. Returns
    /// its block tables on device and host, which the transfer owns, and the number of device blocks that the fence of the transfer frees.
    pub fn swap_out(&mut self, sequence: &mut Sequence) -> (Tables, Tables, u32) {
        let mut device = std::mem::take(&mut sequence.tables);
        let ends = self.device.ends(sequence.committed_tokens);
        self.device.truncate(&mut device, &ends);
        let mut host = device.without_blocks();
        let taken = self.host.extend(&mut host, &ends);
        assert!(taken, "{} free host blocks were found", device.len());
        let exclusive = self.device.exclusive(&device);
        (device, host, exclusive)
    }

    /// Returns the blocks that must be free to swap a sequence in, including the watermark if it is not alone.
    pub fn blocks_to_swap_in(&self, sequence: &Sequence, alone: bool) -> u32 {
        let firsts = sequence.host_tables.firsts();
        self.limits.blocks_of(&firsts, &self.ends_to_swap_in(sequence))
            + self.limits.shape.state_blocks()
            + self.watermark(alone)
    }

    /// Returns the spans up to which the tables of a swapped sequence reach when it is swapped in: it reserves as many as an
    /// admission, so that it is not preempted again for lack of its next block.
    fn ends_to_swap_in(&self, sequence: &Sequence) -> Spans {
        let computed = sequence.committed_tokens;
        let mut ends = self.limits.reserved(sequence.known_tokens, sequence.remaining_tokens, computed);
        ends.iter_mut().zip(sequence.host_tables.ends()).for_each(|(end, held)| *end = held.max(*end));
        ends
    }

    /// Takes the device blocks of a swapped sequence, which are free. Returns the tables of device and host, which the transfer owns.
    pub fn swap_in(&mut self, sequence: &mut Sequence) -> (Tables, Tables) {
        let ends = self.ends_to_swap_in(sequence);
        let host = std::mem::take(&mut sequence.host_tables);
        let mut device = self.tables(sequence.known_tokens + sequence.remaining_tokens);
        device.begin(&host.firsts());
        self.reserve(&mut device, &ends);
        // Formerly shared blocks are now private copies; the originals stay cached.
        sequence.sealed_spans = 0;
        (device, host)
    }

    /// Takes the prefix-cache blocks that would be evicted next, and host blocks to copy them to.
    pub fn take_cold(&mut self) -> Vec<Offloaded> {
        // In other shapes a span's blocks are in several groups, and host blocks of one without the others are of no use.
        let applies = self.limits.prefix_cache && self.limits.shape.is_uniform();
        if self.limits.host_blocks == 0 || !applies {
            return Vec::new();
        }
        let fresh = |(_, hash): &(Block, BlockHash)| self.host.cache().lookup(*hash).is_none();
        // Examines at most half of the free host blocks; otherwise offloaded blocks would evict each other
        // endlessly.
        let examined = OFFLOAD_EXAMINED_MAX.min(self.host.free() as usize / 2);
        let cold: Vec<(Block, BlockHash)> =
            self.device.coldest().take(examined).filter(fresh).take(OFFLOAD_MAX).collect();
        let mut offloaded = Vec::with_capacity(cold.len());
        for (device, hash) in cold {
            self.device.borrow(device);
            let host = self.host.take().expect("at least twice as many host blocks were found free");
            offloaded.push((device, host, hash));
        }
        offloaded
    }

    /// Gives blocks back that were taken by [`KvMemory::take_cold`], and adds those that were copied to the prefix cache of the host.
    pub fn finish_offload(&mut self, offloaded: &[Offloaded], succeeded: bool) {
        for (device, host, hash) in offloaded {
            // Its content may have been discarded meanwhile.
            let cached = self.device.cache().lookup(*hash) == Some(*device);
            self.device.release_cold(*device);
            if succeeded && cached {
                self.host.seal_block(*host, *hash);
            }
            self.host.release(*host);
        }
    }

    /// Extends the tables of a sequence of `end` tokens for at most `drafts` tokens more, as far as free blocks beyond the watermark and
    /// `kept` ones hold them. Returns the number of tokens that they hold.
    pub fn extend_for_drafts(&mut self, sequence: &mut Sequence, end: u32, drafts: u32, kept: u32) -> u32 {
        let spare = self.device.free().saturating_sub(self.limits.watermark_blocks + kept);
        let most = self.limits.shape.spans(end + drafts);
        let room = sequence.tables.reachable(most, spare) * self.limits.block_tokens() - end;
        let drafts = drafts.min(room);
        let held = sequence.tables.ends();
        if drafts == 0 || !self.extend(sequence, end + drafts) {
            return 0;
        }
        sequence.undrafted = held;
        drafts
    }

    /// Releases the blocks that were taken for drafts and hold no computed token.
    pub fn roll_back(&mut self, sequence: &mut Sequence) {
        let mut keep = self.device.ends(sequence.computed_tokens);
        keep.iter_mut().zip(sequence.undrafted).for_each(|(keep, before)| *keep = before.max(*keep));
        self.device.truncate(&mut sequence.tables, &keep);
    }

    /// Adds the full spans of a sequence's committed tokens to the prefix cache, as far as their hashes are known.
    pub fn seal(&mut self, sequence: &mut Sequence) {
        // Rows are of no use to others without the states behind them.
        if self.limits.shape.state_blocks() > 0 && self.snapshot_every.is_none() {
            return;
        }
        let full = (sequence.committed_tokens / self.limits.block_tokens()).min(sequence.hashes.len() as u32);
        if full <= sequence.sealed_spans {
            return;
        }
        for position in sequence.sealed_spans..full {
            let parent = position.checked_sub(1).map(|before| sequence.hashes[before as usize]);
            let span = SealedSpan { hash: sequence.hashes[position as usize], position, parent };
            self.device.seal(&span, &sequence.tables);
        }
        sequence.sealed_spans = full;
    }

    /// Releases the blocks of a sequence that its windows have passed, unless a copy in flight uses them.
    pub fn pass_windows(&mut self, sequence: &mut Sequence) {
        if self.has_windows && sequence.copies == 0 {
            self.device.pass(&mut sequence.tables, sequence.committed_tokens, sequence.junction);
        }
    }

    /// Makes a new sequence an owner of the snapshot behind its cached prefix. If that leaves fewer than `needed` free blocks, its blocks become those of the sequence's state; with windows always, as prefills then take blocks that are not reserved.
    /// Models without recurrent layers have no snapshots.
    pub fn share_snapshot(&mut self, tables: &mut Tables, hash: BlockHash, needed: u32) -> StateBegin {
        let leader = self.device.cache().lookup(hash).filter(|_| self.snapshot_every.is_some());
        let Some(leader) = leader else { return StateBegin::Empty };
        let free = |block: &&Block| self.device.owners(**block) == 0;
        let unowned = self.device.cache().snapshot(leader).iter().filter(free).count() as u32;
        if unowned == 0 || !self.has_windows && self.device.free() >= needed + unowned {
            return StateBegin::Copied { superfluous: self.device.share_snapshot(tables, leader) };
        }
        self.device.take_snapshot(tables, leader);
        StateBegin::Taken
    }

    /// Returns the number of snapshots in the prefix cache.
    pub fn snapshots(&self) -> u32 {
        self.device.cache().snapshots()
    }

    /// Returns what is kept of a recurrent state.
    pub fn snapshot(&self) -> Option<SnapshotShape> {
        self.limits.snapshot
    }

    /// Takes free blocks beyond the watermark for a snapshot of a sequence's state, unless one is kept at `position`. Returns false if there
    /// are none.
    pub fn take_for_snapshot(&mut self, sequence: &mut Sequence, position: u32) -> bool {
        let (Some(shape), Some(hash)) = (self.limits.snapshot, self.hash_before(sequence, position)) else {
            return false;
        };
        let cache = self.device.cache();
        let known = cache.lookup(hash).is_some_and(|leader| cache.has_state(leader));
        let kept = self.limits.watermark_blocks;
        !known && self.device.take_for_snapshot(&mut sequence.tables, shape.blocks, kept)
    }

    /// Adds the snapshot that was copied from a sequence's state at `position` to the prefix cache.
    pub fn store_snapshot(&mut self, sequence: &mut Sequence, position: u32, kind: SnapshotKind) {
        let hash = self.hash_before(sequence, position);
        let demoted =
            hash.is_some_and(|hash| self.device.keep_snapshot(hash, sequence.tables.snapshot(), kind));
        self.release_snapshot(sequence, demoted);
    }

    /// Releases the snapshot that a sequence holds; `demoted`: to be evicted before others.
    pub fn release_snapshot(&mut self, sequence: &mut Sequence, demoted: bool) {
        self.device.release_snapshot(&mut sequence.tables, demoted);
    }

    /// Adds the state of a sequence that gives up its blocks to the prefix cache, if it can be resumed from. Returns true if it is to be
    /// evicted before others.
    pub fn keep_state(&mut self, sequence: &Sequence) -> bool {
        let (Some(shape), Some(at)) = (self.limits.snapshot, sequence.progress.settled()) else {
            return false;
        };
        let Some(blocks) = sequence.tables.state().get(..shape.blocks as usize) else { return false };
        let hash = self.hash_before(sequence, at).filter(|_| at >= self.limits.snapshot_worth());
        hash.is_some_and(|hash| self.device.keep_snapshot(hash, blocks, SnapshotKind::Output))
    }

    /// Returns the hash of the span that ends at a position at which a state can be kept.
    fn hash_before(&self, sequence: &Sequence, position: u32) -> Option<BlockHash> {
        let every = self.snapshot_every?;
        let last = (position / self.limits.block_tokens()).checked_sub(1)?;
        sequence.hashes.get(last as usize).copied().filter(|_| position.is_multiple_of(every))
    }

    /// Releases all blocks of device tables; `demoted`: a snapshot of the state is to be evicted before others.
    pub fn release(&mut self, tables: &mut Tables, demoted: bool) {
        self.device.release_all(tables, demoted);
    }

    /// Releases all blocks of host tables.
    pub fn release_on_host(&mut self, tables: &mut Tables) {
        self.host.release_all(tables, false);
    }

    /// Removes the spans with these hashes from both prefix caches; their owners keep them.
    pub fn forget(&mut self, hashes: &[BlockHash]) {
        for hash in hashes {
            self.device.forget(*hash);
            self.host.forget(*hash);
        }
    }

    /// Drains the changes of the prefix caches since the last call, in order per tier.
    pub fn drain_events(&mut self) -> impl Iterator<Item = (CacheTier, CacheEvent)> + '_ {
        let device = self.device.drain_events().map(|event| (CacheTier::Device, event));
        device.chain(self.host.drain_events().map(|event| (CacheTier::Host, event)))
    }

    /// Returns the hashes of the spans behind which a sequence can resume, with undrained changes applied.
    pub fn contents(&self) -> impl Iterator<Item = (CacheTier, BlockHash)> + '_ {
        let device = self.device.cache().contents().map(|hash| (CacheTier::Device, hash));
        device.chain(self.host.cache().contents().map(|hash| (CacheTier::Host, hash)))
    }

    /// Checks that each block is owned by the tables of sequences and by transfers, as often as its count says, for tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_conserved<'a>(&self, sequences: impl Iterator<Item = &'a Sequence>, transfers: &Transfers) {
        let mut device = vec![0; self.device.total() as usize];
        let mut host = vec![0; self.host.total() as usize];
        for transfer in transfers.iter() {
            transfer.device_blocks().for_each(|block| device[block as usize] += 1);
            transfer.host_blocks().for_each(|block| host[block as usize] += 1);
        }
        for sequence in sequences {
            sequence.tables.blocks().for_each(|block| device[block as usize] += 1);
            sequence.host_tables.blocks().for_each(|block| host[block as usize] += 1);
        }
        self.device.assert_consistent(&device);
        self.host.assert_consistent(&host);
    }

    /// Checks the tables of a running sequence: they hold what its next token sees and what is computed, and no block that it may
    /// still write to has another owner. For tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_tables_fit(&self, sequence: &Sequence) {
        let (id, block_tokens) = (sequence.id, self.limits.block_tokens());
        let tokens = sequence.known_tokens + sequence.remaining_tokens;
        let most = self.limits.shape.blocks(tokens, self.limits.tokens_ahead());
        assert!(
            sequence.tables.len() <= most,
            "{id:?} holds {} blocks, more than {most}",
            sequence.tables.len()
        );
        assert_eq!(sequence.tables.lacking_state(), 0, "{id:?} lacks blocks of its state");
        for block in sequence.tables.state() {
            assert_eq!(self.device.owners(*block), 1, "{id:?} shares its state");
        }
        let firsts = self.limits.first_spans(sequence.committed_tokens);
        let groups = self.limits.shape.groups();
        for ((group, table), first) in groups.iter().zip(sequence.tables.groups()).zip(firsts) {
            let (begin, end) = (table.first_span(), table.end_span());
            assert!(begin <= first, "{id:?} lacks rows of a live window");
            assert!(sequence.computed_tokens <= end * block_tokens, "{id:?} computed more than it holds");
            let blocks = group.blocks * (end - begin);
            assert_eq!(table.blocks().len() as u32, blocks, "{id:?} holds a part of a span");
            for span in (sequence.computed_tokens / block_tokens)..end {
                for block in table.span(span) {
                    assert_eq!(self.device.owners(*block), 1, "{id:?} may write to a shared block");
                }
            }
        }
    }
}

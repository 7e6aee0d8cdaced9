//! Prefix index: a copy of a worker's prefix cache, maintained from its numbered events and snapshots.

use std::hash::{BuildHasherDefault, Hasher};

/// Pool that holds a cached block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Tier {
    /// Device pool: shared at no cost.
    Device,
    /// Host pool: must be copied first.
    Host,
}

impl Tier {
    fn bit(self) -> u8 {
        match self {
            Self::Device => 1,
            Self::Host => 2,
        }
    }
}

/// Change of a worker's prefix cache. Blocks are named by their short chained hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum CacheChange {
    /// A block was cached.
    Stored(Tier, u64),
    /// A block was evicted.
    Removed(Tier, u64),
    /// All blocks were evicted.
    Cleared,
    /// Kind of a newer protocol version: numbered, without effect here.
    Unknown,
}

/// Part of a snapshot of a worker's prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotPiece<'a> {
    /// First part: the previous contents are void.
    pub first: bool,
    /// Blocks in the device pool.
    pub device: &'a [u64],
    /// Blocks in the host pool.
    pub host: &'a [u64],
    /// Set in the last part: number of the first event after the snapshot.
    pub next: Option<u64>,
}

/// Result of applying events or a part of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexStatus {
    /// The index matches the worker, or will once the snapshot is complete.
    Followed,
    /// Dropped: a snapshot was requested and has not started.
    Ignored,
    /// Events are missing and the index is empty: request a snapshot from the worker.
    Lost,
    /// The worker reported more blocks than it has; it is not indexed any more.
    Overfull,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IndexState {
    /// Empty, until a snapshot starts or the worker's very first event arrives.
    Empty {
        /// A snapshot was requested.
        requested: bool,
    },
    /// Within a snapshot.
    Loading,
    /// Exact; holds the number of the next event.
    Exact(u64),
    /// Disabled: the worker reported more blocks than it has.
    Disabled,
}

/// Prefix cache of one worker as its events report it: exact, or empty.
///
/// Events are numbered. A gap empties the index until a snapshot fills it again, so a wrong entry lives no
/// longer than an event travels. Blocks of different tenants never match: a tenant's name is the root of its
/// hash chains (`BlockHash::root`).
///
/// **Invariants**: at most `blocks_max` blocks; while exact, it holds the snapshot with all events since.
#[derive(Debug)]
pub struct PrefixIndex {
    blocks: BlockMap<u8>,
    blocks_max: usize,
    state: IndexState,
}

impl PrefixIndex {
    /// Creates an empty index for a worker whose pools hold `blocks_max` blocks.
    pub fn new(blocks_max: usize) -> Self {
        Self { blocks: BlockMap::default(), blocks_max, state: IndexState::Empty { requested: false } }
    }

    /// Returns the number of indexed blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is indexed.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether it equals the worker's cache at its last event.
    pub fn is_exact(&self) -> bool {
        matches!(self.state, IndexState::Exact(_))
    }

    /// Whether a block is in a tier.
    pub fn holds(&self, tier: Tier, block: u64) -> bool {
        self.blocks.get(&block).is_some_and(|tiers| tiers & tier.bit() != 0)
    }

    /// Applies consecutive events, numbered from `first`.
    pub fn apply(&mut self, first: u64, changes: impl IntoIterator<Item = CacheChange>) -> IndexStatus {
        let mut number = match self.state {
            IndexState::Exact(next) if next == first => next,
            // Event 0: the worker's cache was empty before.
            IndexState::Empty { requested: false } if first == 0 => 0,
            IndexState::Disabled => return IndexStatus::Overfull,
            IndexState::Empty { .. } | IndexState::Exact(_) | IndexState::Loading => return self.desync(),
        };
        for change in changes {
            number = number.wrapping_add(1);
            match change {
                CacheChange::Stored(tier, block) => {
                    if !self.add(tier, block) {
                        return IndexStatus::Overfull;
                    }
                }
                CacheChange::Removed(tier, block) => self.remove(tier, block),
                CacheChange::Cleared => self.blocks.clear(),
                CacheChange::Unknown => {}
            }
        }
        self.state = IndexState::Exact(number);
        IndexStatus::Followed
    }

    /// Loads a part of a snapshot.
    pub fn load(&mut self, piece: SnapshotPiece<'_>) -> IndexStatus {
        match self.state {
            IndexState::Disabled => return IndexStatus::Overfull,
            _ if piece.first => self.reset(IndexState::Loading),
            IndexState::Loading => {}
            IndexState::Empty { .. } | IndexState::Exact(_) => return self.desync(),
        }
        for (tier, blocks) in [(Tier::Device, piece.device), (Tier::Host, piece.host)] {
            if !blocks.iter().all(|block| self.add(tier, *block)) {
                return IndexStatus::Overfull;
            }
        }
        if let Some(next) = piece.next {
            self.state = IndexState::Exact(next);
        }
        IndexStatus::Followed
    }

    /// Empties the index after missing events, until a snapshot that is requested once.
    fn desync(&mut self) -> IndexStatus {
        let requested = matches!(self.state, IndexState::Empty { requested: true });
        self.reset(IndexState::Empty { requested: true });
        if requested { IndexStatus::Ignored } else { IndexStatus::Lost }
    }

    /// Adds a block. Returns whether there was room for it.
    fn add(&mut self, tier: Tier, block: u64) -> bool {
        let known = self.blocks.len();
        let tiers = self.blocks.entry(block).or_insert(0);
        if *tiers == 0 && known >= self.blocks_max {
            self.reset(IndexState::Disabled);
            return false;
        }
        *tiers |= tier.bit();
        true
    }

    fn remove(&mut self, tier: Tier, block: u64) {
        if let Some(tiers) = self.blocks.get_mut(&block) {
            *tiers &= !tier.bit();
            if *tiers == 0 {
                self.blocks.remove(&block);
            }
        }
    }

    fn reset(&mut self, state: IndexState) {
        self.blocks.clear();
        self.state = state;
    }
}

/// Map by block hash. Looked up for each block of each prompt and never iterated, so its order has no effect.
#[allow(clippy::disallowed_types, reason = "never iterated")]
pub(crate) type BlockMap<V> = std::collections::HashMap<u64, V, BuildHasherDefault<Uniform>>;

/// Identity hasher: block hashes are uniform already.
#[derive(Debug, Default)]
pub(crate) struct Uniform(u64);

impl Hasher for Uniform {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Op {
        Change(bool, bool, u64),
        Clear,
        /// Event of a newer protocol version.
        Unknown,
        /// The next batch is lost.
        Drop,
        /// The session is lost and reopened.
        Reconnect,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            30 => (any::<bool>(), any::<bool>(), 0u64..40).prop_map(|(s, d, b)| Op::Change(s, d, b)),
            1 => Just(Op::Clear),
            2 => Just(Op::Unknown),
            2 => Just(Op::Drop),
            2 => Just(Op::Reconnect),
        ]
    }

    fn tier(device: bool) -> Tier {
        if device { Tier::Device } else { Tier::Host }
    }

    proptest! {
        #[test]
        fn the_index_equals_the_workers_cache_or_is_empty_after_any_loss(
            steps in prop::collection::vec((prop::collection::vec(op(), 1..8), 1usize..5), 1..40)
        ) {
            let mut index = PrefixIndex::new(40);
            let mut has: BTreeSet<(Tier, u64)> = BTreeSet::new();
            let mut sent = 0u64;
            let mut requested = false;
            for (ops, pieces) in steps {
                let first = sent;
                let mut changes = Vec::new();
                let (mut dropped, mut snapshot) = (false, std::mem::take(&mut requested));
                for op in ops {
                    match op {
                        Op::Change(true, device, block) if has.insert((tier(device), block)) => {
                            changes.push(CacheChange::Stored(tier(device), block));
                        }
                        Op::Change(false, device, block) if has.remove(&(tier(device), block)) => {
                            changes.push(CacheChange::Removed(tier(device), block));
                        }
                        Op::Change(..) => {}
                        Op::Clear => {
                            has.clear();
                            changes.push(CacheChange::Cleared);
                        }
                        Op::Unknown => changes.push(CacheChange::Unknown),
                        Op::Drop => dropped = true,
                        Op::Reconnect => {
                            index = PrefixIndex::new(40);
                            snapshot = true;
                        }
                    }
                }
                sent += changes.len() as u64;
                if snapshot {
                    // Its contents include the changes of this step.
                    let blocks = |wanted: Tier| -> Vec<u64> {
                        has.iter().filter(|(tier, _)| *tier == wanted).map(|(_, block)| *block).collect()
                    };
                    let (device, host) = (blocks(Tier::Device), blocks(Tier::Host));
                    for piece in 0..pieces {
                        let part = |all: &[u64]| -> Vec<u64> {
                            all.iter().copied().skip(piece).step_by(pieces).collect()
                        };
                        let (device, host) = (part(&device), part(&host));
                        let next = (piece + 1 == pieces).then_some(sent);
                        let step = index.load(SnapshotPiece {
                            first: piece == 0, device: &device, host: &host, next,
                        });
                        prop_assert_eq!(step, IndexStatus::Followed);
                    }
                } else if !changes.is_empty() && !dropped {
                    requested |= index.apply(first, changes) == IndexStatus::Lost;
                }
                if index.state == IndexState::Exact(sent) {
                    for block in 0..40 {
                        for tier in [Tier::Device, Tier::Host] {
                            prop_assert_eq!(index.holds(tier, block), has.contains(&(tier, block)));
                        }
                    }
                } else {
                    // A loss is not detected yet, or the index is empty.
                    prop_assert!(index.is_exact() || index.is_empty());
                    prop_assert!(!snapshot);
                }
            }
        }
    }

    #[test]
    fn a_worker_that_reports_more_blocks_than_it_has_is_not_indexed() {
        let mut index = PrefixIndex::new(3);
        let stored =
            |blocks: std::ops::Range<u64>| blocks.map(|block| CacheChange::Stored(Tier::Device, block));
        assert_eq!(index.apply(0, stored(0..3)), IndexStatus::Followed);
        assert_eq!(index.apply(3, [CacheChange::Stored(Tier::Host, 1)]), IndexStatus::Followed);
        assert_eq!(index.apply(4, stored(3..4)), IndexStatus::Overfull);
        assert!(index.is_empty());
        let piece = SnapshotPiece { first: true, device: &[1], host: &[], next: Some(9) };
        assert_eq!(index.load(piece), IndexStatus::Overfull);
        assert_eq!(index.apply(9, stored(0..1)), IndexStatus::Overfull);
    }

    #[test]
    fn events_out_of_order_empty_the_index_until_a_snapshot_starts() {
        let stored = |block| [CacheChange::Stored(Tier::Device, block)];
        let mut index = PrefixIndex::new(10);
        assert_eq!(index.apply(5, stored(1)), IndexStatus::Lost, "what came before is not known");
        assert_eq!(index.apply(6, stored(1)), IndexStatus::Ignored, "a snapshot was asked for");
        let piece = |first, next| SnapshotPiece { first, device: &[7], host: &[8], next };
        assert_eq!(index.load(piece(false, Some(6))), IndexStatus::Ignored);
        assert_eq!(index.load(piece(true, None)), IndexStatus::Followed);
        assert_eq!(index.apply(6, stored(1)), IndexStatus::Lost, "the snapshot is not complete");
        assert_eq!(index.load(piece(true, Some(6))), IndexStatus::Followed);
        assert!(index.holds(Tier::Device, 7) && index.holds(Tier::Host, 8) && !index.holds(Tier::Host, 7));
        for wrong in [5, 7] {
            assert_eq!(index.load(piece(true, Some(6))), IndexStatus::Followed);
            assert_eq!(index.apply(wrong, stored(1)), IndexStatus::Lost);
            assert!(index.is_empty() && !index.is_exact());
        }
    }
}

use std::hash::{BuildHasherDefault, Hasher};

/// Where a worker keeps a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// In the device's pool: shared at no cost.
    Device,
    /// In the host's pool: to be copied first.
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

/// A change of what a worker can find again. Blocks go by the short form of their chained hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheChange {
    /// A block can be shared.
    Stored(Tier, u64),
    /// It is gone.
    Removed(Tier, u64),
    /// All blocks are gone.
    Cleared,
    /// Of a kind that a newer protocol added: it has a number, and changes nothing that is known here.
    Unknown,
}

/// A piece of the whole of what a worker can find again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotPiece<'a> {
    /// It is the first of its snapshot: what was known before is void.
    pub first: bool,
    /// Blocks on the device.
    pub device: &'a [u64],
    /// Blocks on the host.
    pub host: &'a [u64],
    /// It is the last, and the changes after it are numbered from here.
    pub next: Option<u64>,
}

/// What became of news from a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexStep {
    /// The index says what the worker has, or will once the rest of a snapshot has come.
    Followed,
    /// Nothing is known until a snapshot begins, which has been asked for before.
    Ignored,
    /// Some changes are missing: nothing is known any more. Ask the worker for a snapshot.
    Lost,
    /// The worker named more blocks than it has: nothing of it is indexed any more.
    Overfull,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Until a snapshot begins, or the very first change ever comes.
    Blank {
        /// A snapshot was asked for.
        asked: bool,
    },
    /// Within a snapshot.
    Loading,
    /// The next change has this number.
    Exact(u64),
    /// Its worker lies.
    Off,
}

/// What one worker's prefix cache holds, as its events tell: exact, or known to be nothing.
///
/// Changes are numbered. A number that does not follow the one before empties the index until a snapshot fills it again,
/// so that it never claims what is not there for longer than an event travels. Blocks of different tenants never
/// meet: a tenant's name is the start of its chains (`BlockHash::root`).
///
/// **Invariants**: it holds at most `most` blocks; while it is exact, it holds the snapshot with all changes since.
#[derive(Debug)]
pub struct PrefixIndex {
    blocks: BlockMap<u8>,
    most: usize,
    state: State,
}

impl PrefixIndex {
    /// Nothing is known. The worker's pools hold `most` blocks in all.
    pub fn new(most: usize) -> Self {
        Self { blocks: BlockMap::default(), most, state: State::Blank { asked: false } }
    }

    /// Blocks known.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether it says what the worker had when it sent the last change.
    pub fn is_exact(&self) -> bool {
        matches!(self.state, State::Exact(_))
    }

    /// Whether a block is in a tier.
    pub fn holds(&self, tier: Tier, block: u64) -> bool {
        self.blocks.get(&block).is_some_and(|tiers| tiers & tier.bit() != 0)
    }

    /// Takes changes in, the first of which has this number.
    pub fn apply(&mut self, first: u64, changes: impl IntoIterator<Item = CacheChange>) -> IndexStep {
        let mut number = match self.state {
            State::Exact(next) if next == first => next,
            // A worker that has never told anybody anything has had nothing to tell.
            State::Blank { asked: false } if first == 0 => 0,
            State::Off => return IndexStep::Overfull,
            State::Blank { .. } | State::Exact(_) | State::Loading => return self.lose(),
        };
        for change in changes {
            number = number.wrapping_add(1);
            match change {
                CacheChange::Stored(tier, block) => {
                    if !self.add(tier, block) {
                        return IndexStep::Overfull;
                    }
                }
                CacheChange::Removed(tier, block) => self.remove(tier, block),
                CacheChange::Cleared => self.blocks.clear(),
                CacheChange::Unknown => {}
            }
        }
        self.state = State::Exact(number);
        IndexStep::Followed
    }

    /// Takes a piece of a snapshot in.
    pub fn load(&mut self, piece: SnapshotPiece<'_>) -> IndexStep {
        match self.state {
            State::Off => return IndexStep::Overfull,
            _ if piece.first => self.forget(State::Loading),
            State::Loading => {}
            State::Blank { .. } | State::Exact(_) => return self.lose(),
        }
        for (tier, blocks) in [(Tier::Device, piece.device), (Tier::Host, piece.host)] {
            if !blocks.iter().all(|block| self.add(tier, *block)) {
                return IndexStep::Overfull;
            }
        }
        if let Some(next) = piece.next {
            self.state = State::Exact(next);
        }
        IndexStep::Followed
    }

    /// Something is missing: nothing is known until a snapshot begins, for which to ask once.
    fn lose(&mut self) -> IndexStep {
        let asked = matches!(self.state, State::Blank { asked: true });
        self.forget(State::Blank { asked: true });
        if asked { IndexStep::Ignored } else { IndexStep::Lost }
    }

    /// Returns whether there was room for it.
    fn add(&mut self, tier: Tier, block: u64) -> bool {
        let known = self.blocks.len();
        let tiers = self.blocks.entry(block).or_insert(0);
        if *tiers == 0 && known >= self.most {
            self.forget(State::Off);
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

    fn forget(&mut self, state: State) {
        self.blocks.clear();
        self.state = state;
    }
}

/// By block. It is looked up for each block of each prompt, and never iterated, so that its order decides nothing.
#[allow(clippy::disallowed_types, reason = "never iterated")]
pub(crate) type BlockMap<V> = std::collections::HashMap<u64, V, BuildHasherDefault<Uniform>>;

/// Block hashes are uniform already.
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
        /// Something of a newer protocol.
        Unknown,
        /// The batch that comes next is lost on the way.
        Drop,
        /// The session breaks and opens again.
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
        fn it_is_what_the_worker_has_or_nothing_whatever_is_lost(
            steps in prop::collection::vec((prop::collection::vec(op(), 1..8), 1usize..5), 1..40)
        ) {
            let mut index = PrefixIndex::new(40);
            let mut has: BTreeSet<(Tier, u64)> = BTreeSet::new();
            let mut sent = 0u64;
            let mut asked = false;
            for (ops, pieces) in steps {
                let first = sent;
                let mut changes = Vec::new();
                let (mut dropped, mut snapshot) = (false, std::mem::take(&mut asked));
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
                    // Its content includes the changes of this step.
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
                        prop_assert_eq!(step, IndexStep::Followed);
                    }
                } else if !changes.is_empty() && !dropped {
                    asked |= index.apply(first, changes) == IndexStep::Lost;
                }
                if index.state == State::Exact(sent) {
                    for block in 0..40 {
                        for tier in [Tier::Device, Tier::Host] {
                            prop_assert_eq!(index.holds(tier, block), has.contains(&(tier, block)));
                        }
                    }
                } else {
                    // It can't know yet that something was lost, or it knows nothing.
                    prop_assert!(index.is_exact() || index.is_empty());
                    prop_assert!(!snapshot);
                }
            }
        }
    }

    #[test]
    fn a_worker_that_names_more_blocks_than_it_has_is_not_indexed_any_more() {
        let mut index = PrefixIndex::new(3);
        let stored =
            |blocks: std::ops::Range<u64>| blocks.map(|block| CacheChange::Stored(Tier::Device, block));
        assert_eq!(index.apply(0, stored(0..3)), IndexStep::Followed);
        assert_eq!(index.apply(3, [CacheChange::Stored(Tier::Host, 1)]), IndexStep::Followed);
        assert_eq!(index.apply(4, stored(3..4)), IndexStep::Overfull);
        assert!(index.is_empty());
        let piece = SnapshotPiece { first: true, device: &[1], host: &[], next: Some(9) };
        assert_eq!(index.load(piece), IndexStep::Overfull);
        assert_eq!(index.apply(9, stored(0..1)), IndexStep::Overfull);
    }

    #[test]
    fn news_out_of_order_empty_it_until_a_snapshot_begins() {
        let stored = |block| [CacheChange::Stored(Tier::Device, block)];
        let mut index = PrefixIndex::new(10);
        assert_eq!(index.apply(5, stored(1)), IndexStep::Lost, "what came before is not known");
        assert_eq!(index.apply(6, stored(1)), IndexStep::Ignored, "a snapshot was asked for");
        let piece = |first, next| SnapshotPiece { first, device: &[7], host: &[8], next };
        assert_eq!(index.load(piece(false, Some(6))), IndexStep::Ignored);
        assert_eq!(index.load(piece(true, None)), IndexStep::Followed);
        assert_eq!(index.apply(6, stored(1)), IndexStep::Lost, "the snapshot is not complete");
        assert_eq!(index.load(piece(true, Some(6))), IndexStep::Followed);
        assert!(index.holds(Tier::Device, 7) && index.holds(Tier::Host, 8) && !index.holds(Tier::Host, 7));
        for wrong in [5, 7] {
            assert_eq!(index.load(piece(true, Some(6))), IndexStep::Followed);
            assert_eq!(index.apply(wrong, stored(1)), IndexStep::Lost);
            assert!(index.is_empty() && !index.is_exact());
        }
    }
}

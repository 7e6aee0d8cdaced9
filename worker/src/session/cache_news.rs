use inflight_proto::v1;
use inflight_worker_core::{BlockHash, CacheEvent, CacheTier};

/// Changes of the prefix cache that may wait for a router.
const EVENTS_MAX: usize = 1 << 14;

/// Blocks in one piece of a snapshot: 64 KiB on the wire.
const PIECE_BLOCKS: usize = 1 << 13;

/// What a session still has to be told of the prefix cache.
///
/// A router first gets all that the cache holds, piece by piece, then every change since. One that does not read loses
/// changes in the end, and once it reads again it gets all from the start.
///
/// **Invariant**: what was taken, in order, is a snapshot followed by all changes after it, without a gap; or the next
/// thing taken is the first piece of a new snapshot. It holds at most one snapshot and [`EVENTS_MAX`] changes.
#[derive(Debug, Default)]
pub(super) struct CacheNews {
    snapshot: Option<Snapshot>,
    events: v1::KvEvents,
    /// Changes were dropped.
    lost: bool,
    /// A snapshot is to be made.
    wanted: bool,
}

#[derive(Debug)]
struct Snapshot {
    blocks: Vec<(CacheTier, u64)>,
    sent: usize,
    next: u64,
}

impl CacheNews {
    /// Adds changes, the first of which has this number.
    pub fn push(&mut self, first: u64, events: &[(CacheTier, CacheEvent)]) {
        if self.lost {
            return;
        }
        let kept = self.events.events.len();
        let gap = kept > 0 && self.events.first_event + kept as u64 != first;
        if gap || kept + events.len() > EVENTS_MAX {
            *self = Self { lost: true, ..Self::default() };
            return;
        }
        if kept == 0 {
            self.events.first_event = first;
        }
        self.events.events.extend(events.iter().map(|(tier, event)| event_of(*tier, *event)));
    }

    /// Begins anew with all that the cache holds; changes are numbered from `next` on.
    pub fn begin(&mut self, contents: impl Iterator<Item = (CacheTier, BlockHash)>, next: u64) {
        let blocks = contents.map(|(tier, hash)| (tier, hash.short())).collect();
        *self = Self { snapshot: Some(Snapshot { blocks, sent: 0, next }), ..Self::default() };
    }

    /// The router has asked for a snapshot. One that is under way answers it.
    pub fn request(&mut self) {
        self.wanted |= self.snapshot.is_none();
    }

    /// Whether [`CacheNews::begin`] is to be called.
    pub fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Whether there is something to take.
    pub fn is_empty(&self) -> bool {
        self.snapshot.is_none() && self.events.events.is_empty()
    }

    /// Takes what goes into the next update.
    pub fn take(&mut self) -> (Option<v1::KvSnapshot>, Option<v1::KvEvents>) {
        // It reads, so it is worth a snapshot.
        self.wanted |= self.lost;
        let piece = self.snapshot.as_mut().map(Snapshot::piece);
        if piece.as_ref().is_some_and(|piece| piece.next_event.is_some()) {
            self.snapshot = None;
        }
        let events = (self.snapshot.is_none() && !self.events.events.is_empty())
            .then(|| std::mem::take(&mut self.events));
        (piece, events)
    }
}

impl Snapshot {
    fn piece(&mut self) -> v1::KvSnapshot {
        let left = &self.blocks[self.sent..];
        let mut piece = v1::KvSnapshot { is_first: self.sent == 0, ..v1::KvSnapshot::default() };
        for (tier, block) in left.iter().take(PIECE_BLOCKS) {
            match tier {
                CacheTier::Device => piece.device_block_hashes.push(*block),
                CacheTier::Host => piece.host_block_hashes.push(*block),
            }
        }
        self.sent += left.len().min(PIECE_BLOCKS);
        piece.next_event = (self.sent == self.blocks.len()).then_some(self.next);
        piece
    }
}

fn event_of(tier: CacheTier, event: CacheEvent) -> v1::KvEvent {
    use v1::kv_event::Event;
    let event = match (tier, event) {
        (CacheTier::Device, CacheEvent::Stored(hash)) => Event::Stored(hash.short()),
        (CacheTier::Device, CacheEvent::Removed(hash)) => Event::Removed(hash.short()),
        (CacheTier::Host, CacheEvent::Stored(hash)) => Event::StoredOnHost(hash.short()),
        (CacheTier::Host, CacheEvent::Removed(hash)) => Event::RemovedFromHost(hash.short()),
    };
    v1::KvEvent { event: Some(event) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn stored(blocks: std::ops::Range<u128>) -> Vec<(CacheTier, CacheEvent)> {
        blocks.map(|raw| (CacheTier::Device, CacheEvent::Stored(BlockHash::from_raw(raw)))).collect()
    }

    #[test]
    fn a_snapshot_comes_in_pieces_before_the_changes_after_it() {
        let total = 2 * PIECE_BLOCKS + 5;
        let mut news = CacheNews::default();
        let tier = |raw: u128| if raw.is_multiple_of(3) { CacheTier::Host } else { CacheTier::Device };
        news.begin((0..total as u128).map(|raw| (tier(raw), BlockHash::from_raw(raw))), 70);
        news.push(70, &stored(900_000..900_002));
        let mut blocks = BTreeSet::new();
        for number in 0..3 {
            let (piece, events) = news.take();
            let piece = piece.unwrap();
            assert!(piece.device_block_hashes.len() + piece.host_block_hashes.len() <= PIECE_BLOCKS);
            assert_eq!(piece.is_first, number == 0);
            assert_eq!(piece.next_event, (number == 2).then_some(70));
            assert_eq!(
                events.map(|events| (events.first_event, events.events.len())),
                (number == 2).then_some((70, 2))
            );
            assert!(piece.host_block_hashes.iter().all(|block| block % 3 == 0));
            blocks.extend(piece.device_block_hashes.into_iter().chain(piece.host_block_hashes));
        }
        assert_eq!(blocks.len(), total);
        assert!(news.is_empty());
        news.begin(std::iter::empty(), 72);
        assert_eq!(
            news.take().0.map(|piece| (piece.is_first, piece.next_event)),
            Some((true, Some(72))),
            "also of nothing"
        );
    }

    #[test]
    fn a_router_that_does_not_read_costs_no_more_than_the_bound_and_begins_anew_once_it_reads() {
        let mut news = CacheNews::default();
        let mut first = 0;
        for _ in 0..100 {
            news.push(first, &stored(0..1000));
            first += 1000;
            assert!(news.events.events.len() <= EVENTS_MAX);
        }
        assert!(!news.is_wanted(), "nobody reads");
        assert_eq!(news.take(), (None, None));
        assert!(news.is_wanted());
        news.begin(std::iter::once((CacheTier::Device, BlockHash::from_raw(1))), first);
        news.request();
        assert!(!news.is_wanted(), "one is under way");
        news.push(first, &stored(5..6));
        let (piece, events) = news.take();
        assert_eq!((piece.unwrap().next_event, events.unwrap().first_event), (Some(first), first));
        news.request();
        assert!(news.is_wanted());
    }
}

//! Prefix-cache feed of a session: a snapshot in pieces, then the events since.

use inflight_proto::v1;
use inflight_worker_core::{BlockHash, CacheEvent, CacheTier};

/// Maximum events queued for a router.
const EVENTS_MAX: usize = 1 << 14;

/// Blocks per piece of a snapshot: 64 KiB on the wire.
const PIECE_BLOCKS: usize = 1 << 13;

/// Prefix-cache snapshot and events that a session has not sent yet.
///
/// A router first receives the cache's content, piece by piece, then every event since. If it does not read
/// and the queue overflows, events are dropped, and it receives a new snapshot once it reads again.
///
/// **Invariant**: the sequence of taken items is a snapshot followed by all events after it, without a gap;
/// or the next taken item is the first piece of a new snapshot. At most one snapshot and [`EVENTS_MAX`]
/// events are held.
#[derive(Debug, Default)]
pub(super) struct CacheFeed {
    snapshot: Option<PendingSnapshot>,
    events: v1::KvEvents,
    /// Events were dropped since the last snapshot.
    lost: bool,
    /// A snapshot must be started.
    needs_snapshot: bool,
}

#[derive(Debug)]
struct PendingSnapshot {
    blocks: Vec<(CacheTier, u64)>,
    sent: usize,
    next: u64,
}

impl CacheFeed {
    /// Queues consecutive events, the first of which is number `first`.
    pub fn push(&mut self, first: u64, events: &[(CacheTier, CacheEvent)]) {
        if self.lost {
            return;
        }
        let queued = self.events.events.len();
        let gap = queued > 0 && self.events.first_event + queued as u64 != first;
        if gap || queued + events.len() > EVENTS_MAX {
            *self = Self { lost: true, ..Self::default() };
            return;
        }
        if queued == 0 {
            self.events.first_event = first;
        }
        self.events.events.extend(events.iter().map(|(tier, event)| event_of(*tier, *event)));
    }

    /// Starts a snapshot of `contents`, dropping queued items; later events are numbered from `next`.
    pub fn start_snapshot(&mut self, contents: impl Iterator<Item = (CacheTier, BlockHash)>, next: u64) {
        let blocks = contents.map(|(tier, hash)| (tier, hash.short())).collect();
        *self = Self { snapshot: Some(PendingSnapshot { blocks, sent: 0, next }), ..Self::default() };
    }

    /// Requests a snapshot on behalf of the router, unless one is being sent.
    pub fn request_snapshot(&mut self) {
        self.needs_snapshot |= self.snapshot.is_none();
    }

    /// Returns whether the owner must call [`CacheFeed::start_snapshot`].
    pub fn needs_snapshot(&self) -> bool {
        self.needs_snapshot
    }

    /// Returns whether [`CacheFeed::take`] would return nothing.
    pub fn is_empty(&self) -> bool {
        self.snapshot.is_none() && self.events.events.is_empty()
    }

    /// Takes the snapshot piece and the events for the next update.
    pub fn take(&mut self) -> (Option<v1::KvSnapshot>, Option<v1::KvEvents>) {
        // The router reads again, so a new snapshot reaches it.
        self.needs_snapshot |= self.lost;
        let piece = self.snapshot.as_mut().map(PendingSnapshot::piece);
        if piece.as_ref().is_some_and(|piece| piece.next_event.is_some()) {
            self.snapshot = None;
        }
        let events = (self.snapshot.is_none() && !self.events.events.is_empty())
            .then(|| std::mem::take(&mut self.events));
        (piece, events)
    }
}

impl PendingSnapshot {
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
        let mut feed = CacheFeed::default();
        let tier = |raw: u128| if raw.is_multiple_of(3) { CacheTier::Host } else { CacheTier::Device };
        feed.start_snapshot((0..total as u128).map(|raw| (tier(raw), BlockHash::from_raw(raw))), 70);
        feed.push(70, &stored(900_000..900_002));
        let mut blocks = BTreeSet::new();
        for number in 0..3 {
            let (piece, events) = feed.take();
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
        assert!(feed.is_empty());
        feed.start_snapshot(std::iter::empty(), 72);
        assert_eq!(
            feed.take().0.map(|piece| (piece.is_first, piece.next_event)),
            Some((true, Some(72))),
            "also of an empty cache"
        );
    }

    #[test]
    fn a_router_that_does_not_read_overflows_and_gets_a_new_snapshot() {
        let mut feed = CacheFeed::default();
        let mut first = 0;
        for _ in 0..100 {
            feed.push(first, &stored(0..1000));
            first += 1000;
            assert!(feed.events.events.len() <= EVENTS_MAX);
        }
        assert!(!feed.needs_snapshot(), "the router does not read");
        assert_eq!(feed.take(), (None, None));
        assert!(feed.needs_snapshot());
        feed.start_snapshot(std::iter::once((CacheTier::Device, BlockHash::from_raw(1))), first);
        feed.request_snapshot();
        assert!(!feed.needs_snapshot(), "one is being sent");
        feed.push(first, &stored(5..6));
        let (piece, events) = feed.take();
        assert_eq!((piece.unwrap().next_event, events.unwrap().first_event), (Some(first), first));
        feed.request_snapshot();
        assert!(feed.needs_snapshot());
    }
}

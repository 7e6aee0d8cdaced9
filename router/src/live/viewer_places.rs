//! Places of viewers, bounded in number and shared between those who watch.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reason for which a viewer has lost its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlaceLost {
    /// It has not asked for an update for the stall timeout.
    Stalled,
    /// Another tenant or address, with fewer viewers, took it.
    Displaced,
}

/// Places of viewers. A newcomer finds one unless no tenant (without a tenants file: no address) has two viewers more than its own.
#[derive(Debug)]
pub(super) struct ViewerPlaces {
    most: usize,
    next: u64,
    /// Viewers that have a place, in the order in which they came.
    present: BTreeMap<u64, PresentViewer>,
    /// Viewers that have lost theirs to others and do not know it yet.
    displaced: BTreeSet<u64>,
}

#[derive(Debug)]
struct PresentViewer {
    whose: Arc<str>,
    iterations: bool,
    /// Time at which the viewer's next update is due.
    due: Instant,
}

impl ViewerPlaces {
    /// Creates `most` places.
    pub(super) fn new(most: u32) -> Self {
        Self { most: most as usize, next: 0, present: BTreeMap::new(), displaced: BTreeSet::new() }
    }

    /// Number of places.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Number of viewers.
    pub(super) fn taken(&self) -> usize {
        self.present.len()
    }

    /// Whether a viewer follows iterations.
    pub(super) fn observe_iterations(&self) -> bool {
        self.present.values().any(|viewer| viewer.iterations)
    }

    /// Takes a place for a viewer of a tenant or address and returns its id; `None` if all are taken and none is to be given up for it.
    pub(super) fn enter(&mut self, whose: Arc<str>, iterations: bool, now: Instant) -> Option<u64> {
        if self.present.len() >= self.most {
            let displaced = self.displaced_by(&whose)?;
            self.present.remove(&displaced);
            self.displaced.insert(displaced);
        }
        let id = self.next;
        self.next += 1;
        self.present.insert(id, PresentViewer { whose, iterations, due: now });
        Some(id)
    }

    /// Returns the last viewer of the tenant or address with most, if that is two more than the newcomer's.
    fn displaced_by(&self, newcomer: &Arc<str>) -> Option<u64> {
        let mut counts: BTreeMap<&Arc<str>, usize> = BTreeMap::new();
        self.present.values().for_each(|viewer| *counts.entry(&viewer.whose).or_default() += 1);
        let own = counts.get(newcomer).copied().unwrap_or(0);
        let (most, _) =
            counts.into_iter().max_by_key(|(_, count)| *count).filter(|(_, count)| *count >= own + 2)?;
        self.present.iter().rev().find(|(_, viewer)| viewer.whose == *most).map(|(id, _)| *id)
    }

    /// Keeps a place until the stall timeout after `due`, the time of the next update.
    ///
    /// # Errors
    /// [`PlaceLost`].
    pub(super) fn keep(&mut self, id: u64, due: Instant) -> Result<(), PlaceLost> {
        match self.present.get_mut(&id) {
            Some(viewer) => viewer.due = due,
            None if self.displaced.contains(&id) => return Err(PlaceLost::Displaced),
            None => return Err(PlaceLost::Stalled),
        }
        Ok(())
    }

    /// Gives up a place, or what is known of a lost one.
    pub(super) fn leave(&mut self, id: u64) {
        self.present.remove(&id);
        self.displaced.remove(&id);
    }

    /// Takes the places of viewers that have not asked for an update for `timeout` after it was due; returns whether there were any.
    pub(super) fn remove_stalled(&mut self, now: Instant, timeout: Duration) -> bool {
        let before = self.present.len();
        self.present.retain(|_, viewer| now.saturating_duration_since(viewer.due) <= timeout);
        self.present.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_holds_all_places_gives_up_its_last_ones_to_others() {
        let now = Instant::now();
        let mut places = ViewerPlaces::new(8);
        let enter = |places: &mut ViewerPlaces, whose: &str| places.enter(whose.into(), false, now);
        let many: Vec<_> = (0..8).map(|_| enter(&mut places, "many").unwrap()).collect();
        assert_eq!(enter(&mut places, "many"), None);
        let others: Vec<_> = std::iter::from_fn(|| enter(&mut places, "other")).collect();
        assert_eq!((others.len(), places.taken()), (4, 8), "as many as the first one keeps");
        let kept: Vec<_> = many.iter().filter(|id| places.keep(**id, now).is_ok()).collect();
        assert_eq!(kept, many[..4].iter().collect::<Vec<_>>());
        assert_eq!(places.keep(many[7], now), Err(PlaceLost::Displaced));
        // Eight of one place each give up none.
        for whose in ["c", "d", "e", "f", "g", "h"] {
            assert!(enter(&mut places, whose).is_some());
        }
        assert_eq!(enter(&mut places, "i"), None);
        for id in 0..places.next {
            places.leave(id);
        }
        assert_eq!((places.taken(), places.displaced.len()), (0, 0));
    }

    #[test]
    fn a_viewer_that_asks_for_nothing_loses_its_place_after_the_timeout() {
        let (now, timeout) = (Instant::now(), Duration::from_secs(10));
        let mut places = ViewerPlaces::new(2);
        let [idle, reader] =
            [false, true].map(|iterations| places.enter("a".into(), iterations, now).unwrap());
        places.keep(reader, now + timeout).unwrap();
        assert!(!places.remove_stalled(now + timeout, timeout) && places.observe_iterations());
        assert!(places.remove_stalled(now + timeout * 2, timeout));
        assert_eq!(places.keep(idle, now), Err(PlaceLost::Stalled));
        assert_eq!(places.keep(reader, now), Ok(()));
    }
}

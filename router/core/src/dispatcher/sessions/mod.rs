//! Open sessions with workers.

mod session;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(super) use session::{Reservation, WorkerSession};

use crate::{SessionId, WorkerId};

/// Open sessions, by worker.
///
/// **Invariant**: `reserved` and `draining` hold the workers whose sessions are, so that the few of them are found without a pass over all.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    open: BTreeMap<WorkerId, WorkerSession>,
    reserved: BTreeSet<WorkerId>,
    draining: BTreeSet<WorkerId>,
}

impl Sessions {
    /// Adds a session, in place of an older one of its worker.
    pub(super) fn insert(&mut self, session: WorkerSession) {
        self.remove(session.worker);
        self.open.insert(session.worker, session);
    }

    /// Removes the session of a worker.
    pub(super) fn remove(&mut self, worker: WorkerId) -> Option<WorkerSession> {
        self.reserved.remove(&worker);
        self.draining.remove(&worker);
        self.open.remove(&worker)
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &WorkerSession> + Clone {
        self.open.values()
    }

    pub(super) fn get(&self, worker: WorkerId) -> Option<&WorkerSession> {
        self.open.get(&worker)
    }

    pub(super) fn get_mut(&mut self, worker: WorkerId) -> Option<&mut WorkerSession> {
        self.open.get_mut(&worker)
    }

    /// Returns this session of a worker; `None` if it has been closed.
    pub(super) fn session_mut(&mut self, worker: WorkerId, session: SessionId) -> Option<&mut WorkerSession> {
        self.open.get_mut(&worker).filter(|open| open.id == session)
    }

    /// Lets a worker accept nothing new from now on. Returns whether it did accept.
    pub(super) fn drain(&mut self, worker: WorkerId, now: Duration) -> bool {
        let Some(session) = self.open.get_mut(&worker) else { return false };
        session.draining.get_or_insert(now);
        self.draining.insert(worker)
    }

    /// Reserves a worker for a quarantined request.
    pub(super) fn reserve(&mut self, worker: WorkerId, reservation: Reservation) {
        if let Some(session) = self.open.get_mut(&worker) {
            session.reserved = Some(reservation);
            self.reserved.insert(worker);
        }
    }

    /// Ends the reservation of a worker. `failed_at` is the time at which it timed out, if it did.
    pub(super) fn end_reservation(&mut self, worker: WorkerId, failed_at: Option<Duration>) {
        self.reserved.remove(&worker);
        if let Some(session) = self.open.get_mut(&worker) {
            session.reserved = None;
            session.reservation_failed_at = failed_at.or(session.reservation_failed_at);
        }
    }

    /// Returns the reserved workers.
    pub(super) fn reserved(&self) -> Vec<WorkerId> {
        self.reserved.iter().copied().collect()
    }

    /// Returns the workers that drain or are reserved.
    pub(super) fn reserved_or_draining(&self) -> Vec<WorkerId> {
        self.draining.union(&self.reserved).copied().collect()
    }
}

//! The models that workers serve, or served lately, each with its workers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use inflight_contract::ModelLimits;

use crate::{LaneId, WorkerId, WorkerInfo};

/// Model that workers serve, or served lately.
#[derive(Debug)]
pub struct Lane {
    name: String,
    architecture: String,
    limits: ModelLimits,
    unserved_since: Option<Duration>,
    bundle_digest: String,
    /// Workers with an open session.
    workers: BTreeSet<WorkerId>,
    /// Backlog state last sent to all of these; `None` if one of them may not have it.
    backlog: Option<bool>,
}

/// Lanes by id, and those in which a request may have become dispatchable.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: BTreeMap<LaneId, Lane>,
    next: LaneId,
    touched: BTreeSet<LaneId>,
}

impl Lane {
    /// Name of the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Architecture of the model.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Limits of its worker with the longest sequences; placement checks each worker.
    pub fn limits(&self) -> ModelLimits {
        self.limits
    }

    /// Time since which no worker serves it; `None` while one does.
    pub fn unserved_since(&self) -> Option<Duration> {
        self.unserved_since
    }

    /// Whether no worker has served the lane for this long.
    pub(super) fn unserved_for(&self, wait: Duration, now: Duration) -> bool {
        self.unserved_since.is_some_and(|since| now.saturating_sub(since) >= wait)
    }

    /// Workers with an open session.
    pub(super) fn workers(&self) -> impl Iterator<Item = WorkerId> {
        self.workers.iter().copied()
    }

    fn serves(&self, info: &WorkerInfo) -> bool {
        self.name == info.model
            && self.bundle_digest == info.bundle_digest
            // Another vocabulary means another model, even under the same name.
            && self.limits.vocab_size == info.limits.vocab_size
    }
}

impl Lanes {
    pub(super) fn get(&self, id: LaneId) -> Option<&Lane> {
        self.lanes.get(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (LaneId, &Lane)> {
        self.lanes.iter().map(|(id, lane)| (*id, lane))
    }

    /// Returns the lane of a worker, which is created if the worker is the first of its model.
    pub(super) fn lane_of(&mut self, info: &WorkerInfo) -> LaneId {
        if let Some((id, _)) = self.lanes.iter().find(|(_, lane)| lane.serves(info)) {
            return *id;
        }
        let id = self.next;
        self.next.0 += 1;
        let lane = Lane {
            name: info.model.clone(),
            architecture: info.architecture.clone(),
            limits: info.limits,
            unserved_since: None,
            bundle_digest: info.bundle_digest.clone(),
            workers: BTreeSet::new(),
            backlog: None,
        };
        self.lanes.insert(id, lane);
        id
    }

    /// Adds a worker that has opened a session.
    pub(super) fn add_worker(&mut self, id: LaneId, worker: WorkerId) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.workers.insert(worker);
        }
    }

    /// Removes a worker whose session is closed.
    pub(super) fn remove_worker(&mut self, id: LaneId, worker: WorkerId) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.workers.remove(&worker);
        }
    }

    /// Sets the limits of a lane from those of its serving workers; `None`: it is unserved from now on.
    pub(super) fn update_served(&mut self, id: LaneId, limits: Option<ModelLimits>, now: Duration) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        match limits {
            Some(limits) => {
                lane.limits = limits;
                lane.unserved_since = None;
            }
            None => {
                lane.unserved_since.get_or_insert(now);
            }
        }
    }

    /// Marks a lane in which a request may have become dispatchable.
    pub(super) fn touch(&mut self, id: LaneId) {
        self.touched.insert(id);
    }

    /// Takes the first marked lane.
    pub(super) fn next_touched(&mut self) -> Option<LaneId> {
        self.touched.pop_first()
    }

    /// Sets the backlog state of a lane. Returns whether it is to be sent to its workers.
    pub(super) fn set_backlog(&mut self, id: LaneId, waits: bool) -> bool {
        self.lanes.get_mut(&id).is_some_and(|lane| lane.backlog.replace(waits) != Some(waits))
    }

    /// Makes the next dispatch in a lane send every worker its backlog state again.
    pub(super) fn resend_backlog(&mut self, id: LaneId) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.backlog = None;
        }
        self.touch(id);
    }

    /// Removes the lanes without workers that have been without a serving worker for longer than `wait`, except those to keep. Returns the removed ones.
    pub(super) fn forget(
        &mut self,
        wait: Duration,
        now: Duration,
        keeps: impl Fn(LaneId) -> bool,
    ) -> Vec<LaneId> {
        let mut forgotten = Vec::new();
        self.lanes.retain(|id, lane| {
            let lost_long_ago = lane.unserved_since.is_some_and(|since| now.saturating_sub(since) > wait);
            let kept = !lost_long_ago || !lane.workers.is_empty() || keeps(*id);
            if !kept {
                forgotten.push(*id);
            }
            kept
        });
        forgotten
    }
}

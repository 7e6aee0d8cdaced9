//! Model catalogue: names of models and fingerprints, resolved to lanes of the queue.

use std::collections::BTreeSet;
use std::time::Duration;

use inflight_contract::ModelLimits;

use super::Dispatcher;
use super::lanes::Lane;
use super::sessions::WorkerSession;
use crate::{Command, Failure, LaneId, Notice, RequestId, RequestSpec, WorkerInfo};

/// Why a model name does not resolve to a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResolveError {
    /// No worker has connected since the router started.
    NeverConnected {
        /// Number of known workers.
        workers: usize,
    },
    /// No worker has served the model for the configured time.
    Unserved {
        /// Name of the model; empty if none was asked for.
        model: String,
    },
    /// No model was named and several are served.
    Ambiguous {
        /// Names of the served models.
        served: Vec<String>,
    },
    /// No worker serves a model of this name.
    Unknown {
        /// The name asked for.
        asked: String,
        /// Names of the served models.
        served: Vec<String>,
    },
}

impl Dispatcher {
    /// Resolves a model name to a lane; of several lanes, the one with workers of the required fingerprint.
    ///
    /// # Errors
    /// [`ResolveError`].
    pub fn resolve(
        &self,
        asked: &str,
        fingerprint: Option<&str>,
        now: Duration,
    ) -> Result<LaneId, ResolveError> {
        let wait = self.options.no_worker_timeout;
        let in_reach = |lane: &Lane| !lane.unserved_for(wait, now);
        let names: BTreeSet<&str> =
            self.lanes.iter().filter(|(_, lane)| in_reach(lane)).map(|(_, lane)| lane.name()).collect();
        let served = || names.iter().map(|name| (*name).to_owned()).collect();
        let name = match (asked, names.first()) {
            (_, None) if !self.connected_ever => {
                return Err(ResolveError::NeverConnected { workers: self.members.len() });
            }
            ("", None) => return Err(ResolveError::Unserved { model: String::new() }),
            ("", Some(only)) if names.len() == 1 => *only,
            ("", Some(_)) => return Err(ResolveError::Ambiguous { served: served() }),
            (asked, _) => asked,
        };
        // Workers of the same model with another bundle form their own lane: choose the one with most
        // workers.
        let best = self.lanes.iter().filter(|(_, lane)| lane.name() == name && in_reach(lane)).max_by_key(
            |(id, _)| {
                let required = fingerprint.is_some_and(|required| {
                    self.fingerprints(*id).any(|served| RequestSpec::matches(required, served))
                });
                (required, self.serving(*id).count(), *id)
            },
        );
        match best {
            Some((id, _)) => Ok(id),
            None if self.lanes.iter().any(|(_, lane)| lane.name() == name) => {
                Err(ResolveError::Unserved { model: name.to_owned() })
            }
            None => Err(ResolveError::Unknown { asked: name.to_owned(), served: served() }),
        }
    }

    /// Returns a lane.
    pub fn lane(&self, id: LaneId) -> Option<&Lane> {
        self.lanes.get(id)
    }

    /// Returns the lanes with serving workers.
    pub fn served_lanes(&self) -> impl Iterator<Item = (LaneId, &Lane)> {
        self.lanes.iter().filter(|(_, lane)| lane.unserved_since().is_none())
    }

    /// Returns the model of each lane with its numbers of serving workers and of queued requests. A model whose workers
    /// have different bundles has several lanes.
    pub fn lane_loads(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        self.lanes.iter().map(|(id, lane)| (lane.name(), self.serving(id).count(), self.queue.len_of(id)))
    }

    /// Returns the block sizes of a lane's workers; empty if the placement policy ignores prefixes.
    pub fn block_sizes(&self, lane: LaneId) -> Vec<u32> {
        if !self.placement.reads_prefixes() {
            return Vec::new();
        }
        let sizes: BTreeSet<u32> =
            self.sessions_of(lane).map(|session| session.shape.block_tokens()).collect();
        sizes.into_iter().take(Self::BLOCK_SIZES_MAX).collect()
    }

    /// Returns the fingerprint of each serving worker of a lane.
    pub fn fingerprints(&self, lane: LaneId) -> impl Iterator<Item = &str> {
        self.serving(lane).map(|session| &*session.fingerprint)
    }

    /// Returns the names of the lanes whose serving workers have different fingerprints.
    pub fn mixed_lanes(&self) -> impl Iterator<Item = &str> + '_ {
        let mixed = self.lanes.iter().filter(|(lane, _)| self.distinct_fingerprints(*lane).len() > 1);
        mixed.map(|(_, lane)| lane.name())
    }

    pub(super) fn sessions_of(&self, lane: LaneId) -> impl Iterator<Item = &WorkerSession> {
        let workers = self.lanes.get(lane).map(Lane::workers);
        workers.into_iter().flatten().filter_map(|worker| self.sessions.get(worker))
    }

    /// Returns the sessions of a lane that do not drain.
    pub(super) fn serving(&self, lane: LaneId) -> impl Iterator<Item = &WorkerSession> {
        self.sessions_of(lane).filter(|session| session.draining().is_none())
    }

    /// Returns the failure of a request for a fingerprint that no worker has.
    pub(super) fn unknown_fingerprint(&self, lane: LaneId, required: &str) -> Failure {
        let served = self.distinct_fingerprints(lane).into_iter().map(str::to_owned).collect();
        Failure::UnknownFingerprint { required: required.to_owned(), served }
    }

    /// Returns the distinct fingerprints of the serving workers of a lane.
    fn distinct_fingerprints(&self, lane: LaneId) -> BTreeSet<&str> {
        self.fingerprints(lane).collect()
    }

    /// Reports the first worker of a lane with a new fingerprint: from then on failover may change tokens.
    pub(super) fn notice_mixed_fingerprints(&mut self, lane: LaneId, info: &WorkerInfo) {
        let served = self.distinct_fingerprints(lane);
        if served.is_empty() || served.contains(info.fingerprint.as_str()) {
            return;
        }
        let others = served.into_iter().map(str::to_owned).collect();
        self.commands.push(Notice::MixedFingerprints { worker: info.worker, others }.into());
    }

    /// Updates a lane from its sessions.
    pub(super) fn refresh_lane(&mut self, id: LaneId) {
        let limits = self.serving(id).map(|session| session.limits).max_by_key(ModelLimits::sequence_tokens);
        self.lanes.update_served(id, limits, self.now);
    }

    /// Fails the requests that wait for a model which no worker has served for the configured time.
    pub(super) fn fail_unserved(&mut self) {
        let (now, wait) = (self.now, self.options.no_worker_timeout);
        let expired = |lane: &Lane| lane.unserved_for(wait, now);
        if !self.lanes.iter().any(|(_, lane)| expired(lane)) {
            return;
        }
        let waiting: Vec<RequestId> = self
            .requests
            .values()
            .filter(|request| request.waits() && self.lanes.get(request.spec.lane).is_some_and(expired))
            .map(|request| request.id)
            .collect();
        for request in waiting {
            self.end(request, Failure::Unserved);
        }
    }

    /// Removes lanes without sessions and waiting requests, some time after their last worker left.
    pub(super) fn forget_lanes(&mut self) {
        let wait = self.options.model_retention.max(self.options.no_worker_timeout);
        for lane in self.lanes.forget(wait, self.now, |lane| self.queue.waits_in(lane)) {
            self.queue.forget_lane(lane);
            self.commands.push(Command::LaneForgotten { lane });
        }
    }
}

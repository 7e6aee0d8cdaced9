//! Model catalogue: the models that workers serve, each a lane of the queue.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use inflight_contract::ModelLimits;
use tokio::sync::watch;

use super::request::LaneId;
use super::session::WorkerInfo;
use super::{Dispatcher, DispatcherState, Lane, ServedModel};
use crate::dispatcher::session::WorkerSession;
use crate::outcome::Outcome;

impl Dispatcher {
    /// Resolves a model name; of several lanes, the one with workers of the required fingerprint.
    pub(crate) fn resolve(
        &self,
        asked: &str,
        fingerprint: Option<&str>,
        now: Instant,
    ) -> Result<ServedModel, Outcome> {
        let state = self.lock();
        let wait = self.options.no_worker_timeout;
        let in_reach = |lane: &Lane| match *lane.unserved.borrow() {
            None => true,
            Some(since) => now.saturating_duration_since(since) < wait,
        };
        let names: BTreeSet<&str> =
            state.lanes.values().filter(|lane| in_reach(lane)).map(|lane| lane.name.as_str()).collect();
        let unserved = |model: &str| Outcome::Unserved { model: model.to_owned(), waited: wait };
        let name = match (asked, names.first()) {
            (_, None) if !state.connected_ever => {
                return Err(Outcome::NeverConnected { workers: state.members.len() });
            }
            ("", None) => return Err(unserved("")),
            ("", Some(only)) if names.len() == 1 => *only,
            ("", Some(_)) => {
                let names: Vec<_> = names.into_iter().collect();
                return Err(Outcome::Invalid(format!(
                    "model is empty, but several are served; name one of: {}",
                    names.join(", ")
                )));
            }
            (asked, _) => asked,
        };
        // Workers of the same model with another bundle form their own lane: choose the one with most
        // workers.
        let workers = |id: LaneId| state.sessions_of(id).filter(|session| session.draining.is_none()).count();
        let best = state.lanes.iter().filter(|(_, lane)| lane.name == name && in_reach(lane)).max_by_key(
            |(id, _)| {
                let required =
                    fingerprint.is_some_and(|required| state.fingerprints(**id).any(|f| f == required));
                (required, workers(**id), **id)
            },
        );
        match best {
            Some((id, lane)) => Ok(ServedModel {
                lane: *id,
                name: lane.name.clone(),
                architecture: lane.architecture.clone(),
                limits: lane.limits,
                model: lane.model.clone(),
                unserved: lane.unserved.subscribe(),
            }),
            None if state.lanes.values().any(|lane| lane.name == name) => Err(unserved(name)),
            None => Err(Outcome::UnknownModel {
                asked: name.to_owned(),
                served: names.into_iter().map(str::to_owned).collect(),
            }),
        }
    }

    /// Returns the models with serving workers, by name, with the fingerprint of each worker.
    pub(crate) fn models(&self) -> Vec<(ServedModel, Vec<String>)> {
        let state = self.lock();
        let mut models: BTreeMap<String, (ServedModel, Vec<String>)> = BTreeMap::new();
        for (id, lane) in &state.lanes {
            let workers: Vec<String> = state.fingerprints(*id).map(str::to_owned).collect();
            if workers.is_empty() {
                continue;
            }
            let served = ServedModel {
                lane: *id,
                name: lane.name.clone(),
                architecture: lane.architecture.clone(),
                limits: lane.limits,
                model: lane.model.clone(),
                unserved: lane.unserved.subscribe(),
            };
            models
                .entry(lane.name.clone())
                .and_modify(|entry| entry.1.extend_from_slice(&workers))
                .or_insert((served, workers));
        }
        models.into_values().collect()
    }
}

impl DispatcherState {
    pub(super) fn sessions_of(&self, lane: LaneId) -> impl Iterator<Item = &WorkerSession> {
        self.sessions.values().filter(move |session| session.lane == lane)
    }

    /// Returns the fingerprint of each serving worker of a lane.
    pub(super) fn fingerprints(&self, lane: LaneId) -> impl Iterator<Item = &str> {
        let serving = self.sessions_of(lane).filter(|session| session.draining.is_none());
        serving.map(|session| &*session.fingerprint)
    }

    /// Returns the outcome of a request for a fingerprint that no worker has.
    pub(super) fn unknown_fingerprint(&self, lane: LaneId, required: &str) -> Outcome {
        let served = self.distinct_fingerprints(lane).into_iter().map(str::to_owned).collect();
        Outcome::UnknownFingerprint { required: required.to_owned(), served }
    }

    /// Returns the distinct fingerprints of the serving workers of a lane.
    pub(super) fn distinct_fingerprints(&self, lane: LaneId) -> BTreeSet<&str> {
        self.fingerprints(lane).collect()
    }

    /// Logs the first worker of a lane with a new fingerprint: from then on failover may change tokens.
    pub(super) fn warn_of_mixed_fingerprints(&self, lane: LaneId, info: &WorkerInfo) {
        let served = self.distinct_fingerprints(lane);
        let joining = info.fingerprint.as_str();
        if served.is_empty() || served.contains(joining) {
            return;
        }
        tracing::warn!(
            model = info.model_name,
            worker = info.address,
            fingerprint = joining,
            others = served.into_iter().collect::<Vec<_>>().join(", "),
            "workers of one model have different numerics fingerprints: streams that fail over between them may \
             continue with other tokens",
        );
    }

    pub(super) fn lane_for(&mut self, info: &WorkerInfo) -> LaneId {
        let same = |lane: &Lane| {
            lane.name == info.model_name
                && lane.bundle_digest == info.bundle_digest
                // Another vocabulary means another model, even under the same name.
                && lane.limits.vocab_size == info.limits.vocab_size
        };
        if let Some((id, _)) = self.lanes.iter().find(|(_, lane)| same(lane)) {
            return *id;
        }
        let id = self.next_lane;
        self.next_lane += 1;
        let lane = Lane {
            name: info.model_name.clone(),
            bundle_digest: info.bundle_digest.clone(),
            architecture: info.architecture.clone(),
            limits: info.limits,
            model: info.model.clone(),
            unserved: watch::Sender::new(None),
        };
        self.lanes.insert(id, lane);
        id
    }

    /// Updates a lane from its sessions. Its limits are those of the worker with the longest sequences;
    /// placement checks each worker.
    pub(super) fn refresh(&mut self, id: LaneId, now: Instant) {
        let serving = self.sessions_of(id).filter(|session| session.draining.is_none());
        let limits = serving.map(|session| session.limits).max_by_key(ModelLimits::sequence_tokens);
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        match limits {
            Some(limits) => {
                lane.limits = limits;
                lane.unserved.send_if_modified(|since| since.take().is_some());
            }
            None => {
                lane.unserved.send_if_modified(|since| since.is_none() && since.replace(now).is_none());
            }
        }
    }

    /// Removes lanes without sessions and waiting requests, `wait` after their last worker left.
    pub(super) fn forget_lanes(&mut self, now: Instant, wait: Duration) {
        let in_use: BTreeSet<LaneId> =
            self.sessions.values().map(|session| session.lane).chain(self.queue.lanes()).collect();
        let queue = &mut self.queue;
        self.lanes.retain(|id, lane| {
            let lost_long_ago = lane.unserved.borrow().is_some_and(|since| now.duration_since(since) > wait);
            let kept = in_use.contains(id) || !lost_long_ago;
            if !kept {
                queue.forget_lane(*id);
            }
            kept
        });
    }
}

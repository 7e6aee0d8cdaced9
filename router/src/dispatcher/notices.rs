//! Logs, metrics and the live view of the dispatcher's notices. Those of a request go to its observer.

use std::sync::Arc;
use std::time::Instant;

use inflight_router_core::{Notice, RequestId, WorkerId};

use super::state::DispatcherState;
use super::transition::Transition;
use crate::live::worker::LiveWorker;
use crate::metrics as names;

impl DispatcherState {
    /// Reports a notice.
    pub(super) fn report(&self, notice: Notice, now: Instant) {
        match notice {
            Notice::Bypassed => metrics::counter!(names::QUEUE_BYPASSES).increment(1),
            Notice::StaleUpdates { updates } => {
                metrics::counter!(names::STALE_UPDATES).increment(updates.into());
            }
            Notice::Unbilled { request, tokens } => {
                self.observe(request, &Transition::Discarded { tokens: tokens as usize }, now);
            }
            Notice::Resubmitted { request, reason, attempt, wait } => {
                self.observe(request, &Transition::Resubmitted { reason, attempt, wait }, now);
            }
            Notice::Requeued { request } => self.observe(request, &Transition::Requeued, now),
            Notice::Quarantined { request, worker } => tracing::warn!(
                request_id = self.request_id(request),
                worker = self.address(worker),
                "quarantining request: two workers in a row were lost before its first token; it will run on a worker of its own"
            ),
            Notice::Ejected { worker, duration } => {
                let (address, seconds) = (self.address(worker), duration.as_secs_f64());
                tracing::warn!(
                    worker = worker.0,
                    address,
                    seconds,
                    "ejecting worker after consecutive failures"
                );
                metrics::counter!(names::EJECTIONS).increment(1);
                if let Some(live) = self.live_worker(worker) {
                    live.ejected(now + duration);
                }
            }
            Notice::Draining { worker } => {
                tracing::info!(worker = self.address(worker), "worker is draining");
                if let Some(live) = self.live_worker(worker) {
                    live.draining();
                }
            }
            Notice::MixedFingerprints { worker, others } => self.report_mixed_fingerprints(worker, &others),
            Notice::Routers { before, now } if now < before => tracing::warn!(
                before,
                now,
                "workers report fewer routers; if none was stopped, routers have no worker in common any more, and each admits more of a tenant's limit"
            ),
            Notice::Routers { before, now } => tracing::info!(before, now, "workers report more routers"),
            Notice::PrefixIndexLost { worker } => self.count_of(names::PREFIX_INDEX_RESYNCS, worker),
            Notice::PrefixIndexOverfull { worker } => self.count_of(names::PREFIX_INDEX_OVERFULL, worker),
        }
    }

    /// Passes a transition to the observer of an open request.
    fn observe(&self, request: RequestId, transition: &Transition<'_>, now: Instant) {
        if let Some(active) = self.requests.get(request) {
            active.observe(transition, now);
        }
    }

    /// Returns a worker of the live view, if there is one.
    fn live_worker(&self, worker: WorkerId) -> Option<Arc<LiveWorker>> {
        self.live.as_ref()?.worker(worker)
    }

    fn report_mixed_fingerprints(&self, worker: WorkerId, others: &[String]) {
        let lane = self.core.lane_of(worker).and_then(|lane| self.core.lane(lane));
        tracing::warn!(
            model = lane.map_or("", |lane| lane.name()),
            worker = self.address(worker),
            fingerprint = self.core.fingerprint_of(worker).unwrap_or_default(),
            others = others.join(", "),
            "workers of one model have different numerics fingerprints: streams that fail over between them may \
             continue with other tokens",
        );
    }

    fn count_of(&self, name: &'static str, worker: WorkerId) {
        metrics::counter!(name, "worker" => self.address(worker).to_owned()).increment(1);
    }
}

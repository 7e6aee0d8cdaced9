//! Logs and metrics of the dispatcher's notices.

use inflight_router_core::{Notice, RequestId, ResubmissionReason, WorkerId};

use super::state::DispatcherState;
use crate::metrics as names;

impl DispatcherState {
    /// Reports a notice to logs and metrics.
    pub(super) fn report(&self, notice: Notice) {
        match notice {
            Notice::Bypassed => metrics::counter!(names::QUEUE_BYPASSES).increment(1),
            Notice::StaleUpdates { updates } => {
                metrics::counter!(names::STALE_UPDATES).increment(updates.into());
            }
            Notice::Unbilled { request, tokens } => {
                if let Some(active) = self.requests.get(request) {
                    active.count_unbilled(tokens as usize);
                }
            }
            Notice::Resubmitted { request, reason, attempt, quarantined } => {
                self.report_resubmission(request, reason, attempt, quarantined);
            }
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
            }
            Notice::Draining { worker } => {
                tracing::info!(worker = self.address(worker), "worker is draining")
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
            Notice::PromptPlaced { tokens, cached_tokens } => {
                metrics::counter!(names::PLACED_TOKENS).increment(tokens.into());
                metrics::counter!(names::PLACED_CACHED_TOKENS).increment(cached_tokens.into());
            }
        }
    }

    fn report_resubmission(
        &self,
        request: RequestId,
        reason: ResubmissionReason,
        attempt: u32,
        quarantined: bool,
    ) {
        metrics::counter!(names::RESUBMISSIONS, "reason" => reason.label()).increment(1);
        if let Some(active) = self.requests.get(request) {
            active.retry(reason.label());
        }
        tracing::info!(
            request_id = self.request_id(request),
            reason = reason.label(),
            attempt,
            isolated = quarantined,
            "resubmitting request"
        );
        if quarantined {
            metrics::counter!(names::QUARANTINED_REQUESTS).increment(1);
        }
    }

    fn report_mixed_fingerprints(&self, worker: WorkerId, others: &[String]) {
        let lane = self.core.lane_of(worker).and_then(|lane| self.core.lane(lane));
        tracing::warn!(
            model = lane.map_or("", |lane| lane.name.as_str()),
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

//! Reports of the dispatcher's shell to the live view.

use std::time::Instant;

use inflight_router_core::{Notice, RequestId};

use super::state::DispatcherState;
use crate::live::tracker::{Placement, Tracker};

impl DispatcherState {
    /// Returns the tracker of an open request, if there is a live view.
    pub(super) fn tracker(&self, request: RequestId) -> Option<&Tracker> {
        self.live.as_ref()?;
        self.requests.get(request)?.live.as_ref()
    }

    /// Reports a notice to the live view.
    pub(super) fn track(&mut self, notice: &Notice, now: Instant) {
        match notice {
            // It precedes the command that the request was placed.
            Notice::PromptPlaced { tokens, cached_tokens } => {
                self.placement = Placement { tokens: *tokens, cached_tokens: *cached_tokens };
            }
            Notice::Resubmitted { request, reason, quarantined, .. } => {
                let waits = self.core.awaits_retry(*request);
                if let Some(live) = self.tracker(*request) {
                    live.lost(reason.label(), *quarantined, waits, now);
                    if *quarantined || waits {
                        self.held.push(*request);
                    }
                }
            }
            Notice::Ejected { worker, duration } => {
                if let Some(worker) = self.live.as_ref().and_then(|hub| hub.worker(*worker)) {
                    worker.ejected(now + *duration);
                }
            }
            Notice::Draining { worker } => {
                if let Some(worker) = self.live.as_ref().and_then(|hub| hub.worker(*worker)) {
                    worker.draining();
                }
            }
            _ => {}
        }
    }

    /// Reports the requests whose next attempt no longer waits outside of the queue.
    pub(super) fn track_held(&mut self, now: Instant) {
        let mut held = std::mem::take(&mut self.held);
        held.retain(|request| {
            let Some(live) = self.tracker(*request).filter(|live| live.is_held()) else { return false };
            let waits = self.core.awaits_retry(*request);
            if !waits {
                live.requeued(now);
            }
            waits
        });
        self.held = held;
    }
}

//! Drafting: proposes tokens for the decoding choices before an iteration is planned.

use inflight_worker_core::DraftsWanted;

use super::Engine;
use super::live_constraint::PREDICTED_MIN;

impl Engine {
    /// Offers the scheduler drafts for each decoding choice that it wants some for.
    pub(super) fn offer_drafts(&mut self) {
        let mut requests = std::mem::take(&mut self.draft_requests);
        requests.clear();
        requests.extend(self.scheduler.draft_requests());
        for &(id, mut wanted) in &requests {
            if !self.looks_up {
                wanted.guessed = 0;
            }
            let Some((kind, count)) = self.live.propose_drafts(id, wanted) else { continue };
            self.scheduler.draft(id, count as u32, kind);
        }
        self.draft_requests = requests;
    }

    /// Returns true if the next iteration should be planned after the one in flight is completed: that one has
    /// drafts, so the lengths of their sequences are not known, or predicts some, or drafts are wanted for one of its choices whose
    /// next tokens can be predicted. They could not be verified behind a token that is in flight.
    pub(super) fn awaits_drafts(&mut self) -> bool {
        let Some(launched) = self.launches.newest() else { return false };
        if !launched.drafts.is_empty() || launched.chunks.iter().any(|chunk| chunk.predictions > 0) {
            return true;
        }
        for chunk in launched.chunks.iter().filter(|chunk| chunk.samples) {
            let mut wanted = self.scheduler.drafts_wanted(chunk.id);
            if !self.looks_up {
                wanted.guessed = 0;
            }
            if wanted.is_none() {
                continue;
            }
            let predicted = |wanted: u32| if wanted > 0 { PREDICTED_MIN } else { 0 };
            let (guessed, forced) = (predicted(wanted.guessed), predicted(wanted.forced));
            let wanted = DraftsWanted { guessed, forced, ..DraftsWanted::default() };
            let proposed = self.live.propose_drafts(chunk.id, wanted);
            if proposed.is_some_and(|(_, count)| count >= PREDICTED_MIN as usize) {
                return true;
            }
        }
        false
    }

    /// Bytes of the draft sources of all choices.
    pub fn draft_index_bytes(&self) -> usize {
        self.live.draft_bytes()
    }
}

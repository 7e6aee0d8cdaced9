//! Drafting: proposes tokens for the decoding choices before an iteration is planned.

use inflight_worker_core::{DraftKind, DraftsWanted};

use super::Engine;
use super::live_choice::LiveChoice;
use super::live_constraint::PREDICTED_MIN;

impl Engine {
    /// Offers the scheduler drafts for each decoding choice that it wants some for.
    pub(super) fn offer_drafts(&mut self) {
        let mut requests = std::mem::take(&mut self.draft_requests);
        requests.clear();
        requests.extend(self.scheduler.draft_requests());
        for &(id, wanted) in &requests {
            let Some(Some(live)) = self.live.get_mut(id.index()) else { continue };
            let (kind, count, grown) = live.propose_drafts(wanted);
            self.draft_index_bytes += grown;
            self.scheduler.draft(id, count as u32, kind);
        }
        self.draft_requests = requests;
    }

    /// Returns true if the next iteration should be planned after the one in flight is completed: that one has
    /// drafts, so the lengths of their sequences are not known, or drafts are wanted for one of its choices whose
    /// next tokens can be predicted. They could not be verified behind a token that is in flight.
    pub(super) fn awaits_drafts(&mut self) -> bool {
        let Some(launched) = self.launched.back() else { return false };
        if !launched.drafts.is_empty() {
            return true;
        }
        for chunk in launched.chunks.iter().filter(|chunk| chunk.samples) {
            let wanted = self.scheduler.drafts_wanted(chunk.id);
            let Some(Some(live)) = self.live.get_mut(chunk.id.index()).filter(|_| !wanted.is_none()) else {
                continue;
            };
            let predicted = |wanted: u32| if wanted > 0 { PREDICTED_MIN } else { 0 };
            let wanted =
                DraftsWanted { guessed: predicted(wanted.guessed), forced: predicted(wanted.forced) };
            let (_, count, grown) = live.propose_drafts(wanted);
            self.draft_index_bytes += grown;
            if count >= PREDICTED_MIN as usize {
                return true;
            }
        }
        false
    }

    /// Bytes of the draft sources of all choices.
    pub fn draft_index_bytes(&self) -> usize {
        self.draft_index_bytes
    }
}

impl LiveChoice {
    /// Proposes tokens that follow, at most as many as are wanted, for [`super::drafter::Drafter::take`]: those that its
    /// grammar forces, else those of its draft source that its grammar allows. Returns their kind, their number and the bytes
    /// that the source has grown by.
    fn propose_drafts(&mut self, wanted: DraftsWanted) -> (DraftKind, usize, usize) {
        let Self { drafter, constraint, tokens, .. } = self;
        if let Some(constraint) = constraint.as_mut().filter(|_| wanted.forced > 0) {
            let forced = constraint.forced_tokens(wanted.forced as usize);
            if !forced.is_empty() {
                let count = forced.len();
                drafter.set(forced);
                return (DraftKind::Forced, count, 0);
            }
        }
        if wanted.guessed == 0 {
            return (DraftKind::Guessed, 0, 0);
        }
        let (count, grown) = drafter.propose(tokens, wanted.guessed as usize);
        let valid = match constraint {
            Some(constraint) => constraint.valid_drafts(drafter.take(count as u32)),
            None => count,
        };
        (DraftKind::Guessed, valid, grown)
    }
}

//! Drafts: tokens that the driver guesses to follow the newest one, computed and verified in one iteration.
//!
//! A draft stands while it equals the token that is sampled at its position, so the output is the one without
//! drafts. A decode with `k` drafts is a chunk of `1 + k` tokens. Until its iteration is committed, all of them
//! count as known and computed, and the sequence is in no other plan: its length is not known. Then the
//! rejected ones are rolled back, with the blocks that were taken for them.
//!
//! Drafts come after all decodes and take what is left: half of the token budget where prompts want tokens, and
//! free blocks beyond the watermark. They preempt nothing.

use super::Scheduler;
use super::drafting::{DraftCandidate, DraftStep};
use super::plan_draft::PlanDraft;
use crate::drafts::{DraftKind, DraftsWanted};
use crate::sequence::{Sequence, SequenceState};
use crate::{Chunk, SequenceId, Time};

impl Scheduler {
    /// Offers `count` drafted tokens of a decoding sequence for the next plan, which uses a number of them, from
    /// the first on, and forgets the rest. No-op for a sequence that does not decode, or whose newest token is
    /// in flight.
    pub fn draft(&mut self, id: SequenceId, count: u32, kind: DraftKind) {
        let known = self.sequences.get(id).is_some_and(Self::is_draftable);
        if !known || count == 0 || self.limits.drafts_max == 0 {
            return;
        }
        self.log.iter_mut().for_each(|log| log.draft(id, count, kind));
        self.drafting.offer(&mut self.sequences[id.index], count.min(self.limits.drafts_max), kind);
    }

    /// Returns the numbers of drafted tokens of a sequence that a plan would use if made now and if nothing but
    /// their price limited them; none for a sequence that does not run. A driver that plans ahead completes the
    /// iteration in flight first if a sequence is worth drafting for.
    pub fn drafts_wanted(&self, id: SequenceId) -> DraftsWanted {
        let sequence = self.sequences.get(id);
        sequence.map_or_else(DraftsWanted::default, |sequence| self.drafting.wanted(sequence, &self.limits))
    }

    /// Returns the sequences for which a plan made now would use drafts, with the numbers of tokens to draft.
    pub fn draft_requests(&self) -> impl Iterator<Item = (SequenceId, DraftsWanted)> + '_ {
        let drafts = self.limits.drafts_max > 0;
        let running = self.running.iter().filter(move |_| drafts).map(|index| &self.sequences[*index]);
        running
            .filter(|sequence| Self::is_draftable(sequence))
            .map(|sequence| (sequence.id, self.drafting.wanted(sequence, &self.limits)))
            .filter(|(_, wanted)| !wanted.is_none())
    }

    /// Returns true if the next plan may extend the sequence by drafts.
    fn is_draftable(sequence: &Sequence) -> bool {
        matches!(sequence.state, SequenceState::Decoding { .. }) && sequence.in_flight == 0
    }

    /// Extends the decodes of the plan by drafted tokens.
    pub(super) fn plan_drafts(&mut self, now: Time, draft: &mut PlanDraft) {
        let governed = self.limits.drafts_max > 0 && self.limits.govern_drafts && self.iteration.decodes > 0;
        if !governed && self.drafting.is_empty() {
            return;
        }
        let lost = if self.limits.depth > 1 { self.lost_overlap(now) } else { None };
        let budget = self.drafts_max(draft);
        let step = DraftStep {
            limits: &self.limits,
            cost: &self.cost,
            sequences: &self.sequences,
            chunks: &self.iteration.chunks,
            work: draft.work,
        };
        if governed {
            self.drafting.update_price(&step, lost);
        }
        if self.drafting.is_empty() {
            return;
        }
        let candidates = self.drafting.choose(&step, budget);
        for candidate in candidates.iter().filter(|candidate| candidate.drafts > 0) {
            self.extend_decode(candidate, draft);
        }
        self.drafting.recycle(candidates);
        self.drafting.clear(&mut self.sequences);
    }

    /// Returns the seconds between the end of the last iteration and this plan, if nothing is in flight because
    /// the driver waited for drafts to be verified or predicted.
    fn lost_overlap(&self, now: Time) -> Option<f64> {
        let last = self.history.iter().next_back().filter(|last| last.drafts > 0 || last.predictions > 0)?;
        let took = last.took.filter(|_| self.launches.in_flight() == 0)?;
        Some(now.since(last.planned).saturating_sub(took).min(took).as_secs_f64())
    }

    /// Returns the maximum number of drafts of a plan.
    fn drafts_max(&self, draft: &PlanDraft) -> u32 {
        let (running, waiting) = (self.running.len() as u32, self.waiting.len());
        let prompts = waiting > 0 || running > self.iteration.decodes;
        let budget = if prompts { draft.budget / 2 } else { draft.budget };
        // Prompts, also those that are admitted yet, may sample a token each.
        let samples = (running + waiting).min(self.limits.running_max);
        budget.min(self.limits.iteration_samples.saturating_sub(samples))
    }

    /// Extends a planned decode by its drafts, as far as free blocks beyond the watermark hold them, and advances
    /// the sequence as if all of them stood.
    fn extend_decode(&mut self, candidate: &DraftCandidate, draft: &mut PlanDraft) {
        let kept = self.prefill_blocks_needed();
        let chunk = &mut self.iteration.chunks[candidate.at];
        let sequence = &mut self.sequences[candidate.index];
        let end = chunk.start + chunk.len;
        let drafts = self.memory.extend_for_drafts(sequence, end, candidate.drafts, kept);
        if drafts == 0 {
            return;
        }
        sequence.drafts_in_flight = drafts;
        sequence.computed_tokens += drafts;
        sequence.known_tokens += drafts;
        sequence.remaining_tokens -= drafts;
        draft.budget -= drafts;
        draft.work.extend(chunk.start, chunk.len, drafts);
        self.iteration.drafts += drafts;
        (chunk.len, chunk.drafts) = (chunk.len + drafts, drafts);
    }

    /// Rolls back the drafts of a chunk that do not stand, and returns their number. `accepted` tokens stand or
    /// were sampled behind the last one that does.
    pub(super) fn roll_back_drafts(&mut self, chunk: &Chunk, accepted: u32) -> u32 {
        let rejected = chunk.drafts + 1 - accepted;
        self.totals.drafted_tokens += u64::from(chunk.drafts);
        self.totals.accepted_drafts += u64::from(accepted - 1);
        let sequence = &mut self.sequences[chunk.id.index];
        self.drafting.verify(sequence, chunk.drafts, accepted - 1);
        sequence.drafts_in_flight = 0;
        sequence.computed_tokens -= rejected;
        sequence.known_tokens -= rejected;
        sequence.remaining_tokens += rejected;
        self.memory.roll_back(sequence);
        rejected
    }
}

//! Drafts: tokens that the driver guesses to follow the newest one, computed and verified in one iteration.
//!
//! A draft stands while it equals the token that is sampled at its position, so the output is the one without
//! drafts. A decode with `k` drafts is a chunk of `1 + k` tokens. Until its iteration is committed, all of them
//! count as known and computed, and the sequence is in no other plan: its length is not known. Then the
//! rejected ones are rolled back, with the blocks that were taken for them.
//!
//! Drafts come after all decodes and take what is left: half of the token budget where prompts want tokens, and
//! free blocks beyond the watermark. They preempt nothing.

use super::plan::PlanDraft;
use super::{CommitError, LaunchedIteration, Scheduler};
use crate::cost::StepWork;
use crate::drafts::{Acceptance, DraftKind, DraftPrice, DraftsWanted};
use crate::sequence::{Sequence, SequenceState};
use crate::{Chunk, SequenceId, StepTarget, Time};

/// Prefill time as a multiple of the decode time that must fit into a step target beside drafts.
const PREFILL_TIME_FACTOR: f64 = 0.25;

/// Decode of the step that is planned, with its drafts.
#[derive(Debug, Clone, Copy)]
pub(super) struct DraftCandidate {
    /// Index of its chunk in the plan.
    at: usize,
    index: u32,
    /// Maximum number of drafts.
    most: u32,
    /// Number of drafts planned.
    drafts: u32,
    /// Probability that all drafts planned stand.
    all_stand: f64,
}

impl LaunchedIteration {
    /// Returns the number of accepted tokens over all sampling chunks.
    ///
    /// # Errors
    /// [`CommitError::Accepted`] if `accepted` does not fit the chunks with drafts.
    pub(super) fn accepted_tokens(&self, accepted: &[u32]) -> Result<usize, CommitError> {
        let mut given = accepted.iter().copied();
        let mut tokens = 0;
        for chunk in self.chunks.iter().filter(|chunk| chunk.samples) {
            if chunk.drafts == 0 {
                tokens += 1;
                continue;
            }
            let given = given.next().unwrap_or(0);
            if !(1..=chunk.drafts + 1).contains(&given) {
                return Err(CommitError::Accepted { drafts: chunk.drafts, given });
            }
            tokens += given as usize;
        }
        match given.next() {
            Some(given) => Err(CommitError::Accepted { drafts: 0, given }),
            None => Ok(tokens),
        }
    }
}

impl Scheduler {
    /// Offers `count` drafted tokens of a decoding sequence for the next plan, which uses a number of them, from
    /// the first on, and forgets the rest. No-op for a sequence that does not decode, or whose newest token is
    /// in flight.
    pub fn draft(&mut self, id: SequenceId, count: u32, kind: DraftKind) {
        let known = self.get(id).is_some_and(Self::is_draftable);
        if !known || count == 0 || self.limits.drafts_max == 0 {
            return;
        }
        self.log.iter_mut().for_each(|log| log.draft(id, count, kind));
        let drafts_max = self.limits.drafts_max;
        let sequence = self.sequence_mut(id.index);
        (sequence.drafted, sequence.draft_kind) = (count.min(drafts_max), kind);
        self.drafting.push(id.index);
    }

    /// Returns the numbers of drafted tokens of a sequence that a plan would use if made now and if nothing but
    /// their price limited them; none for a sequence that does not run. A driver that plans ahead completes the
    /// iteration in flight first if a sequence is worth drafting for.
    pub fn drafts_wanted(&self, id: SequenceId) -> DraftsWanted {
        let Some(sequence) = self.get(id) else { return DraftsWanted::default() };
        if !matches!(sequence.state, SequenceState::Decoding { .. }) || sequence.is_marked() {
            return DraftsWanted::default();
        }
        let most = self.limits.drafts_max.min(sequence.remaining_tokens);
        if !self.limits.govern_drafts || most == 0 {
            return DraftsWanted { guessed: most, forced: most };
        }
        let Some(price) = self.draft_budget.price() else { return DraftsWanted::default() };
        let wanted = |kind| self.acceptance(sequence, kind).drafts_wanted(price, &self.draft_budget, most);
        DraftsWanted { guessed: wanted(DraftKind::Guessed), forced: wanted(DraftKind::Forced) }
    }

    /// Returns the estimate of how many drafts of a sequence and kind stand.
    fn acceptance<'s>(&'s self, sequence: &'s Sequence, kind: DraftKind) -> &'s Acceptance {
        match kind {
            DraftKind::Guessed => &sequence.acceptance,
            DraftKind::Forced => &self.forced_acceptance,
        }
    }

    /// Returns the kind of a sequence's newest drafts.
    pub(super) fn draft_kind(&self, index: u32) -> Option<DraftKind> {
        self.sequences[index as usize].as_ref().map(|sequence| sequence.draft_kind)
    }

    /// Returns the sequences for which a plan made now would use drafts, with the numbers of tokens to draft.
    pub fn draft_requests(&self) -> impl Iterator<Item = (SequenceId, DraftsWanted)> + '_ {
        let drafts = self.limits.drafts_max > 0;
        let running = self.running.iter().filter(move |_| drafts).map(|index| self.sequence(*index));
        running
            .filter(|sequence| Self::is_draftable(sequence))
            .map(|sequence| (sequence.id, self.drafts_wanted(sequence.id)))
            .filter(|(_, wanted)| !wanted.is_none())
    }

    /// Returns true if the next plan may extend the sequence by drafts.
    fn is_draftable(sequence: &Sequence) -> bool {
        matches!(sequence.state, SequenceState::Decoding { .. }) && sequence.in_flight == 0
    }

    /// Extends the decodes of the plan by drafted tokens.
    pub(super) fn plan_drafts(&mut self, now: Time, draft: &mut PlanDraft) {
        let mut candidates = std::mem::take(&mut self.draft_candidates);
        candidates.clear();
        if self.limits.drafts_max > 0 && self.limits.govern_drafts && self.iteration.decodes > 0 {
            self.update_draft_price(now, &draft.work);
        }
        if !self.drafting.is_empty() {
            for (at, chunk) in self.iteration.chunks.iter().enumerate() {
                let sequence = self.sequence(chunk.id.index);
                let most = sequence.drafted.min(sequence.remaining_tokens);
                if most > 0 {
                    let index = chunk.id.index;
                    candidates.push(DraftCandidate { at, index, most, drafts: 0, all_stand: 1.0 });
                }
            }
            self.choose_drafts(&mut candidates, draft);
            self.check_overlap(&candidates, &draft.work);
            for candidate in candidates.iter().filter(|candidate| candidate.drafts > 0) {
                self.extend_decode(candidate, draft);
            }
            for index in self.drafting.drain(..) {
                // A sequence may have ended since.
                if let Some(Some(sequence)) = self.sequences.get_mut(index as usize) {
                    sequence.drafted = 0;
                }
            }
        }
        self.draft_candidates = candidates;
    }

    /// Computes the price of a draft beside these decodes.
    fn update_draft_price(&mut self, now: Time, decodes: &StepWork) {
        let row = self.draft_row(decodes);
        let step = self.cost.step(decodes).as_secs_f64();
        let lost = if self.limits.depth > 1 { self.lost_overlap(now) } else { None };
        self.draft_budget.observe_step(step, row, decodes.sequences, lost);
    }

    /// Returns the seconds that one more token of a decode takes in a step with these decodes.
    fn draft_row(&self, decodes: &StepWork) -> f64 {
        let mut with = *decodes;
        let keys = decodes.keys / u64::from(decodes.sequences.max(1));
        with.tokens += 1;
        (with.keys, with.prefill_keys) = (with.keys + keys, with.prefill_keys + keys);
        (self.cost.step(&with).as_secs_f64() - self.cost.step(decodes).as_secs_f64()).max(0.0)
    }

    /// Returns the seconds between the end of the last iteration and this plan, if nothing is in flight because
    /// the driver waited for drafts to be verified.
    fn lost_overlap(&self, now: Time) -> Option<f64> {
        let last = self.history.iter().next_back().filter(|last| last.drafts > 0)?;
        let took = last.took.filter(|_| self.launched.is_empty())?;
        Some(now.since(last.planned).saturating_sub(took).min(took).as_secs_f64())
    }

    /// Chooses the number of drafts of each candidate: the first one of each, then the second ones, and so on,
    /// while they are worth their price.
    fn choose_drafts(&self, candidates: &mut [DraftCandidate], draft: &PlanDraft) {
        let prompts = self.waiting > 0 || self.running.len() as u32 > self.iteration.decodes;
        let budget = if prompts { draft.budget / 2 } else { draft.budget };
        // Prompts, also those that are admitted yet, may sample a token each.
        let samples = (self.running.len() as u32 + self.waiting).min(self.limits.running_max);
        let mut budget = budget.min(self.limits.iteration_samples.saturating_sub(samples));
        let (mut work, mut probes) = (draft.work, 0);
        let mut price = DraftPrice {
            seconds_per_token: self.cost.step(&work).as_secs_f64() / f64::from(work.sequences.max(1)),
            row: self.draft_row(&work),
        };
        let (mut tokens, mut grows) = (f64::from(work.sequences), true);
        while grows && budget > 0 {
            grows = false;
            for candidate in candidates.iter_mut() {
                if candidate.drafts == candidate.most || budget == 0 {
                    continue;
                }
                let chunk = self.iteration.chunks[candidate.at];
                let sequence = self.sequence(candidate.index);
                let acceptance = self.acceptance(sequence, sequence.draft_kind);
                let mut with = work;
                with.extend(chunk.start, 1 + candidate.drafts, 1);
                let wanted = !self.limits.govern_drafts
                    || acceptance.pays(candidate.drafts, price, &self.draft_budget)
                    || candidate.drafts == 0 && acceptance.may_probe(price, &self.draft_budget, probes) && {
                        probes += 1;
                        true
                    };
                if !wanted || !self.within_target(&with) {
                    candidate.most = candidate.drafts;
                    continue;
                }
                (budget, grows) = (budget - 1, true);
                candidate.drafts += 1;
                candidate.all_stand *= acceptance.probability();
                (work, tokens) = (with, tokens + candidate.all_stand);
                // Each draft that pays shortens the time per token, so the next one must save more.
                let seconds = self.cost.step(&work).as_secs_f64() / tokens;
                price.seconds_per_token = price.seconds_per_token.min(seconds);
            }
        }
    }

    /// Pauses drafts if the chosen ones, less probes, are not worth the overlap of host and device that is lost
    /// when the driver waits for their verification.
    fn check_overlap(&mut self, candidates: &[DraftCandidate], decodes: &StepWork) {
        if self.limits.depth == 1 || !self.limits.govern_drafts {
            return;
        }
        let (mut work, mut tokens) = (*decodes, f64::from(decodes.sequences));
        for candidate in candidates.iter().filter(|candidate| candidate.drafts > 0) {
            let sequence = self.sequence(candidate.index);
            let acceptance = self.acceptance(sequence, sequence.draft_kind);
            if !acceptance.is_proven() {
                continue;
            }
            let p = acceptance.probability();
            work.extend(self.iteration.chunks[candidate.at].start, 1, candidate.drafts);
            tokens += (1..=candidate.drafts).map(|nth| p.powi(nth as i32)).sum::<f64>();
        }
        if work.tokens > decodes.tokens {
            let (before, after) = (self.cost.step(decodes), self.cost.step(&work));
            let sequences = f64::from(decodes.sequences);
            self.draft_budget.check_overlap(before.as_secs_f64(), sequences, after.as_secs_f64(), tokens);
        }
    }

    /// Returns true if a step of these decodes leaves room for prefills within a fixed step target or the
    /// objective for gaps.
    fn within_target(&self, decodes: &StepWork) -> bool {
        let target = match self.limits.step_target {
            StepTarget::Unbounded => None,
            StepTarget::Fixed(target) => Some(target),
            StepTarget::Adaptive(objectives) => objectives.gap,
        };
        target.is_none_or(|target| self.cost.target_with_slack(decodes, PREFILL_TIME_FACTOR) <= target)
    }

    /// Extends a planned decode by its drafts, as far as free blocks beyond the watermark hold them, and advances
    /// the sequence as if all of them stood.
    fn extend_decode(&mut self, candidate: &DraftCandidate, draft: &mut PlanDraft) {
        let chunk = self.iteration.chunks[candidate.at];
        let end = chunk.start + chunk.len;
        let kept = self.limits.watermark_blocks + self.prefill_blocks_needed();
        let spare = self.device.free().saturating_sub(kept);
        let sequence = self.sequence(candidate.index);
        let most = self.limits.shape.spans(end + candidate.drafts);
        let room = sequence.tables.reachable(most, spare) * self.limits.block_tokens() - end;
        let drafts = candidate.drafts.min(room);
        let ends = self.device.ends(end + drafts);
        // Borrows two fields at once, which `sequence_mut` cannot.
        let Some(sequence) = self.sequences[candidate.index as usize].as_mut() else { return };
        let held = sequence.tables.ends();
        if drafts == 0 || !self.device.extend(&mut sequence.tables, &ends) {
            return;
        }
        sequence.undrafted = held;
        sequence.drafts_in_flight = drafts;
        sequence.computed_tokens += drafts;
        sequence.known_tokens += drafts;
        sequence.remaining_tokens -= drafts;
        draft.budget -= drafts;
        draft.work.extend(chunk.start, chunk.len, drafts);
        self.iteration.drafts += drafts;
        let chunk = &mut self.iteration.chunks[candidate.at];
        (chunk.len, chunk.drafts) = (chunk.len + drafts, drafts);
    }

    /// Rolls back the drafts of a chunk that do not stand, and returns their number. `accepted` tokens stand or
    /// were sampled behind the last one that does.
    pub(super) fn roll_back_drafts(&mut self, chunk: &Chunk, accepted: u32) -> u32 {
        let rejected = chunk.drafts + 1 - accepted;
        self.totals.drafted_tokens += u64::from(chunk.drafts);
        self.totals.accepted_drafts += u64::from(accepted - 1);
        self.draft_budget.verify(accepted - 1, rejected);
        let Some(sequence) = self.sequences[chunk.id.index()].as_mut() else { return rejected };
        match sequence.draft_kind {
            DraftKind::Guessed => sequence.acceptance.verify(chunk.drafts, accepted - 1),
            DraftKind::Forced => self.forced_acceptance.verify(chunk.drafts, accepted - 1),
        }
        sequence.drafts_in_flight = 0;
        sequence.computed_tokens -= rejected;
        sequence.known_tokens -= rejected;
        sequence.remaining_tokens += rejected;
        let mut keep = self.device.ends(sequence.computed_tokens);
        keep.iter_mut().zip(sequence.undrafted).for_each(|(keep, before)| *keep = before.max(*keep));
        self.device.truncate(&mut sequence.tables, &keep);
        rejected
    }
}

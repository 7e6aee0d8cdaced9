//! Choice of the numbers of tokens that the MTP layer predicts: they are the drafts of the next plan.
//!
//! A prediction pass computes the MTP layer and the LM head for one token of each sequence, so its cost is shared. The plan decides on passes
//! one by one: the first predicts for all sequences whose first draft is worth its row, and takes place if the expected savings exceed its
//! duration; then the second one. Sequences whose acceptance is not known are probed in a pass of others or, without one, at growing intervals.

use std::time::Duration;

use super::Scheduler;
use super::drafting::{Drafting, PredictionCandidate};
use super::sequences::Sequences;
use crate::drafts::{DraftKind, DraftPrice};
use crate::{Chunk, SchedulerLimits};

impl Drafting {
    /// Sets the numbers of tokens to predict behind the sampling chunks of a plan, within `rows` rows. `number` is that of the iteration.
    fn choose_predictions(
        &mut self,
        chunks: &mut [Chunk],
        sequences: &Sequences,
        limits: &SchedulerLimits,
        (number, mut rows): (u64, u32),
    ) {
        let (continues, governed) = (std::mem::take(&mut self.passes) > 0, limits.govern_drafts);
        let sampling = chunks.iter().filter(|chunk| chunk.samples).count();
        let Some(mut price) = self.prediction_price(limits) else { return };
        let (mut candidates, mut set) = std::mem::take(&mut self.predictions);
        self.candidates(chunks, sequences, limits, &mut candidates);
        // Rotated, so that other sequences are left out each time where rows are short.
        let first = number as usize % candidates.len().max(1);
        candidates.rotate_left(first);
        let (mut tokens, mut time) = (sampling as f64, sampling as f64 * price.seconds_per_token);
        for depth in 0..limits.predicted_max {
            // Only behind the token before.
            let next = |candidate: &&PredictionCandidate| {
                depth < candidate.most && chunks[candidate.at].predictions == depth
            };
            let pays = |candidate: &&PredictionCandidate| {
                !governed || candidate.acceptance.pays(depth, price, &self.budget)
            };
            set.clear();
            set.extend(candidates.iter().filter(next).filter(pays).take(rows as usize).copied());
            let stands =
                |candidate: &PredictionCandidate| candidate.acceptance.probability().powi(depth as i32 + 1);
            let gained: f64 = set.iter().map(stands).sum();
            if governed && !self.budget.pass_pays(gained, set.len() as u32, price, continues) {
                set.clear();
            }
            if depth == 0
                && governed
                && (!set.is_empty() || self.predicted.is_proven() || self.predicted.is_due())
            {
                // Probes: in a pass of others, or when the wait is over; no more than the next plan may verify.
                let room = (rows as usize).saturating_sub(set.len());
                let probes = candidates.iter().filter(|candidate| !candidate.acceptance.is_proven());
                let probes = probes
                    .zip(0..)
                    .filter(|(candidate, nth)| candidate.acceptance.may_probe(price, &self.budget, *nth));
                set.extend(probes.map(|(candidate, _)| *candidate).take(room));
            }
            if set.is_empty() {
                break;
            }
            rows -= set.len() as u32;
            self.passes = depth + 1;
            set.iter().for_each(|candidate| chunks[candidate.at].predictions = depth + 1);
            time += set.len() as f64 * price.row + self.budget.pass_seconds();
            tokens += gained;
            price.seconds_per_token = price.seconds_per_token.min(time / tokens);
        }
        if self.passes == 0 && !candidates.is_empty() {
            self.budget.skip_pass();
        }
        self.predictions = (candidates, set);
    }

    /// Returns the price of a draft; `None` if none is to be predicted now.
    fn prediction_price(&self, limits: &SchedulerLimits) -> Option<DraftPrice> {
        let any = DraftPrice { seconds_per_token: 1.0, row: 0.0 };
        if limits.govern_drafts { self.budget.price() } else { Some(any) }
    }

    /// Collects the sampling chunks for which tokens may be predicted.
    fn candidates(
        &self,
        chunks: &[Chunk],
        sequences: &Sequences,
        limits: &SchedulerLimits,
        candidates: &mut Vec<PredictionCandidate>,
    ) {
        let candidate = |(at, chunk): (usize, &Chunk)| {
            let sequence = &sequences[chunk.id.index];
            // A draft stands before the last token at most.
            let most =
                limits.predicted_max.min(limits.drafts_max).min(sequence.remaining_tokens.saturating_sub(1));
            let (guessed, predicted) = (&sequence.acceptance, sequence.predicted);
            let guesses = guessed.is_drafting()
                && guessed.is_proven()
                && self.budget.prefers_guesses(guessed, &predicted);
            let due = !limits.govern_drafts || !guesses && (predicted.is_proven() || predicted.is_due());
            (chunk.samples && most > 0 && due).then_some(PredictionCandidate {
                at,
                most,
                acceptance: predicted,
            })
        };
        candidates.clear();
        candidates.extend(chunks.iter().enumerate().filter_map(candidate));
    }
}

impl Scheduler {
    /// Sets for which sampling chunks the MTP layer predicts the tokens of the next plan's drafts, and how many, within the rows of drafts.
    pub(super) fn plan_predictions(&mut self) {
        if self.limits.predicted_max.min(self.limits.drafts_max) == 0 {
            return;
        }
        let rows = self.limits.iteration_samples.saturating_sub(self.limits.running_max);
        let chunks = &mut self.iteration.chunks;
        self.drafting.choose_predictions(
            chunks,
            &self.sequences,
            &self.limits,
            (self.launches.count(), rows),
        );
    }

    /// Returns the expected duration of the prediction passes that follow a step, as many as the last plan had.
    pub(super) fn prediction_time(&self) -> Duration {
        Duration::try_from_secs_f64(self.drafting.passes_seconds()).unwrap_or_default()
    }

    /// Counts predicted tokens that the plan does not use as drafts as rejected ones, so that fewer are predicted.
    pub(super) fn note_unused_predictions(&mut self) {
        if self.limits.predicted_max == 0 {
            return;
        }
        let (mut unused, mut used) = (false, false);
        for chunk in &self.iteration.chunks {
            let sequence = &mut self.sequences[chunk.id.index];
            if std::mem::take(&mut sequence.predictions) == 0 {
                continue;
            }
            if chunk.drafts == 0 || sequence.draft_kind == DraftKind::Forced {
                sequence.predicted.reject_unused();
                unused = true;
            } else {
                used = true;
            }
        }
        if unused && !used {
            self.drafting.predicted.back_off();
        }
    }

    /// Records the measured duration of the prediction passes of the oldest iteration in flight, before its commit. The iteration's own duration
    /// does not include it.
    pub fn observe_predictions(&mut self, took: Duration) {
        let Some(launched) = self.launches.oldest_mut() else { return };
        let passes = launched.chunks.iter().map(|chunk| chunk.predictions).max().unwrap_or(0);
        self.log.iter_mut().for_each(|log| log.predictions(took));
        launched.predicting = took;
        self.drafting.observe_passes(took.as_secs_f64(), passes);
    }
}

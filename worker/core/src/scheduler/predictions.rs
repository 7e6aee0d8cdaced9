//! Choice of the numbers of tokens that the MTP layer predicts: they are the drafts of the next plan.
//!
//! A prediction is a pass over the weights of the layer and the LM head for all sequences at once, so passes are chosen rather than
//! sequences: the first one for all sequences whose first draft pays, then the second one, while what a pass is expected to save exceeds what
//! it takes. A sequence without an estimate is predicted for together with others or, where there are none, at growing intervals.

use std::time::Duration;

use super::Scheduler;
use super::drafting::Drafting;
use super::sequences::Sequences;
use crate::drafts::{DraftKind, DraftPrice};
use crate::{Chunk, SchedulerLimits};

/// Sampling chunk for which tokens may be predicted.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    /// Index of the chunk in the plan.
    at: usize,
    /// Maximum number of tokens.
    most: u32,
    /// Probability that a draft stands if all before it do; `None` if it is not known.
    probability: Option<f64>,
}

impl Drafting {
    /// Sets the numbers of tokens to predict behind the sampling chunks of a plan, within `rows` rows. `number` is that of the iteration.
    fn choose_predictions(
        &mut self,
        chunks: &mut [Chunk],
        sequences: &Sequences,
        limits: &SchedulerLimits,
        (number, mut rows): (u64, u32),
    ) {
        let continues = std::mem::take(&mut self.passes) > 0;
        let sampling = chunks.iter().filter(|chunk| chunk.samples).count();
        let Some(mut price) = self.prediction_price(limits) else { return };
        let mut candidates = self.candidates(chunks, sequences, limits);
        if candidates.is_empty() {
            self.budget.pass_prediction();
            return;
        }
        // Not always the same ones where rows are short.
        let first = number as usize % candidates.len();
        candidates.rotate_left(first);
        let (mut tokens, mut time) = (sampling as f64, sampling as f64 * price.seconds_per_token);
        for depth in 0..limits.predicted_max {
            let mut gained = 0.0;
            let pays = |candidate: &Candidate| {
                let stands = candidate.probability.map_or(0.0, |p| p.powi(depth as i32 + 1));
                let pays = !limits.govern_drafts || stands * price.seconds_per_token > price.row;
                (depth < candidate.most && pays).then_some((candidate.at, stands))
            };
            let mut set: Vec<(usize, f64)> = candidates.iter().filter_map(pays).collect();
            set.truncate(rows as usize);
            set.iter().for_each(|(_, stands)| gained += stands);
            let futile = set.is_empty()
                || limits.govern_drafts
                    && !self.budget.pays_to_predict(gained, set.len() as u32, price, continues);
            if futile {
                set.clear();
            }
            if depth == 0 && limits.govern_drafts {
                // Those without an estimate, beside others or when it is their turn.
                let alone = self.predicted.is_proven() || self.predicted.is_due();
                let unknown = candidates.iter().filter(|candidate| candidate.probability.is_none());
                let room = (rows as usize).saturating_sub(set.len());
                let may = !set.is_empty() || alone;
                set.extend(unknown.take(if may { room } else { 0 }).map(|candidate| (candidate.at, 0.0)));
            }
            if set.is_empty() {
                break;
            }
            rows -= set.len() as u32;
            self.passes = depth + 1;
            set.iter().for_each(|(at, _)| chunks[*at].predictions = depth + 1);
            time += set.len() as f64 * price.row + self.budget.prediction();
            tokens += gained;
            price.seconds_per_token = price.seconds_per_token.min(time / tokens);
        }
        if self.passes == 0 {
            self.budget.pass_prediction();
        }
    }

    /// Returns the price of a draft; `None` if none is to be predicted now.
    fn prediction_price(&self, limits: &SchedulerLimits) -> Option<DraftPrice> {
        let any = DraftPrice { seconds_per_token: 1.0, row: 0.0 };
        if limits.govern_drafts { self.budget.price() } else { Some(any) }
    }

    /// Returns the sampling chunks for which tokens may be predicted.
    fn candidates(
        &self,
        chunks: &[Chunk],
        sequences: &Sequences,
        limits: &SchedulerLimits,
    ) -> Vec<Candidate> {
        let candidate = |(at, chunk): (usize, &Chunk)| {
            let sequence = &sequences[chunk.id.index];
            // A draft stands before the last token at most.
            let most =
                limits.predicted_max.min(limits.drafts_max).min(sequence.remaining_tokens.saturating_sub(1));
            let (guessed, predicted) = (&sequence.acceptance, &sequence.predicted);
            let guesses = guessed.is_drafting()
                && guessed.is_proven()
                && self.budget.prefers_guesses(guessed, predicted);
            let known = predicted.is_proven();
            let due = !limits.govern_drafts || !guesses && (known || predicted.is_due());
            let probability = known.then(|| predicted.probability());
            (chunk.samples && most > 0 && due).then_some(Candidate { at, most, probability })
        };
        chunks.iter().enumerate().filter_map(candidate).collect()
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

    /// Returns the time that predictions are expected to take behind a step, by those of the last plan.
    pub(super) fn prediction_time(&self) -> Duration {
        let seconds = self.drafting.prediction_time(self.drafting.passes());
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }

    /// Counts the tokens predicted for the decodes of the plan that are no drafts of it: predictions that are not used are made seldom.
    pub(super) fn note_unused_predictions(&mut self) {
        for chunk in &self.iteration.chunks {
            let sequence = &mut self.sequences[chunk.id.index];
            let unused = chunk.drafts == 0 || sequence.draft_kind == DraftKind::Forced;
            if std::mem::take(&mut sequence.predictions) > 0 && unused {
                sequence.predicted.waste();
            }
        }
    }

    /// Takes the measured time of the predictions of the oldest iteration in flight, before it is committed. Its own time is without it.
    pub fn observe_predictions(&mut self, took: Duration) {
        let Some(launched) = self.launches.oldest_mut() else { return };
        let passes = launched.chunks.iter().map(|chunk| chunk.predictions).max().unwrap_or(0);
        self.log.iter_mut().for_each(|log| log.predictions(took));
        launched.predicting = took;
        self.drafting.observe_predictions(took.as_secs_f64(), passes);
    }
}

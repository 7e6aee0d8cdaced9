//! Results of an iteration: tokens, stop conditions, verification of drafts.

use std::time::Duration;

use inflight_runtime::{self as runtime, NonFiniteRows, Predictions, PromptLogprobs, Runtime, Sampled};
use inflight_worker_core::{IterationOutcome, SequenceId, TokenVerdict};

use super::launches::LaunchedIteration;
use super::live_choices::LiveChoices;
use super::live_constraint::{ConstraintEnd, Consumed};
use super::{ChoiceEvent, Failure};

/// Results of the iteration completed last; the buffers are reused.
#[derive(Default)]
pub(super) struct Results {
    sampled: Vec<Sampled>,
    scores: Vec<PromptLogprobs>,
    /// Rows whose logits are not all finite.
    non_finite: NonFiniteRows,
    predictions: Predictions,
    /// Sequences with such rows.
    unsound: Vec<SequenceId>,
    verdicts: Vec<TokenVerdict>,
    /// Number of tokens accepted of each chunk with drafts.
    accepted: Vec<u32>,
}

impl Results {
    /// Waits for the oldest launched iteration and takes its results. Returns its duration.
    pub(super) fn receive(&mut self, runtime: &mut dyn Runtime) -> Result<Duration, runtime::Error> {
        let took = runtime.complete(&mut self.sampled)?;
        self.scores.clear();
        runtime.take_scores(&mut self.scores);
        runtime.take_non_finite(&mut self.non_finite);
        runtime.take_predictions(&mut self.predictions);
        Ok(took)
    }

    /// Returns the time of the predictions, if there are some.
    pub(super) fn predicting(&self) -> Option<Duration> {
        (!self.predictions.is_empty()).then_some(self.predictions.took)
    }

    /// Hands the predicted tokens to their choices, behind the sampled ones.
    pub(super) fn keep_predictions(&self, launched: &LaunchedIteration, live: &mut LiveChoices) {
        for (slot, predicted) in self.predictions.iter() {
            let chunk = launched.chunks.iter().find(|chunk| chunk.samples && chunk.slot == slot);
            // A choice may have ended since.
            if let Some(live) = chunk.and_then(|chunk| live.get_mut(chunk.id)) {
                live.drafter.predict(live.tokens.len(), predicted);
            }
        }
    }

    /// Returns what the scheduler commits of the iteration.
    pub(super) fn outcome(&self, took: Duration) -> IterationOutcome<'_> {
        IterationOutcome { verdicts: &self.verdicts, accepted: &self.accepted, took }
    }

    /// Returns the number of tokens accepted of each chunk with drafts.
    pub(super) fn accepted(&self) -> &[u32] {
        &self.accepted
    }

    /// Returns the number of tokens sampled.
    pub(super) fn sampled(&self) -> u32 {
        self.verdicts.len() as u32
    }

    /// Returns the sequences with rows whose logits are not all finite.
    pub(super) fn unsound(&self) -> &[SequenceId] {
        &self.unsound
    }

    /// Appends the sampled tokens to their choices, checks stop conditions and pushes an event for each token;
    /// before the first, one with the log probabilities of the prompt tokens that the chunk has scored.
    ///
    /// Of a chunk with drafts, the first sample counts, and each further one while the draft before it equals
    /// the token sampled there and does not end the choice. A choice with a row that counts and whose logits are not all finite fails: no
    /// token comes of such a row.
    pub(super) fn apply(
        &mut self,
        launched: &LaunchedIteration,
        live: &mut LiveChoices,
        block_tokens: usize,
        eos_token_ids: &[u32],
        events: &mut Vec<ChoiceEvent>,
    ) {
        self.verdicts.clear();
        self.accepted.clear();
        self.unsound.clear();
        let (mut sampled, mut scores) = (self.sampled.drain(..), self.scores.drain(..));
        // Rows of the chunks before.
        let (mut samples_before, mut scores_before) = (0, 0);
        let mut drafts = launched.drafts.as_slice();
        for (at, chunk) in launched.chunks.iter().enumerate() {
            let own;
            (own, drafts) = drafts.split_at(chunk.drafts as usize);
            let rows = if chunk.samples { 1 + own.len() } else { 0 };
            let samples = sampled.by_ref().take(rows);
            let scored = launched.scored.get(at).map_or(0, |scored| *scored as usize);
            let prompt_logprobs: Vec<_> = scores.by_ref().take(scored).collect();
            let (first_sample, first_score) = (samples_before, scores_before);
            (samples_before, scores_before) = (first_sample + rows as u32, first_score + scored as u32);
            // The index is not reused while the iteration is in flight: the entry is this sequence, or empty
            // if it has ended.
            let Some(live) = live.get_mut(chunk.id) else {
                samples.for_each(drop);
                self.verdicts.extend(chunk.samples.then_some(TokenVerdict::CONTINUE));
                self.accepted.extend((!own.is_empty()).then_some(1));
                continue;
            };
            live.computed_tokens += chunk.len;
            let is_score = |row: &u32| (first_score..scores_before).contains(row);
            let mut unsound = self.non_finite.scores.iter().any(is_score).then_some("in the prompt");
            if !prompt_logprobs.is_empty() && unsound.is_none() {
                events.push(ChoiceEvent { prompt_logprobs, ..live.event() });
            }
            let (mut taken, mut stands) = (0, true);
            for (nth, Sampled { token, logprobs }) in samples.enumerate() {
                if !stands {
                    continue; // behind a draft that does not stand, or behind the end
                }
                if self.non_finite.samples.binary_search(&(first_sample + nth as u32)).is_ok() {
                    unsound.get_or_insert("in place of an output token");
                }
                if unsound.is_some() {
                    self.verdicts.push(TokenVerdict::STOP);
                    (taken, stands) = (taken + 1, false);
                    continue;
                }
                let consumed = live.consume(token);
                if let Consumed::Ended(end) = consumed {
                    match end {
                        ConstraintEnd::Complete => live.complete = true,
                        ConstraintEnd::Failed(reason) => {
                            live.failure.get_or_insert(Failure::Constraint(reason));
                        }
                    }
                    self.verdicts.push(TokenVerdict { stop: true, hash: None });
                    (taken, stands) = (taken + 1, false);
                    continue;
                }
                let hash = live.push(token, block_tokens);
                let stopped = live.ends_with(token, eos_token_ids);
                live.complete = consumed == Consumed::Completes && !stopped;
                let stop = live.complete || stopped;
                self.verdicts.push(TokenVerdict { stop, hash });
                let computed_tokens = live.report_computed();
                events.push(ChoiceEvent { token: Some(token), logprobs, computed_tokens, ..live.event() });
                taken += 1;
                stands = !stop && own.get(nth) == Some(&token);
            }
            self.accepted.extend((!own.is_empty()).then_some(taken));
            if let Some(place) = unsound {
                live.failure.get_or_insert(Failure::NonFinite(place));
                self.unsound.push(chunk.id);
                metrics::counter!(crate::metrics::NON_FINITE).increment(1);
            }
        }
    }
}

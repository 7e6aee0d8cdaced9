//! Completion of iterations and transfers.

use std::time::Duration;

use inflight_contract::FinishReason;

use super::transfers::TransferPurpose;
use super::{CommitError, Scheduler};
use crate::drafts::DraftKind;
use crate::sequence::SequenceState;
use crate::{Chunk, Direction, IterationOutcome, Time, TokenVerdict, TransferId};

impl Scheduler {
    /// Commits the results of the oldest iteration in flight.
    ///
    /// # Errors
    /// [`CommitError`]; the scheduler is then unchanged.
    pub fn commit(&mut self, iteration: u64, outcome: IterationOutcome<'_>) -> Result<(), CommitError> {
        let launched = self.launches.oldest(iteration)?;
        let expected = launched.accepted_tokens(outcome.accepted)?;
        if expected != outcome.verdicts.len() {
            return Err(CommitError::Verdicts { expected, given: outcome.verdicts.len() });
        }
        self.log.iter_mut().for_each(|log| log.commit(iteration, &outcome));
        let Some(mut launched) = self.launches.pop() else { return Ok(()) };
        let took = outcome.took + std::mem::take(&mut launched.predicting);
        self.history.finish(launched.number, took);
        self.cost.observe_step(&launched.work, outcome.took);
        self.prefill_load.observe(outcome.took, launched.prefill_share);
        let (mut verdicts, mut accepted) = (outcome.verdicts, outcome.accepted.iter().copied());
        for index in launched.sources.drain(..) {
            self.release_copy(index);
        }
        let (mut sampled, mut forced, mut predicted) = (false, false, false);
        for chunk in launched.chunks.drain(..) {
            sampled |= chunk.samples;
            self.totals.predicted_tokens += u64::from(chunk.predictions);
            if chunk.drafts > 0 {
                let kind = self.sequences.find(chunk.id.index).map(|sequence| sequence.draft_kind);
                forced |= kind == Some(DraftKind::Forced);
                predicted |= kind == Some(DraftKind::Predicted);
            }
            let count = match (chunk.samples, chunk.drafts) {
                (false, _) => 0,
                (true, 0) => 1,
                (true, _) => accepted.next().unwrap_or(1),
            };
            let own;
            (own, verdicts) = verdicts.split_at(count as usize);
            self.commit_chunk(&chunk, own, iteration);
        }
        for (kind, had) in [(DraftKind::Forced, forced), (DraftKind::Predicted, predicted)] {
            if sampled && !had {
                self.drafting.pass(kind);
            }
        }
        self.launches.recycle(launched);
        Ok(())
    }

    /// Ends all sequences of all iterations in flight after a device failure.
    ///
    /// # Errors
    /// [`CommitError::UnknownIteration`]; the scheduler is then unchanged.
    pub fn fail(&mut self, iteration: u64) -> Result<(), CommitError> {
        self.launches.oldest(iteration)?;
        self.log.iter_mut().for_each(|log| log.fail(iteration));
        while let Some(launched) = self.launches.pop() {
            for &index in &launched.sources {
                self.release_copy(index);
            }
            for chunk in &launched.chunks {
                // What the device made of its state is not known.
                let sequence = self.sequences.find_mut(chunk.id.index);
                sequence.into_iter().for_each(|sequence| sequence.progress.fail());
                if self.release_from_iteration(chunk.id.index) {
                    self.end(chunk.id.index, FinishReason::Error);
                }
            }
        }
        Ok(())
    }

    /// Completes a transfer that reached its fence or failed; `took` is its measured duration.
    ///
    /// # Errors
    /// [`CommitError::UnknownTransfer`]; the scheduler is then unchanged.
    pub fn transfer_done(
        &mut self,
        id: TransferId,
        succeeded: bool,
        took: Duration,
        now: Time,
    ) -> Result<(), CommitError> {
        let mut transfer = self.transfers.finish(id).ok_or(CommitError::UnknownTransfer(id))?;
        self.log.iter_mut().for_each(|log| log.transfer_done(id, succeeded, took, now));
        if succeeded {
            self.cost.observe_copy(transfer.host_blocks().count() as u32, took);
        }
        if let TransferPurpose::Offload(offloaded) = &transfer.purpose {
            self.memory.finish_offload(offloaded, succeeded);
            return Ok(());
        }
        let owner = transfer.owner().map(|owner| owner.index);
        match (transfer.direction, owner) {
            (Direction::Out, Some(index)) if succeeded => {
                self.memory.release(&mut transfer.device, false);
                let sequence = &mut self.sequences[index];
                sequence.state = SequenceState::Swapped;
                sequence.host_tables = transfer.host;
                self.swapped.push(index);
            }
            (Direction::In, Some(index)) if succeeded => {
                self.memory.release_on_host(&mut transfer.host);
                let sequence = &mut self.sequences[index];
                sequence.tables = transfer.device;
                if let Some(slot) = sequence.slot() {
                    let decodes = sequence.uncomputed() == 1;
                    sequence.state = if decodes {
                        SequenceState::Decoding { slot }
                    } else {
                        SequenceState::Prefilling { slot }
                    };
                }
                self.running.push(index);
            }
            (direction, owner) => {
                self.memory.release(&mut transfer.device, false);
                self.memory.release_on_host(&mut transfer.host);
                let Some(index) = owner else { return Ok(()) };
                let sequence = &mut self.sequences[index];
                // Without blocks, for its next admission.
                sequence.tables = transfer.device;
                if direction == Direction::In {
                    sequence.skip_host = true;
                    self.slots.release(sequence.slot());
                }
                self.requeue(index, now);
            }
        }
        Ok(())
    }

    /// Commits a chunk with the verdicts of its accepted tokens; none if it does not sample.
    fn commit_chunk(&mut self, chunk: &Chunk, verdicts: &[TokenVerdict], iteration: u64) {
        let index = chunk.id.index;
        if !self.release_from_iteration(index) {
            // It has ended, and stays while a later iteration copies a block of it.
            let ended = self.sequences.find_mut(index).filter(|_| chunk.drafts > 0);
            ended.into_iter().for_each(|sequence| sequence.drafts_in_flight = 0);
            return;
        }
        let rejected = if chunk.drafts > 0 { self.roll_back_drafts(chunk, verdicts.len() as u32) } else { 0 };
        let sequence = &mut self.sequences[index];
        sequence.committed_tokens = chunk.start + chunk.len - rejected;
        sequence.without_progress = false;
        if chunk.samples {
            let had = |kind| chunk.drafts > 0 && sequence.draft_kind == kind;
            let (guessed, predicted) = (had(DraftKind::Guessed), had(DraftKind::Predicted));
            if !guessed {
                sequence.acceptance.pass();
            }
            if self.limits.predicted_max > 0 {
                sequence.predictions = chunk.predictions;
                if !predicted {
                    sequence.predicted.pass();
                }
            }
        }
        sequence.scored.start = sequence.scored.start.max(sequence.committed_tokens);
        let inputs = sequence.committed_tokens.min(sequence.input_tokens);
        let charged = inputs.saturating_sub(sequence.charged_tokens);
        sequence.charged_tokens = sequence.charged_tokens.max(inputs);
        self.tenants.charge(sequence.tenant, charged, verdicts.len() as u32);
        // Before blocks are sealed: an accepted draft may complete a block whose last token is computed already.
        if self.limits.prefix_cache {
            sequence.hashes.extend(verdicts.iter().filter_map(|verdict| verdict.hash));
        }
        self.memory.seal(sequence);
        Self::commit_state(&mut self.memory, sequence, chunk, iteration);
        // Nothing is left to generate, and no later sample is in flight.
        let last = sequence.remaining_tokens == 0 && sequence.known_tokens == sequence.committed_tokens + 1;
        self.memory.pass_windows(sequence);
        let Some(verdict) = verdicts.last() else { return };
        if verdict.stop {
            self.end(index, FinishReason::Stop);
        } else if last {
            self.end(index, FinishReason::Length);
        }
    }

    /// Ends the use of a sequence's blocks by a copy of an iteration.
    fn release_copy(&mut self, index: u32) {
        if let Some(sequence) = self.sequences.find_mut(index) {
            sequence.copies -= 1;
            self.memory.pass_windows(sequence);
        }
        self.release_from_iteration(index);
    }

    /// Ends the use of a sequence's slot and blocks by one iteration. Returns true if the sequence is alive.
    /// If it has ended and no other iteration uses it, frees its slot and blocks.
    fn release_from_iteration(&mut self, index: u32) -> bool {
        let Some(sequence) = self.sequences.find_mut(index) else { return false };
        sequence.in_flight -= 1;
        let leaving = matches!(sequence.state, SequenceState::Leaving { .. });
        if leaving && sequence.in_flight == 0 {
            self.remove(index);
        }
        !leaving
    }
}

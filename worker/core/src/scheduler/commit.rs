//! Completion of iterations and transfers.

use std::time::Duration;

use inflight_contract::FinishReason;

use super::{CommitError, LaunchedIteration, Scheduler, TransferPurpose};
use crate::drafts::DraftKind;
use crate::memory::{SealedSpan, Tables};
use crate::sequence::SequenceState;
use crate::{Chunk, Direction, IterationOutcome, Time, TokenVerdict, TransferId};

impl Scheduler {
    /// Commits the results of the oldest iteration in flight.
    ///
    /// # Errors
    /// [`CommitError`]; the scheduler is then unchanged.
    pub fn commit(&mut self, iteration: u64, outcome: IterationOutcome<'_>) -> Result<(), CommitError> {
        let launched = self.oldest_launched(iteration)?;
        let expected = launched.accepted_tokens(outcome.accepted)?;
        if expected != outcome.verdicts.len() {
            return Err(CommitError::Verdicts { expected, given: outcome.verdicts.len() });
        }
        self.log.iter_mut().for_each(|log| log.commit(iteration, &outcome));
        let Some(mut launched) = self.launched.pop_front() else { return Ok(()) };
        self.history.finish(launched.number, outcome.took);
        self.cost.observe_step(&launched.work, outcome.took);
        self.prefill_load.observe(outcome.took, launched.prefill_share);
        let (mut verdicts, mut accepted) = (outcome.verdicts, outcome.accepted.iter().copied());
        for index in launched.sources.drain(..) {
            self.release_copy(index);
        }
        let (mut sampled, mut forced) = (false, false);
        for chunk in launched.chunks.drain(..) {
            sampled |= chunk.samples;
            forced |= chunk.drafts > 0 && self.draft_kind(chunk.id.index) == Some(DraftKind::Forced);
            let count = match (chunk.samples, chunk.drafts) {
                (false, _) => 0,
                (true, 0) => 1,
                (true, _) => accepted.next().unwrap_or(1),
            };
            let own;
            (own, verdicts) = verdicts.split_at(count as usize);
            self.commit_chunk(&chunk, own);
        }
        if sampled && !forced {
            self.forced_acceptance.pass();
        }
        self.recycled.push(launched);
        Ok(())
    }

    /// Ends all sequences of all iterations in flight after a device failure.
    ///
    /// # Errors
    /// [`CommitError::UnknownIteration`]; the scheduler is then unchanged.
    pub fn fail(&mut self, iteration: u64) -> Result<(), CommitError> {
        self.oldest_launched(iteration)?;
        self.log.iter_mut().for_each(|log| log.fail(iteration));
        while let Some(launched) = self.launched.pop_front() {
            for &index in &launched.sources {
                self.release_copy(index);
            }
            for chunk in &launched.chunks {
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
        let mut transfer = self.transfers.remove(&id).ok_or(CommitError::UnknownTransfer(id))?;
        self.log.iter_mut().for_each(|log| log.transfer_done(id, succeeded, took, now));
        if succeeded {
            self.cost.observe_copy(transfer.host_blocks().count() as u32, took);
        }
        if let TransferPurpose::Offload(offloaded) = &transfer.purpose {
            for (device, host, hash) in offloaded {
                // Its content may have been discarded meanwhile.
                let cached = self.device.cache().lookup(*hash) == Some(*device);
                self.device.release_cold(*device);
                if succeeded && cached {
                    self.host.seal_block(*host, *hash);
                }
                self.host.release(*host);
            }
            return Ok(());
        }
        let owner = transfer.owner().map(|owner| owner.index);
        match transfer.direction {
            Direction::Out => {
                self.device.release_all(&mut transfer.device);
                match owner {
                    Some(index) if succeeded => {
                        let sequence = self.sequence_mut(index);
                        sequence.state = SequenceState::Swapped;
                        sequence.host_tables = transfer.host;
                        self.swapped.push(index);
                    }
                    Some(index) => {
                        self.host.release_all(&mut transfer.host);
                        self.reset_tables(index, transfer.device);
                        self.requeue(index, now);
                    }
                    None => self.host.release_all(&mut transfer.host),
                }
            }
            Direction::In => {
                self.host.release_all(&mut transfer.host);
                match owner {
                    Some(index) if succeeded => {
                        let sequence = self.sequence_mut(index);
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
                    Some(index) => {
                        self.device.release_all(&mut transfer.device);
                        self.reset_tables(index, transfer.device);
                        let slot = self.sequence_mut(index).slot();
                        self.free_slots.extend(slot);
                        self.freed_slots.extend(slot);
                        self.sequence_mut(index).skip_host = true;
                        self.requeue(index, now);
                    }
                    None => self.device.release_all(&mut transfer.device),
                }
            }
        }
        Ok(())
    }

    /// Gives a sequence its tables back, without blocks.
    fn reset_tables(&mut self, index: u32, tables: Tables) {
        self.sequence_mut(index).tables = tables;
    }

    /// Returns the oldest iteration in flight, whose number must be `given`.
    fn oldest_launched(&self, given: u64) -> Result<&LaunchedIteration, CommitError> {
        let in_flight = self.launched.front().map(|launched| launched.number);
        match self.launched.front() {
            Some(launched) if launched.number == given => Ok(launched),
            _ => Err(CommitError::UnknownIteration { given, in_flight }),
        }
    }

    /// Commits a chunk with the verdicts of its accepted tokens; none if it does not sample.
    fn commit_chunk(&mut self, chunk: &Chunk, verdicts: &[TokenVerdict]) {
        let index = chunk.id.index;
        if !self.release_from_iteration(index) {
            // It has ended, and stays while a later iteration copies a block of it.
            let ended = self.sequences[index as usize].as_mut().filter(|_| chunk.drafts > 0);
            ended.into_iter().for_each(|sequence| sequence.drafts_in_flight = 0);
            return;
        }
        let rejected = if chunk.drafts > 0 { self.roll_back_drafts(chunk, verdicts.len() as u32) } else { 0 };
        // Borrows single fields, which `sequence_mut` cannot; the sequence exists, as the call above returned
        // true.
        let Some(sequence) = self.sequences[index as usize].as_mut() else { return };
        sequence.committed_tokens = chunk.start + chunk.len - rejected;
        sequence.without_progress = false;
        if chunk.samples && (chunk.drafts == 0 || sequence.draft_kind == DraftKind::Forced) {
            sequence.acceptance.pass();
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
        let full = (sequence.committed_tokens / self.limits.block_tokens()).min(sequence.hashes.len() as u32);
        for position in sequence.sealed_spans..full {
            let parent = position.checked_sub(1).map(|before| sequence.hashes[before as usize]);
            let span = SealedSpan { hash: sequence.hashes[position as usize], position, parent };
            self.device.seal(&span, &sequence.tables);
        }
        sequence.sealed_spans = sequence.sealed_spans.max(full);
        // Nothing is left to generate, and no later sample is in flight.
        let last = sequence.remaining_tokens == 0 && sequence.known_tokens == sequence.committed_tokens + 1;
        self.pass_windows(index);
        let Some(verdict) = verdicts.last() else { return };
        if verdict.stop {
            self.end(index, FinishReason::Stop);
        } else if last {
            self.end(index, FinishReason::Length);
        }
    }

    /// Ends the use of a sequence's blocks by a copy of an iteration.
    fn release_copy(&mut self, index: u32) {
        if let Some(sequence) = self.sequences[index as usize].as_mut() {
            sequence.copies -= 1;
        }
        self.pass_windows(index);
        self.release_from_iteration(index);
    }

    /// Releases the blocks of a sequence that its windows have passed, unless a copy in flight uses them.
    fn pass_windows(&mut self, index: u32) {
        if !self.limits.shape.has_windows() {
            return;
        }
        if let Some(sequence) =
            self.sequences[index as usize].as_mut().filter(|sequence| sequence.copies == 0)
        {
            self.device.pass(&mut sequence.tables, sequence.committed_tokens, sequence.junction);
        }
    }

    /// Ends the use of a sequence's slot and blocks by one iteration. Returns true if the sequence is alive.
    /// If it has ended and no other iteration uses it, frees its slot and blocks.
    fn release_from_iteration(&mut self, index: u32) -> bool {
        let Some(sequence) = self.sequences[index as usize].as_mut() else { return false };
        sequence.in_flight -= 1;
        let leaving = matches!(sequence.state, SequenceState::Leaving { .. });
        if leaving && sequence.in_flight == 0 {
            self.remove(index);
        }
        !leaving
    }
}

//! What becomes of an iteration that has run, and of a transfer that has reached its fence.

use std::time::Duration;

use inflight_contract::FinishReason;

use super::{CommitError, Flight, Purpose, Scheduler};
use crate::sequence::State;
use crate::{Chunk, Direction, Outcome, Time, TransferId, Verdict};

impl Scheduler {
    /// Takes the results of the oldest iteration in flight.
    ///
    /// # Errors
    /// [`CommitError`]; nothing has changed then.
    pub fn commit(&mut self, iteration: u64, outcome: Outcome<'_>) -> Result<(), CommitError> {
        let flight = self.oldest(iteration)?;
        let expected = flight.chunks.iter().filter(|chunk| chunk.samples).count();
        if expected != outcome.verdicts.len() {
            return Err(CommitError::Verdicts { expected, given: outcome.verdicts.len() });
        }
        self.log.iter_mut().for_each(|log| log.commit(iteration, &outcome));
        let Some(mut flight) = self.flights.pop_front() else { return Ok(()) };
        self.history.finish(flight.number, outcome.took);
        self.cost.observe_step(&flight.work, outcome.took);
        let mut verdicts = outcome.verdicts.iter();
        for index in flight.sources.drain(..) {
            self.land(index);
        }
        for chunk in flight.chunks.drain(..) {
            let verdict = if chunk.samples { verdicts.next() } else { None };
            self.commit_chunk(&chunk, verdict);
        }
        self.spare.push(flight);
        Ok(())
    }

    /// Ends everything that takes part in any iteration in flight: the device failed.
    ///
    /// # Errors
    /// [`CommitError::UnknownIteration`]; nothing has changed then.
    pub fn fail(&mut self, iteration: u64) -> Result<(), CommitError> {
        self.oldest(iteration)?;
        self.log.iter_mut().for_each(|log| log.fail(iteration));
        while let Some(flight) = self.flights.pop_front() {
            for &index in &flight.sources {
                self.land(index);
            }
            for chunk in &flight.chunks {
                if self.land(chunk.id.index) {
                    self.end(chunk.id.index, FinishReason::Error);
                }
            }
        }
        Ok(())
    }

    /// A transfer reached its fence, or failed; `took` is how long it ran.
    ///
    /// # Errors
    /// [`CommitError::UnknownTransfer`]; nothing has changed then.
    pub fn transfer_done(
        &mut self,
        id: TransferId,
        succeeded: bool,
        took: Duration,
        now: Time,
    ) -> Result<(), CommitError> {
        let mut moving = self.transfers.remove(&id).ok_or(CommitError::UnknownTransfer(id))?;
        self.log.iter_mut().for_each(|log| log.transfer_done(id, succeeded, took, now));
        if succeeded {
            self.cost.observe_copy(moving.host.len() as u32, took);
        }
        if let Purpose::Offload(hashes) = &moving.purpose {
            for ((device, host), hash) in moving.device.iter().zip(&moving.host).zip(hashes) {
                self.device.release_cold(*device);
                if succeeded {
                    self.host.seal(*host, *hash);
                }
                self.host.release(*host);
            }
            return Ok(());
        }
        let owner = moving.owner().map(|owner| owner.index);
        match moving.direction {
            Direction::Out => {
                self.device.release_table(&mut moving.device);
                match owner {
                    Some(index) if succeeded => {
                        let sequence = self.at(index);
                        sequence.state = State::Swapped;
                        sequence.host_table = moving.host;
                        self.swapped.push(index);
                    }
                    Some(index) => {
                        self.host.release_table(&mut moving.host);
                        self.requeue(index, now);
                    }
                    None => self.host.release_table(&mut moving.host),
                }
            }
            Direction::In => {
                self.host.release_table(&mut moving.host);
                match owner {
                    Some(index) if succeeded => {
                        let sequence = self.at(index);
                        sequence.table = moving.device;
                        if let Some(slot) = sequence.slot() {
                            let decodes = sequence.uncomputed() == 1;
                            sequence.state =
                                if decodes { State::Decoding { slot } } else { State::Prefilling { slot } };
                        }
                        self.running.push(index);
                    }
                    Some(index) => {
                        self.device.release_table(&mut moving.device);
                        let slot = self.at(index).slot();
                        self.free_slots.extend(slot);
                        self.freed_slots.extend(slot);
                        self.at(index).skip_host = true;
                        self.requeue(index, now);
                    }
                    None => self.device.release_table(&mut moving.device),
                }
            }
        }
        Ok(())
    }

    fn oldest(&self, given: u64) -> Result<&Flight, CommitError> {
        let in_flight = self.flights.front().map(|flight| flight.number);
        match self.flights.front() {
            Some(flight) if flight.number == given => Ok(flight),
            _ => Err(CommitError::UnknownIteration { given, in_flight }),
        }
    }

    fn commit_chunk(&mut self, chunk: &Chunk, verdict: Option<&Verdict>) {
        let index = chunk.id.index;
        if !self.land(index) {
            return;
        }
        // Borrows several fields at once, which `at` can't; `land` found it.
        let Some(sequence) = self.sequences[index as usize].as_mut() else { return };
        sequence.committed_tokens = chunk.start + chunk.len;
        sequence.without_progress = false;
        let inputs = sequence.committed_tokens.min(sequence.input_tokens);
        let charged = inputs.saturating_sub(sequence.charged_tokens);
        sequence.charged_tokens = sequence.charged_tokens.max(inputs);
        self.tenants.charge(sequence.tenant, charged, u32::from(verdict.is_some()));
        let full = (sequence.committed_tokens / self.limits.block_tokens).min(sequence.hashes.len() as u32);
        for place in sequence.sealed_blocks..full {
            self.device.seal(sequence.table[place as usize], sequence.hashes[place as usize]);
        }
        sequence.sealed_blocks = sequence.sealed_blocks.max(full);
        let Some(verdict) = verdict else { return };
        if self.limits.prefix_cache {
            sequence.hashes.extend(verdict.hash);
        }
        // Nothing is left to generate, and no later sample is in flight.
        let last = sequence.remaining_tokens == 0 && sequence.known_tokens == sequence.committed_tokens + 1;
        if verdict.stop {
            self.end(index, FinishReason::Stop);
        } else if last {
            self.end(index, FinishReason::Length);
        }
    }

    /// An iteration that uses a sequence's slot or blocks has run. Returns whether the sequence still lives; if
    /// not, and this was the last such iteration, what it owns is free now.
    fn land(&mut self, index: u32) -> bool {
        let Some(sequence) = self.sequences[index as usize].as_mut() else { return false };
        sequence.in_flight -= 1;
        let leaving = matches!(sequence.state, State::Leaving { .. });
        if leaving && sequence.in_flight == 0 {
            self.remove(index);
        }
        !leaving
    }
}

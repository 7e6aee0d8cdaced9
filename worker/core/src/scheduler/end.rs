//! Ends of sequences: cancellations, deadlines, unsound keys and values.

use inflight_contract::FinishReason;

use super::Scheduler;
use crate::record::RecordKind;
use crate::sequence::SequenceState;
use crate::{Ended, SequenceId, Time};

impl Scheduler {
    /// Cancels a sequence, which ends at once. No-op for an unknown or ended sequence.
    pub fn cancel(&mut self, id: SequenceId) {
        if self.sequences.get(id).is_some() {
            self.log.iter_mut().for_each(|log| log.of_sequence(RecordKind::Cancel, id));
            self.end(id.index, FinishReason::Cancelled);
        }
    }

    /// Ends a sequence with [`FinishReason::Error`] because its keys and values are not sound, and removes all blocks of its tokens from
    /// the prefix cache, so that no other sequence starts from them. No-op for an unknown or ended sequence.
    pub fn discard(&mut self, id: SequenceId) {
        if self.sequences.get(id).is_none() {
            return;
        }
        self.log.iter_mut().for_each(|log| log.of_sequence(RecordKind::Discard, id));
        self.memory.forget(&std::mem::take(&mut self.sequences[id.index].hashes));
        self.end(id.index, FinishReason::Error);
    }

    /// Ends the sequences past their deadline.
    pub(super) fn expire(&mut self, now: Time) {
        while let Some(&(deadline, index)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.end(index, FinishReason::Deadline);
        }
    }

    /// Ends a sequence; all terminal events are made here. Slot and blocks are freed now or, if an iteration
    /// or a transfer still uses them, at its completion.
    pub(super) fn end(&mut self, index: u32, reason: FinishReason) {
        if reason == FinishReason::Cancelled && self.sequences[index].preempted_at.is_some() {
            self.resumption.record_cancelled();
        }
        let sequence = &mut self.sequences[index];
        let (id, state, in_flight) = (sequence.id, sequence.state, sequence.in_flight);
        if let Some(deadline) = sequence.deadline.take() {
            self.deadlines.remove(&(deadline, index));
        }
        self.ended.push(Ended { id, reason });
        match state {
            SequenceState::Waiting => self.dequeue(index),
            SequenceState::Swapped => self.swapped.retain(|other| *other != index),
            SequenceState::SwappingOut { transfer } | SequenceState::SwappingIn { transfer, .. } => {
                self.transfers.orphan(transfer);
            }
            SequenceState::Prefilling { slot } | SequenceState::Decoding { slot } => {
                self.running.retain(|other| *other != index);
                if in_flight > 0 {
                    self.sequences[index].state = SequenceState::Leaving { slot };
                    return;
                }
            }
            SequenceState::Leaving { .. } => unreachable!("a sequence ends once"),
        }
        self.remove(index);
    }

    /// Removes a sequence and frees its slot and blocks.
    pub(super) fn remove(&mut self, index: u32) {
        let Some(mut sequence) = self.sequences.remove(index) else { return };
        self.slots.release(sequence.slot());
        Self::give_up_blocks(&mut self.memory, &mut sequence);
        self.memory.release_on_host(&mut sequence.host_tables);
        self.tenants.depart(sequence.tenant);
    }
}

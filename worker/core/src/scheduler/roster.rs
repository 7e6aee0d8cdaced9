//! The sequences as an observer sees them; nothing here changes the scheduler.

use inflight_contract::{GROUPS_MAX, Tenant};

use super::Scheduler;
use crate::sequence::SequenceState;
use crate::{SequenceId, Slot, TransferId};

/// Where a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequencePhase {
    /// In the waiting queue, and has not run yet.
    Waiting,
    /// Computes its known tokens.
    Prefill,
    /// Generates.
    Decode,
    /// In the waiting queue again: its blocks were dropped.
    Preempted,
    /// In the host pool, or on the way there or back.
    Swapped,
}

/// State of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceStatus {
    /// The sequence.
    pub id: SequenceId,
    /// Where it is.
    pub phase: SequencePhase,
    /// Slot of the sequence; `None` while it waits or is preempted.
    pub slot: Option<Slot>,
    /// Tenant of the sequence.
    pub tenant: Tenant,
    /// Device blocks that it, or the transfer of its blocks, owns.
    pub blocks: u32,
    /// Tokens with KV computed by committed iterations.
    pub tokens: u32,
}

impl Scheduler {
    /// Returns the state of every sequence that has not ended.
    pub fn roster(&self) -> impl Iterator<Item = SequenceStatus> + '_ {
        self.sequences.iter().filter_map(|sequence| {
            let in_transfer =
                |id: &TransferId| self.transfers.get(*id).map_or(0, |transfer| transfer.device.len());
            let own = sequence.tables.len();
            let (phase, slot, blocks) = match &sequence.state {
                SequenceState::Waiting if sequence.preempted_at.is_some() => {
                    (SequencePhase::Preempted, None, own)
                }
                SequenceState::Waiting => (SequencePhase::Waiting, None, own),
                SequenceState::Prefilling { slot } => (SequencePhase::Prefill, Some(*slot), own),
                SequenceState::Decoding { slot } => (SequencePhase::Decode, Some(*slot), own),
                SequenceState::Swapped => (SequencePhase::Swapped, None, own),
                SequenceState::SwappingOut { transfer } | SequenceState::SwappingIn { transfer, .. } => {
                    (SequencePhase::Swapped, None, in_transfer(transfer))
                }
                SequenceState::Leaving { .. } => return None,
            };
            let (id, tenant, tokens) = (sequence.id, sequence.tenant, sequence.committed_tokens);
            Some(SequenceStatus { id, phase, slot, tenant, blocks, tokens })
        })
    }

    /// Returns the number of a sequence's tokens with KV computed by committed iterations; 0 if it has been removed.
    pub fn committed_tokens_of(&self, id: SequenceId) -> u32 {
        self.sequences.get(id).map_or(0, |sequence| sequence.committed_tokens)
    }

    /// Returns the tenant of a sequence that has not been removed.
    pub fn tenant_of(&self, id: SequenceId) -> Option<Tenant> {
        let sequence = self.sequences.find(id.index)?;
        (sequence.id == id).then_some(sequence.tenant)
    }

    /// Returns the number of blocks in the tables of the running sequences, by group of layers. A block that several sequences share
    /// counts for each.
    pub fn group_blocks(&self) -> [u32; GROUPS_MAX] {
        let mut blocks = [0; GROUPS_MAX];
        for index in &self.running {
            let tables = self.sequences[*index].tables.groups();
            tables.iter().zip(&mut blocks).for_each(|(table, sum)| *sum += table.blocks().len() as u32);
        }
        blocks
    }

    /// Returns the blocks of the recurrent states of the running sequences, and the number of snapshots in the prefix cache.
    pub fn state_use(&self) -> (u32, u32) {
        let blocks = self.running.iter().map(|index| self.sequences[*index].tables.state().len() as u32);
        (blocks.sum(), self.memory.snapshots())
    }

    /// Returns the number of device blocks in the prefix cache that no sequence uses.
    pub fn cold_blocks(&self) -> u32 {
        self.memory.cold()
    }
}

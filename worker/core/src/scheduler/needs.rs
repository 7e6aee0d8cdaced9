//! Blocks that the running sequences need for their next tokens, and those that become free without another preemption.

use super::Scheduler;
use crate::sequence::{Sequence, SequenceState};

impl Scheduler {
    /// Returns true if a running sequence computes its known tokens and stays.
    pub(super) fn is_prefilling(&self, index: u32) -> bool {
        let sequence = &self.sequences[index];
        matches!(sequence.state, SequenceState::Prefilling { .. }) && !sequence.is_marked()
    }

    /// Returns the number of new blocks that the decodes of this step need.
    pub(super) fn decode_blocks_needed(&self) -> u32 {
        let running = self.running.iter().map(|index| &self.sequences[*index]);
        let grows = |sequence: &&Sequence| {
            matches!(sequence.state, SequenceState::Decoding { .. })
                && !sequence.is_marked()
                && sequence.remaining_tokens > 0
                && sequence.drafts_in_flight == 0
                && !self.memory.holds(sequence, sequence.computed_tokens + 1)
        };
        running
            .filter(grows)
            .map(|sequence| self.memory.lacking(sequence, sequence.computed_tokens + 1))
            .sum()
    }

    /// Returns the number of new blocks that the running prefills need for a token each; without windows all are reserved at
    /// admission.
    pub(super) fn prefill_blocks_needed(&self) -> u32 {
        if !self.limits.shape.has_windows() {
            return 0;
        }
        let prefills = self.running.iter().filter(|index| self.is_prefilling(**index));
        let lacks = |index: &u32| {
            let sequence = &self.sequences[*index];
            self.memory.lacking(sequence, sequence.computed_tokens + 1)
        };
        prefills.map(lacks).sum()
    }

    /// Returns the number of blocks that become free without another preemption: those of transfers to the
    /// host, of ended sequences in flight, and of sequences with a pending preemption.
    pub(super) fn incoming_blocks(&self) -> u32 {
        let leaves = |sequence: &&Sequence| {
            sequence.is_marked() || matches!(sequence.state, SequenceState::Leaving { .. })
        };
        let leaving = self.sequences.iter().filter(leaves);
        self.memory.outgoing(&self.transfers)
            + leaving.map(|sequence| self.memory.exclusive(sequence)).sum::<u32>()
    }
}

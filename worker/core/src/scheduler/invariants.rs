//! Structural invariants of the scheduler, for tests.

use super::Scheduler;
use crate::sequence::{Sequence, SequenceState};

impl Scheduler {
    /// Checks all structural invariants, in time linear in sequences and blocks. For tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_consistent(&self) {
        let mut waiting = 0;
        for sequence in self.sequences.iter() {
            let index = sequence.id.index;
            let is_waiting = sequence.state == SequenceState::Waiting;
            let listed = self.waiting.contains(sequence);
            assert_eq!(is_waiting, listed, "{:?} and the waiting flows disagree", sequence.id);
            waiting += u32::from(is_waiting);
            let runs =
                matches!(sequence.state, SequenceState::Prefilling { .. } | SequenceState::Decoding { .. });
            assert_eq!(runs, self.running.contains(&index), "{:?} and `running` disagree", sequence.id);
            assert_eq!(sequence.state == SequenceState::Swapped, self.swapped.contains(&index));
            assert!(
                runs || sequence.in_flight == 0 || matches!(sequence.state, SequenceState::Leaving { .. })
            );
            assert!(sequence.committed_tokens <= sequence.computed_tokens);
            assert!(sequence.drafts_in_flight <= self.limits.drafts_max);
            let of_drafts = sequence.drafts_in_flight == 0 || sequence.in_flight > 0;
            assert!(of_drafts, "{:?} has drafts in flight without an iteration", sequence.id);
            assert_eq!(self.launches.drafts_of(sequence.id), sequence.drafts_in_flight);
            assert!(sequence.computed_tokens <= sequence.known_tokens);
            if runs {
                self.memory.assert_tables_fit(sequence);
            }
        }
        assert_eq!(waiting, self.waiting.len());
        self.memory.assert_conserved(self.sequences.iter(), &self.transfers);
        self.slots.assert_conserved(self.sequences.iter().filter_map(Sequence::slot));
        assert!(self.launches.in_flight() <= self.limits.depth as usize);
    }
}

//! Structural invariants of the scheduler, for tests.

use super::Scheduler;
use crate::sequence::SequenceState;

impl Scheduler {
    /// Checks all structural invariants, in time linear in sequences and blocks. For tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_consistent(&self) {
        let mut device = vec![0; self.device.total() as usize];
        let mut host = vec![0; self.host.total() as usize];
        let mut slots: Vec<u32> = self.free_slots.clone();
        let claim = |claims: &mut Vec<u32>, blocks: &[u32]| {
            blocks.iter().for_each(|block| claims[*block as usize] += 1);
        };
        for transfer in self.transfers.values() {
            claim(&mut device, &transfer.device);
            claim(&mut host, &transfer.host);
        }
        let mut waiting = 0;
        for sequence in self.sequences.iter().flatten() {
            let index = sequence.id.index;
            claim(&mut device, &sequence.table);
            claim(&mut host, &sequence.host_table);
            slots.extend(sequence.slot());
            let is_waiting = sequence.state == SequenceState::Waiting;
            let flow = self.flows.get(&super::flow_key(sequence));
            let listed = flow.and_then(|flow| flow.get(&sequence.arrival)) == Some(&index);
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
            let launched = self.launched.iter().flat_map(|launched| &launched.chunks);
            let drafted = launched.filter(|chunk| chunk.id == sequence.id && chunk.drafts > 0);
            assert_eq!(drafted.map(|chunk| chunk.drafts).sum::<u32>(), sequence.drafts_in_flight);
            assert!(sequence.computed_tokens <= sequence.known_tokens);
            if runs {
                let held = sequence.table.len() as u32 * self.limits.block_tokens;
                assert!(sequence.computed_tokens <= held, "{:?} computed more than it holds", sequence.id);
                let next = (sequence.computed_tokens / self.limits.block_tokens) as usize;
                for block in sequence.table.iter().skip(next) {
                    assert_eq!(
                        self.device.owners(*block),
                        1,
                        "{:?} may write to a shared block",
                        sequence.id
                    );
                }
            }
        }
        assert_eq!(waiting, self.waiting);
        self.device.assert_consistent(&device);
        self.host.assert_consistent(&host);
        slots.sort_unstable();
        assert!(slots.iter().copied().eq(0..self.limits.running_max), "slots are not conserved: {slots:?}");
        assert!(self.launched.len() <= self.limits.depth as usize);
    }
}

//! Structural invariants of the scheduler, for tests.

use super::Scheduler;
use crate::sequence::{Sequence, SequenceState};

impl Scheduler {
    /// Checks all structural invariants, in time linear in sequences and blocks. For tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn assert_consistent(&self) {
        let mut device = vec![0; self.device.total() as usize];
        let mut host = vec![0; self.host.total() as usize];
        let mut slots: Vec<u32> = self.free_slots.clone();
        for transfer in self.transfers.values() {
            transfer.device_blocks().for_each(|block| device[block as usize] += 1);
            transfer.host_blocks().for_each(|block| host[block as usize] += 1);
        }
        let mut waiting = 0;
        for sequence in self.sequences.iter().flatten() {
            let index = sequence.id.index;
            sequence.tables.blocks().for_each(|block| device[block as usize] += 1);
            sequence.host_tables.blocks().for_each(|block| host[block as usize] += 1);
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
                self.assert_tables_fit(sequence);
            }
        }
        assert_eq!(waiting, self.waiting);
        self.device.assert_consistent(&device);
        self.host.assert_consistent(&host);
        slots.sort_unstable();
        assert!(slots.iter().copied().eq(0..self.limits.running_max), "slots are not conserved: {slots:?}");
        assert!(self.launched.len() <= self.limits.depth as usize);
    }

    /// Checks the tables of a running sequence: they hold what its next token sees and what is computed, and no block that it may
    /// still write to has another owner.
    fn assert_tables_fit(&self, sequence: &Sequence) {
        let (id, block_tokens) = (sequence.id, self.limits.block_tokens());
        let tokens = sequence.known_tokens + sequence.remaining_tokens;
        let most = self.limits.shape.blocks(tokens, self.limits.tokens_ahead());
        assert!(
            sequence.tables.len() <= most,
            "{id:?} holds {} blocks, more than {most}",
            sequence.tables.len()
        );
        let firsts = self.limits.first_spans(sequence.committed_tokens);
        let groups = self.limits.shape.groups();
        for ((group, table), first) in groups.iter().zip(sequence.tables.groups()).zip(firsts) {
            let (begin, end) = (table.first_span(), table.end_span());
            assert!(begin <= first, "{id:?} lacks rows of a live window");
            assert!(sequence.computed_tokens <= end * block_tokens, "{id:?} computed more than it holds");
            let blocks = group.blocks * (end - begin);
            assert_eq!(table.blocks().len() as u32, blocks, "{id:?} holds a part of a span");
            for span in (sequence.computed_tokens / block_tokens)..end {
                for block in table.span(span) {
                    assert_eq!(self.device.owners(*block), 1, "{id:?} may write to a shared block");
                }
            }
        }
    }
}

//! Snapshots of recurrent states: where sequences resume, at which positions states are kept, and the copies between both.
//!
//! A state cannot be shared while its sequence changes it. So a sequence that resumes copies a snapshot with its first chunk, or takes the
//! blocks of the snapshot if there are none for a copy. Two sources make snapshots: a sequence that ends or is preempted, whose blocks are
//! cached as they are; and copies of a running sequence's state, shortly before the end of its prompt and at the end of a prefix that other
//! prompts share. A copy takes free blocks only. It is in the cache once its iteration is committed.

use inflight_contract::BlockHash;

use super::Scheduler;
use super::kv_memory::KvMemory;
use super::prefix::PrefixMatch;
use crate::sequence::Sequence;
use crate::state_progress::{StateBegin, StateCopy, StateProgress};
use crate::{BlockedBy, Chunk, Copy};

/// Maximum number of tokens that a chat template appends to a prompt and leaves out of the next turn, such as `<think>\n\n</think>\n\n` for an
/// answer without reasoning. A snapshot of a prompt is taken before them. It also leaves out the last token, whose logits each choice of a
/// request needs.
const OPENING_TOKENS: u32 = 4;

impl PrefixMatch {
    /// Returns the hash of the span whose snapshot a sequence with these hashes resumes from.
    pub(super) fn snapshot(&self, hashes: &[BlockHash]) -> Option<BlockHash> {
        hashes.get(self.found.spans.checked_sub(1)? as usize).copied()
    }
}

impl Scheduler {
    /// Looks up the cached prefix of a sequence of a model with recurrent layers.
    pub(super) fn match_snapshot(&self, index: u32) -> Result<PrefixMatch, BlockedBy> {
        let found = self.memory.find_prefix(self.reusable_hashes(index));
        let tokens = found.spans * self.limits.block_tokens();
        if self.may_wait_to_share(index) && self.shared_state(index, tokens).is_some() {
            return Err(BlockedBy::PrefixUnderWay);
        }
        Ok(PrefixMatch { found, sibling: None, copy: false, host: 0, tokens })
    }

    /// Returns the hashes of the spans that a waiting sequence need not compute.
    fn reusable_hashes(&self, index: u32) -> &[BlockHash] {
        let sequence = &self.sequences[index];
        let max = (sequence.reusable_tokens() / self.limits.block_tokens()) as usize;
        &sequence.hashes[..sequence.hashes.len().min(max)]
    }

    /// Returns a running sequence that has yet to compute, behind the first `found` tokens, a state from which the waiting sequence `index`
    /// can resume, and the position of that state: one of which a snapshot is wanted, or can be.
    fn shared_state(&self, index: u32, found: u32) -> Option<(u32, u32)> {
        let every = self.limits.snapshot_every()?;
        let own = self.reusable_hashes(index);
        self.running.iter().copied().find_map(|other| {
            let running = &self.sequences[other];
            let most = own.len().min(running.hashes.len());
            if running.is_marked() || most == 0 || running.hashes[0] != own[0] {
                return None;
            }
            // Hashes are chained, so that equal ones follow equal ones.
            let (mut common, mut differs) = (1, most + 1);
            while common + 1 < differs {
                let middle = usize::midpoint(common, differs);
                let equal = running.hashes[middle - 1] == own[middle - 1];
                *(if equal { &mut common } else { &mut differs }) = middle;
            }
            let common = common as u32 * self.limits.block_tokens();
            let least = found.saturating_add(self.limits.snapshot_worth().max(1));
            let coming = running.progress.coming().filter(|position| (least..=common).contains(position));
            if let Some(position) = coming.max() {
                return Some((other, position));
            }
            let position = common - common % every;
            let can_keep = position >= least && running.computed_tokens <= position;
            let mut progress = running.progress;
            (can_keep && progress.want(position)).then_some((other, position))
        })
    }

    /// Wants a snapshot of the state from which a waiting sequence will resume.
    pub(super) fn want_shared_state(&mut self, index: u32) {
        if self.limits.snapshot_every().is_none() {
            return;
        }
        let found = self.memory.find_prefix(self.reusable_hashes(index)).spans * self.limits.block_tokens();
        if let Some((other, position)) = self.shared_state(index, found) {
            self.sequences[other].progress.want(position);
        }
    }

    /// Sets how the state of an admitted sequence begins and at which positions snapshots of it are wanted.
    pub(super) fn begin_state(&mut self, index: u32, prefix: &PrefixMatch, begin: StateBegin) {
        let Some(every) = self.limits.snapshot_every() else { return };
        let sequence = &mut self.sequences[index];
        let worth = self.limits.snapshot_worth().max(1);
        let least = prefix.tokens.saturating_add(worth);
        let end_of = |tokens: u32| Some(tokens - tokens % every).filter(|position| *position >= least);
        let junction = end_of(prefix.found.cached * self.limits.block_tokens());
        // Of a preempted sequence, only the prompt is one that others have.
        let tokens = sequence.known_tokens.min(sequence.input_tokens);
        let end = end_of(tokens.saturating_sub(OPENING_TOKENS));
        // One is enough where they are close.
        let end = end.filter(|end| junction.is_none_or(|junction| end.abs_diff(junction) >= worth));
        let (position, copy) = match begin {
            StateBegin::Empty => (None, StateCopy::None),
            StateBegin::Taken => (Some(prefix.tokens), StateCopy::None),
            StateBegin::Copied { superfluous } => {
                (None, StateCopy::Load { superfluous: superfluous && end.is_some() })
            }
        };
        sequence.progress = StateProgress::admitted(position, copy, [junction, end]);
    }

    /// Plans the copies of states with the chunks of the iteration, and advances the states.
    pub(super) fn plan_state_copies(&mut self) {
        let Some(shape) = self.limits.snapshot else { return };
        let (chunks, copies) = (&self.iteration.chunks, &mut self.iteration.copies);
        let number = self.iteration.number;
        for chunk in chunks {
            let sequence = &mut self.sequences[chunk.id.index];
            match (sequence.progress.copy, sequence.progress.take_due()) {
                (StateCopy::Load { superfluous }, _) => {
                    let pairs = sequence.tables.snapshot().iter().zip(sequence.tables.state());
                    copies.extend(pairs.map(|(from, to)| Copy { from: *from, to: *to }));
                    sequence.progress.copy = StateCopy::Loading { iteration: number, superfluous };
                }
                (StateCopy::None, Some((position, kind)))
                    if self.memory.take_for_snapshot(sequence, position) =>
                {
                    let pairs = sequence.tables.state().iter().zip(sequence.tables.snapshot());
                    copies.extend(pairs.map(|(from, to)| Copy { from: *from, to: *to }));
                    sequence.progress.copy = StateCopy::Storing { iteration: number, position, kind };
                }
                _ => {}
            }
            sequence.progress.launch(chunk.certain_end(), shape);
        }
    }

    /// Releases the blocks of a sequence. What it has of states is added to the prefix cache: a copy that was made, and the state itself.
    pub(super) fn give_up_blocks(memory: &mut KvMemory, sequence: &mut Sequence) {
        if let Some((position, kind)) = sequence.progress.stored() {
            memory.store_snapshot(sequence, position, kind);
        }
        let demoted = memory.keep_state(sequence);
        sequence.progress = StateProgress::default();
        memory.release(&mut sequence.tables, demoted);
    }

    /// Commits a chunk as far as the state is concerned, and ends the copy that was made in its iteration.
    pub(super) fn commit_state(
        memory: &mut KvMemory,
        sequence: &mut Sequence,
        chunk: &Chunk,
        committed: u64,
    ) {
        let Some(shape) = memory.snapshot() else { return };
        sequence.progress.commit(chunk.certain_end(), shape);
        match sequence.progress.copy {
            StateCopy::Loading { iteration, superfluous } if iteration == committed => {
                memory.release_snapshot(sequence, superfluous);
            }
            StateCopy::Storing { iteration, position, kind } if iteration == committed => {
                memory.store_snapshot(sequence, position, kind);
            }
            _ => return,
        }
        sequence.progress.copy = StateCopy::None;
    }
}

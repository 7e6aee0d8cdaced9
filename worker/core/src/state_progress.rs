//! Recurrent state of a sequence: the position it is at, and the copies of it that are to be made.

use crate::SnapshotShape;
use crate::memory::SnapshotKind;

/// Copy between a sequence's state and a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum StateCopy {
    /// None.
    #[default]
    None,
    /// From a snapshot, with the first chunk.
    Load {
        /// Whether the sequence makes the snapshot superfluous.
        superfluous: bool,
    },
    /// From a snapshot, in the iteration with this number.
    Loading {
        /// Number of the iteration that makes the copy.
        iteration: u64,
        /// As of `Load`.
        superfluous: bool,
    },
    /// To a snapshot.
    Storing {
        /// Number of the iteration that makes the copy.
        iteration: u64,
        /// Position of the state.
        position: u32,
        /// Kind of the snapshot.
        kind: SnapshotKind,
    },
}

/// Source of the recurrent state of an admitted sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StateBegin {
    /// Before the first token.
    Empty,
    /// In the blocks of a snapshot that became its own.
    Taken,
    /// As a copy of a snapshot.
    Copied {
        /// Whether a later snapshot of the sequence would make that one superfluous.
        superfluous: bool,
    },
}

/// Progress of a sequence's recurrent state. Without snapshots, all of it stays empty.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StateProgress {
    /// Position of the state once all launched iterations have run; `None` if it is not known: before the first chunk, or after a failure.
    at: Option<u32>,
    /// Position of the state once the committed iterations have run; `None` before the first one.
    committed: Option<u32>,
    /// Copy to be made or in flight.
    pub copy: StateCopy,
    /// Positions at which a snapshot is wanted; 0: none. The first one is where others part from the prompt, the second one the prompt's end.
    wanted: [u32; 2],
}

impl StateProgress {
    /// Returns the progress of a sequence that is admitted with a state at `position`, if it has one already, and the positions at which a
    /// snapshot is wanted.
    pub fn admitted(position: Option<u32>, copy: StateCopy, wanted: [Option<u32>; 2]) -> Self {
        let wanted = wanted.map(|position| position.unwrap_or(0));
        Self { at: position, committed: position, copy, wanted }
    }

    /// Wants a snapshot at a position before the prompt's end, unless another one is wanted there. Returns true if one at this position is
    /// wanted.
    pub fn want(&mut self, position: u32) -> bool {
        if self.wanted[0] == 0 && (self.wanted[1] == 0 || position < self.wanted[1]) {
            self.wanted[0] = position;
        }
        self.wanted.contains(&position)
    }

    /// Returns the positions at which a snapshot is wanted or being copied.
    pub fn coming(&self) -> impl Iterator<Item = u32> + '_ {
        let storing = match self.copy {
            StateCopy::Storing { position, .. } => Some(position),
            StateCopy::None | StateCopy::Load { .. } | StateCopy::Loading { .. } => None,
        };
        self.wanted.into_iter().filter(|position| *position > 0).chain(storing)
    }

    /// Returns true if no copy from a snapshot is to be made.
    pub fn is_loaded(&self) -> bool {
        !matches!(self.copy, StateCopy::Load { .. } | StateCopy::Loading { .. })
    }

    /// Returns the maximum length of a chunk from the position `start` on, of a sequence of `known` tokens, after which the state is where a
    /// snapshot is wanted.
    pub fn chunk_max(&self, start: u32, known: u32, shape: SnapshotShape) -> u32 {
        let ahead = self.wanted.iter().filter(|position| **position > start).min();
        // A shorter rest goes to the log behind the state.
        ahead
            .filter(|position| known.saturating_sub(**position) >= shape.every)
            .map_or(u32::MAX, |position| position - start)
    }

    /// Returns the position of the state and the kind of a snapshot if one is wanted there, and forgets the positions up to there.
    pub fn take_due(&mut self) -> Option<(u32, SnapshotKind)> {
        let at = self.at.filter(|at| *at > 0)?;
        if self.copy != StateCopy::None {
            // Later, if the state is still there then.
            self.wanted.iter_mut().filter(|position| **position < at).for_each(|position| *position = 0);
            return None;
        }
        let due = self.wanted.iter().zip([SnapshotKind::Junction, SnapshotKind::Prompt]);
        let due = due.filter(|(position, _)| **position == at).map(|(_, kind)| (at, kind)).next_back();
        self.wanted.iter_mut().filter(|position| **position <= at).for_each(|position| *position = 0);
        due
    }

    /// Advances the state by a launched chunk whose tokens, without drafts, end at the position `end`.
    pub fn launch(&mut self, end: u32, shape: SnapshotShape) {
        self.at = Some(end - end % shape.every.max(1));
    }

    /// Notes that a chunk was committed whose tokens, without drafts, end at the position `end`.
    pub fn commit(&mut self, end: u32, shape: SnapshotShape) {
        self.committed = Some(end - end % shape.every.max(1));
    }

    /// Notes that an iteration failed, which may have changed the state.
    pub fn fail(&mut self) {
        (self.at, self.committed) = (None, None);
    }

    /// Returns the position of the state that the sequence's blocks have, if it is of committed tokens alone.
    pub fn settled(&self) -> Option<u32> {
        self.committed.filter(|committed| self.at == Some(*committed))
    }

    /// Returns the position of the state that was copied to a snapshot, if it is of committed tokens alone.
    pub fn stored(&self) -> Option<(u32, SnapshotKind)> {
        match self.copy {
            StateCopy::Storing { position, kind, .. } => {
                self.committed.filter(|committed| *committed >= position).map(|_| (position, kind))
            }
            StateCopy::None | StateCopy::Load { .. } | StateCopy::Loading { .. } => None,
        }
    }
}

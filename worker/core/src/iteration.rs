use crate::{SequenceId, Slot};

/// Tokens of one sequence to compute in an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Whose.
    pub id: SequenceId,
    /// Its slot.
    pub slot: Slot,
    /// Absolute position of the first token.
    pub start: u32,
    /// Number of tokens; at least 1.
    pub len: u32,
    /// Whether a token is sampled after the last one.
    pub samples: bool,
}

/// What the next forward pass computes. The buffers are reused from plan to plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Iteration {
    /// Counts iterations, from 1.
    pub number: u64,
    /// Sequences that were given a slot: attach them, with all tokens they have.
    pub admitted: Vec<(SequenceId, Slot)>,
    /// Sequences that lost slot and blocks and will be computed again: detach the slots.
    pub preempted: Vec<(SequenceId, Slot)>,
    /// The work: decodes first, then prefill chunks.
    pub chunks: Vec<Chunk>,
    /// Why the first of the waiting sequences was not admitted.
    pub blocked: Option<Blocked>,
}

impl Iteration {
    /// Tokens to compute.
    pub fn tokens(&self) -> u32 {
        self.chunks.iter().map(|chunk| chunk.len).sum()
    }

    pub(crate) fn clear(&mut self) {
        self.admitted.clear();
        self.preempted.clear();
        self.chunks.clear();
        self.blocked = None;
    }
}

/// A sequence that could not start, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocked {
    /// The first in the queue.
    pub id: SequenceId,
    /// What it lacks.
    pub by: BlockedBy,
}

/// What a waiting sequence lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockedBy {
    /// Blocks: it needs so many, the watermark included, and so many are free.
    Blocks {
        /// Blocks that must be free.
        needed: u32,
        /// Blocks that are.
        free: u32,
    },
    /// All slots are taken.
    Slots,
    /// The iteration's tokens went to others.
    Budget,
    /// A sequence was preempted in this iteration; admitting another would undo it.
    Preemption,
}

impl BlockedBy {
    /// A stable label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Blocks { .. } => "blocks",
            Self::Slots => "slots",
            Self::Budget => "budget",
            Self::Preemption => "preemption",
        }
    }
}

/// What the driver says of a sampled token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The sequence goes on, unless it has reached its length.
    Continue,
    /// The token ends the sequence.
    Stop,
}

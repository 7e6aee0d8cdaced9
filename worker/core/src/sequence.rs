use crate::{Block, Time};

/// Names a sequence from its submission to its end. Ids are reused, but never with the same generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl SequenceId {
    /// A small number, below the most sequences ever held at once: an index for tables kept beside the
    /// scheduler's.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// A running sequence's place in the runtime.
pub type Slot = u32;

/// A sequence to schedule. Its tokens stay with the driver: the scheduler counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewSequence {
    /// Tokens known at submission: the prompt and, for a resumed sequence, what it generated before.
    pub known_tokens: u32,
    /// Most tokens to generate from here on.
    pub max_tokens: u32,
    /// A higher number is more important.
    pub priority: i32,
    /// When to give up.
    pub deadline: Option<Time>,
}

/// Where a sequence is. The transitions are in `scheduler.rs` and nowhere else:
///
/// ```text
/// Waiting ──admit──▶ Prefilling ──last chunk──▶ Decoding ──stop, length──▶ (ended)
///    ▲                   │                          │
///    └─────preempt───────┴──────────────────────────┘     cancel, deadline: from any state
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Owns neither slot nor blocks.
    Waiting,
    /// Owns a slot and the blocks of all its known tokens; some of these are not computed yet.
    Prefilling { slot: Slot },
    /// Owns a slot; all but its newest token are computed.
    Decoding { slot: Slot },
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: SequenceId,
    pub state: State,
    pub priority: i32,
    /// Counts submissions: the order of arrival, kept over preemptions.
    pub arrival: u64,
    pub deadline: Option<Time>,
    /// Prompt and generated tokens.
    pub known_tokens: u32,
    /// Tokens whose keys and values are in the pool.
    pub computed_tokens: u32,
    /// Tokens that may still be generated.
    pub remaining_tokens: u32,
    pub table: Vec<Block>,
    /// Ends at the commit of the iteration in flight, for this reason.
    pub withdrawn: Option<inflight_contract::FinishReason>,
}

impl Sequence {
    /// Who goes first: the more important, then the older.
    pub fn rank(&self) -> Rank {
        Rank { importance: std::cmp::Reverse(self.priority), arrival: self.arrival }
    }

    pub fn slot(&self) -> Option<Slot> {
        match self.state {
            State::Waiting => None,
            State::Prefilling { slot } | State::Decoding { slot } => Some(slot),
        }
    }

    pub fn uncomputed(&self) -> u32 {
        self.known_tokens - self.computed_tokens
    }
}

/// Sort key of queues: the least goes first. Arrivals differ, so no two ranks are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub importance: std::cmp::Reverse<i32>,
    pub arrival: u64,
}

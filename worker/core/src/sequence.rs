use inflight_contract::{BlockHash, Service, Tenant, Weight};

use crate::{Block, Time, TransferId};

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
#[derive(Debug, Clone, Copy)]
pub struct NewSequence<'a> {
    /// Tokens known at submission: the prompt and, for a resumed sequence, what it generated before.
    pub known_tokens: u32,
    /// Most tokens to generate from here on.
    pub max_tokens: u32,
    /// A higher number is more important.
    pub priority: i32,
    /// When to give up.
    pub deadline: Option<Time>,
    /// Whose it is.
    pub tenant: &'a str,
    /// The tenant's share.
    pub weight: Weight,
    /// Hashes of the full blocks of the known tokens; fewer are fine, and none means no sharing.
    pub hashes: &'a [BlockHash],
    /// Sequences of the same group have the same known tokens: the first computes them, the others share.
    pub group: Option<u64>,
    /// Its turn among those that wait: what its tenant had cluster-wide, over its weight, when a router handed it over.
    /// `None`: what the tenant has had here.
    pub order: Option<Service>,
    /// Of the known tokens, those that the tenant was charged for elsewhere.
    pub charged_tokens: u32,
}

/// Where a sequence is. The transitions are in `scheduler/` and nowhere else:
///
/// ```text
/// Waiting ──admit──▶ Prefilling ──last chunk──▶ Decoding ──stop, length──▶ (ended)
///    ▲                   │                          │
///    ├──recompute────────┼──────────────────────────┤        cancel, deadline: from any state
///    │                   └────────swap──────────────┤
///    │                                              ▼
///    ├──copy failed── SwappingIn ◀── Swapped ◀── SwappingOut
///    │                   └──▶ Prefilling, Decoding     │
///    └──────────────────copy failed────────────────────┘
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Owns neither slot nor blocks.
    Waiting,
    /// Owns a slot and the blocks of all its known tokens; some of these are not computed yet.
    Prefilling { slot: Slot },
    /// Owns a slot; all but its newest token are computed.
    Decoding { slot: Slot },
    /// Its blocks are on their way to the host and belong to the transfer.
    SwappingOut { transfer: TransferId },
    /// Its blocks are in `host_table`.
    Swapped,
    /// They are on their way back and belong to the transfer. The slot is its own already.
    SwappingIn { transfer: TransferId, slot: Slot },
    /// Its terminal event is out, but an iteration in flight still writes to its slot and blocks.
    Leaving { slot: Slot },
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: SequenceId,
    pub state: State,
    pub tenant: Tenant,
    /// Its turn while it waits; rises within a lane.
    pub order: Option<Service>,
    pub priority: i32,
    /// Counts submissions: the order of arrival, kept over preemptions.
    pub arrival: u64,
    /// When it last began to wait.
    pub queued: Time,
    pub deadline: Option<Time>,
    /// Prompt and generated tokens, those included whose iteration is in flight.
    pub known_tokens: u32,
    /// Tokens whose keys and values are in the pool or will be when what is in flight has run.
    pub computed_tokens: u32,
    /// Of these, those that have run.
    pub committed_tokens: u32,
    /// Tokens that may still be generated, those in flight excluded.
    pub remaining_tokens: u32,
    /// Known tokens at submission: computing more than these is charged as output.
    pub input_tokens: u32,
    /// Input tokens that were charged, or were shared and need not be.
    pub charged_tokens: u32,
    pub table: Vec<Block>,
    pub host_table: Vec<Block>,
    pub hashes: Vec<BlockHash>,
    /// Blocks of the table that are findable already.
    pub sealed_blocks: u32,
    pub group: Option<u64>,
    /// Iterations in flight that it takes part in.
    pub in_flight: u32,
    /// Will be preempted for this one, once nothing of it is in flight.
    pub evict_for: Option<SequenceId>,
    /// It gives way whether anybody needs its blocks or not.
    pub forced: bool,
    /// A copy of its prefix from the host failed: it is computed instead.
    pub skip_host: bool,
    /// Sequences admitted past it.
    pub bypassed: u32,
    /// When it lost its slot, until it gets one again.
    pub preempted_at: Option<Time>,
    /// Findable blocks that nobody else had when it was preempted by dropping them.
    pub dropped_blocks: u32,
    /// It came back from a preemption, and none of its tokens was computed since.
    pub without_progress: bool,
    /// Number of the iteration before which it is not preempted again, if another candidate is there.
    pub spared_until: u64,
}

impl Sequence {
    pub fn slot(&self) -> Option<Slot> {
        match self.state {
            State::Waiting | State::SwappingOut { .. } | State::Swapped => None,
            State::Prefilling { slot }
            | State::Decoding { slot }
            | State::SwappingIn { slot, .. }
            | State::Leaving { slot } => Some(slot),
        }
    }

    /// Whether it is about to be preempted.
    pub fn evicted(&self) -> bool {
        self.evict_for.is_some()
    }

    pub fn uncomputed(&self) -> u32 {
        self.known_tokens - self.computed_tokens
    }
}

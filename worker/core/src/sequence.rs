//! Sequences: submission parameters, states and per-sequence bookkeeping.

use inflight_contract::{BlockHash, Service, Tenant, Weight};

use crate::drafts::{Acceptance, DraftKind};
use crate::memory::{Spans, Tables};
use crate::state_progress::StateProgress;
use crate::{Time, TransferId};

/// Id of a sequence from submission to end. Indices are reused, with a new generation each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl SequenceId {
    /// Returns a dense index, smaller than the maximum number of sequences ever held at once, for tables
    /// parallel to the scheduler's.
    pub fn index(self) -> usize {
        self.index as usize
    }

    /// Returns a number that no other sequence of the scheduler has, unless billions came between.
    pub fn number(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }
}

/// Index of a running sequence's slot in the runtime.
pub type Slot = u32;

/// Sequence to be submitted. The driver keeps its tokens; the scheduler only counts them.
#[derive(Debug, Clone, Copy)]
pub struct NewSequence<'a> {
    /// Tokens known at submission: the prompt and, for a resumed sequence, the tokens generated before.
    pub known_tokens: u32,
    /// Maximum number of tokens to generate.
    pub max_tokens: u32,
    /// Priority; higher is more important.
    pub priority: i32,
    /// Time at which the sequence ends unfinished.
    pub deadline: Option<Time>,
    /// Name of the tenant.
    pub tenant: &'a str,
    /// Fairness weight of the tenant.
    pub weight: Weight,
    /// Hashes of the leading full spans of the known tokens; fewer are allowed, none disables prefix
    /// sharing.
    pub hashes: &'a [BlockHash],
    /// Group of sequences with equal known tokens (choices of one request): the first computes them, the
    /// others share.
    pub group: Option<u64>,
    /// Virtual start time: the tenant's cluster-wide virtual time at dispatch. `None`: the tenant's virtual
    /// time on this worker.
    pub virtual_start_time: Option<Service>,
    /// Known tokens already charged to the tenant by another worker.
    pub charged_tokens: u32,
    /// Positions whose logits are wanted; none beyond the last known token but one.
    pub scored: ScoredRange,
}

/// Positions of a sequence whose logits are wanted, for log probabilities of the prompt. Each is computed,
/// also where its keys and values are in the prefix cache, and an iteration computes the logits of a bounded
/// number of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScoredRange {
    /// First position.
    pub start: u32,
    /// Position behind the last one.
    pub end: u32,
}

impl ScoredRange {
    /// Returns true if no position is left.
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Returns the part in a chunk of `len` tokens at `start`.
    pub fn within(self, start: u32, len: u32) -> Self {
        Self { start: self.start.max(start), end: self.end.min(start + len) }
    }

    /// Returns the number of positions.
    pub fn len(self) -> u32 {
        self.end.saturating_sub(self.start)
    }

    /// Returns the length of the longest chunk at `start` with at most `most` of the positions.
    pub(crate) fn chunk_max(self, start: u32, most: u32) -> u32 {
        let first = self.start.max(start);
        if self.end.saturating_sub(first) <= most { u32::MAX } else { first - start + most }
    }
}

/// State of a sequence. Only `scheduler/` makes the transitions:
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
pub(crate) enum SequenceState {
    /// In the waiting queue; owns neither slot nor blocks.
    Waiting,
    /// Owns a slot and the blocks of all its known tokens, some of which are not computed yet.
    Prefilling { slot: Slot },
    /// Owns a slot; all tokens but the newest are computed.
    Decoding { slot: Slot },
    /// Being copied to the host; the transfer owns its blocks.
    SwappingOut { transfer: TransferId },
    /// On the host, with its blocks in `host_tables`.
    Swapped,
    /// Being copied to the device; it owns a slot, and the transfer owns its blocks.
    SwappingIn { transfer: TransferId, slot: Slot },
    /// Ended, but an iteration in flight still writes to its slot and blocks.
    Leaving { slot: Slot },
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: SequenceId,
    pub state: SequenceState,
    pub tenant: Tenant,
    /// Virtual start time, used while it waits; non-decreasing within a flow.
    pub virtual_start_time: Option<Service>,
    pub priority: i32,
    /// Arrival number, counted over submissions and kept over preemptions.
    pub arrival: u64,
    /// Time at which it was last queued.
    pub queued: Time,
    pub deadline: Option<Time>,
    /// Prompt and generated tokens, including those sampled by iterations in flight.
    pub known_tokens: u32,
    /// Tokens with KV computed, including launched but uncommitted iterations.
    pub computed_tokens: u32,
    /// Tokens with KV computed by committed iterations.
    pub committed_tokens: u32,
    /// Tokens that may still be generated, not counting those in flight.
    pub remaining_tokens: u32,
    /// Known tokens at submission; tokens beyond these are charged as output.
    pub input_tokens: u32,
    /// Input tokens already charged, or shared and therefore not charged.
    pub charged_tokens: u32,
    pub tables: Tables,
    pub host_tables: Tables,
    pub hashes: Vec<BlockHash>,
    /// Leading spans that are in the prefix cache, or whose window has passed.
    pub sealed_spans: u32,
    /// Number of spans that the prompt shares with an earlier one, if it could not resume behind them for lack of windowed rows, else 0:
    /// the rows before that boundary are kept for later prompts.
    pub junction: u32,
    /// Progress of its recurrent state, of which snapshots are kept.
    pub progress: StateProgress,
    pub group: Option<u64>,
    /// Positions whose logits are wanted and not committed.
    pub scored: ScoredRange,
    /// Tokens that the driver has drafted for the next plan.
    pub drafted: u32,
    /// Kind of the drafted tokens, also of those in flight.
    pub draft_kind: DraftKind,
    /// Drafted tokens in the iteration in flight; they count as known and computed until it is committed.
    pub drafts_in_flight: u32,
    /// Spans up to which the tables reached before they were extended for the drafts in flight, by group.
    pub undrafted: Spans,
    /// Estimate of how many of its guessed drafts stand, and of its predicted ones.
    pub acceptance: Acceptance,
    pub predicted: Acceptance,
    /// Number of tokens predicted in its last committed chunk, until a plan takes them as drafts.
    pub predictions: u32,
    /// Number of iterations in flight that use its slot or blocks.
    pub in_flight: u32,
    /// Number of block copies from or to it in iterations in flight: windows do not pass meanwhile.
    pub copies: u32,
    /// Beneficiary of a pending preemption, which happens when no iteration uses this sequence any more.
    pub preempt_for: Option<SequenceId>,
    /// Set if the pending preemption happens even if no sequence needs the blocks.
    pub forced: bool,
    /// Set after a copy of its prefix from the host failed; the prefix is then computed.
    pub skip_host: bool,
    /// Number of sequences admitted past it.
    pub bypass_count: u32,
    /// Time of its preemption; `None` while it has a slot or was never preempted.
    pub preempted_at: Option<Time>,
    /// Exclusively owned cached spans that were dropped by its last recompute preemption.
    pub dropped_spans: u32,
    /// Set after resumption until one of its tokens is computed.
    pub without_progress: bool,
    /// Iteration number until which other sequences are preempted first (cool-down after resumption).
    pub protected_until: u64,
}

impl Sequence {
    pub fn slot(&self) -> Option<Slot> {
        match self.state {
            SequenceState::Waiting | SequenceState::SwappingOut { .. } | SequenceState::Swapped => None,
            SequenceState::Prefilling { slot }
            | SequenceState::Decoding { slot }
            | SequenceState::SwappingIn { slot, .. }
            | SequenceState::Leaving { slot } => Some(slot),
        }
    }

    /// Returns true if its preemption is pending.
    pub fn is_marked(&self) -> bool {
        self.preempt_for.is_some()
    }

    /// Returns the number of leading tokens that may be taken from the prefix cache. The last known token is
    /// always computed, since the next token is sampled from it.
    pub fn reusable_tokens(&self) -> u32 {
        let most = self.known_tokens - 1;
        if self.scored.is_empty() { most } else { most.min(self.scored.start) }
    }

    /// Returns the number of known tokens without computed KV.
    pub fn uncomputed(&self) -> u32 {
        self.known_tokens - self.computed_tokens
    }
}

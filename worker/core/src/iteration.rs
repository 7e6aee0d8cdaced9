//! Types exchanged between the scheduler and its driver: plans, transfers, verdicts and outcomes.

use std::hash::{Hash, Hasher};
use std::time::Duration;

use inflight_contract::BlockHash;

use crate::{Block, SequenceId, Slot};

/// Tokens of one sequence to compute in an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// Sequence the tokens belong to.
    pub id: SequenceId,
    /// Slot of that sequence.
    pub slot: Slot,
    /// Position of the first token in the sequence.
    pub start: u32,
    /// Number of tokens; at least 1.
    pub len: u32,
    /// Set if the last token's logits are sampled.
    pub samples: bool,
    /// Number of drafted tokens, the last ones of the chunk. The logits of the token before them and of each of
    /// them are sampled.
    pub drafts: u32,
    /// Number of tokens that the MTP layer predicts behind the one that is sampled, to be offered as drafts for the next plan.
    pub predictions: u32,
}

impl Chunk {
    /// Returns the position behind the last token that is no draft.
    pub(crate) fn certain_end(&self) -> u32 {
        self.start + self.len - self.drafts
    }
}

/// Id of a transfer between device and host, valid until its completion is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Device to host.
    Out,
    /// Host to device.
    In,
}

/// Asynchronous copy of KV blocks between device and host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// Id under which completion is reported.
    pub id: TransferId,
    /// Copy direction.
    pub direction: Direction,
    /// Pairs of device block and host block.
    pub blocks: Vec<(Block, Block)>,
}

/// Copy of a whole device block to another one, made before the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Copy {
    /// Source block.
    pub from: Block,
    /// Destination block.
    pub to: Block,
}

/// Plan of the next forward pass. Its buffers are reused by every plan. Its hash, which recordings keep, is that of the decisions,
/// not of what explains them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Iteration {
    /// Iteration number, counted from 1.
    pub number: u64,
    /// Sequences that received a slot; the driver attaches them with all their known tokens.
    pub admitted: Vec<(SequenceId, Slot)>,
    /// Sequences that lost their slot and blocks.
    pub preempted: Vec<Preempted>,
    /// Pairs of victim and beneficiary: preempted after the iterations in flight, if still needed then.
    pub marked: Vec<(SequenceId, SequenceId)>,
    /// Device/host transfers to start now.
    pub transfers: Vec<Transfer>,
    /// Block copies to make before the forward pass.
    pub copies: Vec<Copy>,
    /// Chunks to compute: decodes first, then prefill chunks.
    pub chunks: Vec<Chunk>,
    /// Number of decodes at the start of `chunks`.
    pub decodes: u32,
    /// Drafted tokens of all decodes.
    pub drafts: u32,
    /// Reason why the first waiting sequence was not admitted.
    pub blocked: Option<Blocked>,
    /// Sequences that were considered and neither admitted nor swapped in, with their reasons.
    pub not_admitted: Vec<Blocked>,
    /// Number of decoding sequences stalled until a fence frees blocks.
    pub stalled: u32,
}

impl Hash for Iteration {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.number, &self.admitted, &self.preempted, &self.marked, &self.transfers, &self.copies)
            .hash(state);
        (&self.chunks, self.decodes, self.drafts, self.blocked, self.stalled).hash(state);
    }
}

impl Iteration {
    /// Returns the number of tokens to compute.
    pub fn tokens(&self) -> u32 {
        self.chunks.iter().map(|chunk| chunk.len).sum()
    }

    pub(crate) fn clear(&mut self) {
        self.admitted.clear();
        self.preempted.clear();
        self.marked.clear();
        self.transfers.clear();
        self.copies.clear();
        self.chunks.clear();
        self.decodes = 0;
        self.drafts = 0;
        self.blocked = None;
        self.not_admitted.clear();
        self.stalled = 0;
    }
}

/// Preemption mode: what happens to the KV blocks of a preempted sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Preemption {
    /// Drop the blocks and compute them again later.
    Recompute,
    /// Copy the blocks to the host.
    Swap,
}

/// Record of a preemption. Its hash is that of the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preempted {
    /// Preempted sequence.
    pub id: SequenceId,
    /// Recompute or swap.
    pub kind: Preemption,
    /// Sequence that lacked blocks or a slot; may be the victim itself.
    pub beneficiary: SequenceId,
    /// Device blocks that were dropped, or that are copied to the host.
    pub blocks: u32,
    /// Tokens with KV computed by committed iterations.
    pub tokens: u32,
    /// Predicted cost of both modes.
    pub predicted: PredictedPreemption,
}

impl Hash for Preempted {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.id, self.kind, self.beneficiary).hash(state);
    }
}

/// Predicted costs of preempting a sequence, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PredictedPreemption {
    /// By recompute.
    pub recompute_us: u64,
    /// By swap.
    pub swap_us: u64,
    /// Whether the host pool has room for a swap.
    pub can_swap: bool,
}

/// Waiting sequence that was not admitted, with the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Blocked {
    /// First sequence in the waiting queue.
    pub id: SequenceId,
    /// Resource it lacks.
    pub by: BlockedBy,
}

/// Reason why a waiting sequence is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockedBy {
    /// Too few free KV blocks.
    Blocks {
        /// Blocks that must be free, including the watermark.
        needed: u32,
        /// Free blocks.
        free: u32,
    },
    /// No free slot.
    Slots,
    /// Token budget of the iteration is used up.
    Budget,
    /// A sequence of its class was preempted in this iteration; admitting another one would undo that.
    Preemption,
    /// Another sequence is computing or loading the next block of its prefix, which it will share.
    PrefixUnderWay,
    /// The scheduling policy admits no sequence now.
    Policy,
    /// Enough blocks become free at the fence of a transfer or iteration in flight.
    Fence,
}

impl BlockedBy {
    /// Returns the label used in metrics; stable.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Blocks { .. } => "blocks",
            Self::Slots => "slots",
            Self::Budget => "budget",
            Self::Preemption => "preemption",
            Self::PrefixUnderWay => "prefix_under_way",
            Self::Policy => "policy",
            Self::Fence => "fence",
        }
    }
}

/// Driver's decision about a sampled token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenVerdict {
    /// Set if the token ends the sequence.
    pub stop: bool,
    /// Hash of the KV block completed by this token, if it completes one.
    pub hash: Option<BlockHash>,
}

impl TokenVerdict {
    /// TokenVerdict for a token after which the sequence continues, unless its maximum length is reached.
    pub const CONTINUE: Self = Self { stop: false, hash: None };
    /// TokenVerdict for a token that ends the sequence.
    pub const STOP: Self = Self { stop: true, hash: None };
}

/// Result of an iteration, reported by the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IterationOutcome<'a> {
    /// Verdicts of the accepted tokens of the sampling chunks, in plan order: one token for a chunk without
    /// drafts. A token that ends its sequence is the last one of its chunk.
    pub verdicts: &'a [TokenVerdict],
    /// Number of accepted tokens of each chunk with drafts, in plan order: the token that is sampled in any case,
    /// and one for each draft that stands.
    pub accepted: &'a [u32],
    /// Measured duration of the iteration.
    pub took: Duration,
}

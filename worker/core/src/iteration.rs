use std::time::Duration;

use inflight_contract::BlockHash;

use crate::{Block, SequenceId, Slot};

/// Tokens of one sequence to compute in an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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

/// Names a transfer between device and host until its completion was reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// Which way a transfer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the device to the host.
    Out,
    /// From the host to the device.
    In,
}

/// Blocks to copy between device and host, in the background.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// Its name.
    pub id: TransferId,
    /// Which way.
    pub direction: Direction,
    /// Device block and host block of each copy.
    pub blocks: Vec<(Block, Block)>,
}

/// Copies the whole of one device block over another, before the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Copy {
    /// Block read.
    pub from: Block,
    /// Block written.
    pub to: Block,
}

/// What the next forward pass computes. The buffers are reused from plan to plan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Iteration {
    /// Counts iterations, from 1.
    pub number: u64,
    /// Sequences that were given a slot: attach them, with all tokens they have.
    pub admitted: Vec<(SequenceId, Slot)>,
    /// Sequences that lost slot and blocks.
    pub preempted: Vec<Preempted>,
    /// Sequences that will give way when the iterations in flight have run, and for whom, if that is still needed then.
    pub marked: Vec<(SequenceId, SequenceId)>,
    /// Transfers to start now.
    pub transfers: Vec<Transfer>,
    /// Copies to make first.
    pub copies: Vec<Copy>,
    /// The work: decodes first, then prefill chunks.
    pub chunks: Vec<Chunk>,
    /// Decodes among the chunks.
    pub decodes: u32,
    /// Why the first of the waiting sequences was not admitted.
    pub blocked: Option<Blocked>,
    /// Decoding sequences that stand still until a transfer's fence gives blocks back.
    pub stalled: u32,
}

impl Iteration {
    /// Tokens to compute.
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
        self.blocked = None;
        self.stalled = 0;
    }
}

/// What becomes of a preempted sequence's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Preemption {
    /// They are dropped and computed again.
    Recompute,
    /// They are copied to the host.
    Swap,
}

/// A sequence that gave way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Preempted {
    /// Which.
    pub id: SequenceId,
    /// What becomes of its keys and values.
    pub kind: Preemption,
    /// For whom: the one that lacked blocks or a slot, which may be itself.
    pub needy: SequenceId,
}

/// A sequence that could not start, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Blocked {
    /// The first in the queue.
    pub id: SequenceId,
    /// What it lacks.
    pub by: BlockedBy,
}

/// What a waiting sequence lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    /// Another sequence computes its next block right now: it waits to share it.
    PrefixUnderWay,
    /// The policy starts nobody now.
    Policy,
    /// Blocks are on their way to the host; it waits for the fence.
    Fence,
}

impl BlockedBy {
    /// A stable label for metrics.
    pub fn label(self) -> &'static str {
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

/// What the driver says of a sampled token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// The token ends the sequence.
    pub stop: bool,
    /// The hash of the block that the token fills, if it fills one.
    pub hash: Option<BlockHash>,
}

impl Verdict {
    /// The sequence goes on, unless it has reached its length.
    pub const CONTINUE: Self = Self { stop: false, hash: None };
    /// The token ends the sequence.
    pub const STOP: Self = Self { stop: true, hash: None };
}

/// What the driver measured of an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome<'a> {
    /// One for each sampling chunk, in order.
    pub verdicts: &'a [Verdict],
    /// How long the step took.
    pub took: Duration,
}

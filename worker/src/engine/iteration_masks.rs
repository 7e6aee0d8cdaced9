//! Token masks that a launched iteration waits for.

/// Masks of a launched iteration.
#[derive(Debug, Default)]
pub(super) struct IterationMasks {
    /// Chunks whose sample rows are masked.
    pub(super) chunks: Vec<MaskedChunk>,
    /// Ticket of the masks of each of these chunks; `None`: every token is allowed.
    pub(super) tickets: Vec<Option<u64>>,
    /// Whether they are computed.
    pub(super) started: bool,
}

/// Chunk of a constrained sequence: a sample row behind its last token, and one behind each draft.
#[derive(Debug)]
pub(super) struct MaskedChunk {
    /// Index in the plan.
    pub(super) chunk: usize,
    /// First draft in the iteration's drafts.
    pub(super) first_draft: usize,
    /// Number of drafts.
    pub(super) drafts: usize,
}

impl IterationMasks {
    /// Empties the masks and keeps their buffers.
    pub(super) fn clear(&mut self) {
        self.chunks.clear();
        self.tickets.clear();
        self.started = false;
    }
}

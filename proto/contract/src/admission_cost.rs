//! KV blocks that a request counts against a session's grant.

use crate::MemoryShape;

/// Cost of a request's admission in KV blocks, computed alike by router and worker.
///
/// The blocks of the prompt count once, from submission until the last choice has finished; those of a choice
/// from submission until that choice has finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionCost {
    shape: MemoryShape,
}

impl AdmissionCost {
    /// Creates the cost for a worker's memory.
    pub fn new(shape: MemoryShape) -> Self {
        Self { shape }
    }

    /// Returns the KV blocks of a prompt of `prompt_tokens` tokens.
    pub fn prompt(self, prompt_tokens: usize) -> u32 {
        self.shape.blocks(u32::try_from(prompt_tokens).unwrap_or(u32::MAX), 1)
    }

    /// Returns the KV blocks of a choice: those of `own_tokens` tokens generated in earlier attempts, and of a span for the next
    /// tokens.
    pub fn choice(self, own_tokens: usize) -> u32 {
        self.prompt(own_tokens).saturating_add(self.shape.span_blocks())
    }
}

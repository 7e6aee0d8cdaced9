//! KV blocks that a request counts against a session's grant.

/// Cost of a request's admission in KV blocks, computed alike by router and worker.
///
/// The blocks of the prompt count once, from submission until the last choice has finished; those of a choice
/// from submission until that choice has finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionCost {
    block_tokens: usize,
}

impl AdmissionCost {
    /// Creates the cost for KV blocks of `block_tokens` tokens; 0 is treated as 1.
    pub fn new(block_tokens: u32) -> Self {
        Self { block_tokens: (block_tokens as usize).max(1) }
    }

    /// Returns the KV blocks of a prompt of `prompt_tokens` tokens.
    pub fn prompt(self, prompt_tokens: usize) -> u32 {
        u32::try_from(prompt_tokens.div_ceil(self.block_tokens)).unwrap_or(u32::MAX)
    }

    /// Returns the KV blocks of a choice: those of `own_tokens` tokens generated in earlier attempts, and one
    /// for the next tokens.
    pub fn choice(self, own_tokens: usize) -> u32 {
        u32::try_from(own_tokens.div_ceil(self.block_tokens)).unwrap_or(u32::MAX).saturating_add(1)
    }
}

/// What a request counts against a grant: KV blocks of `block_tokens` tokens at its admission, as router and worker both
/// reckon them, so that their books agree. The prompt's count once, from the submission until the last choice has
/// ended; each choice's own from the submission until that choice has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionCost {
    block_tokens: usize,
}

impl AdmissionCost {
    /// With blocks of this size; 0 is taken for 1.
    pub fn new(block_tokens: u32) -> Self {
        Self { block_tokens: (block_tokens as usize).max(1) }
    }

    /// Blocks of the prompt.
    pub fn prompt(self, prompt_tokens: usize) -> u32 {
        u32::try_from(prompt_tokens.div_ceil(self.block_tokens)).unwrap_or(u32::MAX)
    }

    /// Blocks of a choice that has `own_tokens` from earlier attempts: these, and one to go on in.
    pub fn choice(self, own_tokens: usize) -> u32 {
        u32::try_from(own_tokens.div_ceil(self.block_tokens)).unwrap_or(u32::MAX).saturating_add(1)
    }
}

//! KV blocks that a request counts against a session's grant.

use crate::MemoryShape;

/// Cost of a request's admission in KV blocks, computed alike by router and worker.
///
/// The blocks of the prompt count once, from submission until the last choice has finished; those of a choice
/// from submission until that choice has finished. Choices of a model with recurrent layers have a state each, and share blocks of the
/// prompt only while a snapshot of the state behind them is cached: they count as if they shared nothing.
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
        if self.shape.state_blocks() > 0 { 0 } else { self.blocks(prompt_tokens) }
    }

    /// Returns the KV blocks of a choice of a prompt of `prompt_tokens` tokens beside those that it shares: those of `own_tokens` tokens
    /// generated in earlier attempts, and of a span for the next tokens.
    pub fn choice(self, prompt_tokens: usize, own_tokens: usize) -> u32 {
        let shared = if self.shape.state_blocks() > 0 { 0 } else { prompt_tokens };
        let tokens = prompt_tokens.saturating_add(own_tokens) - shared;
        // A state is held also if neither the prompt nor an earlier attempt has a token.
        let least = self.shape.state_blocks();
        self.blocks(tokens).max(least).saturating_add(self.shape.span_blocks())
    }

    fn blocks(self, tokens: usize) -> u32 {
        self.shape.blocks(u32::try_from(tokens).unwrap_or(u32::MAX), 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_with_states_count_as_if_they_shared_nothing() {
        let plain = AdmissionCost::new(MemoryShape::uniform(16));
        assert_eq!((plain.prompt(33), plain.choice(33, 0), plain.choice(33, 20)), (3, 1, 3));
        let recurrent = AdmissionCost::new(MemoryShape::uniform(16).with_state(10).unwrap());
        assert_eq!((recurrent.prompt(33), recurrent.choice(33, 0), recurrent.choice(33, 20)), (0, 14, 15));
        assert_eq!(recurrent.choice(0, 0), 11);
    }
}

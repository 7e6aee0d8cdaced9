//! Tokens that an MTP layer predicted in a step.

use std::time::Duration;

use super::Slot;

/// Tokens that follow the sampled ones, as the MTP layer predicts them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Predictions {
    /// Slots in the order of the batch, each with the end of its tokens in `tokens`.
    ends: Vec<(Slot, u32)>,
    tokens: Vec<u32>,
    /// Time that the predictions took behind the step's own, which does not include it.
    pub took: Duration,
}

impl Predictions {
    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.ends.clear();
        self.tokens.clear();
        self.took = Duration::ZERO;
    }

    /// Appends the tokens predicted for the sequence of a slot.
    pub fn push(&mut self, slot: Slot, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.ends.push((slot, self.tokens.len() as u32));
    }

    /// Returns the tokens of each slot.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, &[u32])> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|(_, end)| *end));
        starts
            .zip(&self.ends)
            .map(|(start, (slot, end))| (*slot, &self.tokens[start as usize..*end as usize]))
    }

    /// Returns true if nothing was predicted.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

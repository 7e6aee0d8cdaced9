//! Draft source of a choice.

use inflight_worker_core::{DraftSource, PromptLookup};

/// Draft sources of a choice, with the tokens that they proposed for the next iteration.
#[derive(Default)]
pub(super) struct Drafter {
    /// Tokens that the MTP layer predicted, and the number of tokens before them.
    predicted: (usize, Vec<u32>),
    /// Created when the scheduler first wants drafts.
    source: Option<Box<dyn DraftSource>>,
    drafts: Vec<u32>,
}

impl Drafter {
    /// Proposes up to `max` tokens that follow `tokens`. Returns their number and the bytes that the source has
    /// grown by.
    pub fn propose(&mut self, tokens: &[u32], max: usize) -> (usize, usize) {
        self.drafts.clear();
        let source = self.source.get_or_insert_with(|| Box::new(PromptLookup::new()));
        let before = source.bytes();
        source.propose(tokens, max, &mut self.drafts);
        (self.drafts.len(), source.bytes() - before)
    }

    /// Keeps tokens that the MTP layer predicted to follow `tokens` tokens.
    pub fn predict(&mut self, tokens: usize, predicted: &[u32]) {
        self.predicted.0 = tokens;
        self.predicted.1.clear();
        self.predicted.1.extend_from_slice(predicted);
    }

    /// Returns how many tokens are predicted to follow `tokens` tokens, at most `max`.
    pub fn predicted(&self, tokens: usize, max: usize) -> usize {
        if self.predicted.0 == tokens { self.predicted.1.len().min(max) } else { 0 }
    }

    /// Proposes the first `count` predicted tokens.
    pub fn propose_predicted(&mut self, count: usize) {
        self.drafts.clear();
        self.drafts.extend_from_slice(&self.predicted.1[..count]);
    }

    /// Proposes these tokens.
    pub fn set(&mut self, drafts: Vec<u32>) {
        self.drafts = drafts;
    }

    /// Returns the first `count` of the proposed tokens.
    pub fn take(&self, count: u32) -> &[u32] {
        &self.drafts[..count as usize]
    }

    /// Drops the source and returns its bytes. It is built anew from the tokens when drafts are wanted again.
    pub fn clear(&mut self) -> usize {
        self.drafts = Vec::new();
        self.predicted = (0, Vec::new());
        self.source.take().map_or(0, |source| source.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_are_predicted_behind_other_tokens_are_no_drafts() {
        let mut drafter = Drafter::default();
        drafter.predict(7, &[1, 2, 3]);
        assert_eq!(
            [(7, 8), (7, 2), (6, 8), (8, 8)].map(|(tokens, max)| drafter.predicted(tokens, max)),
            [3, 2, 0, 0]
        );
        drafter.propose_predicted(2);
        assert_eq!(drafter.take(2), [1, 2]);
        drafter.clear();
        assert_eq!(drafter.predicted(7, 8), 0);
    }
}

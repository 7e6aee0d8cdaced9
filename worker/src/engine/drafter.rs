//! Draft source of a choice.

use inflight_worker_core::{DraftSource, PromptLookup};

/// Draft source of a choice, with the tokens that it proposed for the next iteration.
#[derive(Default)]
pub(super) struct Drafter {
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
        self.source.take().map_or(0, |source| source.bytes())
    }
}

//! Drafts without a draft model: sources of drafted tokens, and the governor that decides how many are worth
//! computing.

mod governor;
mod prompt_lookup;
mod setting;

pub(crate) use governor::{Acceptance, DraftBudget, DraftPrice};
pub use prompt_lookup::PromptLookup;
pub use setting::{Drafts, UnknownDrafts};

/// Kind of drafts. Each has an estimate of its own of how many stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DraftKind {
    /// Guessed from a sequence's own tokens, by a [`DraftSource`]: whether they stand depends on the sequence.
    #[default]
    Guessed,
    /// Predicted by the MTP layer: whether they stand depends on the layer and on the text.
    Predicted,
    /// Tokens of the bytes that a grammar forces: whether they stand depends on how the model writes these bytes as tokens, so
    /// what is learned from one sequence holds for all, also for short ones.
    Forced,
}

/// Numbers of drafts of a sequence that a plan would use if made now and if nothing but their price limited them, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DraftsWanted {
    /// Number of guessed drafts.
    pub guessed: u32,
    /// Number of predicted drafts.
    pub predicted: u32,
    /// Number of forced drafts.
    pub forced: u32,
    /// Where a sequence has guessed and predicted drafts, the guessed ones are to be taken.
    pub guessed_first: bool,
}

impl DraftsWanted {
    /// Whether no draft of any kind is wanted.
    pub fn is_none(&self) -> bool {
        self.guessed == 0 && self.predicted == 0 && self.forced == 0
    }
}

/// Source of drafted tokens of one sequence.
///
/// A source is a deterministic guess: a draft stands while it equals the token that the sequence's own random
/// number draws, so a source never changes the output, only how many iterations it takes. It guesses from `tokens` alone, like prompt
/// lookup or a suffix tree; what an MTP layer predicts comes with the results of an iteration.
pub trait DraftSource: Send {
    /// Appends up to `max` tokens to `drafts` that may follow `tokens`, prompt and output so far. Between calls
    /// the output of a sequence only grows.
    fn propose(&mut self, tokens: &[u32], max: usize, drafts: &mut Vec<u32>);

    /// Bytes of the source's state.
    fn bytes(&self) -> usize;
}

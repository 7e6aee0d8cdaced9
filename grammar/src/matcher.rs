//! Matcher: the state of a grammar after the tokens of an output.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::api::StopReason;

use crate::MatchError;
use crate::compiler::{MaskShape, shorten};

/// Matcher of one output.
///
/// Its state is a pure function of the grammar and the tokens consumed: after a failover it is rebuilt by consuming
/// them again.
pub struct Matcher {
    inner: llguidance::Matcher,
    shape: Arc<MaskShape>,
    /// Token after which the constraint begins.
    begins_after: Option<u32>,
    /// Whether the constraint has begun.
    begun: bool,
    /// Tokens consumed in all.
    consumed: usize,
    /// Tokens consumed by the grammar.
    matched: usize,
}

/// What may follow an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskOutcome {
    /// The tokens of the mask.
    Masked,
    /// Nothing but the end.
    Complete,
}

impl Matcher {
    pub(crate) fn new(inner: llguidance::Matcher, shape: Arc<MaskShape>) -> Self {
        Self { inner, shape, begins_after: None, begun: true, consumed: 0, matched: 0 }
    }

    /// Returns a matcher of the same state with caches of its own.
    pub(crate) fn fork(&self, begins_after: Option<u32>) -> Self {
        Self {
            inner: self.inner.deep_clone(),
            shape: Arc::clone(&self.shape),
            begins_after,
            begun: begins_after.is_none(),
            consumed: self.consumed,
            matched: self.matched,
        }
    }

    /// Number of 32-bit words of a mask.
    pub fn mask_words(vocab_size: usize) -> usize {
        vocab_size.div_ceil(32)
    }

    /// Whether the constraint has begun; before, every token is allowed.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Consumes the next token of the output.
    ///
    /// # Errors
    /// [`MatchError`] if the grammar does not allow it; the matcher cannot be used any more.
    pub fn consume(&mut self, token: u32) -> Result<(), MatchError> {
        if !self.begun {
            self.begun = self.begins_after == Some(token);
            self.consumed += 1;
            return Ok(());
        }
        let refused = MatchError::TokenRefused { token, consumed: self.consumed };
        if self.is_end(token) {
            // The library accepts an end token anywhere in an accepting state.
            let accepting = self.guarded(|inner| inner.is_accepting().map_err(|error| error.to_string()))?;
            if !accepting {
                return Err(refused);
            }
        } else {
            let valid =
                self.guarded(|inner| inner.validate_tokens(&[token]).map_err(|error| error.to_string()))?;
            if valid == 0 {
                return Err(refused);
            }
        }
        self.guarded(|inner| inner.consume_token(token).map_err(|error| error.to_string()))?;
        self.consumed += 1;
        self.matched += 1;
        Ok(())
    }

    /// Whether the output matches as a whole and nothing may follow it.
    pub fn is_complete(&self) -> bool {
        self.begun
            && matches!(
                self.inner.stop_reason(),
                StopReason::NoExtension | StopReason::NoExtensionBias | StopReason::EndOfSentence
            )
    }

    /// Whether the output matches as a whole, so that it may end.
    ///
    /// # Errors
    /// [`MatchError::Stuck`].
    pub fn is_accepting(&mut self) -> Result<bool, MatchError> {
        if !self.begun || self.is_complete() {
            return Ok(true);
        }
        self.guarded(|inner| inner.is_accepting().map_err(|error| error.to_string()))
    }

    /// Writes the mask of the tokens that may follow: bit `i % 32` of word `i / 32` is token `i`. End tokens are allowed
    /// where the output matches as a whole. Before the constraint begins, all are allowed.
    ///
    /// # Errors
    /// [`MatchError::Stuck`] if nothing may follow although the output does not match as a whole, or the work of
    /// a mask is exhausted.
    pub fn write_mask(&mut self, mask: &mut [u32]) -> Result<MaskOutcome, MatchError> {
        if !self.begun {
            mask.fill(u32::MAX);
            return Ok(MaskOutcome::Masked);
        }
        if self.is_complete() {
            return Ok(MaskOutcome::Complete);
        }
        let allowed = self.guarded(|inner| {
            inner.compute_mask().map_err(|error| {
                let reason = error.to_string();
                let dead_end = reason.starts_with(&StopReason::NoExtensionBias.to_string());
                if dead_end { "no token of the vocabulary may follow".to_owned() } else { reason }
            })
        })?;
        let words = Self::mask_words(self.shape.vocab_size);
        for (at, word) in mask.iter_mut().enumerate() {
            *word = allowed.as_slice().get(at).copied().filter(|_| at < words).unwrap_or(0);
        }
        // The end token behind the vocabulary, and what pads the last word.
        if let Some(last) = mask.get_mut(words - 1)
            && !self.shape.vocab_size.is_multiple_of(32)
        {
            *last &= (1 << (self.shape.vocab_size % 32)) - 1;
        }
        let is_end_only = |at: usize, word: u32| {
            let ends = self.shape.eos_token_ids.iter().filter(|id| **id as usize / 32 == at);
            word & !ends.fold(0, |bits, id| bits | 1 << (id % 32)) == 0
        };
        let complete = mask.iter().enumerate().all(|(at, word)| *word == 0 || is_end_only(at, *word));
        Ok(if complete { MaskOutcome::Complete } else { MaskOutcome::Masked })
    }

    /// Removes the end tokens from a mask, for a sequence that ignores them.
    pub fn clear_end_tokens(&self, mask: &mut [u32]) {
        if !self.begun {
            return;
        }
        for id in &self.shape.eos_token_ids {
            if let Some(word) = mask.get_mut(*id as usize / 32) {
                *word &= !(1 << (id % 32));
            }
        }
    }

    /// Returns how many of the given tokens may follow, in order; for drafts. The state does not change. It stops
    /// before the token after which the constraint begins.
    ///
    /// # Errors
    /// [`MatchError::Stuck`].
    pub fn validate(&mut self, tokens: &[u32]) -> Result<usize, MatchError> {
        if !self.begun {
            let free = tokens.iter().position(|token| Some(*token) == self.begins_after);
            return Ok(free.unwrap_or(tokens.len()));
        }
        self.guarded(|inner| inner.validate_tokens(tokens).map_err(|error| error.to_string()))
    }

    /// Takes back the tokens consumed last; for drafts that were refused.
    ///
    /// # Errors
    /// [`MatchError::Stuck`] if there are fewer.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), MatchError> {
        if tokens > self.consumed {
            let reason = format!("{tokens} tokens were to be taken back");
            return Err(MatchError::Stuck { consumed: self.consumed, reason });
        }
        let of_grammar = tokens.min(self.matched);
        if of_grammar > 0 {
            self.guarded(|inner| inner.rollback(of_grammar).map_err(|error| error.to_string()))?;
        }
        if tokens > self.matched && self.begins_after.is_some() {
            self.begun = false;
        }
        self.matched -= of_grammar;
        self.consumed -= tokens;
        Ok(())
    }

    /// Returns tokens of the bytes that must follow, in the greedy tokenization of the vocabulary; none if several bytes may.
    /// As drafts they are guesses: the model may write the bytes in other tokens. A single byte at the end is left out: a quote
    /// that closes a string is usually written in one token with the punctuation behind it.
    pub fn forced_tokens(&mut self) -> Vec<u32> {
        if !self.begun || self.is_complete() {
            return Vec::new();
        }
        let forced = self.guarded(|inner| {
            let bytes = inner.compute_ff_bytes();
            let environment = inner.tok_env().map_err(|error| error.to_string())?;
            let trie = environment.tok_trie();
            let mut tokens = trie.greedy_tokenize(&bytes);
            if tokens.last().is_some_and(|last| trie.token_len(*last) <= 1) {
                tokens.pop();
            }
            Ok(tokens)
        });
        forced.unwrap_or_default()
    }

    /// Returns the error of a matcher that cannot be used.
    pub(crate) fn error(&self) -> Option<String> {
        self.inner.get_error()
    }

    /// Computes the mask of the first token: whether the grammar can begin.
    pub(crate) fn first_mask(&mut self) -> Result<MaskOutcome, MatchError> {
        let mut mask = vec![0; Self::mask_words(self.shape.vocab_size)];
        self.write_mask(&mut mask)
    }

    fn is_end(&self, token: u32) -> bool {
        self.shape.eos_token_ids.contains(&token)
    }

    /// Runs an operation of the library and turns its errors and panics into one error.
    fn guarded<T>(
        &mut self,
        operation: impl FnOnce(&mut llguidance::Matcher) -> Result<T, String>,
    ) -> Result<T, MatchError> {
        let inner = &mut self.inner;
        let outcome = catch_unwind(AssertUnwindSafe(|| operation(inner)));
        let outcome = outcome.unwrap_or_else(|_| Err("the grammar library failed".to_owned()));
        outcome.map_err(|reason| MatchError::Stuck { consumed: self.consumed, reason: shorten(&reason) })
    }
}

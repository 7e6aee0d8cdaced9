//! Validated sampling parameters.

use std::ops::Deref;
use std::sync::Arc;

use super::list_bytes::{own_list_bytes, shared_list_bytes};
use super::{SamplingError, SamplingSpec};

/// Sampling parameters validated by [`SamplingSpec::validate`]; they dereference to the spec, and what changes them keeps them valid.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams(pub(super) SamplingSpec);

impl SamplingParams {
    /// Returns parameters for greedy decoding, with defaults otherwise.
    pub fn greedy() -> Self {
        Self(SamplingSpec { temperature: 0.0, ..SamplingSpec::default() })
    }

    /// Returns whether decoding is greedy: `temperature` is 0.
    pub fn is_greedy(&self) -> bool {
        self.0.temperature == 0.0
    }

    /// Adds sequences of token ids that the output does not contain.
    ///
    /// # Errors
    /// [`SamplingError`] if they are too many or too long, together with those that the parameters have.
    pub fn add_bad_words(&mut self, words: Vec<Vec<u32>>) -> Result<(), SamplingError> {
        if words.is_empty() {
            return Ok(());
        }
        let before = self.0.bad_word_token_ids.len();
        self.0.bad_word_token_ids.extend(words);
        if let Err(error) = self.0.check_bad_words() {
            self.0.bad_word_token_ids.truncate(before);
            return Err(error);
        }
        self.0.sort_bad_words();
        Ok(())
    }

    /// Bytes of the lists. With `shared`, also of those that the requests of one message share.
    pub fn list_bytes(&self, shared: bool) -> usize {
        let SamplingSpec { logit_bias, bad_word_token_ids, allowed_token_ids, constraint, .. } = &self.0;
        let own = own_list_bytes(logit_bias, bad_word_token_ids);
        own + if shared { shared_list_bytes(allowed_token_ids, constraint.as_deref()) } else { 0 }
    }

    /// Lets a constraint that does not say where it begins begin after `token`.
    pub fn begin_constraint_after(&mut self, token: u32) {
        if let Some(constraint) = self.0.constraint.as_mut().filter(|one| one.begins_after.is_none()) {
            Arc::make_mut(constraint).begins_after = Some(token);
        }
    }

    /// Returns whether `allowed_token_ids` or bad words mask tokens.
    pub fn masks_tokens(&self) -> bool {
        !self.0.allowed_token_ids.is_empty() || !self.0.bad_word_token_ids.is_empty()
    }

    /// Returns the lowest token of a vocabulary that is allowed and no bad word by itself; `None` if there is
    /// none. It is generated where bad words of several tokens, or the mask of end tokens, leave no other.
    pub fn fallback_token(&self, vocab_size: u32) -> Option<u32> {
        let is_bad = |id: &u32| self.0.bad_word_token_ids.binary_search(&vec![*id]).is_ok();
        let allowed = &self.0.allowed_token_ids;
        if allowed.is_empty() {
            return (0..vocab_size).find(|id| !is_bad(id));
        }
        allowed.iter().copied().find(|id| *id < vocab_size && !is_bad(id))
    }

    /// Returns whether sampling depends on the counts of earlier tokens: a penalty is set.
    pub fn needs_history(&self) -> bool {
        self.0.presence_penalty != 0.0 || self.0.frequency_penalty != 0.0 || self.0.repetition_penalty != 1.0
    }
}

impl Deref for SamplingParams {
    type Target = SamplingSpec;

    fn deref(&self) -> &SamplingSpec {
        &self.0
    }
}

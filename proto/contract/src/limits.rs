//! Limits of a loaded model and the validation of requests against them.

use crate::{SamplingError, SamplingParams};

/// Limits of a loaded model, announced by a worker when a session opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ModelLimits {
    /// Tokens in the vocabulary; token ids are below this.
    pub vocab_size: u32,
    /// Context length: maximum tokens of a sequence, prompt and output together.
    pub context_tokens: u32,
    /// Capacity of the KV block pool in tokens; a longer sequence could never run.
    pub kv_tokens: u32,
}

/// Size of a request, as checked against [`ModelLimits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestShape {
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Maximum tokens to generate for each choice.
    pub max_tokens: u32,
}

/// Highest priority; the lowest is its negative.
pub const PRIORITY_MAX: i32 = 100;

/// Reason for which a request can never run on a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The prompt has no tokens.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// `max_tokens` is 0.
    #[error("max_tokens is 0; ask for at least one token")]
    NoTokens,
    /// Prompt and output together exceed the context.
    #[error(
        "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together {}, but the model's \
         context is {context_tokens}; shorten the prompt or lower max_tokens",
        u64::from(*prompt_tokens) + u64::from(*max_tokens)
    )]
    ContextExceeded {
        /// Tokens in the prompt.
        prompt_tokens: u32,
        /// Requested maximum output tokens.
        max_tokens: u32,
        /// Longest sequence that the model can run, in tokens.
        context_tokens: u32,
    },
    /// The priority is outside its range.
    #[error("priority is {0}; it must be in [-{PRIORITY_MAX}, {PRIORITY_MAX}]")]
    Priority(i32),
    /// A token id is outside the vocabulary.
    #[error("token id {id} at position {position} of {field} is outside the vocabulary of {vocab_size}")]
    TokenOutOfVocabulary {
        /// Field of the request that holds it.
        field: &'static str,
        /// Offending token id.
        id: u32,
        /// Its index in the list that holds it.
        position: usize,
        /// Tokens in the vocabulary.
        vocab_size: u32,
    },
    /// Bad words of one token mask every allowed token.
    #[error("every allowed token is a bad word by itself, so no token could be generated; allow another one")]
    NothingAllowed,
}

impl RequestError {
    /// Name of the prompt in errors.
    pub const PROMPT: &'static str = "prompt";

    /// Returns the field of the request that breaks the rule, if it is one.
    pub fn field(&self) -> Option<&'static str> {
        match self {
            Self::EmptyPrompt => Some(Self::PROMPT),
            Self::NoTokens => Some("max_tokens"),
            Self::Priority(_) => Some("priority"),
            Self::TokenOutOfVocabulary { field, .. } => Some(field),
            Self::NothingAllowed => Some("allowed_token_ids"),
            Self::ContextExceeded { .. } => None,
        }
    }
}

/// Priority of a request, in [-100, 100]; higher goes first.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize,
)]
pub struct Priority(i32);

impl Priority {
    /// Highest priority.
    pub const MAX: Self = Self(PRIORITY_MAX);

    /// Returns the priority nearest to a number.
    pub const fn clamped(priority: i32) -> Self {
        match priority {
            _ if priority < -PRIORITY_MAX => Self(-PRIORITY_MAX),
            _ if priority <= PRIORITY_MAX => Self(priority),
            _ => Self(PRIORITY_MAX),
        }
    }

    /// Returns the priority as a number.
    pub fn get(self) -> i32 {
        self.0
    }
}

impl TryFrom<i32> for Priority {
    type Error = RequestError;

    fn try_from(priority: i32) -> Result<Self, RequestError> {
        let within = (-PRIORITY_MAX..=PRIORITY_MAX).contains(&priority);
        if within { Ok(Self(priority)) } else { Err(RequestError::Priority(priority)) }
    }
}

impl ModelLimits {
    /// Returns the length in tokens of the longest sequence that can run: the smaller of context and KV pool.
    pub fn sequence_tokens(&self) -> u32 {
        self.context_tokens.min(self.kv_tokens)
    }

    /// Checks a request's size. `max_tokens` counts in full, so that an admitted request can run to its end.
    ///
    /// # Errors
    /// [`RequestError`] of the first violated rule.
    pub fn check_shape(&self, shape: RequestShape) -> Result<(), RequestError> {
        let RequestShape { prompt_tokens, max_tokens } = shape;
        if prompt_tokens == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        if max_tokens == 0 {
            return Err(RequestError::NoTokens);
        }
        let context_tokens = self.sequence_tokens();
        if u64::from(prompt_tokens) + u64::from(max_tokens) > u64::from(context_tokens) {
            return Err(RequestError::ContextExceeded { prompt_tokens, max_tokens, context_tokens });
        }
        Ok(())
    }

    /// Checks that all token ids of the prompt, the stop tokens, the logit biases and the masks are in the
    /// vocabulary, and that the masks leave a token.
    ///
    /// # Errors
    /// [`RequestError::TokenOutOfVocabulary`] for the first id that is not, [`RequestError::NothingAllowed`].
    pub fn check_tokens(&self, prompt: &[u32], sampling: &SamplingParams) -> Result<(), RequestError> {
        let vocab_size = self.vocab_size;
        let outside = |field, ids: &mut dyn Iterator<Item = u32>| {
            let found = ids.enumerate().find(|(_, id)| *id >= vocab_size);
            found.map(|(position, id)| RequestError::TokenOutOfVocabulary { field, id, position, vocab_size })
        };
        let bias_ids = &mut sampling.logit_bias.iter().map(|(id, _)| *id);
        let begin_ids = &mut sampling.constraint.iter().filter_map(|constraint| constraint.begins_after);
        let word_ids = &mut sampling.bad_word_token_ids.iter().flatten().copied();
        let found = outside(RequestError::PROMPT, &mut prompt.iter().copied())
            .or_else(|| outside("stop_token_ids", &mut sampling.stop_token_ids.iter().copied()))
            .or_else(|| outside("logit_bias", bias_ids))
            .or_else(|| outside("allowed_token_ids", &mut sampling.allowed_token_ids.iter().copied()))
            .or_else(|| outside("bad_word_token_ids", word_ids))
            .or_else(|| outside(SamplingError::CONSTRAINT, begin_ids));
        match found {
            Some(error) => Err(error),
            None if sampling.masks_tokens() && sampling.fallback_token(vocab_size).is_none() => {
                Err(RequestError::NothingAllowed)
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SamplingSpec;

    const LIMITS: ModelLimits = ModelLimits { vocab_size: 100, context_tokens: 64, kv_tokens: 48 };

    #[test]
    fn a_priority_is_within_a_hundred_of_zero() {
        for good in [-PRIORITY_MAX, 0, PRIORITY_MAX] {
            assert_eq!(Priority::try_from(good).map(Priority::get), Ok(good));
        }
        for bad in [i32::MIN, -PRIORITY_MAX - 1, PRIORITY_MAX + 1, i32::MAX] {
            assert_eq!(Priority::try_from(bad), Err(RequestError::Priority(bad)));
        }
    }

    #[test]
    fn masks_must_leave_a_token_of_the_vocabulary() {
        let check = |allowed: &[u32], words: &[&[u32]]| {
            let spec = SamplingSpec {
                allowed_token_ids: allowed.into(),
                bad_word_token_ids: words.iter().map(|word| word.to_vec()).collect(),
                ..SamplingSpec::default()
            };
            let params = spec.validate().unwrap();
            LIMITS.check_tokens(&[0], &params).map(|()| params.fallback_token(LIMITS.vocab_size))
        };
        assert_eq!(check(&[], &[&[0], &[1, 2]]), Ok(Some(1)));
        assert_eq!(check(&[9, 4], &[&[4], &[9, 9]]), Ok(Some(9)));
        assert_eq!(check(&[4], &[&[4]]), Err(RequestError::NothingAllowed));
        let all: Vec<[u32; 1]> = (0..LIMITS.vocab_size).map(|id| [id]).collect();
        let all: Vec<&[u32]> = all.iter().map(|id| &id[..]).collect();
        assert_eq!(check(&[], &all), Err(RequestError::NothingAllowed));
        for outside in [check(&[100], &[]), check(&[1], &[&[1, u32::MAX]])] {
            assert!(matches!(outside, Err(RequestError::TokenOutOfVocabulary { .. })));
        }
    }

    #[test]
    fn the_largest_admissible_request_fills_the_smaller_of_context_and_pool() {
        let at = |prompt_tokens, max_tokens| LIMITS.check_shape(RequestShape { prompt_tokens, max_tokens });
        assert_eq!(at(40, 8), Ok(()));
        assert!(matches!(at(40, 9), Err(RequestError::ContextExceeded { context_tokens: 48, .. })));
        assert!(matches!(at(u32::MAX, u32::MAX), Err(RequestError::ContextExceeded { .. })));
        assert_eq!(at(0, 1), Err(RequestError::EmptyPrompt));
        assert_eq!(at(1, 0), Err(RequestError::NoTokens));
    }
}

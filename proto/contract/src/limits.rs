use crate::SamplingParams;

/// What a loaded model can take; a worker announces it when a session opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelLimits {
    /// Tokens in the vocabulary: ids are below this.
    pub vocab_size: u32,
    /// Most tokens a sequence may hold, prompt and output together.
    pub context_tokens: u32,
    /// Most tokens that the whole KV pool can hold; a longer sequence could never run.
    pub kv_tokens: u32,
}

/// The size of a request: what its limits are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestShape {
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Most tokens to generate for each choice.
    pub max_tokens: u32,
}

/// The most important priority; the least important is its negative.
pub const PRIORITY_MAX: i32 = 100;

/// Why a request can never run on this model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// There is nothing to continue.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// Nothing is asked for.
    #[error("max_tokens is 0; ask for at least one token")]
    NoTokens,
    /// Prompt and output do not fit the context.
    #[error(
        "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together {}, but the model's \
         context is {context_tokens}; shorten the prompt or lower max_tokens",
        u64::from(*prompt_tokens) + u64::from(*max_tokens)
    )]
    ContextExceeded {
        /// Tokens in the prompt.
        prompt_tokens: u32,
        /// Tokens asked for.
        max_tokens: u32,
        /// The model's context.
        context_tokens: u32,
    },
    /// A priority is out of its range.
    #[error("priority is {0}; it must be in [-{PRIORITY_MAX}, {PRIORITY_MAX}]")]
    Priority(i32),
    /// A token id is not in the vocabulary.
    #[error("token id {id} at position {position} is outside the vocabulary of {vocab_size}")]
    TokenOutOfVocabulary {
        /// The offending id.
        id: u32,
        /// Its place in the list it came in.
        position: usize,
        /// Tokens in the vocabulary.
        vocab_size: u32,
    },
}

/// Checks a request's priority.
///
/// # Errors
/// [`RequestError::Priority`].
pub fn check_priority(priority: i32) -> Result<(), RequestError> {
    let within = (-PRIORITY_MAX..=PRIORITY_MAX).contains(&priority);
    if within { Ok(()) } else { Err(RequestError::Priority(priority)) }
}

impl ModelLimits {
    /// The longest sequence that can run here: the context or, where the KV pool is smaller, the pool.
    pub fn sequence_tokens(&self) -> u32 {
        self.context_tokens.min(self.kv_tokens)
    }

    /// Checks a request's size. `max_tokens` counts in full: a request is admitted only if it fits to its end.
    ///
    /// # Errors
    /// [`RequestError`] with the first rule broken.
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

    /// Checks that every id of a prompt, of the stop ids and of the logit biases is in the vocabulary.
    ///
    /// # Errors
    /// [`RequestError::TokenOutOfVocabulary`] for the first that is not.
    pub fn check_tokens(&self, prompt: &[u32], sampling: &SamplingParams) -> Result<(), RequestError> {
        let vocab_size = self.vocab_size;
        let bias_ids = sampling.logit_bias.iter().map(|(id, _)| *id).enumerate();
        let stop_ids = sampling.stop_token_ids.iter().copied().enumerate();
        match prompt
            .iter()
            .copied()
            .enumerate()
            .chain(stop_ids)
            .chain(bias_ids)
            .find(|(_, id)| *id >= vocab_size)
        {
            Some((position, id)) => Err(RequestError::TokenOutOfVocabulary { id, position, vocab_size }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ModelLimits = ModelLimits { vocab_size: 100, context_tokens: 64, kv_tokens: 48 };

    #[test]
    fn a_priority_is_within_a_hundred_of_zero() {
        for good in [-PRIORITY_MAX, 0, PRIORITY_MAX] {
            assert_eq!(check_priority(good), Ok(()));
        }
        for bad in [i32::MIN, -PRIORITY_MAX - 1, PRIORITY_MAX + 1, i32::MAX] {
            assert_eq!(check_priority(bad), Err(RequestError::Priority(bad)));
        }
    }

    #[test]
    fn a_request_that_fills_the_smaller_of_context_and_pool_is_the_largest_taken() {
        let at = |prompt_tokens, max_tokens| LIMITS.check_shape(RequestShape { prompt_tokens, max_tokens });
        assert_eq!(at(40, 8), Ok(()));
        assert!(matches!(at(40, 9), Err(RequestError::ContextExceeded { context_tokens: 48, .. })));
        assert!(matches!(at(u32::MAX, u32::MAX), Err(RequestError::ContextExceeded { .. })));
        assert_eq!(at(0, 1), Err(RequestError::EmptyPrompt));
        assert_eq!(at(1, 0), Err(RequestError::NoTokens));
    }
}

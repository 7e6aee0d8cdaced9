//! Sampling parameters of a request and their validation.

use std::ops::Deref;
use std::sync::Arc;

use crate::{Constraint, ConstraintError};

/// Sampling parameters as requested, not validated; see [`SamplingSpec::validate`].
///
/// Logits are processed in a fixed order: repetition, frequency and presence penalties; logit bias; masks
/// (`min_tokens`, which masks end tokens, `allowed_token_ids`, `bad_word_token_ids`, the tokens that the grammar of `constraint` does
/// not allow next); then argmax if `temperature` is 0, else division by the temperature,
/// top-k, top-p and min-p, each on the distribution left by the previous one, and a random draw.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingSpec {
    /// Divisor of the logits, in [0, 100]; 0 is greedy.
    pub temperature: f32,
    /// Nucleus sampling: cumulative probability of the most probable tokens kept, in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Number of most probable tokens kept; 0 keeps all.
    pub top_k: i32,
    /// Minimum probability of a token relative to the most probable one, in [0, 1]; 0 drops none.
    pub min_p: f32,
    /// Subtracted once from the logit of each token generated so far, in [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated, in [-2, 2].
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output, in (0, 100]; 1 is off.
    pub repetition_penalty: f32,
    /// Pairs of token id and bias added to its logit, in [-100, 100]; sorted by id once validated.
    pub logit_bias: Vec<(u32, f32)>,
    /// Token ids that may be generated, sorted once validated; empty: all. Shared, as it may be long and requests of one call have the same.
    pub allowed_token_ids: Arc<[u32]>,
    /// Sequences of token ids that the output does not contain, sorted once validated. The last token of a
    /// sequence is masked where the output ends with the tokens before it.
    pub bad_word_token_ids: Vec<Vec<u32>>,
    /// Number of top alternatives whose log probabilities are reported beside the chosen token's; `None`:
    /// none.
    pub logprobs: Option<u32>,
    /// Number of top alternatives whose log probabilities are reported for each prompt token but the first;
    /// `None`: no log probabilities of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Number of independent choices to generate, in [1, 16].
    pub n: u32,
    /// Minimum number of generated tokens before an end token.
    pub min_tokens: u32,
    /// Token ids that end the sequence in addition to the model's EOS tokens; sorted once validated.
    pub stop_token_ids: Vec<u32>,
    /// Whether the model's EOS tokens do not end the sequence.
    pub ignore_eos: bool,
    /// Seed of all random draws of the request.
    pub seed: u64,
    /// Grammar that the output must match. Tokens that it does not allow next are masked before temperature,
    /// top-k, top-p and min-p; their log probability is minus infinity. End tokens are allowed where the
    /// output so far matches as a whole.
    pub constraint: Option<Arc<Constraint>>,
}

impl Default for SamplingSpec {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            allowed_token_ids: Arc::default(),
            bad_word_token_ids: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            n: 1,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            seed: 0,
            constraint: None,
        }
    }
}

/// Sampling parameter that is out of range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A value is outside its range or NaN.
    #[error("{name} is {value}; it must be in {range}")]
    OutOfRange {
        /// Name of the field in the API.
        name: &'static str,
        /// Given value.
        value: f64,
        /// Allowed range.
        range: &'static str,
    },
    /// A list is too long.
    #[error("{name} has {len} entries; at most {most} are allowed")]
    TooMany {
        /// Name of the field in the API.
        name: &'static str,
        /// Number of entries given.
        len: usize,
        /// Maximum number of entries.
        most: usize,
    },
    /// A bad word has no or too many tokens.
    #[error("{name}[{index}] has {len} tokens; each must have 1 to {most}", name = Self::BAD_WORDS)]
    BadWord {
        /// Index of the word.
        index: usize,
        /// Number of its tokens.
        len: usize,
        /// Maximum number of tokens.
        most: usize,
    },
    /// The bad words have too many tokens together.
    #[error("bad_words have {tokens} tokens together; at most {most} are allowed")]
    BadWordTokens {
        /// Number of their tokens.
        tokens: usize,
        /// Maximum number of tokens.
        most: usize,
    },
    /// The grammar of the constraint breaks a bound.
    #[error("{name}: {0}", name = Self::CONSTRAINT)]
    Constraint(#[from] ConstraintError),
}

impl SamplingError {
    const BAD_WORDS: &str = "bad_word_token_ids";
    /// Name of the constraint in errors.
    pub const CONSTRAINT: &str = "constraint";

    /// Returns the name of the field in the API.
    pub fn field(&self) -> &'static str {
        match self {
            Self::OutOfRange { name, .. } | Self::TooMany { name, .. } => name,
            Self::BadWord { .. } => Self::BAD_WORDS,
            Self::BadWordTokens { .. } => "bad_words",
            Self::Constraint(_) => Self::CONSTRAINT,
        }
    }
}

impl SamplingSpec {
    /// Maximum entries of `logit_bias`.
    pub const LOGIT_BIAS_MAX: usize = 1024;
    /// Maximum entries of `allowed_token_ids`.
    pub const ALLOWED_TOKEN_IDS_MAX: usize = 65_536;
    /// Maximum entries of `bad_word_token_ids`.
    pub const BAD_WORDS_MAX: usize = 512;
    /// Maximum tokens of an entry of `bad_word_token_ids`.
    pub const BAD_WORD_TOKENS_MAX: usize = 32;
    /// Maximum tokens over all entries of `bad_word_token_ids`.
    pub const BAD_WORDS_TOKENS_MAX: usize = 4096;
    /// Maximum entries of `stop_token_ids`.
    pub const STOP_TOKEN_IDS_MAX: usize = 128;
    /// Maximum `logprobs` and `prompt_logprobs`: top alternatives reported with each token.
    pub const LOGPROBS_MAX: u32 = 20;
    /// Maximum `n`: choices of one request.
    pub const CHOICES_MAX: u32 = 16;

    /// Validates every field; sorts and deduplicates the lists.
    ///
    /// # Errors
    /// [`SamplingError`] of the first field that is out of range.
    pub fn validate(mut self) -> Result<SamplingParams, SamplingError> {
        let within = |name, value: f32, low: f32, high: f32, range| {
            // Comparisons with NaN are false, so NaN is refused too.
            if value >= low && value <= high {
                Ok(())
            } else {
                Err(SamplingError::OutOfRange { name, value: f64::from(value), range })
            }
        };
        within("temperature", self.temperature, 0.0, 100.0, "[0, 100]")?;
        // Subnormal numbers are in the range too.
        within("top_p", self.top_p, f32::from_bits(1), 1.0, "(0, 1]")?;
        within("min_p", self.min_p, 0.0, 1.0, "[0, 1]")?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0, "[-2, 2]")?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "[-2, 2]")?;
        within("repetition_penalty", self.repetition_penalty, f32::MIN_POSITIVE, 100.0, "(0, 100]")?;
        let within_integers = |name, value: i64, low: i64, high: i64, range| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(SamplingError::OutOfRange { name, value: value as f64, range })
            }
        };
        within_integers("top_k", self.top_k.into(), 0, i32::MAX.into(), "[0, 2147483647]")?;
        within_integers("n", self.n.into(), 1, Self::CHOICES_MAX.into(), "[1, 16]")?;
        let logprobs = self.logprobs.unwrap_or(0);
        within_integers("logprobs", logprobs.into(), 0, Self::LOGPROBS_MAX.into(), "[0, 20]")?;
        let prompt_logprobs = self.prompt_logprobs.unwrap_or(0);
        let most = Self::LOGPROBS_MAX.into();
        within_integers("prompt_logprobs", prompt_logprobs.into(), 0, most, "[0, 20]")?;
        let check_len = |name, len, most| {
            if len <= most { Ok(()) } else { Err(SamplingError::TooMany { name, len, most }) }
        };
        check_len("logit_bias", self.logit_bias.len(), Self::LOGIT_BIAS_MAX)?;
        check_len("stop_token_ids", self.stop_token_ids.len(), Self::STOP_TOKEN_IDS_MAX)?;
        for (_, bias) in &self.logit_bias {
            within("logit_bias", *bias, -100.0, 100.0, "[-100, 100]")?;
        }
        check_len("allowed_token_ids", self.allowed_token_ids.len(), Self::ALLOWED_TOKEN_IDS_MAX)?;
        self.check_bad_words()?;
        self.constraint.as_ref().map_or(Ok(()), |constraint| constraint.grammar.check())?;
        self.logit_bias.sort_by_key(|(id, _)| *id);
        self.logit_bias.dedup_by_key(|(id, _)| *id);
        self.stop_token_ids.sort_unstable();
        self.stop_token_ids.dedup();
        self.allowed_token_ids = Self::sorted(self.allowed_token_ids);
        self.bad_word_token_ids.sort_unstable();
        self.bad_word_token_ids.dedup();
        Ok(SamplingParams(self))
    }

    /// Returns token ids in ascending order, each once; the same list if it is so already.
    pub fn sorted(ids: Arc<[u32]>) -> Arc<[u32]> {
        if ids.is_sorted_by(|a, b| a < b) {
            return ids;
        }
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        ids.into()
    }

    fn check_bad_words(&self) -> Result<(), SamplingError> {
        let words = &self.bad_word_token_ids;
        let most = Self::BAD_WORD_TOKENS_MAX;
        if let Some((index, word)) =
            words.iter().enumerate().find(|(_, word)| word.is_empty() || word.len() > most)
        {
            return Err(SamplingError::BadWord { index, len: word.len(), most });
        }
        if words.len() > Self::BAD_WORDS_MAX {
            let (name, len, most) = (SamplingError::BAD_WORDS, words.len(), Self::BAD_WORDS_MAX);
            return Err(SamplingError::TooMany { name, len, most });
        }
        let (tokens, most) = (words.iter().map(Vec::len).sum(), Self::BAD_WORDS_TOKENS_MAX);
        if tokens > most {
            return Err(SamplingError::BadWordTokens { tokens, most });
        }
        Ok(())
    }
}

/// Sampling parameters validated by [`SamplingSpec::validate`]; they dereference to the spec and are
/// immutable.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams(SamplingSpec);

impl SamplingParams {
    /// Returns parameters for greedy decoding, with defaults otherwise.
    pub fn greedy() -> Self {
        Self(SamplingSpec { temperature: 0.0, ..SamplingSpec::default() })
    }

    /// Returns whether decoding is greedy: `temperature` is 0.
    pub fn is_greedy(&self) -> bool {
        self.0.temperature == 0.0
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Grammar;
    use proptest::prelude::*;

    fn refused(spec: SamplingSpec) -> &'static str {
        match spec.validate() {
            Err(error) => error.field(),
            Ok(params) => panic!("accepted {params:?}"),
        }
    }

    #[test]
    fn every_out_of_range_field_is_named() {
        let d = SamplingSpec::default;
        assert_eq!(refused(SamplingSpec { temperature: -0.1, ..d() }), "temperature");
        assert_eq!(refused(SamplingSpec { temperature: f32::NAN, ..d() }), "temperature");
        assert_eq!(refused(SamplingSpec { top_p: 0.0, ..d() }), "top_p");
        assert_eq!(refused(SamplingSpec { top_p: 1.01, ..d() }), "top_p");
        assert!(SamplingSpec { top_p: 1e-45, ..d() }.validate().is_ok(), "subnormal, but above 0");
        assert_eq!(refused(SamplingSpec { top_k: -1, ..d() }), "top_k");
        assert_eq!(refused(SamplingSpec { min_p: f32::NAN, ..d() }), "min_p");
        assert_eq!(refused(SamplingSpec { repetition_penalty: 0.0, ..d() }), "repetition_penalty");
        assert_eq!(refused(SamplingSpec { logit_bias: vec![(1, f32::INFINITY)], ..d() }), "logit_bias");
        assert_eq!(refused(SamplingSpec { stop_token_ids: vec![1; 10_000], ..d() }), "stop_token_ids");
        let words = |bad_word_token_ids| refused(SamplingSpec { bad_word_token_ids, ..d() });
        for bad in [vec![vec![]], vec![vec![1; 33]], vec![vec![1]; 513]] {
            assert_eq!(words(bad), "bad_word_token_ids");
        }
        assert_eq!(words(vec![vec![1; 32]; 129]), "bad_words");
        let allowed_token_ids = vec![1; SamplingSpec::ALLOWED_TOKEN_IDS_MAX + 1].into();
        assert_eq!(refused(SamplingSpec { allowed_token_ids, ..d() }), "allowed_token_ids");
        let constraint = Constraint { grammar: Grammar::Regex(String::new()), begins_after: None };
        assert_eq!(refused(SamplingSpec { constraint: Some(constraint.into()), ..d() }), "constraint");
        assert_eq!(refused(SamplingSpec { n: 0, ..d() }), "n");
        assert_eq!(refused(SamplingSpec { logprobs: Some(21), ..d() }), "logprobs");
        assert_eq!(refused(SamplingSpec { prompt_logprobs: Some(21), ..d() }), "prompt_logprobs");
    }

    proptest! {
        #[test]
        fn accepted_parameters_are_finite_and_in_range(t in any::<f32>(), p in any::<f32>(), k in any::<i32>(),
                                                       m in any::<f32>(), r in any::<f32>()) {
            let spec = SamplingSpec { temperature: t, top_p: p, top_k: k, min_p: m, repetition_penalty: r,
                                      ..SamplingSpec::default() };
            if let Ok(ok) = spec.validate() {
                prop_assert!(ok.temperature.is_finite() && ok.temperature >= 0.0);
                prop_assert!(ok.top_p > 0.0 && ok.top_p <= 1.0 && (0.0..=1.0).contains(&ok.min_p));
                prop_assert!(ok.top_k >= 0 && ok.repetition_penalty > 0.0);
            }
        }
    }
}

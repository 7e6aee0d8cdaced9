//! Sampling parameters of a request and their validation.

use std::sync::Arc;

use super::table::{NumberKind, SAMPLING_NUMBERS, SamplingNumber};
use super::{SamplingError, SamplingParams};
use crate::{Constraint, sampling_numbers};

macro_rules! spec {
    ($($(#[$doc:meta])* $name:ident: $kind:ident { absent: $absent:expr, $($column:tt)* })*) => {
        /// Sampling parameters as requested, not validated; see [`SamplingSpec::validate`].
        ///
        /// Logits are processed in a fixed order: repetition, frequency and presence penalties; logit bias; masks
        /// (`min_tokens`, which masks end tokens, `allowed_token_ids`, `bad_word_token_ids`, the tokens that the grammar of
        /// `constraint` does not allow next); then argmax if `temperature` is 0, else division by the temperature, top-k, top-p and
        /// min-p, each on the distribution left by the previous one, and a random draw.
        #[derive(Debug, Clone, PartialEq)]
        pub struct SamplingSpec {
            $($(#[$doc])* pub $name: $kind,)*
            /// Pairs of token id and bias added to its logit, in [-100, 100]; sorted by id once validated.
            pub logit_bias: Vec<(u32, f32)>,
            /// Token ids that may be generated, sorted once validated; empty: all. Shared, as it may be long and requests of one call
            /// have the same.
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
                    $($name: $absent,)*
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

        impl SamplingSpec {
            /// Returns the value of a numeric parameter.
            pub fn number(&self, number: &SamplingNumber) -> f64 {
                const GET: &[fn(&SamplingSpec) -> f64] = &[$(|spec| f64::from(spec.$name)),*];
                GET[number.row](self)
            }

            /// Sets a numeric parameter; the value becomes the nearest one of its type, without a fraction if that is an integer.
            pub fn set_number(&mut self, number: &SamplingNumber, value: f64) {
                const SET: &[fn(&mut SamplingSpec, f64)] = &[$(|spec, value| spec.$name = value as $kind),*];
                SET[number.row](self, value);
            }

            /// Returns numbers that are equal for two specs if, with the same seed and constraint, both yield the same tokens. Numeric
            /// parameters that were added after the first release count only where they are not the default, so that a
            /// resumable stream survives an upgrade.
            pub fn identity(&self, max_tokens: u32) -> Vec<u32> {
                // Exhaustive: a field that is forgotten here does not compile.
                let Self {
                    $($name: _,)*
                    logit_bias,
                    allowed_token_ids,
                    bad_word_token_ids,
                    logprobs,
                    // Requests with it cannot be resumed.
                    prompt_logprobs: _,
                    n,
                    min_tokens,
                    stop_token_ids,
                    ignore_eos,
                    seed: _,
                    constraint: _,
                } = self;
                let (first, later) = SAMPLING_NUMBERS.split_at(Self::FIRST_NUMBERS);
                let mut numbers: Vec<u32> = first.iter().map(|number| self.bits(number)).collect();
                let logprobs = logprobs.map_or(0, |top| top + 1);
                numbers.extend([logprobs, *n, *min_tokens, u32::from(*ignore_eos), max_tokens]);
                let mut list = |values: &mut dyn Iterator<Item = u32>| {
                    let at = numbers.len();
                    numbers.push(0);
                    numbers.extend(values);
                    numbers[at] = (numbers.len() - at - 1) as u32;
                };
                list(&mut stop_token_ids.iter().copied());
                list(&mut logit_bias.iter().flat_map(|(id, bias)| [*id, bias.to_bits()]));
                list(&mut allowed_token_ids.iter().copied());
                for word in bad_word_token_ids {
                    list(&mut word.iter().copied());
                }
                for (row, number) in later.iter().enumerate() {
                    if self.number(number) != number.absent {
                        // No list has the length u32::MAX.
                        numbers.extend([u32::MAX, row as u32, self.bits(number)]);
                    }
                }
                numbers
            }
        }
    };
}

sampling_numbers!(spec);

impl SamplingSpec {
    /// Numeric parameters of the first release, the first ones of the table.
    const FIRST_NUMBERS: usize = 7;
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

    /// Returns the bits of a numeric parameter in its own type.
    fn bits(&self, number: &SamplingNumber) -> u32 {
        let value = self.number(number);
        match number.kind {
            NumberKind::Float => (value as f32).to_bits(),
            NumberKind::Integer => (value as i32).cast_unsigned(),
        }
    }

    /// Validates every field; sorts and deduplicates the lists.
    ///
    /// # Errors
    /// [`SamplingError`] of the first field that is out of range.
    pub fn validate(mut self) -> Result<SamplingParams, SamplingError> {
        for number in SAMPLING_NUMBERS {
            let value = self.number(number);
            if !number.allows(value) {
                return Err(SamplingError::OutOfRange { name: number.name, value, range: number.range });
            }
        }
        // Samplers need a positive share; of the smallest, they keep the most probable token.
        if self.top_p == 0.0 {
            self.top_p = f32::MIN_POSITIVE;
        }
        let within_integers = |name, value: i64, low: i64, high: i64, range| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(SamplingError::OutOfRange { name, value: value as f64, range })
            }
        };
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
        // NaN is outside of every range.
        if let Some((_, bias)) = self.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias)) {
            let (name, value) = ("logit_bias", f64::from(*bias));
            return Err(SamplingError::OutOfRange { name, value, range: "[-100, 100]" });
        }
        check_len("allowed_token_ids", self.allowed_token_ids.len(), Self::ALLOWED_TOKEN_IDS_MAX)?;
        self.check_bad_words()?;
        self.constraint.as_ref().map_or(Ok(()), |constraint| constraint.grammar.check())?;
        self.logit_bias.sort_by_key(|(id, _)| *id);
        self.logit_bias.dedup_by_key(|(id, _)| *id);
        self.stop_token_ids.sort_unstable();
        self.stop_token_ids.dedup();
        self.allowed_token_ids = Self::sorted(self.allowed_token_ids);
        self.sort_bad_words();
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

    pub(super) fn sort_bad_words(&mut self) {
        self.bad_word_token_ids.sort_unstable();
        self.bad_word_token_ids.dedup();
    }

    pub(super) fn check_bad_words(&self) -> Result<(), SamplingError> {
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
        assert_eq!(refused(SamplingSpec { top_p: -0.1, ..d() }), "top_p");
        let one = SamplingSpec { top_p: 0.0, ..d() }.validate().unwrap();
        assert_eq!(one.top_p, f32::MIN_POSITIVE);
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

    #[test]
    fn the_identity_is_that_of_the_first_release_while_later_numbers_are_absent() {
        let spec = SamplingSpec {
            temperature: 0.5,
            top_p: 0.875,
            top_k: 40,
            min_p: 0.25,
            presence_penalty: 1.5,
            frequency_penalty: -1.25,
            repetition_penalty: 1.125,
            logprobs: Some(2),
            n: 3,
            min_tokens: 4,
            ignore_eos: true,
            stop_token_ids: vec![7],
            logit_bias: vec![(3, 1.0)],
            allowed_token_ids: [5, 6].into(),
            bad_word_token_ids: vec![vec![8, 9]],
            ..SamplingSpec::default()
        };
        let one = 1f32.to_bits();
        let [temperature, top_p, min_p, presence, frequency, repetition] =
            [0.5f32, 0.875, 0.25, 1.5, -1.25, 1.125].map(f32::to_bits);
        let numbers = [temperature, top_p, 40, min_p, presence, frequency, repetition, 3, 3, 4, 1, 100];
        let lists = [1, 7, 2, 3, one, 2, 5, 6, 2, 8, 9];
        assert_eq!(spec.identity(100), [&numbers[..], &lists].concat());
        // Each numeric parameter changes the identity.
        for number in SAMPLING_NUMBERS {
            let mut other = spec.clone();
            other.set_number(number, number.absent + 3.0);
            assert_ne!(other.identity(100), spec.identity(100), "{}", number.name);
        }
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

//! Sampling parameters of a request and their validation.

use std::ops::Deref;

/// Sampling parameters as requested, not validated; see [`SamplingSpec::validate`].
///
/// Logits are processed in a fixed order: repetition, frequency and presence penalties; logit bias;
/// `min_tokens`, which masks end tokens; then argmax if `temperature` is 0, else division by the temperature,
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
    /// Number of top alternatives whose log probabilities are reported beside the chosen token's; `None`:
    /// none.
    pub logprobs: Option<u32>,
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
            logprobs: None,
            n: 1,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            seed: 0,
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
}

impl SamplingSpec {
    /// Maximum entries of `logit_bias`.
    pub const LOGIT_BIAS_MAX: usize = 1024;
    /// Maximum entries of `stop_token_ids`.
    pub const STOP_TOKEN_IDS_MAX: usize = 128;
    /// Maximum `logprobs`: top alternatives reported with each token.
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
        within("top_p", self.top_p, f32::MIN_POSITIVE, 1.0, "(0, 1]")?;
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
        let check_len = |name, len, most| {
            if len <= most { Ok(()) } else { Err(SamplingError::TooMany { name, len, most }) }
        };
        check_len("logit_bias", self.logit_bias.len(), Self::LOGIT_BIAS_MAX)?;
        check_len("stop_token_ids", self.stop_token_ids.len(), Self::STOP_TOKEN_IDS_MAX)?;
        for (_, bias) in &self.logit_bias {
            within("logit_bias", *bias, -100.0, 100.0, "[-100, 100]")?;
        }
        self.logit_bias.sort_by_key(|(id, _)| *id);
        self.logit_bias.dedup_by_key(|(id, _)| *id);
        self.stop_token_ids.sort_unstable();
        self.stop_token_ids.dedup();
        Ok(SamplingParams(self))
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

    /// Returns whether sampling depends on earlier tokens: a penalty is set.
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
    use proptest::prelude::*;

    fn refused(spec: SamplingSpec) -> &'static str {
        match spec.validate() {
            Err(SamplingError::OutOfRange { name, .. } | SamplingError::TooMany { name, .. }) => name,
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
        assert_eq!(refused(SamplingSpec { top_k: -1, ..d() }), "top_k");
        assert_eq!(refused(SamplingSpec { min_p: f32::NAN, ..d() }), "min_p");
        assert_eq!(refused(SamplingSpec { repetition_penalty: 0.0, ..d() }), "repetition_penalty");
        assert_eq!(refused(SamplingSpec { logit_bias: vec![(1, f32::INFINITY)], ..d() }), "logit_bias");
        assert_eq!(refused(SamplingSpec { stop_token_ids: vec![1; 10_000], ..d() }), "stop_token_ids");
        assert_eq!(refused(SamplingSpec { n: 0, ..d() }), "n");
        assert_eq!(refused(SamplingSpec { logprobs: Some(21), ..d() }), "logprobs");
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

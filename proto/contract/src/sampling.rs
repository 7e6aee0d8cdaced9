use std::ops::Deref;

/// How tokens are chosen, as asked for: unchecked, see [`SamplingSpec::validate`].
///
/// The order in which a row of logits is treated is fixed: repetition, frequency and presence penalties; logit
/// bias; `min_tokens` (which masks the ending tokens); greedy choice if `temperature` is 0, else division by
/// the temperature, then top-k, top-p and min-p, each on the distribution that the one before left, and a draw.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingSpec {
    /// 0 is greedy; otherwise logits are divided by it. In [0, 100].
    pub temperature: f32,
    /// Keep the most probable tokens whose probabilities add up to this. In (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Keep the `top_k` most probable tokens; 0 keeps all.
    pub top_k: i32,
    /// Drop tokens less probable than `min_p` times the most probable. In [0, 1]; 0 drops none.
    pub min_p: f32,
    /// Subtracted once from the logit of every token already generated. In [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated. In [-2, 2].
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output. In (0, 100]; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens, each in [-100, 100]; sorted by id once validated.
    pub logit_bias: Vec<(u32, f32)>,
    /// Report the log probability of each chosen token and of this many most probable ones; `None` reports none.
    pub logprobs: Option<u32>,
    /// Independent choices to generate for the prompt. In [1, 16].
    pub n: u32,
    /// No ending token before this many tokens are generated.
    pub min_tokens: u32,
    /// Tokens that end the sequence, beside the model's own; sorted once validated.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end-of-sequence tokens do not end the sequence.
    pub ignore_eos: bool,
    /// Key of all random draws of this request.
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

/// Which parameter is out of its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A number is outside its range or not a number.
    #[error("{name} is {value}; it must be in {range}")]
    OutOfRange {
        /// The field's name in the API.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What is allowed.
        range: &'static str,
    },
    /// A list is too long.
    #[error("{name} has {len} entries; at most {most} are allowed")]
    TooMany {
        /// The field's name in the API.
        name: &'static str,
        /// Entries given.
        len: usize,
        /// Entries allowed.
        most: usize,
    },
}

impl SamplingSpec {
    /// Most entries of `logit_bias`.
    pub const LOGIT_BIAS_MAX: usize = 1024;
    /// Most entries of `stop_token_ids`.
    pub const STOP_TOKEN_IDS_MAX: usize = 128;
    /// Most alternatives reported with each token.
    pub const LOGPROBS_MAX: u32 = 20;
    /// Most choices of one request.
    pub const CHOICES_MAX: u32 = 16;

    /// Checks every field and brings the lists into canonical order.
    ///
    /// # Errors
    /// [`SamplingError`] naming the first field that is out of range.
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
        let counted = |name, value: i64, low: i64, high: i64, range| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(SamplingError::OutOfRange { name, value: value as f64, range })
            }
        };
        counted("top_k", self.top_k.into(), 0, i32::MAX.into(), "[0, 2147483647]")?;
        counted("n", self.n.into(), 1, Self::CHOICES_MAX.into(), "[1, 16]")?;
        let logprobs = self.logprobs.unwrap_or(0);
        counted("logprobs", logprobs.into(), 0, Self::LOGPROBS_MAX.into(), "[0, 20]")?;
        let short = |name, len, most| {
            if len <= most { Ok(()) } else { Err(SamplingError::TooMany { name, len, most }) }
        };
        short("logit_bias", self.logit_bias.len(), Self::LOGIT_BIAS_MAX)?;
        short("stop_token_ids", self.stop_token_ids.len(), Self::STOP_TOKEN_IDS_MAX)?;
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

/// Parameters that passed [`SamplingSpec::validate`]: readable as a spec, not changeable.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams(SamplingSpec);

impl SamplingParams {
    /// Greedy decoding with nothing else set.
    pub fn greedy() -> Self {
        Self(SamplingSpec { temperature: 0.0, ..SamplingSpec::default() })
    }

    /// Whether the most probable token is taken at each step.
    pub fn is_greedy(&self) -> bool {
        self.0.temperature == 0.0
    }

    /// Whether choosing a token needs to know which tokens came before.
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
        fn whatever_is_accepted_is_finite_and_in_range(t in any::<f32>(), p in any::<f32>(), k in any::<i32>(),
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

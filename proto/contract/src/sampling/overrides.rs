//! Sampling parameters and stop conditions that a request sets, before the model's defaults are added.

use std::sync::Arc;

use super::list_bytes::{own_list_bytes, shared_list_bytes};
use super::{SamplingNumber, SamplingSpec};
use crate::{Constraint, sampling_numbers};

macro_rules! overrides {
    ($($(#[$doc:meta])* $name:ident: $kind:ident { $($column:tt)* })*) => {
        /// Sampling parameters that a request sets; absent ones are taken from the model's defaults.
        #[derive(Debug, Clone, Default, PartialEq)]
        pub struct SamplingOverrides {
            $($(#[$doc])* pub $name: Option<$kind>,)*
            /// Pairs of token id and bias added to its logit.
            pub logit_bias: Vec<(u32, f32)>,
            /// Token ids that may be generated; empty: all.
            pub allowed_token_ids: Arc<[u32]>,
            /// Words that the output does not contain, which the router tokenizes.
            pub bad_words: Vec<String>,
            /// Sequences of token ids that the output does not contain.
            pub bad_word_token_ids: Vec<Vec<u32>>,
            /// Number of top alternatives reported with each token; `None`: no log probabilities.
            pub logprobs: Option<u32>,
            /// Number of top alternatives reported with each prompt token; `None`: no log probabilities of the prompt.
            pub prompt_logprobs: Option<u32>,
            /// Seed of all random draws.
            pub seed: Option<u64>,
            /// Number of choices.
            pub n: Option<u32>,
            /// Grammar that the output must match.
            pub constraint: Option<Arc<Constraint>>,
        }

        impl SamplingOverrides {
            /// Sets a numeric parameter; the value becomes the nearest one of its type, without a fraction if that is an integer.
            pub fn set_number(&mut self, number: &SamplingNumber, value: f64) {
                const SET: &[fn(&mut SamplingOverrides, f64)] =
                    &[$(|overrides, value| overrides.$name = Some(value as $kind)),*];
                SET[number.row](self, value);
            }

            /// Returns the sampling parameters of a request. Its bad words must be tokenized: they are left out.
            pub fn apply(self, stop: &StopConditions, defaults: &SamplingSpec) -> SamplingSpec {
                let Self {
                    $($name: _,)*
                    logit_bias,
                    allowed_token_ids,
                    bad_words: _,
                    bad_word_token_ids,
                    logprobs,
                    prompt_logprobs,
                    seed,
                    n,
                    constraint,
                } = self;
                SamplingSpec {
                    $($name: self.$name.unwrap_or(defaults.$name),)*
                    logit_bias,
                    allowed_token_ids,
                    bad_word_token_ids,
                    logprobs,
                    prompt_logprobs,
                    n: n.unwrap_or(defaults.n),
                    min_tokens: stop.min_tokens,
                    stop_token_ids: stop.stop_token_ids.clone(),
                    ignore_eos: stop.ignore_eos,
                    seed: seed.unwrap_or(defaults.seed),
                    constraint,
                }
            }

            /// Names of all fields, as errors of validation use them.
            pub const FIELDS: &[&str] = &[
                $(stringify!($name),)*
                "logit_bias",
                "allowed_token_ids",
                "bad_words",
                "bad_word_token_ids",
                "logprobs",
                "prompt_logprobs",
                "seed",
                "n",
                "constraint",
            ];
        }
    };
}

sampling_numbers!(overrides);

impl SamplingOverrides {
    /// Bytes of its lists. With `shared`, also of those that the requests of one message share.
    pub fn list_bytes(&self, shared: bool) -> usize {
        let words: usize = self.bad_words.iter().map(String::len).sum();
        let own = words + own_list_bytes(&self.logit_bias, &self.bad_word_token_ids);
        let shared = shared.then(|| shared_list_bytes(&self.allowed_token_ids, self.constraint.as_deref()));
        own + shared.unwrap_or(0)
    }
}

/// Conditions that end a choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StopConditions {
    /// Maximum generated tokens; `None`: the router's default. 0 with log probabilities of the prompt only.
    pub max_tokens: Option<u32>,
    /// Minimum number of generated tokens before an end token.
    pub min_tokens: u32,
    /// Stop strings, which the router looks for.
    pub stop: Vec<String>,
    /// Token ids that end the choice in addition to the model's EOS tokens.
    pub stop_token_ids: Vec<u32>,
    /// Whether the model's EOS tokens do not end the choice.
    pub ignore_eos: bool,
}

impl StopConditions {
    /// Names of the fields, as errors of validation use them.
    pub const FIELDS: &[&str] = &["max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"];
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of the fields of a struct, from its debug output; none of the values is a struct.
    fn names(debug: &str) -> Vec<&str> {
        let (_, fields) = debug.trim_end_matches(" }").split_once(" { ").unwrap();
        fields.split(", ").map(|field| field.split_once(": ").unwrap().0).collect()
    }

    #[test]
    fn the_lists_of_field_names_are_complete() {
        let check = |debug: &str, listed: &[&str]| {
            let (mut found, mut listed) = (names(debug), listed.to_vec());
            found.sort_unstable();
            listed.sort_unstable();
            assert_eq!(found, listed);
        };
        check(&format!("{:?}", SamplingOverrides::default()), SamplingOverrides::FIELDS);
        check(&format!("{:?}", StopConditions::default()), StopConditions::FIELDS);
    }
}

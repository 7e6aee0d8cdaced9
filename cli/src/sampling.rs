//! Sampling flags of `inflight generate` and `inflight chat`.

use std::collections::HashMap;

use inflight_contract::sampling_numbers;
use inflight_proto::v1::constraint::Grammar;
use inflight_proto::v1::{Constraint, SamplingParams, StopConditions};

macro_rules! number_args {
    ($($(#[$doc:meta])* $name:ident: $kind:ident {
        absent: $absent:expr, range: $low:expr, $high:expr, $range:literal, model: $model:literal, off: $off:expr,
        http: $http:literal, extension: $extension:literal, flag: $value:literal, $help:literal,
    })*) => {
        /// Flags of the numeric sampling parameters.
        #[derive(Debug, Clone, Default, clap::Args)]
        pub struct NumberArgs {
            $(
                #[doc = $help]
                #[arg(long, value_name = $value, allow_negative_numbers = true)]
                pub $name: Option<$kind>,
            )*
        }

        impl NumberArgs {
            /// Returns the message with these parameters alone.
            fn params(&self) -> SamplingParams {
                SamplingParams { $($name: self.$name,)* ..SamplingParams::default() }
            }
        }
    };
}

sampling_numbers!(number_args);

/// Sampling parameters and stop conditions of a request.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct SamplingArgs {
    /// Maximum tokens to generate for each choice [default: set by the router]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Minimum tokens before a stop condition takes effect [default: 0]
    #[arg(long, value_name = "N")]
    pub min_tokens: Option<u32>,
    #[command(flatten)]
    pub numbers: NumberArgs,
    /// Add BIAS to the logit of token ID, as ID=BIAS; repeatable
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Generate only these token ids, separated by commas
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub allowed_token_ids: Vec<u32>,
    /// Word that the output does not contain; repeatable
    #[arg(long, value_name = "WORD")]
    pub bad_word: Vec<String>,
    /// File with a JSON schema that the output matches
    #[arg(long, value_name = "FILE", conflicts_with = "regex", value_parser = read_schema)]
    pub schema: Option<String>,
    /// Regular expression that the whole output matches
    #[arg(long, value_name = "REGEX")]
    pub regex: Option<String>,
    /// Random seed: the same request and seed yield the same tokens on workers with the same fingerprint
    /// [default: drawn by the router]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop string; repeatable
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Stop token ids, separated by commas
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub stop_token_ids: Vec<u32>,
    /// Ignore the EOS token
    #[arg(long)]
    pub ignore_eos: bool,
}

impl SamplingArgs {
    /// Returns the sampling parameters, without `n` and `logprobs`.
    pub fn params(&self) -> SamplingParams {
        let schema = self.schema.clone().map(Grammar::JsonSchema);
        let grammar = schema.or_else(|| self.regex.clone().map(Grammar::Regex));
        SamplingParams {
            logit_bias: self.logit_bias.iter().copied().collect::<HashMap<_, _>>().into_iter().collect(),
            allowed_token_ids: self.allowed_token_ids.clone(),
            bad_words: self.bad_word.clone(),
            seed: self.seed,
            constraint: grammar.map(|grammar| Constraint { grammar: Some(grammar), ..Constraint::default() }),
            ..self.numbers.params()
        }
    }

    /// Returns the stop conditions.
    pub fn stop_conditions(&self) -> StopConditions {
        StopConditions {
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens.unwrap_or(0),
            stop: self.stop.clone(),
            stop_token_ids: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
        }
    }
}

fn read_schema(path: &str) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read it: {error}"))
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| "write it as a token id and a number, such as 42=-1.5".to_owned())
}

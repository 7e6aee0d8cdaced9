//! Conversions between generated message types and the types of `inflight-contract`.

use std::sync::Arc;

use inflight_contract::{
    Constraint, CostCoefficients, FinishReason, Grammar, JsonWhitespace, PositionLogprobs, PromptLogprobs,
    SamplingOverrides, SamplingSpec, StopConditions, TokenLogprob, sampling_numbers,
};

use crate::v1;
use crate::v1::constraint::Grammar as GrammarMessage;

impl From<CostCoefficients> for v1::CostCoefficients {
    fn from(cost: CostCoefficients) -> Self {
        let CostCoefficients {
            step_s,
            token_s,
            prefill_key_s,
            decode_key_s,
            sequence_s,
            copy_s,
            copy_block_s,
        } = cost;
        Self { step_s, token_s, prefill_key_s, decode_key_s, sequence_s, copy_s, copy_block_s }
    }
}

impl From<v1::CostCoefficients> for CostCoefficients {
    fn from(cost: v1::CostCoefficients) -> Self {
        let v1::CostCoefficients {
            step_s,
            token_s,
            prefill_key_s,
            decode_key_s,
            sequence_s,
            copy_s,
            copy_block_s,
        } = cost;
        Self { step_s, token_s, prefill_key_s, decode_key_s, sequence_s, copy_s, copy_block_s }
    }
}

impl From<FinishReason> for v1::FinishReason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop | FinishReason::Complete => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Cancelled => Self::Cancelled,
            FinishReason::Deadline => Self::Deadline,
            FinishReason::Error => Self::Error,
        }
    }
}

impl v1::FinishReason {
    /// Returns the contract's finish reason; `None` for UNSPECIFIED: the sequence has not finished.
    pub fn to_contract(self) -> Option<FinishReason> {
        match self {
            Self::Unspecified => None,
            Self::Stop => Some(FinishReason::Stop),
            Self::Length => Some(FinishReason::Length),
            Self::Cancelled => Some(FinishReason::Cancelled),
            Self::Deadline => Some(FinishReason::Deadline),
            Self::Error => Some(FinishReason::Error),
        }
    }
}

impl From<TokenLogprob> for v1::TokenLogprob {
    fn from(TokenLogprob { token, logprob }: TokenLogprob) -> Self {
        Self { token_id: token, logprob }
    }
}

impl From<v1::TokenLogprob> for TokenLogprob {
    fn from(v1::TokenLogprob { token_id, logprob }: v1::TokenLogprob) -> Self {
        Self { token: token_id, logprob }
    }
}

impl From<PositionLogprobs> for v1::PositionLogprobs {
    fn from(PositionLogprobs { chosen, top }: PositionLogprobs) -> Self {
        Self { chosen: Some(chosen.into()), top: top.into_iter().map(Into::into).collect() }
    }
}

impl v1::PositionLogprobs {
    /// The contract's type; `None` without a chosen token.
    pub fn to_contract(self) -> Option<PositionLogprobs> {
        let chosen = self.chosen?.into();
        Some(PositionLogprobs { chosen, top: self.top.into_iter().map(Into::into).collect() })
    }
}

impl From<PromptLogprobs> for v1::PromptTokenLogprobs {
    fn from(PromptLogprobs { token, rank, top }: PromptLogprobs) -> Self {
        Self { token: Some(token.into()), rank, top: top.into_iter().map(Into::into).collect() }
    }
}

impl v1::PromptTokenLogprobs {
    /// The contract's type; `None` without a token.
    pub fn to_contract(self) -> Option<PromptLogprobs> {
        let (token, rank) = (self.token?.into(), self.rank);
        Some(PromptLogprobs { token, rank, top: self.top.into_iter().map(Into::into).collect() })
    }
}

macro_rules! sampling_messages {
    ($($(#[$doc:meta])* $name:ident: $kind:ident { $($column:tt)* })*) => {
        impl From<v1::SamplingParams> for SamplingOverrides {
            fn from(message: v1::SamplingParams) -> Self {
                let v1::SamplingParams {
                    $($name: _,)*
                    logit_bias,
                    logprobs,
                    prompt_logprobs,
                    seed,
                    n,
                    allowed_token_ids,
                    bad_words,
                    bad_word_token_ids,
                    constraint,
                } = message;
                Self {
                    $($name: message.$name,)*
                    logit_bias: logit_bias.into_iter().collect(),
                    allowed_token_ids: allowed_token_ids.into(),
                    bad_words,
                    bad_word_token_ids: bad_word_token_ids.into_iter().map(|word| word.token_ids).collect(),
                    logprobs,
                    prompt_logprobs,
                    seed,
                    n,
                    constraint: constraint.map(|constraint| Arc::new(constraint.to_contract())),
                }
            }
        }

        impl From<&SamplingSpec> for v1::SamplingParams {
            /// The message of a spec, with every optional field set except `logprobs` and `prompt_logprobs` where they are `None`.
            fn from(spec: &SamplingSpec) -> Self {
                let SamplingSpec {
                    $($name: _,)*
                    logit_bias,
                    allowed_token_ids,
                    bad_word_token_ids,
                    logprobs,
                    prompt_logprobs,
                    n,
                    seed,
                    constraint,
                    // In the stop conditions.
                    min_tokens: _,
                    stop_token_ids: _,
                    ignore_eos: _,
                } = spec;
                Self {
                    $($name: Some(spec.$name),)*
                    logit_bias: logit_bias.iter().copied().collect(),
                    logprobs: *logprobs,
                    prompt_logprobs: *prompt_logprobs,
                    seed: Some(*seed),
                    n: Some(*n),
                    allowed_token_ids: allowed_token_ids.to_vec(),
                    bad_words: Vec::new(),
                    bad_word_token_ids: bad_word_token_ids.iter().map(|word| sequence(word)).collect(),
                    constraint: constraint.as_ref().map(|constraint| v1::Constraint::from_contract(constraint)),
                }
            }
        }
    };
}

sampling_numbers!(sampling_messages);

impl v1::Constraint {
    /// Returns the contract's constraint. A message without a grammar gives one without choices, which validation refuses.
    pub fn to_contract(self) -> Constraint {
        let whitespace = match self.json_whitespace() {
            v1::JsonWhitespace::OneLine => JsonWhitespace::OneLine,
            v1::JsonWhitespace::Unspecified | v1::JsonWhitespace::Any => JsonWhitespace::Any,
        };
        let grammar = match self.grammar {
            Some(GrammarMessage::JsonObject(v1::JsonObject {})) => Grammar::JsonObject(whitespace),
            Some(GrammarMessage::JsonSchema(text)) => Grammar::JsonSchema(text, whitespace),
            Some(GrammarMessage::Regex(text)) => Grammar::Regex(text),
            Some(GrammarMessage::Choice(v1::ChoiceGrammar { texts })) => Grammar::Choice(texts),
            Some(GrammarMessage::Lark(text)) => Grammar::Lark(text),
            None => Grammar::Choice(Vec::new()),
        };
        Constraint { grammar, begins_after: self.begins_after }
    }

    /// Returns the message of a constraint.
    pub fn from_contract(constraint: &Constraint) -> Self {
        let grammar = match constraint.grammar.clone() {
            Grammar::JsonObject(_) => GrammarMessage::JsonObject(v1::JsonObject {}),
            Grammar::JsonSchema(text, _) => GrammarMessage::JsonSchema(text),
            Grammar::Regex(text) => GrammarMessage::Regex(text),
            Grammar::Choice(texts) => GrammarMessage::Choice(v1::ChoiceGrammar { texts }),
            Grammar::Lark(text) => GrammarMessage::Lark(text),
        };
        let json_whitespace = match constraint.grammar.json_whitespace() {
            None => v1::JsonWhitespace::Unspecified,
            Some(JsonWhitespace::OneLine) => v1::JsonWhitespace::OneLine,
            Some(JsonWhitespace::Any) => v1::JsonWhitespace::Any,
        };
        Self {
            grammar: Some(grammar),
            begins_after: constraint.begins_after,
            json_whitespace: json_whitespace.into(),
        }
    }
}

fn sequence(token_ids: &[u32]) -> v1::TokenSequence {
    v1::TokenSequence { token_ids: token_ids.to_vec() }
}

impl From<v1::StopConditions> for StopConditions {
    fn from(message: v1::StopConditions) -> Self {
        let v1::StopConditions { max_tokens, min_tokens, stop, stop_token_ids, ignore_eos } = message;
        Self { max_tokens, min_tokens, stop, stop_token_ids, ignore_eos }
    }
}

impl v1::StopConditions {
    /// Returns the stop conditions that a worker checks; stop strings are left out, as the router checks
    /// them.
    pub fn from_spec(spec: &SamplingSpec, max_tokens: u32) -> Self {
        Self {
            max_tokens: Some(max_tokens),
            min_tokens: spec.min_tokens,
            stop: Vec::new(),
            stop_token_ids: spec.stop_token_ids.clone(),
            ignore_eos: spec.ignore_eos,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sampling_spec_round_trips_through_its_messages() {
        let spec = SamplingSpec {
            temperature: 0.7,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.05,
            presence_penalty: 0.5,
            frequency_penalty: -0.5,
            repetition_penalty: 1.1,
            logit_bias: vec![(3, 1.0), (9, -2.0)],
            allowed_token_ids: [5, 6].into(),
            bad_word_token_ids: vec![vec![5], vec![6, 7]],
            logprobs: Some(0),
            prompt_logprobs: Some(2),
            n: 3,
            min_tokens: 4,
            stop_token_ids: vec![7],
            ignore_eos: true,
            seed: u64::MAX,
            constraint: None,
        };
        let sampling = SamplingOverrides::from(v1::SamplingParams::from(&spec));
        let stop = v1::StopConditions::from_spec(&spec, 10).into();
        assert_eq!(sampling.apply(&stop, &SamplingSpec::default()), spec);
    }

    #[test]
    fn every_kind_of_constraint_round_trips_and_one_without_a_grammar_is_refused() {
        let kinds = [
            Grammar::JsonObject(JsonWhitespace::Any),
            Grammar::json_schema("{}"),
            Grammar::Regex("a+".to_owned()),
            Grammar::Choice(vec!["a".to_owned(), "b".to_owned()]),
            Grammar::Lark("start: \"a\"".to_owned()),
        ];
        for (grammar, begins_after) in kinds.into_iter().zip([None, Some(0), Some(7), None, Some(9)]) {
            let constraint = Constraint { grammar, begins_after };
            assert_eq!(v1::Constraint::from_contract(&constraint).to_contract(), constraint);
        }
        assert!(v1::Constraint::default().to_contract().grammar.check().is_err());
        // As routers of earlier versions send it.
        let grammar = Some(GrammarMessage::JsonObject(v1::JsonObject {}));
        let earlier = v1::Constraint { grammar, ..v1::Constraint::default() };
        assert_eq!(earlier.to_contract().grammar, Grammar::JsonObject(JsonWhitespace::Any));
    }
}

//! Conversions between generated message types and the types of `inflight-contract`.

use std::sync::Arc;

use inflight_contract::{
    Constraint, CostCoefficients, FinishReason, Grammar, PositionLogprobs, PromptLogprobs, SamplingSpec,
    TokenLogprob,
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

impl v1::SamplingParams {
    /// Returns the contract's sampling parameters, without `bad_words`, which the router tokenizes. Absent fields are taken from `defaults`; `min_tokens`,
    /// `stop_token_ids` and `ignore_eos` from `stop`.
    pub fn to_spec(&self, stop: &v1::StopConditions, defaults: &SamplingSpec) -> SamplingSpec {
        SamplingSpec {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            logit_bias: self.logit_bias.iter().map(|(id, bias)| (*id, *bias)).collect(),
            allowed_token_ids: self.allowed_token_ids.as_slice().into(),
            bad_word_token_ids: self.bad_word_token_ids.iter().map(|word| word.token_ids.clone()).collect(),
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            n: self.n.unwrap_or(defaults.n),
            min_tokens: stop.min_tokens,
            stop_token_ids: stop.stop_token_ids.clone(),
            ignore_eos: stop.ignore_eos,
            seed: self.seed.unwrap_or(defaults.seed),
            constraint: self.constraint.clone().map(|constraint| Arc::new(constraint.to_contract())),
        }
    }

    /// Returns the message of `spec`, with every optional field set except `logprobs` and `prompt_logprobs` where they are `None`.
    pub fn from_spec(spec: &SamplingSpec) -> Self {
        Self {
            temperature: Some(spec.temperature),
            top_p: Some(spec.top_p),
            top_k: Some(spec.top_k),
            min_p: Some(spec.min_p),
            presence_penalty: Some(spec.presence_penalty),
            frequency_penalty: Some(spec.frequency_penalty),
            repetition_penalty: Some(spec.repetition_penalty),
            logit_bias: spec.logit_bias.iter().copied().collect(),
            logprobs: spec.logprobs,
            prompt_logprobs: spec.prompt_logprobs,
            seed: Some(spec.seed),
            n: Some(spec.n),
            allowed_token_ids: spec.allowed_token_ids.to_vec(),
            bad_words: Vec::new(),
            bad_word_token_ids: spec.bad_word_token_ids.iter().map(|word| sequence(word)).collect(),
            constraint: spec.constraint.as_ref().map(|constraint| v1::Constraint::from_contract(constraint)),
        }
    }
}

impl v1::Constraint {
    /// Returns the contract's constraint. A message without a grammar gives one without choices, which validation refuses.
    pub fn to_contract(self) -> Constraint {
        let grammar = match self.grammar {
            Some(GrammarMessage::JsonObject(v1::JsonObject {})) => Grammar::JsonObject,
            Some(GrammarMessage::JsonSchema(text)) => Grammar::JsonSchema(text),
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
            Grammar::JsonObject => GrammarMessage::JsonObject(v1::JsonObject {}),
            Grammar::JsonSchema(text) => GrammarMessage::JsonSchema(text),
            Grammar::Regex(text) => GrammarMessage::Regex(text),
            Grammar::Choice(texts) => GrammarMessage::Choice(v1::ChoiceGrammar { texts }),
            Grammar::Lark(text) => GrammarMessage::Lark(text),
        };
        Self { grammar: Some(grammar), begins_after: constraint.begins_after }
    }
}

fn sequence(token_ids: &[u32]) -> v1::TokenSequence {
    v1::TokenSequence { token_ids: token_ids.to_vec() }
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
        let sampling = v1::SamplingParams::from_spec(&spec);
        let stop = v1::StopConditions::from_spec(&spec, 10);
        assert_eq!(sampling.to_spec(&stop, &SamplingSpec::default()), spec);
    }

    #[test]
    fn every_kind_of_constraint_round_trips_and_one_without_a_grammar_is_refused() {
        let kinds = [
            Grammar::JsonObject,
            Grammar::JsonSchema("{}".to_owned()),
            Grammar::Regex("a+".to_owned()),
            Grammar::Choice(vec!["a".to_owned(), "b".to_owned()]),
            Grammar::Lark("start: \"a\"".to_owned()),
        ];
        for (grammar, begins_after) in kinds.into_iter().zip([None, Some(0), Some(7), None, Some(9)]) {
            let constraint = Constraint { grammar, begins_after };
            assert_eq!(v1::Constraint::from_contract(&constraint).to_contract(), constraint);
        }
        assert!(v1::Constraint::default().to_contract().grammar.check().is_err());
    }
}

//! Log probabilities in the formats of OpenAI's APIs.

use std::collections::BTreeMap;

use inflight_contract::{PositionLogprobs, PromptLogprobs, SamplingSpec, TokenLogprob};
use serde::{Serialize, Serializer};

use crate::outcome::Outcome;
use crate::text::{Detokenizer, Vocabulary};

/// Size of a prompt token in a response beside its alternatives, in alternatives.
const TOKEN_SIZE: usize = 4;
/// Maximum size of the log probabilities in a response that is one object, in alternatives: that of 12,288 tokens with the most
/// alternatives, whose JSON has up to 17 MB. What is larger comes as a stream, which is written piece by piece.
const SIZE_MAX: usize = 12_288 * (TOKEN_SIZE + SamplingSpec::LOGPROBS_MAX as usize);

/// Checks the size of a response with log probabilities of `tokens` prompt tokens in each of `choices` choices. `wanted`: request
/// fields that enable them, each with its number of alternatives per token.
///
/// # Errors
/// There are too many for the alternatives.
pub(crate) fn check_prompts(
    tokens: usize,
    choices: usize,
    wanted: &[(&str, Option<u32>)],
) -> Result<(), Outcome> {
    let wanted: Vec<(&str, usize)> =
        wanted.iter().filter_map(|(name, top)| Some((*name, TOKEN_SIZE + (*top)? as usize))).collect();
    let Some((field, _)) = wanted.first() else { return Ok(()) };
    let most = SIZE_MAX / wanted.iter().map(|(_, size)| size).sum::<usize>();
    if tokens * choices <= most {
        return Ok(());
    }
    let names: Vec<&str> = wanted.iter().map(|(name, _)| *name).collect();
    let names = names.join(" and ");
    let (each, lower) = match choices {
        1 => (String::new(), ""),
        choices => (format!(" in each of {choices} choices"), "n or "),
    };
    let reason = format!(
        "{names} would return log probabilities of {tokens} prompt tokens{each}; at most {most} are returned in all with so many alternatives: lower {lower}{names}, or send fewer or shorter prompts"
    );
    Err(Outcome::field(*field, reason))
}

/// Checks the size of a response that has the log probabilities of up to `tokens` output tokens in one object. `field` enables them,
/// with this number of alternatives per token.
///
/// # Errors
/// There may be too many.
pub(crate) fn check_outputs(tokens: u64, field: &str, alternatives: Option<u32>) -> Result<(), Outcome> {
    let Some(alternatives) = alternatives else { return Ok(()) };
    let most = SIZE_MAX as u64 / (TOKEN_SIZE as u64 + u64::from(alternatives));
    if tokens <= most {
        return Ok(());
    }
    let reason = format!(
        "{field} may return log probabilities of {tokens} output tokens, those of all choices; at most {most} are returned with so many alternatives: lower n or the maximum of tokens, or stream chat or text completions"
    );
    Err(Outcome::field(field, reason))
}

/// Log probability that stands for minus infinity, which JSON cannot express.
const MINUS_INFINITY: f32 = -9999.0;

fn finite<S: Serializer>(logprob: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f32(in_json(*logprob))
}

fn in_json(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { MINUS_INFINITY }
}

/// Log probability of a token in a chat completion.
#[derive(Debug, Serialize)]
struct TokenBody {
    token: String,
    #[serde(serialize_with = "finite")]
    logprob: f32,
    bytes: Vec<u8>,
}

impl TokenBody {
    fn new(TokenLogprob { token, logprob }: TokenLogprob, vocabulary: &Vocabulary) -> Self {
        let bytes = vocabulary.bytes(token).to_vec();
        Self { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
    }
}

/// Position of a chat completion.
#[derive(Debug, Serialize)]
pub(crate) struct PositionBody {
    #[serde(flatten)]
    chosen: TokenBody,
    top_logprobs: Vec<TokenBody>,
}

impl PositionBody {
    pub(crate) fn new(position: &PositionLogprobs, vocabulary: &Vocabulary) -> Self {
        let top = position.top.iter().map(|top| TokenBody::new(*top, vocabulary)).collect();
        Self { chosen: TokenBody::new(position.chosen, vocabulary), top_logprobs: top }
    }
}

/// Log probabilities of a chat completion's choice.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    content: Vec<PositionBody>,
    refusal: Option<()>,
}

impl ChatLogprobs {
    pub(crate) fn new(positions: &[PositionLogprobs], vocabulary: &Vocabulary) -> Self {
        let content = positions.iter().map(|position| PositionBody::new(position, vocabulary)).collect();
        Self { content, refusal: None }
    }
}

/// Log probabilities of a text completion's choice.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    /// Null for the first token of an echoed prompt.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<NamedLogprobs>>,
    text_offset: Vec<usize>,
}

/// Log probabilities by the names of their tokens, sorted. Of several with one name, the last counts. Kept as a list: the nodes
/// of a map have room for many, and most positions of a prompt have few.
#[derive(Debug)]
struct NamedLogprobs(Vec<(String, f32)>);

impl FromIterator<(String, f32)> for NamedLogprobs {
    fn from_iter<I: IntoIterator<Item = (String, f32)>>(named: I) -> Self {
        Self(BTreeMap::from_iter(named).into_iter().collect())
    }
}

impl Serialize for NamedLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, logprob)| (name, logprob)))
    }
}

/// Log probability of a token with its rank, by token id.
#[derive(Debug)]
struct RankedLogprobs(Vec<(u32, RankedBody)>);

#[derive(Debug, Serialize)]
struct RankedBody {
    #[serde(serialize_with = "finite")]
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl Serialize for RankedLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, body)| (token, body)))
    }
}

/// Log probabilities of a prompt in the format of vLLM: null for the first token, then an object for each, with
/// the token first and then the alternatives.
#[derive(Debug, Serialize)]
pub(crate) struct PromptBody(Vec<Option<RankedLogprobs>>);

impl PromptBody {
    /// Converts the log probabilities of a prompt, with `alternatives` of those of each token.
    pub(crate) fn new(positions: &[PromptLogprobs], alternatives: u32, vocabulary: &Vocabulary) -> Self {
        let body = |TokenLogprob { token, logprob }: TokenLogprob, rank| {
            let decoded_token = String::from_utf8_lossy(vocabulary.bytes(token)).into_owned();
            (token, RankedBody { logprob, rank, decoded_token })
        };
        let position = |PromptLogprobs { token, rank, top }: &PromptLogprobs| {
            let top = top.iter().zip(1..).take(alternatives as usize);
            let others = top.filter(|(one, _)| one.token != token.token);
            let others = others.map(|(one, rank)| body(*one, rank));
            Some(RankedLogprobs(std::iter::once(body(*token, *rank)).chain(others).collect()))
        };
        Self(std::iter::once(None).chain(positions.iter().map(position)).collect())
    }
}

/// Offsets of tokens in the text of a choice, in characters; accumulates over deltas.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TextOffset {
    /// Characters that have begun so far.
    characters: usize,
}

impl TextOffset {
    /// Starts after an echoed prompt.
    pub(crate) fn after(text: &str) -> Self {
        Self { characters: text.chars().count() }
    }

    /// Returns the offset of a token's first character; a token that continues a character has the offset of
    /// that one.
    fn next(&mut self, bytes: &[u8]) -> usize {
        let continues = |byte: &u8| *byte & 0xc0 == 0x80;
        let inside = bytes.first().is_some_and(continues);
        let offset = if inside { self.characters.saturating_sub(1) } else { self.characters };
        self.characters += bytes.iter().filter(|byte| !continues(byte)).count();
        offset
    }
}

impl TextLogprobs {
    /// Converts an echoed prompt, with `alternatives` of those of each token. Special tokens are not in its
    /// text.
    pub(crate) fn echo(
        prompt: &[u32],
        positions: &[PromptLogprobs],
        alternatives: u32,
        vocabulary: &Vocabulary,
    ) -> Self {
        let mut body = Self::default();
        let (mut detokenizer, mut text, mut characters) =
            (Detokenizer::new(vocabulary, &[]), String::new(), 0);
        for (at, id) in prompt.iter().enumerate() {
            body.text_offset.push(characters);
            text.clear();
            detokenizer.push(vocabulary, *id, &mut text);
            characters += text.chars().count();
            body.tokens.push(name(vocabulary.bytes(*id)));
            let position = at.checked_sub(1).and_then(|before| positions.get(before));
            body.token_logprobs.push(position.map(|one| in_json(one.token.logprob)));
            body.top_logprobs.push(position.map(|PromptLogprobs { token, top, .. }| {
                let named = |one: &TokenLogprob| (name(vocabulary.bytes(one.token)), in_json(one.logprob));
                top.iter().take(alternatives as usize).chain([token]).map(named).collect()
            }));
        }
        body
    }

    /// Appends positions. The chosen token is among the top ones, with the same number.
    pub(crate) fn extend(
        &mut self,
        positions: &[PositionLogprobs],
        vocabulary: &Vocabulary,
        offset: &mut TextOffset,
    ) {
        for PositionLogprobs { chosen, top } in positions {
            let named = |one: &TokenLogprob| (name(vocabulary.bytes(one.token)), in_json(one.logprob));
            let (token, logprob) = named(chosen);
            let alternatives = top.iter().map(named).chain([(token.clone(), logprob)]).collect();
            self.text_offset.push(offset.next(vocabulary.bytes(chosen.token)));
            self.tokens.push(token);
            self.token_logprobs.push(Some(logprob));
            self.top_logprobs.push(Some(alternatives));
        }
    }
}

/// Returns the text of a token; of a part of a character its bytes, as `bytes:\xf0\x9f`, so that names are
/// unique.
fn name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_count_characters_across_tokens_that_split_one() {
        let emoji = "🙂".as_bytes();
        let mut offset = TextOffset::after("né");
        let offsets = [b"a".as_slice(), &emoji[..1], &emoji[1..], "é!".as_bytes(), b"b"]
            .map(|bytes| offset.next(bytes));
        assert_eq!(offsets, [2, 3, 3, 4, 6]);
        assert_eq!((name(b"ok"), name(&emoji[..2])), ("ok".to_owned(), "bytes:\\xf0\\x9f".to_owned()));
        assert_eq!((in_json(-0.5), in_json(f32::NEG_INFINITY)), (-0.5, MINUS_INFINITY));
    }

    #[test]
    fn fewer_prompt_tokens_have_log_probabilities_the_more_alternatives_are_wanted() {
        let (echo, field) = ("logprobs", "prompt_logprobs");
        for (wanted, most) in [
            ([(echo, Some(20)), (field, None)], 12_288),
            ([(echo, None), (field, Some(20))], 12_288),
            ([(echo, Some(20)), (field, Some(20))], 6_144),
            ([(echo, Some(1)), (field, None)], 58_982),
        ] {
            assert_eq!(check_prompts(most / 16, 16, &wanted), Ok(()), "{wanted:?}");
            for (tokens, choices) in [(most + 1, 1), (most / 16 + 1, 16)] {
                let refused = check_prompts(tokens, choices, &wanted).unwrap_err().message();
                assert!(refused.contains(&format!("at most {most} are returned")), "{refused}");
                assert_eq!(refused.contains("lower n or"), choices > 1, "{refused}");
            }
        }
        assert_eq!(check_prompts(usize::MAX, 1, &[(echo, None), (field, None)]), Ok(()));
        for (alternatives, most) in [(Some(20), 12_288), (Some(0), 73_728)] {
            assert_eq!(check_outputs(most, "top_logprobs", alternatives), Ok(()));
            let refused = check_outputs(most + 1, "top_logprobs", alternatives).unwrap_err();
            assert_eq!(refused.invalid_field().as_deref(), Some("top_logprobs"));
            assert!(refused.message().contains(&format!("at most {most} are returned")), "{refused:?}");
        }
        assert_eq!(check_outputs(u64::MAX, "logprobs", None), Ok(()));
    }
}

//! Added tokens of a tokenizer: where a text has them, and which of them are special.

use std::collections::BTreeSet;
use std::ops::Range;

use aho_corasick::{AhoCorasick, Input, MatchKind};
use tokenizers::{AddedToken, NormalizedString, Normalizer as _, Token};

use super::TokenizerError;

/// Added tokens that are matched in one form of the text: as given, or normalized.
#[derive(Debug)]
struct Matcher {
    /// Searches for the contents of `tokens`; `None` if there are none.
    automaton: Option<AhoCorasick>,
    tokens: Vec<(u32, AddedToken)>,
}

/// Match of an added token.
struct Match {
    /// Bytes of the token itself.
    token: Range<usize>,
    /// Bytes with the whitespace that it absorbs.
    with_spaces: Range<usize>,
    index: usize,
}

impl Matcher {
    fn new(tokens: Vec<(String, u32, AddedToken)>) -> Result<Self, TokenizerError> {
        let patterns: Vec<&str> = tokens.iter().map(|(pattern, ..)| pattern.as_str()).collect();
        let automaton = if patterns.is_empty() {
            None
        } else {
            let built = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(patterns);
            Some(built.map_err(|error| TokenizerError::Load(error.to_string()))?)
        };
        Ok(Self { automaton, tokens: tokens.into_iter().map(|(_, id, token)| (id, token)).collect() })
    }

    /// Returns the first token in `text[from..]`.
    fn find(&self, text: &str, from: usize) -> Option<(Range<usize>, usize)> {
        let found = self.automaton.as_ref()?.find(Input::new(text).range(from..))?;
        Some((found.range(), found.pattern().as_usize()))
    }

    /// Returns the tokens of a text, as the tokenizers library finds them, but for special ones at bytes that
    /// `is_literal`.
    fn matches(&self, text: &str, is_literal: impl Fn(Range<usize>) -> bool) -> Vec<Match> {
        let (mut matches, mut from, mut free) = (Vec::new(), 0, 0);
        while let Some((token, index)) = self.find(text, from) {
            let added = &self.tokens[index].1;
            if added.special && is_literal(token.clone()) {
                // Not its end: a token of the template may begin inside.
                from = next_char(text, token.start);
                continue;
            }
            from = token.end;
            let outside = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
            let (before, after) = (&text[..token.start], &text[token.end..]);
            if added.single_word && !(outside(before.chars().next_back()) && outside(after.chars().next())) {
                continue;
            }
            let start = if added.lstrip { before.trim_end().len().max(free) } else { token.start };
            let spaces = if added.rstrip { after.len() - after.trim_start().len() } else { 0 };
            let with_spaces = start..token.end + spaces;
            free = with_spaces.end;
            from = free;
            matches.push(Match { token, with_spaces, index });
        }
        matches
    }
}

/// Returns the start of the character after the one at `at`.
fn next_char(text: &str, at: usize) -> usize {
    at + text[at..].chars().next().map_or(1, char::len_utf8)
}

/// Added tokens of a tokenizer.
#[derive(Debug)]
pub struct AddedTokens {
    raw: Matcher,
    normalized: Matcher,
    /// Special tokens as they are written, whichever form of the text they are matched in.
    special: Matcher,
    /// First and last characters of special tokens.
    edges: Vec<char>,
    /// Whether special tokens are also matched in the normalized text.
    normalized_special: bool,
    /// Whether a token may have, or absorb, whitespace.
    spaces: bool,
}

impl AddedTokens {
    /// Reads the added tokens of a tokenizer.
    ///
    /// # Errors
    /// [`TokenizerError::Load`] if they cannot be searched.
    pub fn new(tokenizer: &tokenizers::Tokenizer) -> Result<Self, TokenizerError> {
        let (mut raw, mut normalized, mut special) = (Vec::new(), Vec::new(), Vec::new());
        let mut edges = BTreeSet::new();
        let mut tokens: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        tokens.sort_by_key(|(id, _)| *id);
        let mut spaces = tokens
            .iter()
            .any(|(_, token)| token.lstrip || token.rstrip || token.content.chars().any(char::is_whitespace));
        for (id, token) in tokens {
            if token.special {
                edges.extend(token.content.chars().next());
                edges.extend(token.content.chars().next_back());
                special.push((token.content.clone(), id, token.clone()));
            }
            if !token.normalized {
                raw.push((token.content.clone(), id, token));
                continue;
            }
            let mut content = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = tokenizer.get_normalizer() {
                let failed = |error: tokenizers::Error| TokenizerError::Load(error.to_string());
                normalizer.normalize(&mut content).map_err(failed)?;
            }
            spaces |= content.get().chars().any(char::is_whitespace);
            if !content.get().is_empty() {
                normalized.push((content.get().to_owned(), id, token));
            }
        }
        let normalized_special = normalized.iter().any(|(.., token)| token.special);
        Ok(Self {
            raw: Matcher::new(raw)?,
            normalized: Matcher::new(normalized)?,
            special: Matcher::new(special)?,
            edges: edges.into_iter().collect(),
            normalized_special,
            spaces,
        })
    }

    /// Returns the first and last characters of special tokens: text without them has none.
    pub fn edges(&self) -> &[char] {
        &self.edges
    }

    /// Whether an added token may have, or absorb, whitespace.
    pub fn may_have_spaces(&self) -> bool {
        self.spaces
    }

    /// Returns where special tokens begin in a text, overlapping ones included.
    pub fn special_starts(&self, text: &str) -> Vec<usize> {
        let (mut starts, mut from) = (Vec::new(), 0);
        while let Some((token, _)) = self.special.find(text, from) {
            starts.push(token.start);
            from = next_char(text, token.start);
        }
        starts
    }

    /// Whether a special token might be found at bytes that `is_literal`.
    pub fn has_literal(&self, text: &str, is_literal: impl Fn(Range<usize>) -> bool) -> bool {
        if self.normalized_special {
            return true;
        }
        let mut from = 0;
        while let Some((token, index)) = self.raw.find(text, from) {
            if self.raw.tokens[index].1.special && is_literal(token.clone()) {
                return true;
            }
            from = token.end;
        }
        false
    }

    /// Splits a text at the tokens that are matched as given.
    pub fn split_raw(
        &self,
        text: &NormalizedString,
        is_literal: impl Fn(Range<usize>) -> bool,
    ) -> tokenizers::Result<Vec<(NormalizedString, Option<Vec<Token>>)>> {
        split(text, &self.raw, is_literal)
    }

    /// Splits a normalized text at the tokens that are matched there. `is_literal` takes bytes of the whole text.
    pub fn split_normalized(
        &self,
        text: &NormalizedString,
        is_literal: impl Fn(Range<usize>) -> bool,
    ) -> tokenizers::Result<Vec<(NormalizedString, Option<Vec<Token>>)>> {
        let base = text.offsets_original().0;
        split(text, &self.normalized, |bytes| {
            let original = text.convert_offsets(tokenizers::normalizer::Range::Normalized(bytes));
            // Of unknown origin: it may be content.
            original.is_none_or(|bytes| is_literal(base + bytes.start..base + bytes.end))
        })
    }
}

/// Splits a text at the tokens of a matcher.
fn split(
    text: &NormalizedString,
    matcher: &Matcher,
    is_literal: impl Fn(Range<usize>) -> bool,
) -> tokenizers::Result<Vec<(NormalizedString, Option<Vec<Token>>)>> {
    if text.is_empty() {
        return Ok(vec![(text.clone(), None)]);
    }
    let (mut parts, mut end) = (Vec::new(), 0);
    let part = |bytes: Range<usize>| {
        let bytes = tokenizers::normalizer::Range::Normalized(bytes);
        text.slice(bytes).ok_or_else(|| tokenizers::Error::from("an added token splits a character"))
    };
    for found in matcher.matches(text.get(), is_literal) {
        if end < found.with_spaces.start {
            parts.push((part(end..found.with_spaces.start)?, None));
        }
        end = found.with_spaces.end;
        let token = part(found.with_spaces)?;
        let (id, value) = (matcher.tokens[found.index].0, token.get().to_owned());
        let len = value.len();
        debug_assert!(found.token.len() <= len, "whitespace is added to a token");
        parts.push((token, Some(vec![Token::new(id, value, (0, len))])));
    }
    if end < text.len() {
        parts.push((part(end..text.len())?, None));
    }
    Ok(parts)
}

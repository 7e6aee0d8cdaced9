//! Vocabulary of single bytes, some words, control tokens and padding.

use inflight_contract::Grammar;
use inflight_grammar::{Compiler, MaskOutcome, Matcher, Vocabulary};

/// Tokens of several bytes, from id 256 on.
const WORDS: [&str; 12] =
    ["true", "false", "null", "\"name\"", "{\"", "\":", "\",", "\"}", "12", " {", "na", "me"];
/// Control token that ends a text.
pub const END: u32 = 256 + WORDS.len() as u32;
/// Control token that ends reasoning.
pub const THOUGHT: u32 = END + 1;
/// Vocabulary of the model, with padding behind the tokenizer's.
pub const VOCAB_SIZE: u32 = END + 20;

pub fn vocabulary() -> Vocabulary {
    let bytes: Vec<[u8; 1]> = (0..=255).map(|byte| [byte]).collect();
    let singles = bytes.iter().map(|byte| (&byte[..], false));
    let words = WORDS.iter().map(|word| (word.as_bytes(), false));
    let control = [(&b"<end>"[..], true), (&b"</think>"[..], true)];
    Vocabulary::from_tokens(singles.chain(words).chain(control))
}

pub fn compiler() -> Compiler {
    Compiler::new(&vocabulary(), VOCAB_SIZE, &[END]).unwrap()
}

pub fn schema(text: &str) -> Grammar {
    Grammar::json_schema(text)
}

/// Returns the tokens that may follow; none if the output is complete.
pub fn allowed(matcher: &mut Matcher) -> Vec<u32> {
    let mut mask = vec![0; Matcher::mask_words(VOCAB_SIZE as usize)];
    if matcher.write_mask(&mut mask).unwrap() == MaskOutcome::Complete {
        return Vec::new();
    }
    assert!(
        (VOCAB_SIZE..mask.len() as u32 * 32)
            .all(|id| mask[id as usize / 32] >> (id % 32) & 1 == 0 || !matcher.has_begun())
    );
    (0..VOCAB_SIZE).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// Consumes a text byte by byte.
pub fn write(matcher: &mut Matcher, text: &str) {
    for byte in text.bytes() {
        matcher.consume(byte.into()).unwrap();
    }
}

//! Lower bound on the number of tokens of a text, from its bytes alone: rejects text that cannot fit the
//! context without tokenizing it.

use serde_json::Value;

use super::Vocabulary;

/// Number of byte classes with separate bounds, so that a token of a hundred spaces does not loosen the bound
/// for letters.
const CLASSES: usize = 5;

fn class(byte: u8) -> usize {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' => 0,
        b'0'..=b'9' => 1,
        b' ' | b'\t'..=b'\r' => 2,
        0x80.. => 3,
        _ => 4,
    }
}

fn count(bytes: &[u8]) -> [usize; CLASSES] {
    let mut counts = [0; CLASSES];
    bytes.iter().for_each(|byte| counts[class(*byte)] += 1);
    counts
}

/// Effect of a normalizer on the length of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Normalizer {
    /// Maximum factor by which the text becomes shorter.
    shrink: usize,
    /// Whether all bytes stay as they are, except spaces that decoding restores.
    same_bytes: bool,
}

/// Bound on how few tokens a tokenizer can produce.
///
/// A tokenizer that keeps every byte gives a text of `n` bytes at least `n / longest token` tokens. Steps
/// that may shorten a text loosen the bound; steps that may drop any part of it remove it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenBound {
    /// Effect of the normalizer; `None` if unbounded.
    normalizer: Option<Normalizer>,
    /// Whether added tokens may absorb whitespace around them.
    strips: bool,
    /// Maximum bytes of each class, and of all classes, in one token.
    longest: [usize; CLASSES],
    longest_token: usize,
}

impl TokenBound {
    /// Computes the bound from a tokenizer.json and its vocabulary.
    pub fn new(tokenizer: &Value, vocabulary: &Vocabulary) -> Self {
        let (mut longest, mut longest_token) = ([0; CLASSES], 0);
        for id in 0..vocabulary.len() as u32 {
            let bytes = vocabulary.bytes(id);
            longest_token = longest_token.max(bytes.len());
            for (longest, count) in longest.iter_mut().zip(count(bytes)) {
                *longest = count.max(*longest);
            }
        }
        let keeps = keeps_bytes(&tokenizer["pre_tokenizer"]) && knows_all(&tokenizer["model"]);
        let added = tokenizer["added_tokens"].as_array();
        let strip = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
        Self {
            normalizer: normalizer(&tokenizer["normalizer"]).filter(|_| keeps),
            strips: added.is_some_and(|tokens| tokens.iter().any(strip)),
            longest,
            longest_token,
        }
    }

    /// Returns a lower bound on the number of tokens of a text.
    pub fn min_tokens(&self, text: &str) -> usize {
        let Some(Normalizer { shrink, same_bytes }) = self.normalizer else { return 0 };
        let mut counts = count(text.as_bytes());
        if self.strips {
            // Only ASCII whitespace is distinguished, so non-ASCII bytes have no bound either.
            counts[class(b' ')] = 0;
            counts[class(0x80)] = 0;
        }
        let total = counts.iter().sum::<usize>().div_ceil(self.longest_token.max(1).saturating_mul(shrink));
        if !same_bytes {
            return total;
        }
        let of_classes = counts.into_iter().zip(self.longest).filter(|(_, longest)| *longest > 0);
        of_classes.map(|(count, longest)| count.div_ceil(longest)).fold(total, usize::max)
    }
}

fn kind(step: &Value) -> Option<&str> {
    step["type"].as_str()
}

/// Reads a normalizer; `None` if unknown or if it may drop text.
fn normalizer(value: &Value) -> Option<Normalizer> {
    let keeps = Normalizer { shrink: 1, same_bytes: true };
    let shortens = |shrink| Normalizer { shrink, same_bytes: false };
    if value.is_null() {
        return Some(keeps);
    }
    Some(match kind(value)? {
        // Composing three Hangul letters leaves three bytes of nine; a mathematical letter of four bytes
        // becomes one.
        "NFC" | "NFD" | "Lowercase" => shortens(3),
        "NFKC" | "NFKD" => shortens(4),
        "Prepend" => keeps,
        "Replace" => {
            let (pattern, content) = (value["pattern"]["String"].as_str()?, value["content"].as_str()?);
            match (pattern, content) {
                // SentencePiece's encoding of a space.
                (" ", "\u{2581}") => keeps,
                (_, "") => return None,
                _ => shortens(pattern.len().div_ceil(content.len()).max(1)),
            }
        }
        "Sequence" => {
            let steps = value["normalizers"].as_array()?.iter().map(normalizer);
            steps.collect::<Option<Vec<_>>>()?.into_iter().fold(keeps, |all, step| Normalizer {
                shrink: all.shrink.saturating_mul(step.shrink),
                same_bytes: all.same_bytes && step.same_bytes,
            })
        }
        _ => return None,
    })
}

/// Whether a pre-tokenizer keeps every byte in some token.
fn keeps_bytes(pre_tokenizer: &Value) -> bool {
    match kind(pre_tokenizer) {
        None => pre_tokenizer.is_null(),
        Some("ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts") => true,
        Some("Split") => pre_tokenizer["behavior"] != "Removed",
        Some("Sequence") => {
            pre_tokenizer["pretokenizers"].as_array().is_some_and(|steps| steps.iter().all(keeps_bytes))
        }
        Some(_) => false,
    }
}

/// Whether a model has a token for every byte, so that it neither drops text nor merges much of it into one
/// unknown token.
fn knows_all(model: &Value) -> bool {
    let has = |piece: String| match &model["vocab"] {
        Value::Object(pieces) => pieces.contains_key(&piece),
        Value::Array(pieces) => pieces.iter().any(|entry| entry[0].as_str() == Some(&piece)),
        _ => false,
    };
    // In byte-level BPE, non-printable bytes are mapped to characters from U+0100 on.
    let spelt = || (0..256u32).all(|at| has(byte_piece(at)));
    let fallback = || model["byte_fallback"] == true && (0..256).all(|byte| has(format!("<0x{byte:02X}>")));
    match kind(model) {
        Some("BPE") | None => spelt() || fallback(),
        Some("Unigram") => fallback(),
        Some(_) => false,
    }
}

/// Returns the piece of the byte with this rank in GPT-2's alphabet: first printable bytes as themselves,
/// then the others as characters from U+0100 on.
fn byte_piece(rank: u32) -> String {
    let printable = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff);
    let others = 0x100..0x144u32;
    printable.chain(others).nth(rank as usize).and_then(char::from_u32).map(String::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::Family;
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::Tokenizer;
    use super::*;

    fn parsed(family: Family) -> Value {
        serde_json::from_str(family.tokenizer_json()).unwrap()
    }

    fn load(tokenizer: &Value) -> Tokenizer {
        Tokenizer::from_json(tokenizer.to_string().as_bytes()).unwrap()
    }

    proptest! {
        /// Text of whole tokens, which comes closest to the bound, or any other text.
        #[test]
        fn no_text_has_fewer_tokens_than_the_bound(
            ids in prop::collection::vec(0u32..400, 0..40), repeats in 1usize..20, any in "\\PC{0,60}"
        ) {
            for family in Family::all() {
                let tokenizer = load(&parsed(*family));
                let pieces: String = ids.iter().map(|id| tokenizer.piece(*id).repeat(repeats)).collect();
                for text in [&pieces, &any, &any.repeat(repeats)] {
                    let bound = tokenizer.min_tokens(text);
                    let tokens = tokenizer.encode_rendered(text).unwrap().len();
                    prop_assert!(bound <= tokens, "{family:?}: {bound} > {tokens} for {text:?}");
                }
            }
        }
    }

    #[test]
    fn a_long_text_has_a_high_bound_for_every_kind_of_text() {
        for family in Family::all() {
            let tokenizer = load(&parsed(*family));
            for text in ["word ", " ", "12", "\u{4f60}\u{597d}", "a", "!?"] {
                let repeats = 100_000;
                let bound = tokenizer.min_tokens(&text.repeat(repeats));
                assert!(bound >= repeats / 100, "{family:?}: {bound} for {text:?}");
            }
        }
    }

    #[test]
    fn steps_that_may_drop_text_leave_no_bound() {
        let text = "a ".repeat(10_000);
        let bound = |change: &dyn Fn(&mut Value)| {
            let mut value = parsed(Family::Llama3);
            change(&mut value);
            let vocabulary = load(&parsed(Family::Llama3));
            TokenBound::new(&value, vocabulary.vocabulary()).min_tokens(&text)
        };
        assert!(bound(&|_| {}) > 100);
        let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        let nfc = json!({"type": "Sequence", "normalizers": [{"type": "NFC"}]});
        assert_eq!(bound(&|value| value["normalizer"] = strip.clone()), 0);
        let loosened = bound(&|value| value["normalizer"] = nfc.clone());
        assert!(loosened > 0 && loosened < bound(&|_| {}));
        assert_eq!(bound(&|value| value["pre_tokenizer"] = json!({"type": "WhitespaceSplit"})), 0);
        assert_eq!(bound(&|value| value["model"]["type"] = json!("WordPiece")), 0);
        let missing = |value: &mut Value| {
            value["model"]["vocab"].as_object_mut().unwrap().remove("!");
        };
        assert_eq!(bound(&missing), 0, "bytes without a token are dropped");
        let strips = |value: &mut Value| value["added_tokens"][0]["rstrip"] = json!(true);
        assert!((1..=bound(&|_| {})).contains(&bound(&strips)), "the letters still count");
    }
}

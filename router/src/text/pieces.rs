//! Cutting of long texts into pieces that tokenize like the whole.

use std::ops::Range;

use serde_json::Value;

/// Maximum bytes of a piece, where the text can be cut.
pub(super) const PIECE_BYTES: usize = 64 << 10;

/// Alternatives of pre-tokenizer patterns (GPT-2, GPT-4, GPT-4o, Llama 3, Qwen) none of which matches a letter that
/// is followed by a space, or looks behind, or looks ahead further than over whitespace.
const ALTERNATIVES: [&str; 19] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"'(?i:[sdmt]|ll|ve|re)",
    r"'s",
    r"'t",
    r"'re",
    r"'ve",
    r"'m",
    r"'ll",
    r"'d",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r" ?\p{L}+",
    r" ?\p{N}+",
    r"\p{N}",
    r"\p{N}{1,3}",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];
/// Alternatives for runs of punctuation.
const PUNCTUATION: [&str; 4] = [
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
];

/// Whether the text of a tokenizer can be cut between an ASCII letter and a space that another one follows, with
/// the same tokens as the whole: no word spans the cut, and the words on each side do not depend on the other.
///
/// The normalizer must act on each side alone, the pre-tokenizer have a word boundary there for whatever text, and
/// the model tokenize each word alone. Added tokens must have no whitespace, which the caller checks.
pub(super) fn is_cuttable(tokenizer: &Value) -> bool {
    let composes = |step: &Value| matches!(step["type"].as_str(), Some("NFC" | "NFD" | "NFKC" | "NFKD"));
    let normalizer = &tokenizer["normalizer"];
    let steps = normalizer["normalizers"].as_array();
    let normalizes = match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some("Sequence") => steps.is_some_and(|steps| steps.iter().all(composes)),
        Some(_) => composes(normalizer),
    };
    let model = &tokenizer["model"];
    let words = matches!(model["type"].as_str(), Some("BPE") | None) && model["dropout"].is_null();
    normalizes && words && has_boundary(&tokenizer["pre_tokenizer"])
}

/// Whether a pre-tokenizer has a boundary between a letter and a space that a letter follows.
fn has_boundary(pre_tokenizer: &Value) -> bool {
    let byte_level = |step: &Value, regex: bool| {
        step["type"] == "ByteLevel"
            && step["add_prefix_space"] == false
            && step["use_regex"].as_bool().unwrap_or(true) == regex
    };
    if byte_level(pre_tokenizer, true) {
        return true;
    }
    let steps = pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice);
    let (Some("Sequence"), Some([split, bytes])) = (pre_tokenizer["type"].as_str(), steps) else {
        return false;
    };
    let pattern = split["pattern"]["Regex"].as_str();
    split["type"] == "Split"
        && split["behavior"] == "Isolated"
        && split["invert"] != true
        && byte_level(bytes, false)
        && pattern.is_some_and(|pattern| {
            alternatives(pattern).iter().all(|one| ALTERNATIVES.contains(one) || PUNCTUATION.contains(one))
        })
}

/// Splits a pattern at the bars outside of groups and classes.
fn alternatives(pattern: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth, mut escaped) = (Vec::new(), 0, 0u32, false);
    for (at, c) in pattern.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            '|' if depth == 0 => {
                parts.push(&pattern[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&pattern[start..]);
    parts
}

/// Cuts a text into pieces of at most `bytes_max`, or longer ones where it has no place for a cut.
pub(super) fn cut(text: &str, bytes_max: usize) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let is_cut = |at: &usize| {
        let letter = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphabetic);
        bytes.get(*at) == Some(&b' ') && letter(at + 1) && at.checked_sub(1).is_some_and(letter)
    };
    let (mut pieces, mut start) = (Vec::new(), 0);
    while bytes.len() - start > bytes_max {
        let most = start + bytes_max;
        let before = (start + 1..=most).rev().find(is_cut);
        let Some(end) = before.or_else(|| (most..bytes.len()).find(is_cut)) else { break };
        pieces.push(start..end);
        start = end;
    }
    pieces.push(start..bytes.len());
    pieces
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use inflight_fixtures::Family;
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::Tokenizer;
    use super::*;

    fn parsed(family: Family) -> Value {
        serde_json::from_str(family.tokenizer_json()).unwrap()
    }

    /// Tokenizers whose texts are cut: the byte-level families, and GPT-2's and GPT-4o's patterns.
    fn cuttable() -> Vec<Value> {
        let mut gpt2 = parsed(Family::Llama3);
        gpt2["pre_tokenizer"] =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let mut gpt4o = parsed(Family::Llama3);
        let words = [
            ALTERNATIVES[10],
            ALTERNATIVES[11],
            r"\p{N}{1,3}",
            PUNCTUATION[2],
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ];
        gpt4o["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(words.join("|"));
        vec![parsed(Family::Llama3), parsed(Family::ChatMl), gpt2, gpt4o]
    }

    static CUTTABLE: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
        let load = |json: Value| {
            assert!(is_cuttable(&json), "{json}");
            Tokenizer::from_json(json.to_string().as_bytes()).unwrap()
        };
        cuttable().into_iter().map(load).collect()
    });

    fn text() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            4 => "[a-z]{1,6}",
            3 => Just(" ".to_owned()),
            1 => "\\PC{1,3}",
            1 => "[ \n\t'.,!0-9]{1,4}",
            1 => prop::sample::select(vec!["'s", "'LL", "e\u{301}", "\u{1112}\u{1161}", "<|eot_id|>", "\u{a0}"])
                .prop_map(str::to_owned),
        ];
        prop::collection::vec(part, 0..60).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn pieces_tokenize_like_the_whole(text in text(), most in 1usize..40) {
            for tokenizer in CUTTABLE.iter() {
                let pieces = cut(&text, most).into_iter().map(|piece| tokenizer.encode_rendered(&text[piece]).unwrap());
                prop_assert_eq!(pieces.collect::<Vec<_>>().concat(), tokenizer.encode_rendered(&text).unwrap());
            }
        }
    }

    #[test]
    fn long_prompts_are_cut_and_keep_the_special_tokens_around_them() {
        let text = "many words, and more. ".repeat(10_000);
        let prompt = super::super::PromptText::with_special_tokens(text.clone());
        for tokenizer in CUTTABLE.iter() {
            let pieces = tokenizer.pieces(&prompt);
            assert!(pieces.len() >= 4 && pieces.iter().all(|piece| piece.len() <= PIECE_BYTES), "{pieces:?}");
            assert_eq!(tokenizer.encode_prompt(&prompt, true).unwrap(), tokenizer.encode(&text).unwrap());
            assert_eq!(
                tokenizer.encode_prompt(&prompt, false).unwrap(),
                tokenizer.encode_rendered(&text).unwrap()
            );
        }
    }

    #[test]
    fn tokenizers_whose_words_may_span_a_cut_are_not_cut() {
        assert!(!is_cuttable(&parsed(Family::SentencePiece)), "one word for the whole text");
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut json = parsed(Family::Llama3);
            change(&mut json);
            is_cuttable(&json)
        };
        assert!(changed(&|_| {}));
        let regex = |regex: &'static str| {
            changed(&|json| json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(regex))
        };
        assert!(regex(r"\s+|'s") && !regex(r"\s+|\S+ \S+") && !regex(r"(?<=a) b|\s+"));
        assert!(!changed(
            &|json| json["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("MergedWithNext")
        ));
        assert!(
            !changed(&|json| json["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = json!(true))
        );
        assert!(!changed(&|json| json["model"]["dropout"] = json!(0.1)));
        assert!(!changed(
            &|json| json["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true})
        ));
        let mut spaced = parsed(Family::Llama3);
        spaced["added_tokens"][4]["content"] = json!("<|eot id|>");
        let tokenizer = Tokenizer::from_json(spaced.to_string().as_bytes()).unwrap();
        let prompt = super::super::PromptText::with_special_tokens("a <|eot id|> b ".repeat(10_000));
        assert_eq!(tokenizer.pieces(&prompt).len(), 1, "an added token has a space");
    }
}

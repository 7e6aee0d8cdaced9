//! SentencePiece vocabularies (BPE) of GGUF files, as tokenizer.json. Files hold scores of tokens instead of merges: the pair
//! with the highest score is merged first.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::super::Error;
use super::Gguf;
use super::vocabulary::{TokenClass, Vocabulary};

/// Longest token that merges are derived for, in bytes; the number of splits grows with the square of it.
const TOKEN_BYTES_MAX: usize = 256;

/// Converts the vocabulary to tokenizer.json.
///
/// # Errors
/// It has no scores.
pub(super) fn tokenizer(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Value, Error> {
    let scores = gguf.list("tokenizer.ggml.scores").unwrap_or_default();
    let tokens: Map<String, Value> =
        vocabulary.iter().map(|(id, text, _)| (text.to_owned(), id.into())).collect();
    let has_bytes = tokens.contains_key("<0x00>") && tokens.contains_key("<0xFF>");
    let prefix =
        gguf.metadata.get("tokenizer.ggml.add_space_prefix").and_then(Value::as_bool).unwrap_or(true);
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let normalizers = match prefix {
        true => vec![json!({ "type": "Prepend", "prepend": "▁" }), spaces],
        false => vec![spaces],
    };
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null,
        "post_processor": vocabulary.post_processor(true),
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": vocabulary.special("unknown_token_id").map(|(_, text)| text),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": has_bytes, "ignore_merges": false, "vocab": tokens,
            "merges": merges(vocabulary, scores),
        },
    }))
}

/// Returns the merges of a vocabulary in the order of their results' scores, highest first; of equal ones, in the order of ids.
fn merges(vocabulary: &Vocabulary<'_>, scores: &[Value]) -> Vec<[String; 2]> {
    let normal = || vocabulary.iter().filter(|(_, _, class)| *class == TokenClass::Normal);
    let ids: HashMap<&str, usize> = normal().map(|(id, text, _)| (text, id)).collect();
    let score = |id: usize| scores.get(id).and_then(Value::as_f64).unwrap_or(0.0);
    let mut merges = Vec::new();
    for (id, text, _) in normal().filter(|(_, text, _)| text.len() <= TOKEN_BYTES_MAX) {
        let mut pairs: Vec<_> = text
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| Some((*ids.get(&text[..at])?, *ids.get(&text[at..])?, at)))
            .collect();
        pairs.sort_unstable();
        merges
            .extend(pairs.into_iter().map(|(_, _, at)| (id, [text[..at].to_owned(), text[at..].to_owned()])));
    }
    // Stable: pairs of one result stay in the order of ids.
    merges.sort_by(|(a, _), (b, _)| score(*b).total_cmp(&score(*a)).then(a.cmp(b)));
    merges.into_iter().map(|(_, pair)| pair).collect()
}

//! Byte-level BPE vocabularies of GGUF files, as tokenizer.json.

use serde_json::{Map, Value, json};

use super::super::Error;
use super::Gguf;
use super::vocabulary::Vocabulary;

/// Rule by which a vocabulary splits text before BPE.
struct PreTokenizer {
    /// Regular expression of the parts.
    pattern: &'static str,
    /// Each digit is a part, before the pattern applies.
    single_digits: bool,
    /// Parts that are tokens need no merges.
    ignore_merges: bool,
    /// The BOS token comes first, unless the file says otherwise.
    add_bos: bool,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Returns the rule of the pre-tokenizer `name`, if known. Merges and BOS are llama.cpp's defaults.
fn pre_tokenizer(name: &str) -> Option<PreTokenizer> {
    let plain =
        |pattern| PreTokenizer { pattern, single_digits: false, ignore_merges: false, add_bos: false };
    Some(match name {
        "llama-bpe" | "llama3" | "llama-v3" => {
            PreTokenizer { ignore_merges: true, add_bos: true, ..plain(LLAMA3) }
        }
        "dbrx" | "smaug-bpe" => plain(LLAMA3),
        "qwen2" | "deepseek-r1-qwen" => plain(QWEN2),
        "qwen35" => plain(QWEN35),
        "gpt-2" | "default" => plain(GPT2),
        "smollm" => PreTokenizer { single_digits: true, ..plain(GPT2) },
        _ => return None,
    })
}

/// Converts the vocabulary to tokenizer.json.
///
/// # Errors
/// Its pre-tokenizer is unknown, or it has no merges.
pub(super) fn tokenizer(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Value, Error> {
    let name = gguf.metadata.get("tokenizer.ggml.pre").and_then(Value::as_str).unwrap_or("default");
    let rule = pre_tokenizer(name).ok_or_else(|| {
        Vocabulary::unusable(gguf, &format!("its vocabulary cuts text by the unknown rule `{name}`"))
    })?;
    let merges = gguf.list("tokenizer.ggml.merges");
    let merges = merges.ok_or_else(|| Vocabulary::unusable(gguf, "its vocabulary lacks merges"))?;
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let split = json!({ "type": "Split", "pattern": { "Regex": rule.pattern }, "behavior": "Isolated", "invert": false });
    let digits = json!({ "type": "Digits", "individual_digits": true });
    let steps: Vec<&Value> =
        if rule.single_digits { vec![&digits, &split, &byte_level] } else { vec![&split, &byte_level] };
    let tokens: Map<String, Value> =
        vocabulary.iter().map(|(id, text, _)| (text.to_owned(), id.into())).collect();
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": steps },
        "post_processor": vocabulary.post_processor(rule.add_bos),
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": rule.ignore_merges, "vocab": tokens, "merges": merges,
        },
    }))
}

//! Conversion of a GGUF vocabulary to tokenizer.json and tokenizer_config.json.

use serde_json::{Map, Value, json};

use super::super::Error;
use super::Gguf;

/// Values of `tokenizer.ggml.token_type` for added tokens.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// Returns the pre-tokenization regex of the pre-tokenizer `name`, if known.
fn pattern(name: &str) -> Option<&'static str> {
    match name {
        "llama-bpe" | "llama3" | "llama-v3" => Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        "qwen2" => Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        "gpt-2" | "default" => {
            Some(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
        }
        _ => None,
    }
}

/// Converts the vocabulary in the file to tokenizer.json and tokenizer_config.json.
///
/// # Errors
/// The vocabulary is of an unsupported kind; then the model's tokenizer.json must be in the same directory.
pub(in super::super) fn tokenizer(gguf: &Gguf) -> Result<[(&'static str, Value); 2], Error> {
    let unusable = |what: String| Error::Broken {
        file: gguf.label.clone(),
        reason: format!("{what}; put the model's tokenizer.json into the same directory"),
    };
    let get = |key: &str| gguf.metadata.get(&format!("tokenizer.ggml.{key}"));
    let list = |key: &str| get(key).and_then(Value::as_array);
    match get("model").and_then(Value::as_str) {
        Some("gpt2") => {}
        Some(other) => {
            return Err(unusable(format!("its vocabulary is of the kind `{other}`, only `gpt2` is rebuilt")));
        }
        None => return Err(unusable("it has no vocabulary".to_owned())),
    }
    let kind = get("pre").and_then(Value::as_str).unwrap_or("default");
    let pattern = pattern(kind)
        .ok_or_else(|| unusable(format!("its vocabulary cuts text by the unknown rule `{kind}`")))?;
    let (Some(tokens), Some(merges)) = (list("tokens"), list("merges")) else {
        return Err(unusable("its vocabulary lacks tokens or merges".to_owned()));
    };
    let types = list("token_type").map(Vec::as_slice).unwrap_or_default();
    let (mut vocabulary, mut added) = (Map::new(), Vec::new());
    for (id, token) in tokens.iter().enumerate() {
        let Some(text) = token.as_str() else { return Err(unusable(format!("its token {id} is no text"))) };
        let class = types.get(id).and_then(Value::as_u64).unwrap_or(1);
        if class == CONTROL || class == USER_DEFINED {
            added.push(json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": class == CONTROL,
            }));
        }
        vocabulary.insert(text.to_owned(), id.into());
    }
    let text_of = |key: &str| {
        let id = get(key).and_then(Value::as_u64)?;
        tokens.get(usize::try_from(id).ok()?)?.as_str().map(|text| (id, text.to_owned()))
    };
    let begin =
        text_of("bos_token_id").filter(|_| get("add_bos_token").and_then(Value::as_bool) == Some(true));
    let post_processor = begin.map(|(id, text)| {
        let special = json!({ "SpecialToken": { "id": text, "type_id": 0 } });
        let sequence = |name: &str| json!({ "Sequence": { "id": name, "type_id": 0 } });
        json!({
            "type": "TemplateProcessing",
            "single": [special, sequence("A")],
            "pair": [special, sequence("A"), sequence("B")],
            "special_tokens": { text.clone(): { "id": text, "ids": [id], "tokens": [text] } },
        })
    });
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false },
            byte_level,
        ]},
        "post_processor": post_processor,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": kind.starts_with("llama"), "vocab": vocabulary, "merges": merges,
        },
    });
    let config = json!({
        "chat_template": gguf.metadata.get("tokenizer.chat_template"),
        "bos_token": text_of("bos_token_id").map(|(_, text)| text),
        "eos_token": text_of("eos_token_id").map(|(_, text)| text),
    });
    Ok([("tokenizer.json", tokenizer), ("tokenizer_config.json", config)])
}
